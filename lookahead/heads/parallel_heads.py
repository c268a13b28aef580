"""Heads that guess side by side, at work: all of them after the newest token, their guesses combined."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lookahead.heads.guess_tree import GuessTree, HeadDrafter, Warp
from lookahead.heads.hit_rates import HeadRates
from lookahead.heads.independent_heads_tree import grow_product
from lookahead.heads.medusa import MedusaHeads

_GUESSES = 32  # of each head: a draft of any size hardly reaches further down


class ParallelDrafter(HeadDrafter):
    """Combines what heads say of the next places into one tree a row.

    Args:
        rates: How far guesses can be trusted.
        warp: What sampling does to logits; None where the likeliest token is taken.
    """

    hidden_layers: tuple[int, ...] = (-1,)

    def __init__(self, rates: HeadRates, warp: Warp | None) -> None:
        self._rates = rates
        self._warp = warp

    def draft(self, rows: Sequence[int], roots: Sequence[int], room: int) -> list[GuessTree]:
        """What may follow the newest token of each of some rows; the heads run once for all."""
        logits = self._logits(rows)
        if self._warp is not None:
            logits = self._warp(logits.flatten(0, 1).float()).view(logits.shape)
        promised, tokens = logits.softmax(-1, dtype=torch.float32).topk(min(_GUESSES, logits.shape[-1]))
        # One copy from the device: [heads, rows, guesses], tokens and the bits of their probabilities.
        packed = torch.cat((tokens.int(), promised.view(torch.int32)), -1).cpu().numpy()
        trees = []
        for i, root in enumerate(roots):
            guesses, bits = (np.ascontiguousarray(half) for half in np.split(packed[:, i], 2, axis=-1))
            trees.append(grow_product(root, guesses, bits.view(np.float32), self._rates, room))
        return trees

    @abstractmethod
    def _logits(self, rows: Sequence[int]) -> Tensor:
        """What every head says after the newest token of some rows, `[heads, rows, vocab]`."""


class MedusaDrafter(ParallelDrafter):
    """Medusa heads, which remember the newest hidden state of a row and nothing else.

    Args:
        heads: The heads.
        rates: How far their guesses can be trusted.
        warp: What sampling does to logits; None where the likeliest token is taken.
    """

    reads_all = False

    def __init__(self, heads: MedusaHeads, rates: HeadRates, warp: Warp | None) -> None:
        super().__init__(rates, warp)
        self._heads = heads
        self._newest: dict[int, Tensor] = {}

    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Keep the last hidden state of each row."""
        self._newest.update((row, each[-1]) for row, each in zip(rows, states, strict=True))

    def forget(self, row: int) -> None:
        """Forget a row."""
        self._newest.pop(row, None)

    def _logits(self, rows: Sequence[int]) -> Tensor:
        """What every head says, `[heads, rows, vocab]`."""
        logits: Tensor = self._heads(torch.stack([self._newest[row] for row in rows]))
        return logits
