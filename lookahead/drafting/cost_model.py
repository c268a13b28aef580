"""The measured cost of a target step by its rows, nodes and context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.errors import ConfigError
from lookahead.ngram.inlining import jit_inline
from lookahead.utils.jit import njit

FloatArray = NDArray[np.float64]

_POINTS = np.array(
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096], np.float64
)
_BORDERS = np.sqrt(_POINTS[:-1] * _POINTS[1:])  # a point covers the values nearest to it by ratio
NODE_COST = 0.04  # first estimate: cost of one more node, as a share of a step with one node
_RATE = 0.2  # EMA rate
_OUTLIER = 2.0  # a measurement counts as at most this multiple of the expected one
_FORGET = 0.002  # rate at which the excess of a point over the plain step decays while the point is not measured
_SHORT_CONTEXT = 512  # tokens; end of the first bucket; each further one is four times as long

Bucket = tuple[int, int]


class StepCost:
    """Seconds of one target step by its rows, its nodes per row, and the length of its context.

    Rows and contexts fall into buckets: 1, 2, 3-4, 5-8, … rows; up to 512, 2048, 8192, … tokens. Within a bucket the
    cost depends on rows times nodes. The first estimate is a straight line that adds 4% of a one-token step per token,
    or the share in `node_cost`. The ratio to it is learned at fixed points and interpolated between them. A new bucket
    starts as a copy of the nearest one.

    - A plain step scales the whole bucket, so costs from a file keep their shape and adapt to this machine. A larger
      step moves its point.
    - A point above the plain step decays towards it while it is not measured, so that a cost once measured too high is
      retried.

    Attributes:
        node_cost: First estimate of the cost of one more node, as a share of a one-node step; measured costs stay.
        is_warm: Whether a step with a draft has run: the first includes compilation.

    Example:
        >>> cost = StepCost()
        >>> for _ in range(50):
        ...     _ = cost.observe(1, 0.010), cost.observe(16, 0.030)
        >>> cost.curve(rows=1, nodes=16)[[1, 16]].round(2).tolist()
        [0.01, 0.03]
        >>> cost.knows(rows=1), cost.measured(rows=1), cost.plain(rows=1).round(2).tolist()
        (True, 19, [0.0, 0.01])
        >>> later = StepCost()
        >>> later.update(cost.to_dict())
        >>> bool((later.curve(rows=1, nodes=64) == cost.curve(rows=1, nodes=64)).all())
        True
    """

    def __init__(self) -> None:
        self.node_cost = NODE_COST
        self.is_warm = False
        self._tables: dict[Bucket, FloatArray] = {}  # seconds at every point; 0: not measured
        self._measured: set[Bucket] = set()  # in this process

    def observe(self, nodes: float, seconds: float, *, rows: int = 1, context: int = 0) -> tuple[float, float]:
        """Learn from a step, its host work on drafts excluded; returns the cost of a plain step, and of one like this.

        `nodes` are the nodes of its largest tree, `context` the tokens of its longest row.
        """
        table = self._tables.get(bucket := _bucket_of(rows, context))
        if table is None:
            table = self._tables[bucket] = self._near(bucket).copy()
        if bucket not in self._measured:
            self._measured.add(bucket)
            # Keep the shape measured elsewhere, and take the scale from one step.
            table *= seconds / self._seconds(table, rows * nodes)
        costs: tuple[float, float] = _learn(table, float(rows * nodes), float(rows), seconds, self.node_cost)
        return costs

    def knows(self, rows: int, context: int = 0) -> bool:
        """Whether a step was measured in the bucket of these rows and this context."""
        return _bucket_of(rows, context) in self._tables

    def curve(self, rows: int, nodes: int, context: int = 0) -> FloatArray:
        """Cost of a step whose trees have 0, 1, …, `nodes` nodes, roots counted: float64 `[nodes + 1]`.

        In seconds once a step was measured, before that in steps of one token. Not always monotonic: a step of 16 nodes
        can take less time than one of 12.
        """
        table = self._tables.get(bucket := _bucket_of(rows, context))
        if table is None:
            table = self._near(bucket)
        curve: FloatArray = _curve(table, float(rows), nodes, self.node_cost)
        return curve

    def plain(self, rows: int, context: int = 0) -> FloatArray:
        """Cost of a plain step of 0, 1, …, `rows` rows, float64 `[rows + 1]`, in units of `curve`; non-decreasing."""
        sizes = sorted({1 << power for power in range(rows.bit_length())} | {rows})  # one of every bucket
        costs = [self.curve(some, 1, context)[1] for some in sizes]
        return np.maximum.accumulate(np.interp(np.arange(rows + 1), [0, *sizes], [0.0, *costs]))

    def measured(self, rows: int, context: int = 0) -> int:
        """Maximum nodes per row with measured costs; larger steps are extrapolated."""
        last = max(np.flatnonzero(self._near(_bucket_of(rows, context))), default=0)
        return max(1, int(_BORDERS[last] if last < len(_BORDERS) else _POINTS[last]) // rows)

    def calibrate(self, nodes: Sequence[int], seconds: Sequence[float], *, rows: int, context: int) -> None:
        """Set the costs of a bucket from a sweep: `seconds` of steps of `nodes` nodes per row."""
        tokens = rows * np.array(nodes, np.float64)
        points = _BORDERS.searchsorted(tokens)
        bucket = _bucket_of(rows, context)
        self._tables[bucket] = np.zeros(len(_POINTS))
        self._tables[bucket][points] = np.array(seconds) * self._guess(_POINTS[points]) / self._guess(tokens)
        self._measured.add(bucket)

    def to_dict(self) -> list[dict[str, Any]]:
        """All learned costs, JSON-ready."""
        return [{"bucket": list(bucket), "seconds": table.tolist()} for bucket, table in self._tables.items()]

    def update(self, learned: Sequence[Mapping[str, Any]]) -> None:
        """Load the output of `to_dict`, keeping measurements of this process; ConfigError if it is invalid."""
        try:
            tables = {
                (int(entry["bucket"][0]), int(entry["bucket"][1])): np.array(entry["seconds"], np.float64)
                for entry in learned
            }
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"step costs must be the output of StepCost.to_dict, got {error!r}") from error
        for seconds in tables.values():
            good = seconds.shape == _POINTS.shape and np.isfinite(seconds).all() and (seconds >= 0).all()
            if not (good and (seconds > 0).any()):
                raise ConfigError(f"step costs must be {len(_POINTS)} positive numbers a bucket")
        for bucket, table in tables.items():
            if bucket in self._measured:
                own, tokens = self._tables[bucket], 1 << bucket[0]
                table = np.where(own > 0, own, table * self._seconds(own, tokens) / self._seconds(table, tokens))
            self._tables[bucket] = table

    def _near(self, bucket: Bucket) -> FloatArray:
        """The table of the nearest measured bucket, first by rows, then by context; zeros if there is none."""
        distance = {other: (abs(other[0] - bucket[0]), abs(other[1] - bucket[1])) for other in self._tables}
        nearest = min(distance, key=lambda other: distance[other], default=None)
        return self._tables[nearest] if nearest is not None else np.zeros(len(_POINTS))

    def _guess(self, tokens: NDArray[Any] | float) -> Any:
        """Cost of a step before anything was measured, in steps of one token."""
        return 1.0 + self.node_cost * (tokens - 1.0)

    def _seconds(self, table: FloatArray, tokens: float) -> float:
        """Cost of a step of `tokens` tokens: the first estimate times the ratio interpolated between known points."""
        return float(_curve(table, float(tokens), 1, self.node_cost)[1])


def padded_nodes(nodes: int, most: int) -> int:
    """Nodes per row of a fixed-shape pass for `nodes` nodes: the next power of two, at most `most`.

    Example:
        >>> [padded_nodes(nodes, most=24) for nodes in (1, 5, 20)]
        [1, 8, 24]
    """
    return max(nodes, min(1 << (nodes - 1).bit_length(), most))


def _bucket_of(rows: int, context: int) -> Bucket:
    """The bucket of a number of rows and a length of context."""
    beyond = max(0, context - 1) // _SHORT_CONTEXT
    return (rows - 1).bit_length(), (beyond.bit_length() + 1) // 2


@jit_inline
def _ratio_at(table, tokens, node_cost):
    """Measured cost over the first estimate, interpolated between the measured points around `tokens`."""
    below = above = -1
    for point in range(len(table)):
        if table[point] > 0.0:
            if _POINTS[point] > tokens:
                above = point
                break
            below = point
    if below < 0 and above < 0:
        return 1.0
    if below < 0 or above < 0:
        point = max(below, above)
        return table[point] / (1.0 + node_cost * (_POINTS[point] - 1.0))
    low = table[below] / (1.0 + node_cost * (_POINTS[below] - 1.0))
    high = table[above] / (1.0 + node_cost * (_POINTS[above] - 1.0))
    return low + (tokens - _POINTS[below]) / (_POINTS[above] - _POINTS[below]) * (high - low)


@jit_inline
def _cost_at(table, tokens, node_cost):
    return _ratio_at(table, tokens, node_cost) * (1.0 + node_cost * (tokens - 1.0))


@njit(error_model="numpy")
def _curve(table, rows, nodes, node_cost):
    """Cost of steps of 0, 1, …, `nodes` nodes per row."""
    costs = np.empty(nodes + 1)
    for at in range(nodes + 1):
        costs[at] = _cost_at(table, max(1.0, rows * at), node_cost)
    return costs


@njit(error_model="numpy")
def _learn(table, tokens, rows, seconds, node_cost):
    """Move a table, float64 `[points]`, towards a measurement; returns the cost of a plain step and of `tokens`."""
    nearest = plain = 0
    ratios = np.empty(len(table))
    for point in range(len(table)):
        ratios[point] = table[point] / (1.0 + node_cost * (_POINTS[point] - 1.0))
        if point < len(_BORDERS):
            nearest += _BORDERS[point] < tokens
            plain += _BORDERS[point] < rows
    expected = _ratio_at(table, tokens, node_cost)
    change = seconds / (expected * (1.0 + node_cost * (tokens - 1.0)))
    if table.any():
        # The first measurement of a point replaces the interpolated value. So does one below half of it: the old value
        # was a step delayed by other work.
        rate = _RATE if ratios[nearest] > 0.0 and change * _OUTLIER > 1.0 else 1.0
        change = 1.0 + rate * (min(change, _OUTLIER) - 1.0)
    # The point moves by its own ratio: by the interpolated one it would stay too near to its neighbours.
    moved = (ratios[nearest] if ratios[nearest] > 0.0 else expected) * change
    if nearest == plain:
        ratios *= change
    ratios[nearest] = moved
    for point in range(len(table)):
        if ratios[plain] > 0.0 and ratios[point] > ratios[plain] and point != nearest:
            ratios[point] += _FORGET * (ratios[plain] - ratios[point])
        table[point] = ratios[point] * (1.0 + node_cost * (_POINTS[point] - 1.0))
    return _cost_at(table, rows, node_cost), _cost_at(table, tokens, node_cost)
