"""Trees of guesses, and the base class of drafters with heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.heads.layers import DraftCache
from lookahead.ngram.acceptance import AcceptanceTable
from lookahead.ngram.prune import IntArray, best_nodes

FloatArray = NDArray[np.float32]
Warp = Callable[[Tensor], Tensor]


class GuessTree(NamedTuple):
    """Guesses as a tree of nodes. Node 0 is the root, the last token of the row; its own values count for nothing."""

    tokens: IntArray
    parents: IntArray  # before their children; that of the root is 0
    kinds: IntArray  # [nodes, 2]: the head or the depth, from 0, and the rank among the guesses after the parent
    draft_probs: FloatArray  # that the head gave it, once the parent is right

    @classmethod
    def of(cls, tokens: IntArray, parents: IntArray, kinds: IntArray, draft_probs: FloatArray) -> GuessTree:
        """The tree of some guesses; guess i is node i + 1."""
        kinds = np.concatenate((np.zeros((1, 2), np.int32), kinds))
        draft_probs = np.append(np.float32(1), np.nan_to_num(draft_probs))  # heads that overflow give NaN
        return cls(np.append(np.int32(0), tokens), np.append(np.int32(0), parents), kinds, draft_probs)

    def best(self, root: int, rates: AcceptanceTable, max_nodes: int) -> tuple[IntArray, IntArray, FloatArray]:
        """Tokens, parents and probabilities of `root` and the guesses likeliest to be reached, at most `max_nodes`."""
        probabilities = rates.calibrate(self.kinds, self.draft_probs)
        probabilities[0] = 1.0
        nodes, parents = best_nodes(self.parents, probabilities, max_nodes)
        tokens = self.tokens[nodes]
        tokens[0] = root
        return tokens, parents, probabilities[nodes]


def independent_heads_tree(
    tokens: IntArray, draft_probs: FloatArray, rates: AcceptanceTable, max_nodes: int
) -> GuessTree:
    """Combine the guesses of independent heads: each guess of a head may follow each guess of the head before.

    Published trees of this kind are fixed, chosen from the average accuracy of every rank of every head. Here each step
    has the nodes with the highest product of probabilities along their path. The guesses and their probabilities are
    `[heads, k]`, those of a head all different.

    Source: Cai et al. 2024, "Medusa", §2.3.3 (sparse trees), there greedy over measured accuracies.
    """
    heads, width = tokens.shape
    kinds = np.indices((heads, width), np.int32).transpose(1, 2, 0)
    probabilities = rates.calibrate(kinds, draft_probs)
    # The best nodes of a level follow the best nodes of the level before, so no other node needs children.
    chosen, parents, path_probs, first = [], [], np.ones(1, np.float32), 0
    for head in range(heads):
        paths = (path_probs[:, None] * probabilities[head]).ravel()
        best = np.argsort(-paths, kind="stable")[:max_nodes]
        chosen.append(head * width + best % width)
        parents.append(first + best // width)
        path_probs, first = paths[best], 1 + sum(map(len, chosen[:-1]))
    index, earlier = np.concatenate(chosen), np.concatenate(parents).astype(np.int32)
    return GuessTree.of(tokens.ravel()[index], earlier, kinds.reshape(-1, 2)[index], draft_probs.ravel()[index])


class HeadDrafter(ABC):
    """Drafts with heads for the rows of one call, and keeps their states of each row."""

    def __init__(
        self, heads: Any, model: PreTrainedModel, rates: AcceptanceTable, warp: Warp | None, rows: int = 1
    ) -> None:
        self._heads, self._model, self._rates = heads, model, rates
        # Of the model that the heads read, numbered as by `output_hidden_states`.
        self.hidden_layers: tuple[int, ...] = getattr(heads, "hidden_layers", (-1,))
        self._warp = warp  # the logits processors of sampling, on `[n, vocab]`
        self._last: dict[int, Tensor] = {}  # by row, the state that its next guesses are made from
        self._caches = [DraftCache(rows) for _ in range(getattr(heads, "cached_layers", 0))]

    @abstractmethod
    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Read the new tokens `[n]` of each row, and the states `[n, size]` that they were chosen from."""

    @abstractmethod
    def draft(self, rows: Sequence[int], max_nodes: int) -> list[GuessTree]:
        """Guess after the last token of each of some rows; of a tree `max_nodes` will be drafted at most."""

    def forget(self, row: int) -> None:
        """Drop the states of a row."""
        self._last.pop(row, None)
        for cache in self._caches:
            cache.lengths[row] = 0

    def _guess(self, logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Probabilities and indices of the likeliest guesses, `[..., most]` each, of logits `[..., vocab]`."""
        if self._warp is not None:
            logits = self._warp(logits.flatten(0, -2).float()).view(logits.shape)
        best = logits.softmax(-1, dtype=torch.float32).topk(min(most, logits.shape[-1]))
        return best.values, best.indices
