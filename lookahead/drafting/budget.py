"""One kind of budget bounds the time lost: to drafting as a whole, and to each source with a cost of its own."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

REFILL = 0.01  # share of the time that drafting may lose in the long run
SOURCE_REFILL = 0.005  # share of the tokens that one source may lose in the long run
START = 2.0  # what may be lost before anything was gained; in plain steps, or in tokens of a row for one source
CAP = 8.0  # gain that a budget holds at most
OVERDRAFT = 2.0  # plain steps that long matches may lose beyond an empty budget
LONG_MATCH = 1.25  # expected speedup of a draft that is likely a long match
_LEAST_CLIP = 0.5  # tokens; a higher price of one step counts as at most twice the usual one
_MAX_DEBT = 32.0  # tokens; bounds the time until a source is shown another row
_LATER_START = 1.0, 4.0  # plain steps that a later output may lose, by the gains before it
_PROBE_EVERY = 128  # drafted steps between two plain ones
_FIRST_PROBE, _PROBE_GROWTH = 2, 4  # drafted steps before the first of them, and the factor up to _PROBE_EVERY
_OUTLIER = 1.3  # a step counts as at most so many times the usual time of its size
_MIN_COUNT = 3  # observations after which an average clips outliers
_PASS_RATE = 0.2  # EMA rate of the times of passes


@dataclass(slots=True)
class Ema:
    """An exponential moving average; the plain mean of the first 1 / rate observations."""

    rate: float
    clip: float = math.inf  # a new observation counts as at most so many times the average, or as `least`
    least: float = 0.0
    value: float = 0.0
    count: int = 0  # observations; at first those that the initial value stands for

    def add(self, observation: float) -> float:
        """Add an observation; returns its clipped value."""
        if self.count >= _MIN_COUNT:
            observation = min(observation, max(self.least, self.clip * self.value))
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


def _price() -> Ema:
    return Ema(0.2, clip=2.0, least=_LEAST_CLIP)


@dataclass(slots=True)
class Budget:
    """Bounds what one source of drafts may lose, whatever it costs and offers. Drafting as a whole is a source too.

    The unit is plain steps for drafting as a whole, and tokens of a row for any other source.

    - A step pays in the tokens that the source added, and pays out the tokens that its time would have given without
      it. A share `refill` of all work is paid in. The balance begins with 2 and is at most 8.
    - The source is asked while the balance holds the usual price of that, or `enough`. With less it is tried again as
      soon as the refill since it was last asked covers the price.
    - It is proven while the balance is at least 2: it has saved what it cost. While it is not, its steps are charged to
      its own budget alone, and drafting as a whole gets them as they would have been without it.
    - The first step of a row is charged the usual price, since a draft model reads the prompt then. The time of reading
      is owed instead: while more is owed than the balance holds, the source is not shown another row. The very first
      reading is free, since it includes warm-up. What is earned beyond the most that the balance holds repays the debt.

    So a source loses at most the share, the 2 of the beginning and one price beyond what it gained. A step that was
    held up by other work counts as at most twice the usual price.

    Source: Tanenbaum and Wetherall 2011, "Computer Networks", §5.4.2 (token buckets).
    """

    refill: float = SOURCE_REFILL
    enough: float = START  # balance at which the source is asked whatever it costs
    price: Ema = field(default_factory=_price)  # of asking once
    balance: float = START
    idle: float = 0.0  # work since the source was last asked
    reading: Ema = field(default_factory=_price)  # of the first step of a row
    owed: float = 0.0

    @property
    def affords(self) -> bool:
        """Whether the source is asked."""
        price = self.price.value
        return price <= self.refill * max(1.0, self.idle) or self.balance >= min(self.enough, price)

    @property
    def begins(self) -> bool:
        """Whether the source is shown a new row."""
        return self.balance >= self.owed

    @property
    def is_proven(self) -> bool:
        """Whether the source has saved what it cost."""
        return self.balance >= START

    def settle(self, gain: float, work: float, *, is_asked: bool) -> None:
        """Count a step: pay in its gain (a loss is negative), and the share of its work."""
        self.idle = 0.0 if is_asked else self.idle + work
        balance = self.balance + gain + self.refill * work
        self.balance = min(CAP, balance)
        if self.owed > 0.0:
            self.owed = max(0.0, min(self.owed - (balance - self.balance), self.balance + _MAX_DEBT))

    def charge(
        self, *, spent_s: float | None, alone: float, tokens: float, step_s: float, is_first: bool = False
    ) -> None:
        """Count a step by its time and its tokens.

        Args:
            spent_s: Seconds of the step that the source took; None if it was not asked.
            alone: Tokens of a row that this source alone offered.
            tokens: Tokens of a row that the step emitted, `alone` included.
            step_s: Seconds of the whole step, more than `spent_s`.
            is_first: It is the first step with the source since it was shown a row.
        """
        gain = 0.0
        if spent_s is not None:
            price = spent_s * (tokens - alone) / (step_s - spent_s)
            if is_first:
                gain, is_known = min(0.0, alone - self.price.value), self.reading.count > 0
                price = self.reading.add(price)
                self.owed = max(0.0, self.owed + price + gain - alone) if is_known else self.owed
            else:
                gain = alone - self.price.add(price)
        self.settle(gain, tokens, is_asked=spent_s is not None)


@dataclass(slots=True)
class _BatchState:
    """State of the drafting budget for one batch size; times are in plain steps."""

    budget: Budget = field(
        default_factory=lambda: Budget(REFILL, enough=1.0, price=Ema(0.2, clip=2.0, value=0.05, count=5))
    )
    since_plain: float = math.inf  # drafted steps since the last plain one
    probe_after: int = _FIRST_PROBE  # drafted steps before the next plain one


class DraftingBudget:
    """Turns drafting on and off by the time it was measured to save, separately for batch sizes 1, 2, 3-4, … rows.

    - A `Budget` in plain steps: a step with proposals pays in what it saved against plain decoding of its tokens, or
      pays out what it lost; 1% of all time is paid in. Every later output begins with 1 to 4. A draft is verified while
      the budget holds what it may lose; a long match may overdraw it by 2. So the time lost stays below 1% and a few
      plain steps per output, for any costs and any drafts.
    - No draft is larger than what the budget holds, with that overdraft, pays for if none of it is accepted.
    - Proposers are asked while the budget holds the cost of that, or 1. With less they are asked as often as takes 1%
      of the time, which is always with every large model, so that no long match is missed.
    - While all steps draft, one in 128 is plain, so that the plain speed stays known.
    """

    def __init__(self) -> None:
        self._states: defaultdict[int, _BatchState] = defaultdict(_BatchState)  # by `(rows - 1).bit_length()`

    def begin_output(self) -> None:
        """Begin a new output: it may lose a little, and part of what was gained before."""
        for state in self._states.values():
            least, most = _LATER_START
            state.budget.balance = max(least, min(most, state.budget.balance))

    def proposes(self, rows: int) -> bool:
        """Whether the proposers are asked before the next step."""
        state = self._states[(rows - 1).bit_length()]
        return state.since_plain < state.probe_after and state.budget.affords

    def proposing_cost(self, rows: int) -> float:
        """Cost of asking the proposers, in plain steps."""
        return self._states[(rows - 1).bit_length()].budget.price.value

    def verifies(self, rows: int, speedup: float, at_risk: float = 0.0) -> bool:
        """Whether a draft is verified that loses `at_risk` plain steps where none of it is accepted."""
        needed = -OVERDRAFT if speedup >= LONG_MATCH else min(at_risk, 1.0)
        return self._states[(rows - 1).bit_length()].budget.balance >= needed

    def most_at_risk(self, rows: int) -> float:
        """The plain steps that a single draft may lose: what the budget holds, and its overdraft."""
        return self._states[(rows - 1).bit_length()].budget.balance + OVERDRAFT

    def record_plain(self, rows: int) -> bool:
        """Count a step without proposals; returns whether it is a probe: the first one, or the first after drafts."""
        state = self._states[(rows - 1).bit_length()]
        is_probe = state.since_plain > 0
        state.budget.settle(0.0, 1.0, is_asked=False)
        if 0 < state.since_plain < math.inf:
            state.probe_after = min(_PROBE_EVERY, _PROBE_GROWTH * state.probe_after)
        state.since_plain = 0
        return is_probe

    def record(
        self, rows: int, *, drafted: bool, tokens: float, forward: float, usual: float, proposing: float
    ) -> None:
        """Count a step with proposals, a draft verified or not.

        Args:
            rows: Rows of the batch.
            drafted: Whether a draft was verified.
            tokens: Plain steps that the emitted tokens would have taken.
            forward: Time of the step without `proposing`, in plain steps.
            usual: Average time of a step of such trees, in plain steps.
            proposing: Time of the proposers with their learning, in plain steps.
        """
        state = self._states[(rows - 1).bit_length()]
        proposing = state.budget.price.add(proposing)
        took = min(forward, _OUTLIER * usual) + proposing
        state.budget.settle(tokens - took if drafted else -proposing, took, is_asked=True)
        state.since_plain = state.since_plain + 1 if drafted else 0
