"""Chooses the lengths of the chains of a batch for the most tokens per second."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from lookahead.drafting.budget import DraftingBudget
from lookahead.drafting.cost_model import FloatArray
from lookahead.utils.jit import njit

_MARGIN = 1.25  # factor on the cost of drafted tokens: the expected gain of a draft must cover its risk
_PROBES = 3  # initial plain steps for timing; some are delayed by other work of the engine
_RECENT = 9  # plain steps whose lower quartile is used
# Maximum drafted tokens of a step before any were timed: a number, or one per this many requests; later a multiple of
# the most that were timed.
_FIRST_TOKENS, _ROWS_PER_FIRST_TOKEN, _GROWTH = 8, 8, 4
_OUTLIER = 2.0  # a measurement counts as at most this multiple of the expected one
_TICK = 1e-9  # minimum seconds of a step: a clock may not advance
_WORST = 3.0  # maximum charge of a step in plain steps, unless more was expected; limits the cost of stalls
_FEW = 3.0  # the first measurements of drafted steps are not clipped
_STALE = 16  # drafted steps after which the time of a plain step is considered outdated
_MEMORY = 0.98  # decay of earlier measurements at each further drafted step
_DOUBT = 0.99  # the same each time no draft pays: a cost once measured too high is retried
# First estimate of the cost of one drafted token per request, as a share of a plain step. The cost at zero drafted
# tokens is better known than the cost at many, so it counts as more measurements.
_TOKEN_COST, _GUESSED, _GUESSED_FAR = 0.02, 2.0, 0.1


class BatchCost:
    """Seconds of a step by the number of drafted tokens, for one number of requests.

    Plain steps are timed separately, since engines have faster kernels for them: by the lower quartile of the last 9,
    since other work in a step only makes it longer. The time of a step with drafts is a line fitted by least squares;
    older measurements count less. The first one is skipped: engines compile then. If recent drafted steps contradict an
    old plain time, the plain time becomes the line at zero drafted tokens: plain steps are rare while most steps draft.

    The cost of a drafted token is estimated at first, and may be tens of times higher if the processor is saturated. So
    the first steps with drafts verify few tokens, and each later one at most four times the most that were timed.

    Example:
        >>> cost = BatchCost()
        >>> for _ in range(50):
        ...     _ = cost.observe(rows=1, drafted=0, seconds=0.010), cost.observe(rows=1, drafted=4, seconds=0.014)
        >>> [round(seconds, 3) for seconds in cost.line(rows=1)], cost.max_tokens(rows=1)
        ([0.01, 0.001], 16)
    """

    __slots__ = ("_is_warm", "_recent", "_since_plain", "is_untimed", "largest", "plain", "sums", "tries")

    def __init__(self) -> None:
        self.plain = 0.0  # seconds of a plain step; 0 if none is timed
        self._recent = deque[float](maxlen=_RECENT)
        self.tries = 0  # plain steps taken only for timing
        self.is_untimed = False  # the last draft was not timed, or no plain step to compare it with
        self.largest = 0  # maximum drafted tokens of a timed step
        self._since_plain = 0
        self._is_warm = False
        self.sums = [0.0] * 5  # weight, tokens, seconds, tokens², tokens × seconds

    def observe(self, rows: int, drafted: int, seconds: float) -> float:
        """Learn the time of a step; returns the expected time of a step with these drafted tokens."""
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
        """Maximum drafted tokens of the next step."""
        timed = self.largest if self.sums[0] >= 1.0 else 0  # a retried cost is retried with few tokens
        return max(_FIRST_TOKENS, rows // _ROWS_PER_FIRST_TOKEN, _GROWTH * timed)

    def line(self, rows: int) -> tuple[float, float]:
        """Seconds of a drafted step at zero drafted tokens, and per drafted token; needs a timed plain step."""
        plain, most = self.plain, float(self.largest or self.max_tokens(rows))
        far = plain * (1.0 + _TOKEN_COST * most / rows)
        # Two fictitious measurements, of zero and of `most` drafted tokens, represent the first estimate.
        weight, tokens, seconds, squares, products = self.sums
        weight, seconds = weight + _GUESSED + _GUESSED_FAR, seconds + _GUESSED * plain + _GUESSED_FAR * far
        tokens, squares = tokens + _GUESSED_FAR * most, squares + _GUESSED_FAR * most * most
        products += _GUESSED_FAR * most * far
        per_token = max(0.0, (weight * products - tokens * seconds) / (weight * squares - tokens * tokens))
        return (seconds - per_token * tokens) / weight, per_token


class ChainLengths:
    """Decides by measured times of steps how many drafted tokens of each chain of a batch are verified.

    A step verifies the drafted tokens most likely to be reached across all requests, as many as give the most expected
    tokens per second. A `DraftingBudget` bounds the loss: while it is empty nothing is drafted. The first three steps
    of each power of two of requests verify nothing, to time plain steps. Steps that requests join are not timed: until
    a step with and one without drafts are timed, drafts hold few tokens and are followed by three plain steps.

    It reads no clock.

    Example:
        >>> lengths = ChainLengths()
        >>> lengths.drafts(rows=1)  # the first steps time plain decoding
        False
        >>> for _ in range(50):
        ...     lengths.observe(rows=1, drafted=0, emitted=1, seconds=0.010)
        ...     lengths.observe(rows=1, drafted=2, emitted=2, seconds=0.015)
        ...     lengths.observe(rows=1, drafted=8, emitted=6, seconds=0.045)
        >>> lengths.choose(np.array([[0.9, 0.8, 0.2, 0.1]]))
        [2]
    """

    def __init__(self) -> None:
        self._costs: defaultdict[int, BatchCost] = defaultdict(BatchCost)  # by buckets of rows: 1, 2, 3-4, 5-8, …
        self._budget = DraftingBudget()

    def drafts(self, rows: int) -> bool:
        """Whether this step of `rows` requests drafts."""
        cost = self._cost_of(rows)
        if cost.is_untimed:
            cost.tries, cost.is_untimed = 0, False
        if cost.tries < _PROBES:
            cost.tries += 1
            return False
        return not cost.plain or self._budget.prices(rows) is not None

    def choose(self, path_probs: FloatArray) -> list[int]:
        """The number of tokens of each chain to verify, given the probability that each token is reached and accepted.

        `path_probs` is float64 `[rows, longest]`, 0 after the end of a chain.
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
            cost.sums = [_DOUBT * measured for measured in cost.sums]
        return [0] * rows

    def observe(self, *, rows: int, drafted: int, emitted: int, seconds: float, host_s: float | None = 0.0) -> None:
        """Learn from a step.

        Args:
            rows: Requests of the step, at least 1.
            drafted: Drafted tokens that it verified, in all rows.
            emitted: Tokens that it emitted, in all rows.
            seconds: Its time without drafting.
            host_s: Seconds of drafting; None if no proposer was called.
        """
        cost, seconds = self._cost_of(rows), max(seconds, _TICK)
        host_s = host_s and max(0.0, host_s)  # a clock may go backwards
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
    """The lengths with the most tokens per second, int64 `[rows]`, their speedup, and their seconds.

    Their sum is at most `most`. The lengths are None if none beats a plain step; the speedup is 0 if nothing was
    drafted.
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
    lengths = np.array([(chain > least).sum() for chain in path_probs])
    tied = size - lengths.sum()
    for row in range(rows):
        more = min(tied, (path_probs[row] == least).sum())
        lengths[row] += more
        tied -= more
    return lengths, best, seconds
