"""Trees of guesses, and the base class of the heads that make them."""

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

_GUESSES = 32  # of each independent head: a draft of any size hardly reaches further down


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
    """The tree of the guesses that are likeliest to be reached.

    Args:
        root: The token they follow.
        tokens: int32 `[n]`; guess i is node i + 1.
        parents: int32 `[n]`, the node each follows, an earlier one; 0 is the root.
        kinds: int32 `[n, 2]`, as of a `GuessTree`.
        draft_probs: float32 `[n]`, likewise.
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

    Published trees of this kind are chosen once, from the average accuracy of every rank of every head. Here every
    step has its own tree, of the nodes with the highest product of probabilities along their path.

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
    # The best nodes of a level follow the best nodes of the level before, so that no other node is worth extending.
    chosen, parents, path_probs, first = [], [], np.ones(1, np.float32), 0
    for head in range(heads):
        paths = (path_probs[:, None] * probabilities[head]).ravel()
        best = np.argsort(-paths, kind="stable")[:max_nodes]
        chosen.append(head * width + best % width)
        parents.append(first + best // width)
        path_probs, first = paths[best], 1 + sum(map(len, chosen[:-1]))
    index = np.concatenate(chosen)
    return guess_tree(
        root,
        tokens.reshape(-1)[index],
        np.concatenate(parents).astype(np.int32),
        kinds.reshape(-1, 2)[index],
        draft_probs.reshape(-1)[index],
        rates,
        max_nodes,
    )


class HeadDrafter(ABC):
    """Heads that draft for the rows of one call, and what they remember of each row.

    Args:
        model: The model, for its embedding and its LM head.
        rates: Calibrates the guesses.
        warp: What sampling does to logits `[n, vocab]`; None for greedy decoding.

    Attributes:
        hidden_layers: The hidden states of the model they read, numbered as by `output_hidden_states`.
        reads_all: Whether they read those of every token, not of the last one alone.
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
        """Read what is new in some rows.

        Args:
            rows: The rows.
            tokens: For each int64 `[n]`, the tokens that followed.
            states: For each `[n, size]`, the hidden states that these were chosen from, layers side by side.
        """

    @abstractmethod
    def draft(self, rows: Sequence[int], roots: Sequence[int], max_nodes: int) -> list[GuessTree]:
        """Draft after the last token of each of some rows, at most `max_nodes` nodes besides the root."""

    def forget(self, row: int) -> None:
        """Forget a row."""
        self._last.pop(row, None)

    def _guess(self, logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Probabilities and indices of the likeliest guesses, `[..., most]` each, of logits `[..., vocab]`."""
        if self._warp is not None:
            logits = self._warp(logits.flatten(0, -2).float()).view(logits.shape)
        best = logits.softmax(-1, dtype=torch.float32).topk(min(most, logits.shape[-1]))
        return best.values, best.indices


class IndependentHeadsDrafter(HeadDrafter):
    """Heads that all guess from the same state; their guesses are combined into one tree a row."""

    def draft(self, rows: Sequence[int], roots: Sequence[int], max_nodes: int) -> list[GuessTree]:
        """Draft after the last token of each of some rows; the heads run once for all."""
        draft_probs, tokens = self._guess(self._logits(rows), _GUESSES)
        # One copy from the device: [heads, rows, guesses], tokens and the bits of their probabilities.
        packed = torch.stack((tokens.int(), draft_probs.view(torch.int32))).cpu().numpy()
        return [
            independent_heads_tree(root, packed[0, :, i], packed[1, :, i].view(np.float32), self._rates, max_nodes)
            for i, root in enumerate(roots)
        ]

    @abstractmethod
    def _logits(self, rows: Sequence[int]) -> Tensor:
        """Logits of every head after the last token of some rows, `[heads, rows, vocab]`."""
