"""The lengths of the chains of a batch: as much is verified as gives the most tokens per second."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.budget import DraftingBudget
from lookahead.utils.jit import njit

_MARGIN = 1.25  # factor on the cost of drafted tokens: the expected gain of a draft must cover its risk
_PROBES = 3  # plain steps taken at first to be timed; some are lost, as the engine did other work in them too
_RECENT = 9  # plain steps whose lower quartile is believed
# Drafted tokens of a step before any were timed: so many, or one of so many requests; later so many times the most that
# were.
_FIRST_TOKENS, _ROWS_PER_FIRST_TOKEN, _GROWTH = 8, 8, 4
_OUTLIER = 2.0  # a measurement counts as at most so many times the expected one
_TICK = 1e-9  # seconds of a step at least: a clock may not have moved
_WORST = 3.0  # plain steps that the budget is charged for a step at most, unless more was expected: stalls cost no more
_FEW = 3.0  # the first measurements of drafted steps count as they are
_STALE = 16  # steps with drafts after which the time of a plain step is believed less than theirs
_MEMORY = 0.98  # share of the measurements of drafted steps that each further one leaves
_DOUBT = 0.99  # the same for each time that no draft pays: a cost once measured too high is tried again
# First guess of the cost of a drafted token, as a share of a plain step where each request has one. What a step without
# drafted tokens takes is known better than the cost of many, and so counts as more measurements.
_TOKEN_COST, _GUESSED, _GUESSED_FAR = 0.02, 2.0, 0.1


class BatchCost:
    """Seconds of a step of some number of requests by the number of drafted tokens.

    A plain step has a time of its own, as engines have faster kernels for it: the lower quartile of the last 9, since
    what else an engine does in a step only makes it longer. The time of a step with drafts is a line through those
    measured, fitted by least squares; older ones count less. The first one is left out: engines compile then. A plain
    step that took longer than steps with drafts do by now is taken to be as fast as these without their drafted tokens:
    few plain steps are measured where all others draft.

    What a drafted token takes is guessed at first, and may be tens of times as much where the processor is at its
    limit. So the first steps with drafts verify few tokens, and each later one at most four times the most that were
    timed.
    """

    __slots__ = ("_is_warm", "_recent", "_since_plain", "is_untimed", "largest", "plain", "sums", "tries")

    def __init__(self) -> None:
        self.plain = 0.0  # seconds of a plain step; 0 if none is timed
        self._recent = deque[float](maxlen=_RECENT)
        self.tries = 0  # plain steps taken only to be timed
        self.is_untimed = False  # the last draft, or no plain step was timed that it could be compared with
        self.largest = 0  # drafted tokens of a step that was timed, at most
        self._since_plain = 0
        self._is_warm = False
        self.sums = [0.0] * 5  # weight, tokens, seconds, tokens², tokens × seconds

    def observe(self, rows: int, drafted: int, seconds: float) -> float:
        """Learn the time of a step; returns the time of a step with drafts that was expected."""
        if drafted == 0:
            self._since_plain = 0
            self._recent.append(seconds)
            self.plain = sorted(self._recent)[len(self._recent) // 4]
            return self.plain
        self._since_plain += 1
        self.is_untimed = not self.plain
        if not self._is_warm:
            self._is_warm = True
            return 0.0
        first, per_token = self.line(rows)
        expected = max(self.plain, first) + per_token * drafted
        if self.plain and self.sums[0] > _FEW:
            seconds = min(seconds, _OUTLIER * expected)
            if self._since_plain > _STALE and 0.0 < first < self.plain:
                self.plain = first
                self._recent = deque([first], maxlen=_RECENT)
        self.largest = max(self.largest, drafted)
        measured = 1.0, drafted, seconds, drafted * drafted, drafted * seconds
        self.sums = [_MEMORY * old + new for old, new in zip(self.sums, measured, strict=True)]
        return expected

    def max_tokens(self, rows: int) -> int:
        """Drafted tokens that the next step verifies at most."""
        timed = self.largest if self.sums[0] >= 1.0 else 0  # a cost that is tried again is tried with few
        return max(_FIRST_TOKENS, rows // _ROWS_PER_FIRST_TOKEN, _GROWTH * timed)

    def line(self, rows: int) -> tuple[float, float]:
        """Seconds of a step with drafts without its drafted tokens, and of each of these; a plain step is measured."""
        plain, most = self.plain, float(self.largest or self.max_tokens(rows))
        far = plain * (1.0 + _TOKEN_COST * most / rows)
        # Two measurements that were never made, of none and of `most` drafted tokens, are the first guess.
        weight, tokens, seconds, squares, products = self.sums
        weight, seconds = weight + _GUESSED + _GUESSED_FAR, seconds + _GUESSED * plain + _GUESSED_FAR * far
        tokens, squares = tokens + _GUESSED_FAR * most, squares + _GUESSED_FAR * most * most
        products += _GUESSED_FAR * most * far
        per_token = max(0.0, (weight * products - tokens * seconds) / (weight * squares - tokens * tokens))
        return (seconds - per_token * tokens) / weight, per_token


class ChainLengths:
    """Decides how much of the drafted chains of a batch is verified, by measured times of steps.

    A step verifies the drafted tokens that are likeliest to be reached, in all requests together. How many is the
    number that gives the most expected tokens per second. A `DraftingBudget` bounds what drafting may lose: while its
    budget is empty nothing is drafted. The first three steps of each power of two of requests verify nothing, so that
    plain steps are timed. Where requests come in every step, none is timed: until one with and one without drafts
    were, a draft that was not timed holds few tokens, and three steps without one follow.

    It reads no clock.

    Example:
        >>> lengths = ChainLengths()
        >>> for _ in range(50):
        ...     lengths.observe(rows=1, drafted=0, emitted=1, seconds=0.010)
        ...     lengths.observe(rows=1, drafted=2, emitted=2, seconds=0.015)
        ...     lengths.observe(rows=1, drafted=8, emitted=6, seconds=0.045)
        >>> lengths.choose(np.array([[0.9, 0.8, 0.2, 0.1]]))
        [2]
    """

    def __init__(self) -> None:
        self._costs: defaultdict[int, BatchCost] = defaultdict(BatchCost)  # by the bucket of rows: 1, 2, 3-4, 5-8, …
        self._budget = DraftingBudget()

    def drafts(self, rows: int) -> bool:
        """Whether anything is drafted in this step of so many requests."""
        cost = self._cost_of(rows)
        if cost.is_untimed:
            cost.tries, cost.is_untimed = 0, False
        if cost.tries < _PROBES:
            cost.tries += 1
            return False
        return not cost.plain or self._budget.proposes(rows)

    def choose(self, path_probs: NDArray[np.float64]) -> list[int]:
        """How many tokens of each chain are verified, by the probability to be accepted up to each.

        `path_probs` is float64 `[rows, longest]`, 0 behind the end of a chain.
        """
        rows = len(path_probs)
        if not rows:
            return []
        cost = self._cost_of(rows)
        plain, line = (cost.plain, cost.line(rows)) if cost.plain else (1.0, (1.0, 0.0))
        chosen, speedup, seconds = _fastest(path_probs, plain, *line, cost.max_tokens(rows))
        if chosen is not None and self._budget.verifies(rows, speedup, seconds / plain - 1.0):
            cost.is_untimed = not (cost.plain and cost.largest)
            lengths: list[int] = chosen.tolist()
            return lengths
        if speedup > 0.0:
            cost.sums = [_DOUBT * each for each in cost.sums]
        return [0] * rows

    def observe(self, *, rows: int, drafted: int, emitted: int, seconds: float, host_s: float | None = 0.0) -> None:
        """Learn from a step.

        Args:
            rows: Requests of the step, at least 1.
            drafted: Drafted tokens that it verified, of all rows together.
            emitted: Tokens that it emitted, of all rows together.
            seconds: Its time without drafting.
            host_s: Seconds of drafting; None if nothing was drafted for.
        """
        cost, seconds = self._cost_of(rows), max(seconds, _TICK)
        host_s = host_s and max(0.0, host_s)  # a clock may have gone back
        expected = cost.observe(rows, drafted, seconds)
        plain = cost.plain
        if host_s is None or not plain:  # not timed yet
            self._budget.record_plain(rows)
        elif expected > 0.0:
            self._budget.record(
                rows,
                drafted=drafted > 0,
                tokens=emitted / rows,
                forward=seconds / plain,
                usual=max(expected / plain, _WORST),
                proposing=host_s / plain,
            )

    def _cost_of(self, rows: int) -> BatchCost:
        return self._costs[(rows - 1).bit_length()]


@njit(error_model="numpy")
def _fastest(path_probs, plain, first, per_token, most):
    """The lengths that give the most tokens per second, int64 `[rows]`, the speedup by them, and their seconds.

    Together they have at most `most` tokens.

    The lengths are None where none gives more than a plain step; the speedup is 0 if nothing was drafted.
    """
    rows, ranked = len(path_probs), np.sort(path_probs.copy().reshape(-1))
    if ranked.size == 0 or ranked[-1] == 0.0:
        return None, 0.0, plain
    drafted, best, size, seconds = 0.0, rows / plain * plain / rows, 0, plain
    for verified in range(1, min(most, ranked.size) + 1):
        prob = ranked[ranked.size - verified]
        if prob == 0.0:
            break
        drafted += prob
        took = plain + _MARGIN * (max(plain, first) + per_token * verified - plain)
        speedup = (rows + drafted) / took * plain / rows
        if speedup > best:
            best, size, seconds = speedup, verified, took
    if size == 0:
        return None, best, plain
    least = ranked[ranked.size - size]
    lengths = np.array([(each > least).sum() for each in path_probs])
    tied = size - lengths.sum()
    for row in range(rows):
        more = min(tied, (path_probs[row] == least).sum())
        lengths[row] += more
        tied -= more
    return lengths, best, seconds
