"""The lengths of the chains of a batch: as much is verified as gives the most tokens per second."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.drafting.budget import EnableRule

_MARGIN = 1.05  # factor on the cost of drafted tokens: the expected gain of a draft must cover its risk
_PROBES = 3  # plain steps taken at first to be timed; some are lost, as the engine did other work in them too
_RATE = 0.1  # EMA rate of the time of a plain step, after the first ones, which count alike
_OUTLIER = 2.0  # a measurement counts as at most so many times the expected one
_WORST = 3.0  # plain steps that the budget is charged for a step at most, unless more was expected: stalls cost no more
_FEW = 3.0  # the first measurements of drafted steps count as they are
_STALE = 16  # steps with drafts after which the time of a plain step is believed less than theirs
_MEMORY = 0.98  # share of the measurements of drafted steps that each further one leaves
_DOUBT = 0.99  # the same for each time that no draft pays: a cost once measured too high is tried again
# First guess of the cost of a drafted token, as a share of a plain step where each request has one; its weight.
_TOKEN_COST, _GUESSED = 0.02, 4.0
_NOTHING: NDArray[np.float64] = np.zeros(0)


class BatchCost:
    """Seconds of a step of some number of requests by the number of drafted tokens.

    A plain step has a time of its own, as engines have faster kernels for it. The time of a step with drafts is a line
    through those measured, fitted by least squares; older ones count less. The first one is left out: engines compile
    then. A plain step that took longer than steps with drafts do by now is taken to be as fast as these without their
    drafted tokens: few plain steps are measured where all others draft.
    """

    __slots__ = ("_is_warm", "_plain_steps", "_since_plain", "_sums", "plain", "tries")

    def __init__(self) -> None:
        self.plain: float | None = None  # seconds of a plain step
        self.tries = 0  # plain steps taken only to be timed
        self._plain_steps = self._since_plain = 0
        self._is_warm = False
        self._sums = [0.0] * 5  # weight, tokens, seconds, tokens², tokens × seconds; in Python faster than in an array

    def observe(self, rows: int, drafted: int, seconds: float) -> float:
        """Learn the time of a step; returns the time of a step with drafts that was expected."""
        if drafted == 0:
            usual = self.plain if self.plain is not None else seconds
            self._plain_steps, self._since_plain = self._plain_steps + 1, 0
            rate = max(_RATE, 1.0 / self._plain_steps)
            self.plain = usual + rate * (min(seconds, _OUTLIER * usual) - usual)
            return self.plain
        self._since_plain += 1
        if not self._is_warm:
            self._is_warm = True
            return 0.0
        first, per_token = self.line(rows)
        expected = max(self.plain or 0.0, first) + per_token * drafted
        if self.plain is not None and self._sums[0] > _FEW:
            seconds = min(seconds, _OUTLIER * expected)
            if self._since_plain > _STALE and first > 0.0:
                self.plain = min(self.plain, first)
        measured = (1.0, drafted, seconds, drafted * drafted, drafted * seconds)
        self._sums = [_MEMORY * old + new for old, new in zip(self._sums, measured, strict=True)]
        return expected

    def line(self, rows: int) -> tuple[float, float]:
        """Seconds of a step with drafts without its drafted tokens, and of each of these; a plain step is measured."""
        plain, most = self.plain or 0.0, 8.0 * rows
        weight, tokens, seconds, squares, products = self._sums
        for guessed in (0.0, most):  # two measurements that were never made, as a first guess
            time = plain * (1.0 + _TOKEN_COST * guessed / rows)
            weight, tokens, seconds = weight + _GUESSED, tokens + _GUESSED * guessed, seconds + _GUESSED * time
            squares, products = squares + _GUESSED * guessed * guessed, products + _GUESSED * guessed * time
        per_token = max(0.0, (weight * products - tokens * seconds) / (weight * squares - tokens * tokens))
        return (seconds - per_token * tokens) / weight, per_token

    def doubt(self) -> None:
        """Trust what was measured with drafts a little less."""
        self._sums = [_DOUBT * old for old in self._sums]


class ChainLengths:
    """Decides how much of the drafted chains of a batch is verified, by measured times of steps.

    A step verifies the drafted tokens that are likeliest to be reached, in all requests together. How many is the
    number that gives the most expected tokens per second. An `EnableRule` bounds what drafting may lose: while its
    budget is empty nothing is drafted. The first steps of each power of two of requests verify nothing, until a plain
    step is timed.

    It reads no clock.

    Example:
        >>> lengths = ChainLengths()
        >>> for _ in range(50):
        ...     lengths.observe(rows=1, drafted=0, emitted=1, seconds=0.010)
        ...     lengths.observe(rows=1, drafted=2, emitted=2, seconds=0.015)
        ...     lengths.observe(rows=1, drafted=8, emitted=6, seconds=0.045)
        >>> lengths.choose([np.array([0.9, 0.8, 0.2, 0.1])])
        [2]
    """

    def __init__(self) -> None:
        self._costs: defaultdict[int, BatchCost] = defaultdict(BatchCost)  # by the bucket of rows: 1, 2, 3-4, 5-8, …
        self._rule = EnableRule()

    def drafts(self, rows: int) -> bool:
        """Whether anything is drafted in this step of so many requests."""
        cost = self._cost_of(rows)
        if cost.plain is None:
            cost.tries += 1
            return cost.tries > _PROBES
        return self._rule.proposes(rows)

    def choose(self, path_probs: Sequence[NDArray[np.float64]]) -> list[int]:
        """How many tokens of each chain are verified, by float64 `[n]`: the probability to be accepted up to each."""
        rows = len(path_probs)
        probs = np.concatenate(path_probs) if rows > 1 else path_probs[0] if rows else _NOTHING
        if probs.size == 0:
            return [0] * rows
        cost = self._cost_of(rows)
        if cost.plain is None:
            return [len(each) for each in path_probs]
        first, per_token = cost.line(rows)
        first = max(cost.plain, first)
        least, speedup, took = _least_verified(probs, rows, cost.plain, first, per_token)
        if least > 1.0 or not self._rule.verifies(rows, speedup, took - 1.0):
            cost.doubt()
            return [0] * rows
        return [int(np.count_nonzero(each >= least)) if each.size else 0 for each in path_probs]

    @staticmethod
    def warm_up() -> None:
        """Compile, or load from the cache, what `choose` calls."""
        _least_verified(np.ones(1), 1, 1.0, 1.0, 0.0)

    def observe(self, *, rows: int, drafted: int, emitted: int, seconds: float, host_s: float | None = 0.0) -> None:
        """Learn from a step: of all rows together its drafted and its emitted tokens, and its time without drafting.

        `host_s` is the time of drafting; None if nothing was drafted for.
        """
        cost = self._cost_of(rows)
        expected = cost.observe(rows, drafted, seconds)
        if host_s is None or not cost.plain:  # not timed yet, or by a clock that did not move
            self._rule.record_plain(rows)
        elif expected > 0.0:
            self._rule.record(
                rows,
                drafted=drafted > 0,
                tokens=emitted / rows,
                forward=seconds / cost.plain,
                usual=max(expected / cost.plain, _WORST),
                proposing=host_s / cost.plain,
            )

    def _cost_of(self, rows: int) -> BatchCost:
        return self._costs[(rows - 1).bit_length()]


@njit(cache=True, error_model="numpy")
def _least_verified(probs, rows, plain, first, per_token):
    """The probability from which on drafted tokens are verified, 2 if none is; the speedup; the cost in plain steps."""
    ranked = np.sort(probs)[::-1]
    expected, best, least, took = float(rows), rows / plain, 2.0, plain
    for at in range(ranked.size):
        expected += ranked[at]
        seconds = plain + _MARGIN * (first + per_token * (at + 1) - plain)
        if expected / seconds > best:
            best, least, took = expected / seconds, ranked[at], seconds
    return least, best * plain / rows, took / plain
