"""Goals for the GPU, used by the commands that measure them and the page that shows them.

    python -m bench.targets build/gpu

prints the figures of `kernel.json` and `gpu_decode.json` in a folder that miss their goals. This is not a failure.
`make test-gpu` writes the files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple


class Goal(NamedTuple):
    """One figure of `bench.gpu_decode` or of `bench.kernel`."""

    key: str  # the name of the figure in the result
    what: str  # in words
    bound: float | None = None  # the goal; None if there is none
    side: Literal["at least", "at most"] = "at least"

    @property
    def target(self) -> str:
        return "" if self.bound is None else f"{self.side} {self.bound:g}"


GPU_DECODE = (
    Goal("weight_read_share", "time to read the weights at the memory's pace, over a step of 1 node", 0.85),
    Goal("step_ratio_16", "a step of 16 nodes over one of 1, with graphs", 1.08, "at most"),
    Goal("step_ratio_64", "a step of 64 nodes over one of 1, with graphs", 1.3, "at most"),
    Goal("host_us", "host time a plain step outside the graph, us", 150, "at most"),
    Goal("plain_speedup", "plain decoding over transformers' `generate`, tokens/s", 3),
    Goal("dictated_speedup", "with drafts over transformers' `generate`, a recorded text being the model's choice"),
)

# Every figure is the worst measured value. Queries: nodes times query heads per KV head.
KERNEL = (
    Goal("copy_share_32k", "tree attention, up to 64 queries after 32k tokens: bandwidth over a copy's", 0.8),
    Goal("copy_share_8k", "the same after 8k tokens, batch 1", 0.55),
    Goal("over_sdpa_32k", "time of SDPA with a dense mask over the kernel's, 32k tokens", 5),
    Goal("over_flex", "time of FlexAttention, its mask made before, over the kernel's, 8k tokens or more", 0.9),
    Goal("over_flex_inside", "the same, its mask made in the step", 1),
    Goal("tflops_128", "TFLOP/s of trees of 128 nodes, 8k tokens or more", 400),
    Goal("compaction_us", "compaction of 5 tokens in all layers, us", 5, "at most"),
)
TARGETS = {"gpu_decode": GPU_DECODE, "kernel": KERNEL}


def print_goals(goals: Sequence[Goal], figures: Mapping[str, float], *, has_targets: bool) -> None:
    for goal in goals:
        if goal.key in figures:
            target = f"  (target: {goal.target})" if goal.target and has_targets else ""
            print(f"{goal.what}: {figures[goal.key]:.3f}{target}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(argv).folder
    for name, goals in TARGETS.items():
        path = folder / f"{name}.json"
        figures = json.loads(path.read_text(encoding="utf-8"))["figures"] if path.exists() else {}
        for goal in goals:
            figure = figures.get(goal.key, goal.bound)
            if goal.bound is not None and (figure < goal.bound if goal.side == "at least" else figure > goal.bound):
                print(f"falls short: {goal.what}: {figure:g}, to be {goal.target}")
        if not figures:
            print(f"not measured: {path}")


if __name__ == "__main__":
    main()
