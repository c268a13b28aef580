"""What heads offer: a tree of guesses, and whoever makes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
Warp = Callable[[Tensor], Tensor]


class GuessTree(NamedTuple):
    """Guesses as a tree.

    Attributes:
        tokens: int32 `[nodes]`; the root first.
        parents: int32 `[nodes]`; a parent comes before its child, that of the root is 0.
        chances: float32 `[nodes]`; the chance of each where its parent is right; 1 for the root.
        kinds: int32 `[nodes, 2]`; the head of each, or its depth, counted from 0, and its rank among the guesses
            after its parent.
        promised: float32 `[nodes]`; the probability that its head gave it.
    """

    tokens: IntArray
    parents: IntArray
    chances: FloatArray
    kinds: IntArray
    promised: FloatArray


class HeadDrafter(Protocol):
    """Heads at work on the rows of one call, with what they remember of each.

    Attributes:
        hidden_layers: The hidden states of the model they read, numbered as by `output_hidden_states`.
        reads_all: Whether they read those of every token, not of the newest alone.
    """

    hidden_layers: tuple[int, ...]
    reads_all: bool

    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Take in what is new in some rows.

        Args:
            rows: The rows.
            tokens: For each int64 `[n]`, the tokens that followed.
            states: For each `[n, size]`, the hidden states that these were chosen from, layers side by side.
        """

    def draft(self, rows: Sequence[int], roots: Sequence[int], room: int) -> list[GuessTree]:
        """What may follow the newest token of each of some rows, at most `room` nodes besides the root."""

    def forget(self, row: int) -> None:
        """Forget a row."""
