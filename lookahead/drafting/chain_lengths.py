"""The lengths of the chains of a batch: as much is verified as gives the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.drafting.cost_model import StepCost

_MARGIN = 1.05  # factor on the cost of drafted tokens: the expected gain of a draft must cover its risk
_NOTHING: NDArray[np.float64] = np.zeros(0)
_LONGEST_REST = 16  # steps at most from one try of drafting to the next where it does not pay
_ALL_TIMED, _TIMED_EVERY = 64, 4  # after so many steps of as many rows, one in four is learned from
_PROBES = 3  # plain steps taken at first to be timed; some are lost, as the engine did other work in them too


class ChainLengths:
    """Decides how much of the drafted chains of a batch is verified, by measured times of steps.

    A step verifies the drafted tokens that are likeliest to be reached, in all requests together. How many is the
    number that gives the most expected tokens per second. Where that is none, drafting rests for 1 step, then for 3, 7
    and 15. The first steps of each power of two of requests verify nothing, until a plain step is timed.

    It reads no clock.

    Example:
        >>> lengths = ChainLengths()
        >>> for _ in range(50):
        ...     lengths.observe(rows=1, tokens=1, seconds=0.010)
        ...     lengths.observe(rows=1, tokens=8, seconds=0.040)
        >>> lengths.choose([np.array([0.9, 0.8, 0.2, 0.1])])
        [2]
    """

    def __init__(self) -> None:
        self.cost = StepCost()
        self._rests: dict[int, int] = {}  # steps of the last rest, by the bucket of rows
        self._probes: dict[int, int] = {}  # plain steps still taken only to be timed, by the bucket of rows
        self._timed: dict[int, int] = {}  # steps whose time was told, by the bucket of rows
        self._left = 0

    def rests(self) -> bool:
        """Whether nothing is drafted in this step; each call counts as a step."""
        self._left = max(0, self._left - 1)
        return self._left > 0

    def choose(self, path_probs: Sequence[NDArray[np.float64]]) -> list[int]:
        """How many tokens of each chain are verified.

        Args:
            path_probs: For each request of the step float64 `[n]`, not increasing: the probability that its chain is
                accepted up to each token.
        """
        rows = len(path_probs)
        probs = np.concatenate(path_probs) if rows > 1 else path_probs[0] if rows else _NOTHING
        if probs.size == 0:
            return [0] * rows
        bucket = (rows - 1).bit_length()
        if self._probes.setdefault(bucket, _PROBES) > 0:
            self._probes[bucket] -= 1
            return [0] * rows
        least = _least_verified(probs, self.cost.curve(rows, 2 + probs.size // rows), rows)
        if least > 1.0:
            self._rests[bucket] = self._left = min(_LONGEST_REST, 2 * self._rests.get(bucket, 1))
            return [0] * rows
        self._rests.pop(bucket, None)
        return [int(np.count_nonzero(each >= least)) if each.size else 0 for each in path_probs]

    def observe(self, *, rows: int, tokens: int, seconds: float) -> None:
        """Learn the time of a step that verified so many tokens in so many requests, the last token of each counted."""
        bucket = (rows - 1).bit_length()
        if tokens == rows:
            self._probes[bucket] = 0
        timed = self._timed[bucket] = self._timed.get(bucket, 0) + 1
        if timed > _ALL_TIMED and timed % _TIMED_EVERY:
            return
        if not self.cost.warms_up(tokens // rows):
            self.cost.observe(tokens / rows, seconds, rows=rows)


@njit(cache=True, error_model="numpy")
def _least_verified(probs, curve, rows):
    """The probability from which on drafted tokens are verified; 2 if none is.

    `curve` has the seconds of a step by the tokens of each row, if all rows have as many; between these it is linear.
    """
    ranked = np.sort(probs)[::-1]
    expected, best, least = float(rows), rows / curve[1], 2.0
    for at in range(ranked.size):
        expected += ranked[at]
        nodes = 1.0 + (at + 1) / rows
        below = int(nodes)
        seconds = curve[below] + (nodes - below) * (curve[below + 1] - curve[below])
        rate = expected / (curve[1] + _MARGIN * (seconds - curve[1]))
        if rate > best:
            best, least = rate, ranked[at]
    return least
