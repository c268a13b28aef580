"""What tokens are worth to a batch: its last row ends it, and a row that ends early saves the others little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


class Batch(NamedTuple):
    """The rows of a step.

    Every row is taken to run to its limit. Were a step as dear with few rows as with many, only the row with the most
    to go would then count; were it dear in proportion to them, a token of any row would count alike.

    Attributes:
        left: float64 `[rows]`, tokens that each row may still emit.
        plain: float64 `[rows + 1]`, what a plain step of 0, 1, … rows takes; it never falls.
    """

    left: FloatArray
    plain: FloatArray

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
