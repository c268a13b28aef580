"""What a pass of a model takes."""

from __future__ import annotations

import statistics
import time

import numpy as np
from transformers import PreTrainedModel

from lookahead.drafting.tree import TokenTree
from lookahead.models.target import Target, input_device, position_limit

_ROUNDS = 25
_PASS_CONTEXT = 64  # tokens


def pass_seconds(model: PreTrainedModel, rounds: int = _ROUNDS) -> float:
    """What a pass over one token takes behind a short context, the median of some rounds."""
    context = min(_PASS_CONTEXT, (position_limit(model) or _PASS_CONTEXT + 1) - 1)
    target = Target(model, rows=1, capacity=context + 1, device=input_device(model), shape="chains")
    prompt = np.arange(context, dtype=np.int32) % 8
    seconds = []
    with target.serving():
        target.prefill([prompt])
        for _ in range(rounds):
            begin = time.perf_counter()
            target.score([TokenTree.root(int(prompt[-1]))]).argmax(-1).cpu()
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
