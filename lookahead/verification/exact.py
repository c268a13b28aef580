"""Reads the scores of a step and walks its trees: the only place where output tokens are chosen and outputs end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.kernels import topk_cpu
from lookahead.ngram.successors import TOP

Walked = tuple[IntArray, IntArray]
"""The accepted nodes from the root, and the target's choice after each of them; both int32 `[a]`."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The most likely tokens after every node, before any logits processor; empty or None if not requested."""

    argmax: IntArray  # int32 `[rows, nodes]`, negative if logits are NaN
    top: IntArray | None = None  # int32 `[rows, nodes, 8]`, most likely first, -1 beyond the vocabulary
    probabilities: NDArray[np.float32] | None = None  # float32 `[rows, nodes, 8]`, 0 if logits are not finite


def likeliest(scores: Tensor) -> Tensor:
    """The index of the highest of `[..., vocab]` scores, int32 `[...]`; negative if one is NaN."""
    values, indices = scores.max(-1)
    return torch.where(values.isnan(), -1, indices).to(torch.int32)


def read_scores(logits: Tensor, *, with_top: bool) -> Scores:
    """Find the most likely tokens of logits `[rows, nodes, vocab]` on their device; one copy to the host."""
    if logits.device.type == "cpu" and logits.dtype in topk_cpu.DTYPES:
        argmax, tokens, probabilities = topk_cpu.rank(logits, TOP if with_top else 0)
        return Scores(argmax, tokens, probabilities) if with_top else Scores(argmax)
    return _read_tensors(logits, with_top=with_top)


def _read_tensors(logits: Tensor, *, with_top: bool) -> Scores:
    """`read_scores` in torch only."""
    argmax = likeliest(logits)
    if not with_top:
        return Scores(argmax.cpu().numpy())
    chances, top = logits.softmax(-1, dtype=torch.float32).topk(min(TOP, logits.shape[-1]))
    chances = chances.nan_to_num(0.0)
    if top.shape[-1] < TOP:
        missing = (0, TOP - top.shape[-1])
        chances, top = torch.nn.functional.pad(chances, missing), torch.nn.functional.pad(top, missing, value=-1)
    # The first of the top 8 may not be the argmax: among equal logits greedy decoding takes the lowest token.
    packed = torch.cat((argmax[..., None], top.int(), chances.view(torch.int32)), -1).cpu().numpy()
    return Scores(
        np.ascontiguousarray(packed[..., 0]),
        np.ascontiguousarray(packed[..., 1 : TOP + 1]),
        np.ascontiguousarray(packed[..., TOP + 1 :]).view(np.float32),
    )


def verify(tree: TokenTree, choose: Callable[[int], int], is_finished: Callable[[int], bool]) -> Walked:
    """Walk from the root: choose a token, emit it, and descend if a child of the node holds it.

    `choose` and `is_finished` are called alternately, once per emitted token and in order, so random numbers, logits
    processors and stopping criteria behave exactly as in a token-by-token loop. `choose` takes a node and returns the
    target's choice after it; `is_finished` takes the emitted token and returns whether the output ends there.

    Source: the sampling loop of transformers, replayed along the tree; lossless for any tree.
    """
    nodes = {edge: node for node, edge in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
    path, tokens = [0], []
    while True:
        token = choose(path[-1])
        tokens.append(token)
        is_last = is_finished(token)
        child = nodes.get((path[-1], token), 0)  # 0, the root, is never a child
        if is_last or not child:
            return np.array(path, np.int32), np.array(tokens, np.int32)
        path.append(child)
