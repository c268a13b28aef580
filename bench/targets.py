"""Goals for the GPU, used by the commands that measure them and the page that shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple


class Goal(NamedTuple):
    """One figure of `bench.gpu_decode` or of `bench.kernel`."""

    key: str  # the name of the figure in the result
    what: str  # in words
    bound: float  # the goal
    side: Literal["at least", "at most"] = "at least"

    @property
    def target(self) -> str:
        return f"{self.side} {self.bound:g}"

    def falls_short(self, figure: float) -> bool:
        return figure < self.bound if self.side == "at least" else figure > self.bound


GPU_DECODE = (
    Goal("weight_read_share", "time to read the weights at the memory's pace, over a step of 1 node", 0.85),
    Goal("step_ratio_16", "a step of 16 nodes over one of 1, with graphs", 1.08, "at most"),
    Goal("step_ratio_64", "a step of 64 nodes over one of 1, with graphs", 1.3, "at most"),
    Goal("host_us", "host time a plain step outside the graph, us", 150, "at most"),
    Goal("plain_speedup", "plain decoding over transformers' `generate`, tokens/s", 3),
)

# Every figure is the worst measured value. Queries: nodes times query heads per KV head.
KERNEL = (
    Goal("copy_share_32k", "tree attention, up to 64 queries after 32k tokens: bandwidth over a copy's", 0.8),
    Goal("copy_share_8k", "the same after 8k tokens, batch 1", 0.55),
    Goal("over_sdpa_32k", "time of SDPA with a dense mask over the kernel's, 32k tokens", 5),
    Goal("tflops_128", "TFLOP/s of trees of 128 nodes, 8k tokens or more", 400),
    Goal("compaction_us", "compaction of 5 tokens in all layers, us", 5, "at most"),
)
TARGETS = {"gpu_decode": GPU_DECODE, "kernel": KERNEL}


def print_goals(goals: Sequence[Goal], figures: Mapping[str, float], *, has_targets: bool) -> None:
    """Print the figures that have a goal; with targets also the goals, and what falls short. That is no failure."""
    for goal in goals:
        if goal.key in figures:
            figure = figures[goal.key]
            verdict = f"{'  FALLS SHORT' * goal.falls_short(figure)}  (target: {goal.target})" if has_targets else ""
            print(f"{goal.what}: {figure:.3f}{verdict}")
