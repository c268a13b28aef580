"""Whether the lookahead branch runs, and how large it is: what it costs and what it adds, both measured, decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.ledger import Ledger
from lookahead.drafting.sizes import MAX_NODES_LIMIT, BranchSize

FloatArray = NDArray[np.float64]

_HOPE = 0.27  # tokens a step, for every doubling of the window, that a branch is hoped to add before it is tried
_TEACHES = 0.004  # tokens a step, for every node of the window, where a memory learns from what is said after it
_CHANGE = 1.05  # times the speed of what runs that something else must promise
_JUDGED = 16  # steps between two judgements
_RATE = 1 / 64  # share of a surprise that is believed, once there were many
_HOPE_STEPS = 4  # with the branch that what was hoped for counts as much as
_FORGET = 1 / 512  # share of a disappointment that is forgotten in a step without the branch


@dataclass(slots=True)
class Lane:
    """What is known for one number of rows; costs are in plain steps, tokens and nodes those of a row.

    Attributes:
        ledger: The account.
        size: Of the branch, None while it is off.
        tokens, nodes, cost: Of a step without the branch, on average.
        more: What the branch takes, at the size it has, on average.
        worth: What the branch adds over what was hoped for.
        steps: Since the size changed.
        seen: Steps that told what one without the branch is like.
    """

    ledger: Ledger = field(default_factory=Ledger)
    size: BranchSize | None = None
    tokens: float = 1.0
    nodes: float = 1.0
    cost: float = 1.0
    more: float = 0.0
    worth: float = 1.0
    steps: int = 1
    seen: int = 0


class Branch:
    """Turns the lookahead branch of one engine on and off, apart for every number of rows (1, 2, 3-4, …).

    The window stands in every draft, whatever the chances of its nodes, so its cost is known beforehand: that of a step
    of so many nodes more. What it adds is known afterwards: the accepted tokens that no other source offered. So each
    step with the branch also tells what it would have been without, on the same text.

    - Every 16 steps the sizes allowed and going without are compared by the tokens per cost they promise, and what
      promises 5% more than what runs takes its place. Before it was tried, the tokens that a branch adds are hoped to
      grow with the logarithm of its window; a disappointment is forgotten over some 500 steps without it.
    - A `Ledger` bounds what trying costs: 0.5% of the time and a few tokens. While it is overdrawn the branch is
      off, and it comes back only when the account is filled again.

    While it is off nothing of it is drafted or looked up.

    Args:
        sizes: To choose from, the smallest first; none where the branch cannot run.
        lanes: What was learned of the model before, and where more is learned.
        max_nodes: Most draft nodes a row's tree may hold, the branch included.
        teaches: Whether another source learns from what the target says after the nodes of the window. Less than half
            of what that is worth to a small model counts where speeds are compared, and nothing on the account.

    Attributes:
        is_open: Whether it may run at all.
        size: Of the branch in the coming step, None where it is off.
        host_s: What its proposer took of the step so far.

    Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", §4 (steps
        saved grow linearly with the logarithm of the window).
    """

    def __init__(
        self,
        sizes: Sequence[BranchSize],
        lanes: dict[int, Lane] | None = None,
        *,
        max_nodes: int = MAX_NODES_LIMIT,
        teaches: bool = False,
    ) -> None:
        self.size: BranchSize | None = None
        self.host_s = 0.0
        self._sizes = tuple(sizes)
        self._lanes = lanes if lanes is not None else {}
        self._lane = Lane()
        self._max_nodes = max_nodes
        self._teaches = _TEACHES if teaches else 0.0
        self.is_open = bool(sizes)

    def rest(self, rows: int) -> None:
        """Leave the branch out of the coming step of so many rows."""
        self.size, self.host_s = None, 0.0
        if self.is_open:
            self._lane = self._lanes.setdefault((rows - 1).bit_length(), Lane())

    def choose(self, rows: int, curve: Callable[[int], FloatArray], measured: Callable[[], int]) -> None:
        """Settle the size for the coming step of so many rows.

        Args:
            rows: Rows that take the step.
            curve: Gives the seconds of a step by its nodes a row, 0 up to a number of nodes.
            measured: Gives the nodes a row of the largest step that was measured.
        """
        self.rest(rows)
        if not self.is_open:
            return
        lane, size = self._lane, self._lane.size
        if size is not None and (size not in self._sizes or not lane.ledger.affords):
            size = None
        elif lane.steps % _JUDGED == 0 and (size is not None or lane.ledger.is_filled):
            size = self._best(curve, measured)
        if size != lane.size:
            lane.size, lane.steps, lane.more = size, 0, 0.0
        self.size = size

    def nodes_beside(self, nodes: int) -> int:
        """Nodes of the largest tree of the coming step, its root counted, where it is `nodes` without the branch."""
        return nodes if self.size is None else min(nodes + self.size.nodes, self._max_nodes + 1)

    @property
    def is_proven(self) -> bool:
        """Whether it runs and has not lost more than it saved."""
        return self.size is not None and self._lane.ledger.is_filled

    def learn(self, *, nodes: int, tokens: float, without: tuple[int, float], costs: FloatArray) -> None:
        """Count a step.

        Args:
            nodes: Nodes of its largest tree, its root counted.
            tokens: Tokens a row emitted, on average.
            without: Both as they would have been without the branch; the same where it is off.
            costs: float64, longer than `nodes`: the seconds of a step by its nodes, this one counted.
        """
        lane, plain_s, (own_nodes, own_tokens) = self._lane, float(costs[1]), without
        lane.steps += 1
        lane.seen += 1
        rate = max(_RATE, 1.0 / lane.seen)
        lane.nodes += rate * (own_nodes - lane.nodes)
        lane.tokens += rate * (own_tokens - lane.tokens)
        lane.cost += rate * (float(costs[own_nodes]) / plain_s - lane.cost)
        if self.size is None:
            lane.worth = max(lane.worth, lane.worth + _FORGET * (1.0 - lane.worth))
            if not lane.ledger.is_filled:  # a trial may lose no more, however long the rest before it
                lane.ledger.settle(spent_s=None, alone=0.0, tokens=tokens, step_s=lane.cost)
            return
        host = min(1.0, self.host_s / plain_s)  # what takes longer is compiling or loading, and happens once
        added, more = tokens - own_tokens, float(costs[nodes] - costs[own_nodes]) / plain_s + host
        rate = max(_RATE, 1.0 / (_HOPE_STEPS + lane.steps))
        lane.worth += rate * (added / max(_hope(self.size), 0.1) - lane.worth)
        lane.more += max(_RATE, 1.0 / lane.steps) * (more - lane.more)
        # What else would have been had in that time is what steps without it give on average.
        lane.ledger.settle(
            spent_s=more, alone=added, tokens=lane.tokens + added, step_s=lane.cost + more, is_steady=True
        )

    def _best(self, curve: Callable[[int], FloatArray], measured: Callable[[], int]) -> BranchSize | None:
        """The size of the most tokens per cost, or None for going without; what runs is kept unless by far worse.

        Of the sizes beyond what was measured only the smallest is considered, as if it cost no more: one step tells.
        """
        lane, known, nodes = self._lane, measured(), round(self._lane.nodes)
        costs = curve(nodes + max(map(_likely_nodes, self._sizes)))
        costs = costs / costs[1]
        best, best_rate = None, lane.tokens / lane.cost * (_CHANGE if lane.size is None else 1.0)
        for size in self._sizes:
            whole = nodes + _likely_nodes(size)
            more = lane.more if size == lane.size else float(costs[max(nodes, min(whole, known))] - costs[nodes])
            added = lane.worth * _hope(size) + self._teaches * size.window_nodes
            rate = (lane.tokens + added) / (lane.cost + more) * (_CHANGE if size == lane.size else 1.0)
            if rate > best_rate:
                best, best_rate = size, rate
            if whole > known:
                break
        return best


def _likely_nodes(size: BranchSize) -> int:
    """Nodes that a branch adds to a tree: guesses share prefixes, and are left out where they are unlikely."""
    return size.window_nodes + size.guesses


def _hope(size: BranchSize) -> float:
    """Tokens a step that a branch of a size is hoped to add."""
    return min(size.ngram_size - 1.0, _HOPE * math.log2(size.window_nodes + 2)) if size.guesses else 0.0
