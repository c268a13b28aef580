"""What tokens are worth to a batch: its last row ends it, and a row that ends early saves the others little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_MOST_COUNTED = 20_000.0  # tokens


@dataclass(slots=True)
class Endings:
    """How often outputs end before their limit: once in 200 tokens, until more is known."""

    ended: float = 1.0
    tokens: float = 200.0

    def count(self, tokens: int, *, is_early: bool) -> None:
        """Count an output of so many tokens, which ended before its limit or did not."""
        self.ended += is_early
        self.tokens += tokens
        if self.tokens > _MOST_COUNTED:
            self.ended, self.tokens = self.ended / 2, self.tokens / 2

    def chance_to_last(self, steps: int) -> float:
        """The chance that an output goes on for so many tokens more."""
        return float((1.0 - min(1.0, self.ended / self.tokens)) ** steps)


class Batch(NamedTuple):
    """The rows of a step.

    Attributes:
        left: float64 `[rows]`, tokens that each row may still emit.
        plain: float64 `[rows + 1]`, what a plain step of 0, 1, … rows counts; it never falls.
    """

    left: FloatArray
    plain: FloatArray

    @classmethod
    def of(cls, left: Sequence[int], plain: FloatArray, lasting: float) -> Batch:
        """The rows of a step by the chance that they run to their limits.

        If they do, the last of them ends the batch: were a step as dear with few rows as with many, only that one would
        count. If any may end at any time, a token of one is worth as much as a token of another.

        Args:
            left: Tokens that each row may still emit.
            plain: float64 `[rows + 1]`, what a plain step of 0, 1, … rows takes.
            lasting: The chance.
        """
        rows = len(left)
        weights = lasting * plain / plain[-1] + (1.0 - lasting) * np.arange(rows + 1.0) / rows
        return cls(np.array(left, np.float64), weights)

    def steps_saved(self, tokens: Sequence[float]) -> float:
        """How much sooner the batch ends for so many tokens of each row at once, in plain steps of all its rows."""
        if len(self.left) == 1:
            return float(tokens[0])
        return float(steps_saved(np.array(tokens, np.float64), self.left, self.plain))


@njit(cache=True, error_model="numpy")
def steps_saved(tokens, left, plain):
    """`Batch.steps_saved`, of arrays."""
    return (_seconds_left(left, plain) - _seconds_left(left - tokens, plain)) / plain[len(left)]


@njit(cache=True, error_model="numpy")
def _seconds_left(left, plain):
    """Seconds that plain decoding takes until every row has emitted all that is left of it."""
    seconds, rows = 0.0, len(left)
    ascending = np.sort(left)
    for ended in range(rows):
        # Without this row the steps until it ends would be those of one row fewer.
        seconds += (plain[rows - ended] - plain[rows - ended - 1]) * max(0.0, ascending[ended])
    return seconds
