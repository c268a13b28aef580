"""A recorded text as the model's choice: the model does all of its work, and what it says was written before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.engine.engine import Engine

_RAISE = 1e4  # logits stay finite, in half precision too, and nothing a model says comes near it


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded prompt and the output that followed it, in tokens."""

    prompt: list[int]
    output: list[int]


@contextmanager
def dictating(engine: Engine, trace: Trace, device: torch.device) -> Iterator[None]:
    """Let an engine of one row that has not started write a trace's output, which it must do within the block.

    The logit of the given next token is raised where the logits are, after the pass and outside what is recorded of it;
    the few numbers that takes go to the device before the pass, so that the host does not wait for it. A node at depth
    d stands d places after the root, and is told what follows there, whatever token it holds.
    """
    target: Any = engine._target
    script = np.array([*trace.prompt, *trace.output], np.int64)
    prefill, score = target.prefill, target.score

    def following(places: IntArray) -> Tensor:
        told = script[np.minimum(places + 1, len(script) - 1)]
        return torch.from_numpy(told)[None, :, None].to(device)

    def dictated_prefill(prompts: Sequence[IntArray], first: int = 0) -> Tensor:
        told = following(np.array([len(prompts[0]) - 1]))
        logits: Tensor = prefill(prompts, first)
        return logits.scatter_(2, told, _RAISE)

    def dictated_score(trees: Sequence[TokenTree]) -> Tensor:
        told = following(target.cache.slots.lengths[0] + trees[0].depths)
        logits: Tensor = score(trees)
        return logits.scatter_(2, told, _RAISE)

    target.prefill, target.score = dictated_prefill, dictated_score
    try:
        yield
    finally:
        del target.prefill, target.score  # they hold the target, and with it the memory of its KV
