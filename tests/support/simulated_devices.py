"""Simulated devices: a real model, and a clock that advances by the cost of its passes on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead import LookaheadConfig
from lookahead.backend.cpu.cpu_backend import CpuBackend
from lookahead.engine.engine import Engine
from lookahead.stats import DecodingStats
from tests.support.engines import engine_of

Cost = Callable[[int], float]


def through(points: dict[int, float]) -> Cost:
    """A piecewise linear curve through some points, extrapolated linearly."""
    nodes, costs = (np.array(each, float) for each in zip(*points.items(), strict=True))
    slope = (costs[-1] - costs[-2]) / (nodes[-1] - nodes[-2])
    return lambda n: float(np.interp(n, nodes, costs) + max(0.0, n - nodes[-1]) * slope)


DEVICES: dict[str, Cost] = {
    "dear": through({1: 1.0, 8: 1.5, 16: 1.83, 32: 2.5, 64: 3.83}),
    "half": through({1: 1.0, 8: 1.4, 16: 1.6, 32: 2.3, 64: 3.5}),
    "wide": through({1: 1.0, 128: 1.05, 256: 2.0}),
}


@contextmanager
def on_device(cost: Cost, host: float = 0.0) -> Iterator[None]:
    """Let engines read a clock that advances by the cost of their passes and drafts on a device."""
    now = [0.0]
    score, draft = CpuBackend.score, Engine._draft

    def timed_score(self: CpuBackend, trees: Any, *scored: Any) -> torch.Tensor:
        now[0] += cost(max(len(tree) for tree in trees))
        return score(self, trees, *scored)

    def timed_draft(self: Engine, left: Any, plan: Any) -> Any:
        now[0] += host * plan.drafts
        return draft(self, left, plan)

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return now[0]

    with (
        patch("lookahead.engine.engine.time", Clock),
        patch("lookahead.proposers.jacobi.time", Clock),
        patch.object(CpuBackend, "score", timed_score),
        patch.object(Engine, "_draft", timed_draft),
    ):
        yield


def decode(
    model: PreTrainedModel, ids: torch.Tensor, tokens: int, config: LookaheadConfig
) -> tuple[list[int], DecodingStats]:
    """The output, and its stats by the simulated clock."""
    engine: Engine = engine_of(model, ids, max_new_tokens=tokens, do_sample=False, lookahead_config=config)
    output = [token for step in engine.run() for step_output in step for token in step_output.tokens.tolist()]
    return output, engine.stats[0]
