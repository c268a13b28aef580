"""What a target step costs, measured as decoding goes along, and so how many draft nodes are worth it."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_POINTS = np.array([1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096], np.float64)
_NODE_COST = 0.04  # first guess: what one more node adds, as a share of a step with one
_RATE = 0.2  # share of a surprise that is believed
_SURPRISE = 2.0  # a step that took longer than this many times the expected was held up by something else
_FORGET = 0.01  # share by which a point not measured goes back to the first guess, per step


class StepCost:
    """Seconds of one target step by its number of tokens, rows times nodes.

    What is learned at some points is the ratio to a first guess, a straight line that adds 4% of a one-token step
    per token; between the points and beyond them it is interpolated. A ratio that is not measured for a while goes
    back to the one measured last, so that a cost once measured too high is tried again.

    Example:
        >>> cost = StepCost()
        >>> for _ in range(50):
        ...     cost.observe(1, 0.010)
        ...     cost.observe(16, 0.030)
        >>> cost.curve(rows=1, nodes=16)[[1, 16]].round(2).tolist()
        [0.01, 0.03]
    """

    def __init__(self) -> None:
        self._ratios = np.zeros(len(_POINTS))  # measured over guessed, 0 where nothing was measured

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step of `tokens` tokens (rows times the nodes of the largest tree) that took `seconds`."""
        _observe(self._ratios, tokens, seconds)

    def curve(self, rows: int, nodes: int) -> FloatArray:
        """Cost of a step whose trees have 0, 1, …, `nodes` nodes, roots counted: float64 `[nodes + 1]`.

        In seconds once a step was measured, before that in steps of one token. It never falls.

        Args:
            rows: Rows that take the step together.
            nodes: Nodes of the largest tree to consider.
        """
        curve: FloatArray = _curve(self._ratios, rows, nodes)
        return curve


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
def _observe(ratios, tokens, seconds):
    """Move the nearest point towards what was measured, and all others a little."""
    ratio = seconds / _guess(tokens)
    nearest, known = 0, False
    for point in range(len(ratios)):
        known = known or ratios[point] > 0.0
        if abs(np.log(_POINTS[point] / tokens)) < abs(np.log(_POINTS[nearest] / tokens)):
            nearest = point
    if known:
        expected = _ratio(ratios, tokens)
        ratio = expected + _RATE * (min(ratio, _SURPRISE * expected) - expected)
        for point in range(len(ratios)):
            if ratios[point] > 0.0:
                ratios[point] += _FORGET * (ratio - ratios[point])
    ratios[nearest] = ratio


@njit(cache=True)
def _curve(ratios, rows, nodes):
    """The ratios times the first guess, from 0 to `nodes` nodes a row, never falling."""
    curve = np.empty(nodes + 1)
    highest = 0.0
    for n in range(nodes + 1):
        tokens = max(1.0, 1.0 * rows * n)
        highest = max(highest, _guess(tokens) * _ratio(ratios, tokens))
        curve[n] = highest
    return curve
