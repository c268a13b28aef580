"""The likeliest tokens of a step's logits, copied from the device at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.drafting.tree import IntArray
from lookahead.kernels import topk_cpu
from lookahead.ngram.recycled import TOP


@dataclass(frozen=True, slots=True)
class Scores:
    """The likeliest tokens after every node, before any logits processor.

    Attributes:
        argmax: int32 `[rows, nodes]`, negative where logits are NaN; empty if not requested.
        top: int32 `[rows, nodes, 8]`, the likeliest first, -1 beyond the vocabulary; None if not requested.
        probabilities: float32 `[rows, nodes, 8]`, 0 where logits are not finite; None if not requested.
    """

    argmax: IntArray
    top: IntArray | None = None
    probabilities: NDArray[np.float32] | None = None


def likeliest(scores: Tensor) -> Tensor:
    """The index of the highest of `[..., vocab]` scores, int32 `[...]`; negative where one is NaN."""
    values, indices = scores.max(-1)
    return torch.where(values.isnan(), -1, indices).to(torch.int32)


def read_scores(logits: Tensor, *, with_top: bool) -> Scores:
    """Find the likeliest tokens on the device of the logits, and copy them to the host at once.

    Args:
        logits: `[rows, nodes, vocab]`.
        with_top: Whether to return the top 8 beside the argmax.
    """
    if logits.device.type == "cpu" and logits.dtype in topk_cpu.DTYPES:
        argmax, tokens, probabilities = topk_cpu.rank(logits, TOP if with_top else 0)
        return Scores(argmax, tokens, probabilities) if with_top else Scores(argmax)
    return _read_tensors(logits, with_top=with_top)


def _read_tensors(logits: Tensor, *, with_top: bool) -> Scores:
    """`read_scores` in torch alone."""
    argmax = likeliest(logits)
    if not with_top:
        return Scores(argmax.cpu().numpy())
    chances, top = logits.softmax(-1, dtype=torch.float32).topk(min(TOP, logits.shape[-1]))
    chances = chances.nan_to_num(0.0)
    if top.shape[-1] < TOP:
        missing = (0, TOP - top.shape[-1])
        chances, top = torch.nn.functional.pad(chances, missing), torch.nn.functional.pad(top, missing, value=-1)
    # The first of the top 8 may not be the argmax: of equal logits, greedy decoding takes the lower token.
    packed = torch.cat((argmax[..., None], top.int(), chances.view(torch.int32)), -1).cpu().numpy()
    return Scores(
        np.ascontiguousarray(packed[..., 0]),
        np.ascontiguousarray(packed[..., 1 : TOP + 1]),
        np.ascontiguousarray(packed[..., TOP + 1 :]).view(np.float32),
    )
