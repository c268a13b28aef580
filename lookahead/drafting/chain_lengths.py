"""The lengths of the chains of a batch: as much is verified as gives the most tokens per second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.budget import EnableRule
from lookahead.drafting.cost_model import StepCost

_MARGIN = 1.05  # factor on the cost of drafted tokens: the expected gain of a draft must cover its risk
_TOKEN_COST = 0.001  # first guess: cost of one more token, as a share of a step of one token
_PROBES = 3  # plain steps taken at first to be timed; some are lost, as the engine did other work in them too
_TICK = 1e-9  # seconds of a step at least: a clock may not have moved
_WORST = 3.0  # plain steps that the budget is charged for a step at most, unless more was expected: stalls cost no more


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
        self._cost = StepCost()
        self._cost.assume(_TOKEN_COST)
        self._rule = EnableRule()
        self._tries: Counter[int] = Counter()  # plain steps taken only to be timed, by the number of requests

    def drafts(self, rows: int) -> bool:
        """Whether anything is drafted in this step of so many requests."""
        if self._cost.knows(rows):
            return self._rule.proposes(rows)
        self._tries[rows] += 1
        return self._tries[rows] > _PROBES

    def choose(self, path_probs: Sequence[NDArray[np.float64]]) -> list[int]:
        """How many tokens of each chain are verified, by float64 `[n]`: the probability to be accepted up to each."""
        rows = len(path_probs)
        ranked = np.sort(np.concatenate([*path_probs, np.zeros(0)]))[::-1]
        if not self._cost.knows(rows) or ranked.size == 0:
            return [len(each) for each in path_probs]
        seconds = self._cost.seconds(rows, np.arange(rows, rows + ranked.size + 1))
        costs = 1.0 + _MARGIN * (seconds / seconds[0] - 1.0)
        speedups = (1.0 + np.cumsum([0.0, *ranked]) / rows) / costs
        verified = int(speedups.argmax())
        if verified == 0 or not self._rule.verifies(rows, speedups[verified], costs[verified] - 1.0):
            return [0] * rows
        return [int(np.count_nonzero(each >= ranked[verified - 1])) for each in path_probs]

    def observe(self, *, rows: int, drafted: int, emitted: int, seconds: float, host_s: float | None = 0.0) -> None:
        """Learn from a step: of all rows together its drafted and its emitted tokens, and its time without drafting.

        `host_s` is the time of drafting; None if nothing was drafted for.
        """
        tokens, seconds = rows + drafted, max(seconds, _TICK)
        if self._cost.warms_up(tokens / rows):
            return
        self._cost.observe(tokens / rows, seconds, rows=rows)
        plain, usual = self._cost.seconds(rows, np.array([rows, tokens])).tolist()
        if host_s is None:
            self._rule.record_plain(rows)
        else:
            self._rule.record(
                rows,
                drafted=drafted > 0,
                tokens=emitted / rows,
                forward=seconds / plain,
                usual=max(usual / plain, _WORST),
                proposing=host_s / plain,
            )
