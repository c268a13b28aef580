"""The lengths of the chains of a batch: as much is verified as gives the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.cost_model import FloatArray, StepCost

_MARGIN = 1.05  # factor on the cost of drafted tokens: the expected gain of a draft must cover its risk
_LONGEST_REST = 16  # steps at most from one try of drafting to the next where it does not pay
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
        probs = np.concatenate(path_probs) if rows > 1 else path_probs[0] if rows else np.zeros(0)
        if probs.size == 0:
            return [0] * rows
        ranked = np.sort(probs)[::-1]
        costs = self._costs(rows, ranked.size)
        rates = (rows + np.concatenate(([0.0], np.cumsum(ranked)))) / costs
        count = int(rates.argmax())
        bucket = (rows - 1).bit_length()
        if self._probes.setdefault(bucket, _PROBES) > 0:
            self._probes[bucket] -= 1
            return [0] * rows
        if count == 0:
            self._rests[bucket] = self._left = min(_LONGEST_REST, 2 * self._rests.get(bucket, 1))
            return [0] * rows
        self._rests.pop(bucket, None)
        least = ranked[count - 1]
        return [int(np.count_nonzero(each >= least)) for each in path_probs]

    def observe(self, *, rows: int, tokens: int, seconds: float) -> None:
        """Learn the time of a step that verified so many tokens in so many requests, the last token of each counted."""
        if tokens == rows:
            self._probes[(rows - 1).bit_length()] = 0
        if not self.cost.warms_up(tokens // rows):
            self.cost.observe(tokens / rows, seconds, rows=rows)

    def _costs(self, rows: int, drafted: int) -> FloatArray:
        """Seconds of a step with 0, 1, …, `drafted` drafted tokens in all requests together."""
        nodes = 2 + drafted // rows
        curve = self.cost.curve(rows, nodes)
        tokens = 1.0 + np.arange(drafted + 1) / rows
        costs = np.interp(tokens, np.arange(nodes + 1), curve)
        costs[1:] = costs[0] + _MARGIN * (costs[1:] - costs[0])
        return costs
