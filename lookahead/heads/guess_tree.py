"""Trees of guesses, and the base class of drafters with heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.ngram.acceptance import AcceptanceTable
from lookahead.ngram.prune import best_nodes

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
Warp = Callable[[Tensor], Tensor]


class GuessTree(NamedTuple):
    """Guesses as a tree.

    Attributes:
        tokens: int32 `[nodes]`; the root first.
        parents: int32 `[nodes]`; a parent comes before its child, that of the root is 0.
        probabilities: float32 `[nodes]`; the calibrated probability of each once its parent is right; 1 for the root.
        kinds: int32 `[nodes, 2]`; the head of each, or its depth, counted from 0, and its rank among the guesses
            after its parent.
        draft_probs: float32 `[nodes]`; the probability that its head gave it.
    """

    tokens: IntArray
    parents: IntArray
    probabilities: FloatArray
    kinds: IntArray
    draft_probs: FloatArray


def guess_tree(
    root: int,
    tokens: IntArray,
    parents: IntArray,
    kinds: IntArray,
    draft_probs: FloatArray,
    rates: AcceptanceTable,
    max_nodes: int,
) -> GuessTree:
    """Select the guesses that are likeliest to be reached.

    Args:
        root: The token they follow.
        tokens: int32 `[n]`; guess i is node i + 1.
        parents: int32 `[n]`, the earlier node that each follows; 0 is the root.
        kinds: int32 `[n, 2]`, as of a `GuessTree`.
        draft_probs: float32 `[n]`, as of a `GuessTree`.
        rates: Calibrates the probabilities.
        max_nodes: Maximum number of nodes besides the root.
    """
    probabilities = np.append(np.float32(1), rates.calibrate(kinds, draft_probs))
    nodes, kept_parents = best_nodes(np.append(np.int32(0), parents), probabilities, max_nodes)
    return GuessTree(
        np.append(np.int32(root), tokens)[nodes],
        kept_parents,
        probabilities[nodes],
        np.concatenate((np.zeros((1, 2), np.int32), kinds))[nodes],
        np.append(np.float32(1), draft_probs)[nodes],
    )


def independent_heads_tree(
    root: int, tokens: IntArray, draft_probs: FloatArray, rates: AcceptanceTable, max_nodes: int
) -> GuessTree:
    """Combine the guesses of independent heads: each guess of a head may follow each guess of the head before.

    Published trees of this kind are fixed, chosen from the average accuracy of every rank of every head. Here each step
    selects the nodes with the highest product of probabilities along their path.

    Args:
        root: The token that the first head's guesses follow.
        tokens: int32 `[heads, k]`, the guesses of each head, all different.
        draft_probs: float32 `[heads, k]`, the probabilities that the heads give them.
        rates: Calibrates the probabilities.
        max_nodes: Maximum number of nodes besides the root.

    Source: Cai et al. 2024, "Medusa", §2.3.3 (sparse trees), there greedy over measured accuracies.
    """
    heads, width = tokens.shape
    kinds = np.indices((heads, width), np.int32).transpose(1, 2, 0)
    probabilities = rates.calibrate(kinds.reshape(-1, 2), draft_probs.reshape(-1)).reshape(heads, width)
    # The best nodes of a level follow the best nodes of the level before, so no other node needs children.
    chosen, parents, path_probs, first = [], [], np.ones(1, np.float32), 0
    for head in range(heads):
        paths = (path_probs[:, None] * probabilities[head]).ravel()
        best = np.argsort(-paths, kind="stable")[:max_nodes]
        chosen.append(head * width + best % width)
        parents.append(first + best // width)
        path_probs, first = paths[best], 1 + sum(map(len, chosen[:-1]))
    index, earlier = np.concatenate(chosen), np.concatenate(parents).astype(np.int32)
    guesses = tokens.reshape(-1)[index], earlier, kinds.reshape(-1, 2)[index], draft_probs.reshape(-1)[index]
    return guess_tree(root, *guesses, rates, max_nodes)


class HeadDrafter(ABC):
    """Drafts with heads for the rows of one call, and keeps their states of each row.

    Args:
        model: The model, for its embedding and its LM head.
        rates: Calibrates the guesses.
        warp: The logits processors of sampling, on `[n, vocab]`; None for greedy decoding.

    Attributes:
        hidden_layers: The hidden states of the model that the heads read, numbered as by `output_hidden_states`.
        reads_all: Whether the heads read the states of every token; otherwise of the last token only.
    """

    hidden_layers: tuple[int, ...] = (-1,)
    reads_all: bool = True

    def __init__(self, model: PreTrainedModel, rates: AcceptanceTable, warp: Warp | None) -> None:
        self._model = model
        self._rates = rates
        self._warp = warp
        self._last: dict[int, Tensor] = {}  # by row, the state that its next guesses are made from

    @abstractmethod
    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Read the new tokens of some rows.

        Args:
            rows: The rows.
            tokens: For each int64 `[n]`, the new tokens.
            states: For each `[n, size]`, the hidden states that the tokens were chosen from, layers side by side.
        """

    @abstractmethod
    def draft(self, rows: Sequence[int], roots: Sequence[int], max_nodes: int) -> list[GuessTree]:
        """Draft after the last token of each of some rows, at most `max_nodes` nodes besides the root."""

    def forget(self, row: int) -> None:
        """Drop the states of a row."""
        self._last.pop(row, None)

    def _guess(self, logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Probabilities and indices of the likeliest guesses, `[..., most]` each, of logits `[..., vocab]`."""
        if self._warp is not None:
            logits = self._warp(logits.flatten(0, -2).float()).view(logits.shape)
        best = logits.softmax(-1, dtype=torch.float32).topk(min(most, logits.shape[-1]))
        return best.values, best.indices
