"""What drafting may lose: a token bucket, and those who hold one: the enable rule, a proposer, the lookahead branch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lookahead.drafting.cost_model import FloatArray, LengthModel
from lookahead.drafting.sizes import MAX_NODES_LIMIT, BranchSize

REFILL = 0.01  # of the time: the most that proposing and wrong drafts may cost in the long run
CAP = 8.0  # plain steps of gain that are remembered, and may be lost again before drafting is held back
START = 2.0  # plain steps that the first output may lose before anything was gained
OVERDRAFT = 2.0  # plain steps that long matches may lose beyond an empty budget
LONG_MATCH = 1.25  # expected times plain speed of what is likely a long match
_MIN_START = 1.0  # plain steps that every later output may lose, though the last ones lost
_CARRIED = 0.25  # of what outputs usually save, the part that one may lose if that is more
_PROPOSALS = 10  # times the cost of proposing that the budget must hold before it, or START / 2
_PROBE_EVERY = 64  # steps between two plain ones, times the speedup: what a plain step forgoes
_FIRST_PROBE, _PROBE_GROWTH = 2, 4  # steps before the second plain one, and the factor of later ones
_HELD_UP = 1.3  # a step counts as at most so many times the usual one
_KNOWN = 3  # observations after which an average is known well enough to clip by it
_PROPOSER_REFILL = 0.005  # of the tokens: the most that one proposer may cost in the long run
_MAX_DEBT = 32.0  # tokens that new rows may have lost; a larger debt would put off a new attempt for too long
_EXPECTED_GAIN = 0.27  # tokens a step, for every doubling of the window, that an untried branch is taken to add
_TEACHING_GAIN = 0.004  # tokens a step, for every node of the window, where another source learns from its logits
_HYSTERESIS = 1.05  # times the speed of what runs that something else must promise
_REVIEW_EVERY = 16  # steps between two choices of a size
_SLOW = 1 / 64  # rate of the branch's averages
_FORGET = 1 / 512  # share of a disappointment that is forgotten in a step without the branch


@dataclass(slots=True)
class Budget:
    """A token bucket: losses are paid from it, gains and a share of all work are paid in.

    Attributes:
        balance: What it holds; at first what may be lost before anything was gained.
        cap: It never holds more.
        refill: Share of the work that is paid in.
        floor: It never holds less.

    Source: Tanenbaum and Wetherall 2011, "Computer Networks", §5.4.2.
    """

    balance: float
    cap: float
    refill: float
    floor: float = -math.inf

    def settle(self, gain: float, work: float) -> None:
        """Pay in a gain, or pay out a loss, and pay in the share of the work."""
        self.balance = max(self.floor, min(self.cap, self.balance + gain + self.refill * work))


@dataclass(slots=True)
class Ema:
    """An exponential moving average, and the plain mean until it has seen 1 / rate observations.

    Attributes:
        rate: Weight of a new observation.
        clip: A new observation counts as at most so many times a known average.
        value: The average.
        count: Observations so far; at first those that the initial value stands for.
    """

    rate: float
    clip: float = math.inf
    value: float = 0.0
    count: int = 0

    def add(self, observation: float, rate: float | None = None) -> float:
        """Follow an observation, at another rate where one is given; returns the observation as it counts."""
        if self.count >= _KNOWN:
            observation = min(observation, self.clip * self.value)
        self.count += 1
        self.value += max(rate or self.rate, 1.0 / self.count) * (observation - self.value)
        return observation


@dataclass(slots=True)
class _BatchState:
    """What is known for one batch size; times are in plain steps."""

    budget: Budget = field(default_factory=lambda: Budget(START, CAP, REFILL))
    proposing: Ema = field(default_factory=lambda: Ema(0.2, clip=2.0, value=0.05, count=5))  # cost of asking
    speedup: Ema = field(default_factory=lambda: Ema(0.2, value=1.0, count=5))  # of drafted steps over plain ones
    since_plain: float = math.inf  # drafted steps since the last plain one
    probe_after: int = _FIRST_PROBE  # drafted steps before the next plain one
    saved: float | None = None  # in this output, once a step of it was counted
    usual: Ema = field(default_factory=lambda: Ema(0.2, count=5))  # saved in one output


class EnableRule:
    """Turns drafting on and off by what it was measured to save, apart for every batch size (1, 2, 3-4, … rows).

    - A budget in plain steps. A step with proposals pays what it took beyond plain decoding of its tokens, or is paid
      what it saved; 1% of all time is paid in. A further output begins with 1 to 2, or a quarter of what outputs
      usually save. A draft is verified while the budget holds what it may lose; a long match may overdraw it by 2. So
      the time lost stays below 1% and a few plain steps per output, whatever steps cost and however wrong drafts are.
    - Proposers are asked while the budget holds ten times what that takes, or 1. Where it takes less than 1% of a plain
      step, as with every large model, they are always asked, so that no long match is missed.
    - While every step drafts, one in 64 times the measured speedup is plain, so that the plain speed stays known.

    Attributes:
        lengths: How outputs ended.
    """

    def __init__(self) -> None:
        self.lengths = LengthModel()
        self._states: dict[int, _BatchState] = {}

    def begin_output(self) -> None:
        """Refill the budgets a little for a further output; most of what earlier outputs gained is kept from it."""
        for state in self._states.values():
            if state.saved is not None:
                # More than can be carried over is not counted, so that a change is noticed soon.
                state.usual.add(min(state.saved, CAP / _CARRIED))
            kept = max(_MIN_START, min(START, state.budget.balance))
            state.budget.balance, state.saved = max(kept, _CARRIED * state.usual.value), None

    def proposes(self, rows: int) -> bool:
        """Whether the proposers are to be asked before the next step of so many rows."""
        state = self._state(rows)
        every = state.probe_after if state.probe_after < _PROBE_EVERY else _PROBE_EVERY * max(1.0, state.speedup.value)
        return state.since_plain < every and self.steps_to_wait(rows) == 0

    def steps_to_wait(self, rows: int) -> int:
        """Plain steps until the proposers can be asked; 0 where they can be now."""
        state = self._state(rows)
        if state.proposing.value <= REFILL:
            return 0
        needed = min(START / 2, _PROPOSALS * state.proposing.value)
        return max(0, math.ceil((needed - state.budget.balance) / REFILL))

    def proposing_cost(self, rows: int) -> float:
        """What asking the proposers takes, in plain steps."""
        return self._state(rows).proposing.value

    def verifies(self, rows: int, speedup: float, at_risk: float = 0.0) -> bool:
        """Whether a draft is to be verified.

        Args:
            rows: Rows of the step.
            speedup: Its expected speed, as a multiple of the plain one.
            at_risk: Plain steps that it loses where none of it is right.
        """
        needed = -OVERDRAFT if speedup >= LONG_MATCH else min(at_risk, START / 2)
        return self._state(rows).budget.balance >= needed

    def record_plain(self, rows: int) -> bool:
        """Count a step before which no proposer was asked; whether it is the first after drafted ones, or at all."""
        state = self._state(rows)
        is_probe = state.since_plain > 0
        state.budget.settle(0.0, 1.0)
        if 0 < state.since_plain < math.inf:
            state.probe_after = min(_PROBE_EVERY, _PROBE_GROWTH * state.probe_after)
        state.since_plain = 0
        return is_probe

    def record(
        self, rows: int, *, drafted: bool, tokens: float, forward: float, usual: float, proposing: float
    ) -> None:
        """Count a step before which the proposers were asked; everything but rows in plain steps.

        Args:
            rows: Rows that took it together.
            drafted: Whether there was anything to verify.
            tokens: Plain steps that it did the work of.
            forward: What the step took but for `proposing`.
            usual: What a step of such trees takes on average.
            proposing: What asking the proposers took, and letting them learn.
        """
        state = self._state(rows)
        # First proposals load what they need, so a lower cost is believed sooner than a higher one.
        proposing = state.proposing.add(proposing, 0.5 if proposing < state.proposing.value else None)
        took = min(forward, _HELD_UP * usual) + proposing
        # A step that drafted nothing lost what proposing took, whatever else became of it.
        saved = tokens - took if drafted else -proposing
        state.budget.settle(saved, took)
        state.saved = (state.saved or 0.0) + saved
        state.since_plain = state.since_plain + 1 if drafted else 0
        if drafted:
            state.speedup.add(tokens / took)

    def _state(self, rows: int) -> _BatchState:
        """What is known for so many rows."""
        size = (rows - 1).bit_length()
        state = self._states.get(size)
        if state is None:
            state = self._states[size] = _BatchState()
        return state


class ProposerBudget:
    """Whether one proposer among several is worth its time, in tokens a row.

    A step before which the proposer was asked pays in the accepted tokens that nobody else offered, and pays out the
    tokens that its time would have given without it; 0.5% of all tokens are paid in. So it is asked as long as its
    share of the tokens is its share of the time.

    - While the budget of questions does not hold the price of one, or 2, the proposer is not asked. The first question
      of a row costs what others did, since a draft model reads the prompt then.
    - The budget of rows bears that reading too, except for the very first one, which also warms up. While it is
      overdrawn, by 32 tokens at most, the proposer is not shown another row.
    """

    def __init__(self) -> None:
        self._questions = Budget(START, CAP, _PROPOSER_REFILL)
        self._rows = Budget(START, CAP, _PROPOSER_REFILL, -_MAX_DEBT)
        self._price, self._reading = Ema(0.2, clip=2.0), Ema(0.2, clip=2.0)
        self._earned = Ema(0.1, count=10)

    @property
    def affords(self) -> bool:
        """Whether the proposer is to be asked."""
        return self._questions.balance >= min(self._price.value, START)

    @property
    def begins(self) -> bool:
        """Whether the proposer is to be shown a new row."""
        return self._rows.balance >= 0.0

    @property
    def earns(self) -> bool:
        """Whether the last questions gave more than they took."""
        return self._earned.value > 0.0

    def settle(
        self, *, spent_s: float | None, alone: float, tokens: float, step_s: float, is_first: bool = False
    ) -> None:
        """Count a step.

        Args:
            spent_s: What the proposer took of it; None where it was not asked.
            alone: Accepted tokens a row that only it offered.
            tokens: Tokens a row emitted.
            step_s: What the whole step took, more than `spent_s`.
            is_first: Whether it was asked for the first time since it was shown a row.
        """
        gain = of_row = 0.0
        if spent_s is not None:
            price = spent_s * (tokens - alone) / (step_s - spent_s)
            if is_first:
                gain = min(0.0, alone - self._price.value)
                is_known = self._reading.count > 0
                reading = self._reading.add(price)
                of_row = alone - reading if is_known else gain
            else:
                gain = of_row = alone - self._price.add(price)
                self._earned.add(gain)
        self._questions.settle(gain, tokens)
        self._rows.settle(of_row, tokens)


@dataclass(slots=True)
class BranchState:
    """What is known of the lookahead branch for one batch size; costs in plain steps, tokens and nodes of a row."""

    budget: Budget = field(default_factory=lambda: Budget(START, CAP, _PROPOSER_REFILL))
    size: BranchSize | None = None  # None while it is off
    steps: int = 1  # since the size changed
    tokens: Ema = field(default_factory=lambda: Ema(_SLOW, value=1.0))  # of a step without the branch
    nodes: Ema = field(default_factory=lambda: Ema(_SLOW, value=1.0))
    cost: Ema = field(default_factory=lambda: Ema(_SLOW, value=1.0))
    added_cost: Ema = field(default_factory=lambda: Ema(_SLOW))  # of the branch, at the size it has
    worth: Ema = field(default_factory=lambda: Ema(_SLOW, value=1.0, count=4))  # tokens added over those expected
    price: float = 0.0  # tokens that its last step took the time of


class LookaheadBranch:
    """Sizes the lookahead branch and turns it on and off, apart for every batch size (1, 2, 3-4, … rows).

    What it costs is known before a step: so many nodes more. What it adds is known after: the accepted tokens that no
    other source offered. Every 16 steps the sizes and going without are compared by tokens per cost; an untried size is
    expected to add tokens by the logarithm of its window. A budget, 0.5% of the time and a few tokens, bounds what
    trying costs: while that is overdrawn the branch is off, and nothing of it is drafted.

    Args:
        sizes: To choose from, the smallest first; none where the branch cannot run.
        states: What was learned of the model before, by batch size.
        max_nodes: Most nodes of a draft, the branch included, the root not counted.
        teaches: Whether another source learns from the logits at the nodes of the window.

    Attributes:
        can_run: Whether there is any size to choose.
        size: In the coming step; None where it is off.
        host_s: What its proposer took of the step so far.

    Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", §4 (steps
        saved grow linearly with the logarithm of the window).
    """

    def __init__(
        self,
        sizes: Sequence[BranchSize],
        states: dict[int, BranchState] | None = None,
        *,
        max_nodes: int = MAX_NODES_LIMIT,
        teaches: bool = False,
    ) -> None:
        self.size: BranchSize | None = None
        self.host_s = 0.0
        self._sizes = tuple(sizes)
        self._states = states if states is not None else {}
        self._state = BranchState()
        self._max_nodes = max_nodes
        self._teaching = _TEACHING_GAIN if teaches else 0.0
        self.can_run = bool(sizes)

    @property
    def is_proven(self) -> bool:
        """Whether it runs and has not lost more than it saved."""
        return self.size is not None and self._state.budget.balance >= START

    def rest(self, rows: int) -> None:
        """Leave the branch out of the coming step of so many rows."""
        self.size, self.host_s = None, 0.0
        if self._sizes:
            self._state = self._states.setdefault((rows - 1).bit_length(), BranchState())

    def choose(self, curve: Callable[[int], FloatArray], measured: int) -> None:
        """Settle the size for the coming step, after `rest`.

        Args:
            curve: Gives the seconds of a step by its nodes a row, 0 up to a number of nodes.
            measured: Nodes a row of the largest step that was measured.
        """
        state, size = self._state, self._state.size
        if size is not None and (size not in self._sizes or state.budget.balance < min(state.price, START)):
            size = None
        elif state.steps % _REVIEW_EVERY == 0 and (size is not None or state.budget.balance >= START):
            size = self._best(curve, measured)
        if size != state.size:
            state.size, state.steps, state.added_cost, state.worth.count = size, 0, Ema(_SLOW), 4
        self.size = size

    def nodes_beside(self, nodes: int) -> int:
        """Most nodes of a draft of the coming step, where it is `nodes` without the branch."""
        return nodes if self.size is None else min(nodes + self.size.nodes, self._max_nodes)

    def record(self, *, nodes: int, tokens: float, without: tuple[int, float], costs: FloatArray) -> None:
        """Count a step: nodes of its largest tree, tokens of a row, both without the branch, seconds by nodes."""
        state, plain_s, (own_nodes, own_tokens) = self._state, float(costs[1]), without
        state.steps += 1
        state.nodes.add(own_nodes)
        state.tokens.add(own_tokens)
        state.cost.add(float(costs[own_nodes]) / plain_s)
        if self.size is None:
            state.worth.value = max(state.worth.value, state.worth.value + _FORGET * (1.0 - state.worth.value))
            if state.budget.balance < START:  # a trial may lose no more, however long the rest before it
                state.budget.settle(0.0, tokens)
            return
        host = min(1.0, self.host_s / plain_s)  # what takes longer is compiling or loading, and happens once
        added, cost = tokens - own_tokens, float(costs[nodes] - costs[own_nodes]) / plain_s + host
        state.worth.add(added / max(_expected_gain(self.size), 0.1))
        state.added_cost.add(cost)
        # In that time steps without it would have given what they give on average.
        state.price = cost * state.tokens.value / state.cost.value
        state.budget.settle(added - state.price, state.tokens.value + added)

    def _best(self, curve: Callable[[int], FloatArray], measured: int) -> BranchSize | None:
        """The size of the most tokens per cost, or None for going without.

        Of the sizes beyond what was measured only the smallest is considered, as if it cost no more: one step tells.
        """
        state, nodes = self._state, round(self._state.nodes.value)
        tokens, cost = state.tokens.value, state.cost.value
        costs = curve(nodes + max(map(_likely_nodes, self._sizes)))
        costs = costs / costs[1]
        best, best_rate = None, tokens / cost * (_HYSTERESIS if state.size is None else 1.0)
        for size in self._sizes:
            whole = nodes + _likely_nodes(size)
            estimate = float(costs[max(nodes, min(whole, measured))] - costs[nodes])
            added_cost = state.added_cost.value if size == state.size else estimate
            added = state.worth.value * _expected_gain(size) + self._teaching * size.window_nodes
            rate = (tokens + added) / (cost + added_cost) * (_HYSTERESIS if size == state.size else 1.0)
            if rate > best_rate:
                best, best_rate = size, rate
            if whole > measured:
                break
        return best


def _likely_nodes(size: BranchSize) -> int:
    """Nodes that a branch adds to a tree: guesses share prefixes, and unlikely ones are left out."""
    return size.window_nodes + size.guesses


def _expected_gain(size: BranchSize) -> float:
    """Tokens a step that an untried branch of a size is expected to add."""
    return min(size.ngram_size - 1.0, _EXPECTED_GAIN * math.log2(size.window_nodes + 2)) if size.guesses else 0.0
