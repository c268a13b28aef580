"""What a target step costs, measured as decoding goes along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.errors import ConfigError

FloatArray = NDArray[np.float64]

_POINTS = np.array(
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096], np.float64
)
_NODE_COST = 0.04  # first guess: what one more node adds, as a share of a step with one
_RATE = 0.2  # share of a surprise that is believed
_SURPRISE = 2.0  # a step that took longer than this many times the expected was held up by something else
_FORGET = 0.002  # share of what a point costs beyond the first guess that is forgotten a step, unless it is measured
_STALE = 0.1  # shares by which ratios may have moved, taken together, before curves are drawn anew
_SHORT_CONTEXT = 512  # tokens; the first bucket ends here, and each further one at four times as many

_MOST_COUNTED = 20_000.0  # tokens

Bucket = tuple[int, int]


class StepCost:
    """Seconds of one target step by its rows, its nodes a row, and the length of its context.

    Rows and contexts fall into buckets: 1, 2, 3-4, 5-8, … rows; up to 512, 2048, 8192, … tokens. Within a bucket the
    cost depends on rows times nodes. What is learned at some points is the ratio to a first guess, a straight line that
    adds 4% of a one-token step per token; other points are interpolated. A new bucket begins as the nearest known one.

    - A plain step moves the whole bucket, so costs from a file keep their shape and take the scale of this machine. A
      larger step moves its point.
    - A point that costs more than the first guess and is not measured for a while goes back to it, so that a cost once
      measured too high is tried again.

    Example:
        >>> cost = StepCost()
        >>> for _ in range(50):
        ...     cost.observe(1, 0.010)
        ...     cost.observe(16, 0.030)
        >>> cost.curve(rows=1, nodes=16)[[1, 16]].round(2).tolist()
        [0.01, 0.03]
    """

    def __init__(self) -> None:
        self._ratios: dict[Bucket, FloatArray] = {}  # measured over guessed at every point, 0 where nothing was
        self._measured: set[Bucket] = set()  # in this process
        self._curves: dict[tuple[Bucket | None, int, int], FloatArray] = {}
        self._drift = 0.0  # of the ratios since curves were drawn from them
        self._is_warm = False

    def warms_up(self, nodes: int) -> bool:
        """Whether a step of so many nodes is the first with a draft: it compiles and loads, and tells nothing."""
        warms_up = nodes > 1 and not self._is_warm
        self._is_warm |= warms_up
        return warms_up

    def observe(self, nodes: int, seconds: float, *, rows: int = 1, context: int = 0) -> None:
        """Learn from a step.

        Args:
            nodes: Nodes of the largest tree, its root counted.
            seconds: What the step took, host work on its draft left out.
            rows: Rows that took the step together.
            context: Tokens the longest row's cache held.
        """
        bucket = bucket_of(rows, context)
        if bucket not in self._ratios:
            nearest = self._nearest(bucket)
            self._ratios[bucket] = self._ratios[nearest].copy() if nearest is not None else np.zeros(len(_POINTS))
        if bucket not in self._measured:
            self._measured.add(bucket)
            _rescale(self._ratios[bucket], rows * nodes, seconds)
            self._curves.clear()
        self._drift += _FORGET + _observe(self._ratios[bucket], rows, nodes, seconds)
        if self._drift > _STALE:
            self._curves.clear()
            self._drift = 0.0

    def knows(self, rows: int, context: int) -> bool:
        """Whether any step of such rows and such a context was measured."""
        return bucket_of(rows, context) in self._ratios

    def curve(self, rows: int, nodes: int, context: int = 0) -> FloatArray:
        """Cost of a step whose trees have 0, 1, …, `nodes` nodes, roots counted: float64 `[nodes + 1]`.

        In seconds once a step was measured, before that in steps of one token. It may fall: a step of 16 nodes can take
        less time than one of 12.

        Args:
            rows: Rows that take the step together.
            nodes: Nodes of the largest tree to consider.
            context: Tokens the longest row's cache holds.
        """
        nearest = self._nearest(bucket_of(rows, context))
        key = (nearest, rows, nodes)
        if key not in self._curves:
            ratios = self._ratios[nearest] if nearest is not None else np.zeros(len(_POINTS))
            self._curves[key] = _curve(ratios, rows, nodes)
        return self._curves[key]

    def plain(self, rows: int, context: int = 0) -> FloatArray:
        """Cost of a plain step of 0, 1, …, `rows` rows, float64 `[rows + 1]`, in what `curve` gives; never falling."""
        key = (bucket_of(rows, context), rows, 0)
        if key not in self._curves:
            costs = [0.0] + [self.curve(some, 1, context)[1] for some in range(1, rows + 1)]
            self._curves[key] = np.maximum.accumulate(costs)
        return self._curves[key]

    def measured(self, rows: int, context: int = 0) -> int:
        """Nodes a row of the largest step that was measured, or nearly; the cost of larger ones is extrapolated."""
        nearest = self._nearest(bucket_of(rows, context))
        known = np.flatnonzero(self._ratios[nearest]) if nearest is not None else np.zeros(1, int)
        around = _POINTS[known[-1] : known[-1] + 2]  # a point stands for what is nearer to it than to the next
        return max(1, int(np.sqrt(around[0] * around[-1])) // rows)

    def calibrate(self, nodes: Sequence[int], seconds: Sequence[float], *, rows: int, context: int) -> None:
        """Take over what a sweep measured: the seconds of steps of so many nodes a row.

        Raises:
            ConfigError: There is nothing to take over, or a figure is not positive.
        """
        if len(nodes) != len(seconds) or not nodes or min(nodes) < 1 or not min(seconds) > 0:
            raise ConfigError(f"a sweep needs positive nodes and seconds, got {list(nodes)} and {list(seconds)}")
        tokens = rows * np.array(nodes, np.float64)
        ratios = np.zeros(len(_POINTS))
        ratios[[_point(each) for each in tokens]] = np.array(seconds) / _guess(tokens)
        bucket = bucket_of(rows, context)
        self._ratios[bucket] = ratios
        self._measured.add(bucket)
        self._curves.clear()

    def to_dict(self) -> list[dict[str, Any]]:
        """Everything known, JSON-ready."""
        return [{"bucket": list(bucket), "ratios": ratios.tolist()} for bucket, ratios in self._ratios.items()]

    def update(self, known: Sequence[Mapping[str, Any]]) -> None:
        """Take over what `to_dict` gave, but for what was measured in this process.

        Raises:
            ConfigError: That is not what this is.
        """
        try:
            buckets: list[Bucket] = [(int(each["bucket"][0]), int(each["bucket"][1])) for each in known]
            tables = [np.array(each["ratios"], np.float64) for each in known]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"these are no step costs: {error!r}") from error
        for ratios in tables:
            good = ratios.shape == _POINTS.shape and np.isfinite(ratios).all() and (ratios >= 0).all()
            if not (good and (ratios > 0).any()):
                raise ConfigError(f"step costs must be {len(_POINTS)} positive numbers a bucket")
        for bucket, ratios in zip(buckets, tables, strict=True):
            if bucket in self._measured:
                own, tokens = self._ratios[bucket], float(1 << bucket[0])
                ratios = np.where(own > 0, own, ratios * _ratio(own, tokens) / _ratio(ratios, tokens))
            self._ratios[bucket] = ratios
        self._curves.clear()

    def _nearest(self, bucket: Bucket) -> Bucket | None:
        """The measured bucket most like another: first by its rows, then by its context."""
        if bucket in self._ratios:
            return bucket
        distance = {other: (abs(other[0] - bucket[0]), abs(other[1] - bucket[1])) for other in self._ratios}
        return min(distance, key=lambda other: distance[other], default=None)


def padded_nodes(nodes: int, most: int) -> int:
    """Nodes a row of a pass of fixed shape that has to hold so many: a power of two, or `most` where that is less."""
    return max(nodes, min(1 << (nodes - 1).bit_length(), most))


def bucket_of(rows: int, context: int) -> Bucket:
    """The bucket of so many rows and so long a context."""
    beyond = max(0, context - 1) // _SHORT_CONTEXT
    return (rows - 1).bit_length(), (beyond.bit_length() + 1) // 2


@njit(cache=True)
def _guess(tokens):
    """Cost of a step before anything was measured, in steps of one token."""
    return 1.0 + _NODE_COST * (tokens - 1.0)


@njit(cache=True)
def _ratio(ratios, tokens):
    """Measured over guessed at some number of tokens: interpolated between the measured points, 1 without any."""
    below, above = -1, -1
    for point in range(len(ratios)):
        if ratios[point] > 0.0:
            if _POINTS[point] <= tokens:
                below = point
            elif above < 0:
                above = point
    if below < 0 and above < 0:
        return 1.0
    if below < 0 or above < 0:
        return ratios[max(below, above)]
    share = (tokens - _POINTS[below]) / (_POINTS[above] - _POINTS[below])
    return ratios[below] + share * (ratios[above] - ratios[below])


@njit(cache=True)
def _point(tokens):
    """The point nearest to some number of tokens, by their ratio."""
    nearest = 0
    for point in range(len(_POINTS)):
        if abs(np.log(_POINTS[point] / tokens)) < abs(np.log(_POINTS[nearest] / tokens)):
            nearest = point
    return nearest


@njit(cache=True)
def _rescale(ratios, tokens, seconds):
    """Keep the shape of what was measured elsewhere, and take the scale from one step."""
    ratios *= seconds / (_guess(tokens) * _ratio(ratios, tokens))


@njit(cache=True)
def _observe(ratios, rows, nodes, seconds):
    """Move the nearest point towards what was measured, or all of them after a plain step; forget a little.

    Returns the share by which it moved.
    """
    nearest, plain = _point(rows * nodes), _point(rows)
    ratio, expected = seconds / _guess(rows * nodes), _ratio(ratios, rows * nodes)
    is_known = ratios[nearest] > 0.0
    if ratios.max() > 0.0:
        # What was never measured is believed at once, but for what can only be a step that was held up; and so is a
        # step that took so much less that what was known before it must have been one.
        rate = _RATE if is_known and ratio * _SURPRISE > expected else 1.0
        ratio = expected + rate * (min(ratio, _SURPRISE * expected) - expected)
        for point in range(len(ratios)):
            if point != nearest and ratios[point] > 0.0:
                ratios[point] *= ratio / expected if nearest == plain else 1.0
                if point != plain and ratios[point] > ratios[plain] > 0.0:
                    ratios[point] += _FORGET * (ratios[plain] - ratios[point])
    ratios[nearest] = ratio
    return abs(ratio / expected - 1.0) if is_known else 1.0


@njit(cache=True)
def _curve(ratios, rows, nodes):
    """The ratios times the first guess, from 0 to `nodes` nodes a row."""
    curve = np.empty(nodes + 1)
    for n in range(nodes + 1):
        tokens = max(1.0, 1.0 * rows * n)
        curve[n] = _guess(tokens) * _ratio(ratios, tokens)
    return curve


@dataclass(slots=True)
class LengthModel:
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


class BatchValue(NamedTuple):
    """What tokens are worth to a batch: its last row ends it, and a row that ends early saves the others little.

    Attributes:
        left: float64 `[rows]`, tokens that each row may still emit.
        plain: float64 `[rows + 1]`, what a plain step of 0, 1, … rows counts; it never falls.
    """

    left: FloatArray
    plain: FloatArray

    @classmethod
    def of(cls, left: Sequence[int], plain: FloatArray, lasting: float) -> BatchValue:
        """By the chance that rows run to their limits, and what a plain step of 0, 1, … rows takes.

        If they do, the last of them ends the batch: were a step as dear with few rows as with many, only that one would
        count. If any may end at any time, a token of one is worth as much as a token of another.
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
    """`BatchValue.steps_saved`, of arrays."""
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


SINGLE_ROW = BatchValue(np.full(1, 1e9), np.arange(2.0))  # a token of a single row is a step
