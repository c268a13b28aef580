"""Token buckets that bound the time lost: to drafting as a whole, and to the lookahead branch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from lookahead.drafting.cost_model import FloatArray
from lookahead.drafting.sizes import MAX_NODES_LIMIT, BranchSize

REFILL = 0.01  # share of the time that drafting may lose in the long run
CAP = 8.0  # plain steps of gain that a budget holds at most
START = 2.0  # plain steps that the first output may lose before drafting gained anything
OVERDRAFT = 2.0  # plain steps that long matches may lose beyond an empty budget
LONG_MATCH = 1.25  # expected speedup of a draft that is likely a long match
_LATER_START = 1.0, 4.0  # plain steps that a later output may lose, by the gains before it
_PROBE_EVERY = 128  # drafted steps between two plain ones
_FIRST_PROBE, _PROBE_GROWTH = 2, 4  # drafted steps before the first of them, and the factor up to _PROBE_EVERY
_OUTLIER = 1.3  # a step counts as at most so many times the usual time of its size
_MIN_COUNT = 3  # observations after which an average clips outliers
PROPOSER_REFILL = 0.005  # share of the tokens that one proposer may lose in the long run
_EXPECTED_GAIN = 0.27  # tokens a step that an untried branch is expected to add per doubling of the window
_TEACHING_GAIN = 0.012  # tokens that a verified node is worth besides, where a source learns from its logits
_WINDOW_SHARE = 1 / 3  # of that, for a node of the window
_HYSTERESIS = 1.03  # speedup over the current choice that the other one must promise
_REVIEW_EVERY = 16  # steps between two choices
_SLOW = 1 / 64  # EMA rate of the branch
_PASS_RATE = 0.2  # EMA rate of the times of passes
_FORGET = 1 / 512  # rate at which a low gain ratio of the branch recovers while it is off


@dataclass(slots=True)
class Budget:
    """A token bucket: losses are paid from it, gains and a share of all work are paid in.

    Source: Tanenbaum and Wetherall 2011, "Computer Networks", §5.4.2.
    """

    balance: float  # at first what may be lost before anything was gained
    cap: float
    refill: float  # share of the work that is paid in
    floor: float = -math.inf

    def settle(self, gain: float, work: float) -> None:
        """Pay in a gain (a loss is negative) and the share of the work."""
        self.balance = max(self.floor, min(self.cap, self.balance + gain + self.refill * work))


@dataclass(slots=True)
class Ema:
    """An exponential moving average; the plain mean of the first 1 / rate observations."""

    rate: float
    clip: float = math.inf  # a new observation counts as at most so many times the average
    value: float = 0.0
    count: int = 0  # observations; at first those that the initial value stands for

    def add(self, observation: float) -> float:
        """Add an observation; returns its clipped value."""
        if self.count >= _MIN_COUNT:
            observation = min(observation, self.clip * self.value)
        self.count += 1
        self.value += max(self.rate, 1.0 / self.count) * (observation - self.value)
        return observation


@dataclass(slots=True)
class PassTimes:
    """Seconds measured for one number of rows; 0 where nothing was measured yet."""

    draft: Ema = field(default_factory=lambda: Ema(_PASS_RATE))  # one pass of what drafts, over new nodes
    target: Ema = field(default_factory=lambda: Ema(_PASS_RATE))  # from the end of drafting to the end of the step

    def pays(self, tokens: float, gain: float, spent: float) -> bool:
        """Whether a further pass, expected to add `gain` to `tokens`, raises the tokens per second.

        The first draft stays small, as no step of the target was timed yet. `spent` are the seconds of drafting.
        """
        return self.target.value > 0.0 and gain * (self.target.value + spent) > tokens * self.draft.value


@dataclass(slots=True)
class _BatchState:
    """State of the drafting budget for one batch size; times are in plain steps."""

    budget: Budget = field(default_factory=lambda: Budget(START, CAP, REFILL))
    proposing: Ema = field(default_factory=lambda: Ema(0.2, clip=2.0, value=0.05, count=5))  # cost of proposals
    since_plain: float = math.inf  # drafted steps since the last plain one
    unasked: int = 0  # steps since the proposers were asked last
    probe_after: int = _FIRST_PROBE  # drafted steps before the next plain one


class DraftingBudget:
    """Turns drafting on and off by the time it was measured to save, separately for batch sizes 1, 2, 3-4, … rows.

    - A budget in plain steps: a step with proposals pays in what it saved against plain decoding of its tokens, or pays
      out what it lost; 1% of all time is paid in. It starts with 2, and every later output with 1 to 4. A draft is
      verified while the budget holds what it may lose; a long match may overdraw it by 2. So the time lost stays below
      1% and a few plain steps per output, for any costs and any drafts.
    - Proposers are asked while the budget holds the cost of that, or 1. With less they are asked as often as takes 1%
      of the time, which is always with every large model, so that no long match is missed.
    - While all steps draft, one in 128 is plain, so that the plain speed stays known.
    """

    def __init__(self) -> None:
        self._states: defaultdict[int, _BatchState] = defaultdict(_BatchState)

    def begin_output(self) -> None:
        """Begin a new output: it may lose a little, and part of what was gained before."""
        for state in self._states.values():
            least, most = _LATER_START
            state.budget.balance = max(least, min(most, state.budget.balance))

    def proposes(self, rows: int) -> bool:
        """Whether the proposers are asked before the next step."""
        state = self._state(rows)
        cost = state.proposing.value
        is_due = cost <= REFILL * max(1, state.unasked) or state.budget.balance >= min(1.0, cost)
        return state.since_plain < state.probe_after and is_due

    def proposing_cost(self, rows: int) -> float:
        """Cost of asking the proposers, in plain steps."""
        return self._state(rows).proposing.value

    def verifies(self, rows: int, speedup: float, at_risk: float = 0.0) -> bool:
        """Whether a draft is verified that loses `at_risk` plain steps where none of it is accepted."""
        needed = -OVERDRAFT if speedup >= LONG_MATCH else min(at_risk, 1.0)
        return self._state(rows).budget.balance >= needed

    def record_plain(self, rows: int) -> bool:
        """Count a step without proposals; returns whether it is a probe: the first one, or the first after drafts."""
        state = self._state(rows)
        is_probe = state.since_plain > 0
        state.unasked += 1
        state.budget.settle(0.0, 1.0)
        if 0 < state.since_plain < math.inf:
            state.probe_after = min(_PROBE_EVERY, _PROBE_GROWTH * state.probe_after)
        state.since_plain = 0
        return is_probe

    def record(
        self, rows: int, *, drafted: bool, tokens: float, forward: float, usual: float, proposing: float
    ) -> None:
        """Count a step with proposals, a draft verified or not; times are in plain steps.

        `tokens` is what the emitted ones would have taken, `forward` the time of the step without `proposing`, that of
        the proposers with their learning, and `usual` the average of a step of such trees.
        """
        state = self._state(rows)
        state.unasked = 0
        proposing = state.proposing.add(proposing)
        took = min(forward, _OUTLIER * usual) + proposing
        state.budget.settle(tokens - took if drafted else -proposing, took)
        state.since_plain = state.since_plain + 1 if drafted else 0

    def _state(self, rows: int) -> _BatchState:
        return self._states[(rows - 1).bit_length()]


@dataclass(slots=True)
class BranchState:
    """What was learned of the lookahead branch for one batch size; costs in plain steps, tokens and nodes of a row."""

    budget: Budget = field(default_factory=lambda: Budget(START, CAP, PROPOSER_REFILL))
    is_on: bool = False
    steps: int = 1  # since that changed
    tokens: Ema = field(default_factory=lambda: Ema(_SLOW, value=1.0))  # of a step without the branch
    nodes: Ema = field(default_factory=lambda: Ema(_SLOW, value=1.0))
    host: Ema = field(default_factory=lambda: Ema(_SLOW))  # time of its proposer
    gain_ratio: Ema = field(default_factory=lambda: Ema(_SLOW, value=1.0, count=4))  # tokens added / tokens expected


class LookaheadBranch:
    """Turns the lookahead branch on and off, separately for batch sizes 1, 2, 3-4, … rows.

    Its cost is known before a step: so many nodes more. Its gain is known after: the accepted tokens that no other
    source offered. Every 16 steps it is compared with going without by tokens per cost; untried, it is expected to add
    tokens by the logarithm of its window. A budget, 0.5% of the time and a few tokens, bounds what trials cost: while
    it is empty the branch is off.

    Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", §4 (steps
        saved grow linearly with the logarithm of the window).
    """

    def __init__(
        self,
        size: BranchSize | None,  # None where the branch cannot run
        states: dict[int, BranchState] | None = None,  # what was learned of the model before, by batch size
        *,
        max_nodes: int = MAX_NODES_LIMIT,  # of a draft, the branch included, the root not counted
        teaches: bool = False,  # a source learns from the logits at all nodes, as the recycled ones do
    ) -> None:
        self.is_on = False  # in the coming step
        self.host_s = 0.0  # time of its proposer in the step so far
        self._size = size
        self._states = states if states is not None else {}
        self._state = BranchState()
        self._max_nodes = max_nodes
        self.teaching = _TEACHING_GAIN if teaches else 0.0  # tokens that a verified node is worth, accepted or not
        self.can_run = size is not None

    @property
    def is_proven(self) -> bool:
        """Whether it runs and has not lost more than it saved."""
        return self.is_on and self._state.budget.balance >= START

    def rest(self, rows: int) -> None:
        """Begin a step of so many rows, with the branch off."""
        self.is_on, self.host_s = False, 0.0
        if self.can_run:
            self._state = self._states.setdefault((rows - 1).bit_length(), BranchState())

    def choose(self, curve: Callable[[int], FloatArray], measured: int) -> None:
        """Choose whether it runs in the coming step, after `rest`.

        `curve` gives the seconds of a step of 0 up to some nodes a row, of which `measured` were measured at most.
        """
        state, is_on = self._state, self._state.is_on
        if is_on and state.budget.balance < 0.0:
            is_on = False
        elif state.steps % _REVIEW_EVERY == 0 and (is_on or state.budget.balance >= START):
            is_on = self._pays(curve, measured)
        if is_on != state.is_on:
            state.is_on, state.steps, state.gain_ratio.count = is_on, 0, 4
        self.is_on = is_on

    def nodes_beside(self, nodes: int) -> int:
        """Maximum nodes of the coming draft, given those without the branch."""
        return min(nodes + self._size.nodes, self._max_nodes) if self._size is not None and self.is_on else nodes

    def record(self, *, nodes: int, tokens: float, without: tuple[int, float], costs: FloatArray) -> None:
        """Count a step: the nodes of its largest tree, the tokens a row, and both if the branch had offered nothing.

        `costs` are the seconds of a step by its nodes.
        """
        state, plain_s, (own_nodes, own_tokens) = self._state, float(costs[1]), without
        state.steps += 1
        state.nodes.add(own_nodes)
        state.tokens.add(own_tokens)
        if self._size is None or not self.is_on:
            state.gain_ratio.value = max(
                state.gain_ratio.value, state.gain_ratio.value + _FORGET * (1.0 - state.gain_ratio.value)
            )
            if state.budget.balance < START:  # a trial may lose no more, however long the branch was off before
                state.budget.settle(0.0, tokens)
            return
        host = state.host.add(min(1.0, self.host_s / plain_s))  # more is compiling or loading, which happens once
        added, own_cost = tokens - own_tokens, float(costs[own_nodes]) / plain_s
        added_cost = float(costs[nodes]) / plain_s - own_cost + host
        state.gain_ratio.add(added / max(_expected_gain(self._size), 0.1))
        # Its time would have given tokens at the rate of the other sources.
        state.budget.settle(added - added_cost * state.tokens.value / own_cost, state.tokens.value + added)

    def _pays(self, curve: Callable[[int], FloatArray], measured: int) -> bool:
        """Whether the branch gives more tokens per cost than going without.

        Beyond what was measured the cost is the highest that was: one step tells.
        """
        state, size, nodes = self._state, self._size, round(self._state.nodes.value)
        assert size is not None
        # Nodes that a branch adds to a tree: guesses share prefixes, and unlikely ones are left out.
        whole = nodes + size.window_nodes + size.guesses
        costs = curve(whole)
        costs = costs / costs[1]
        without = state.tokens.value / costs[nodes] * (1.0 if state.is_on else _HYSTERESIS)
        tokens = state.tokens.value + state.gain_ratio.value * _expected_gain(size)
        tokens += _WINDOW_SHARE * self.teaching * size.window_nodes
        rate = tokens / (costs[max(nodes, min(whole, measured))] + state.host.value)
        return bool(rate * (_HYSTERESIS if state.is_on else 1.0) > without)


def _expected_gain(size: BranchSize) -> float:
    """Tokens a step that an untried branch is expected to add."""
    return min(size.ngram_size - 1.0, _EXPECTED_GAIN * math.log2(size.window_nodes + 2)) if size.guesses else 0.0
