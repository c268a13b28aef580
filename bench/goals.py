"""What decoding on a GPU is meant to reach, for the command that measures it and the page that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure of `bench.gpu_decode`.

    Attributes:
        key: Its name among the figures of the result.
        what: What it is, in words.
        bound: What it is meant to reach; None where nothing was set.
        side: Whether the figure is to be at least the bound or at most.
    """

    key: str
    what: str
    bound: float | None = None
    side: Literal["at least", "at most"] = "at least"

    @property
    def target(self) -> str:
        """The bound in words."""
        return "" if self.bound is None else f"{self.side} {self.bound:g}"


GPU_DECODE = (
    Goal("weight_read_share", "time to read the weights at the memory's pace, over a step of 1 node", 0.85),
    Goal("step_ratio_16", "a step of 16 nodes over one of 1, with graphs", 1.08, "at most"),
    Goal("step_ratio_64", "a step of 64 nodes over one of 1, with graphs", 1.3, "at most"),
    Goal("host_us", "host time a plain step outside the graph, us", 150, "at most"),
    Goal("plain_speedup", "plain decoding over transformers' `generate`, tokens/s", 3),
    Goal("dictated_speedup", "with drafts over transformers' `generate`, a recorded text being the model's choice"),
)
