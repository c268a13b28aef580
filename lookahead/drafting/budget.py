"""Budgets that bound the time lost to drafting as a whole and to each source with its own cost."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

REFILL = 0.01  # share of time that drafting may lose in the long run
SOURCE_REFILL = 0.005  # share of tokens that one source may lose in the long run
START = 2.0  # initial balance; in plain steps, or in tokens per row for one source
CAP = 8.0  # maximum balance
OVERDRAFT = 2.0  # plain steps that long matches may lose beyond an empty budget
_LONG_MATCH = 1.25  # expected speedup of a draft that is likely a long match
_LEAST_CLIP = 0.5  # tokens; a higher price of one step counts as at most twice the usual one
_MAX_DEBT = 32.0  # tokens; bounds the time until a source gets another row
_LATER_START = 1.0, 4.0  # minimum and maximum balance at the start of a later output
_PROBE_EVERY = 128  # drafted steps between two plain ones
_FIRST_PROBE, _PROBE_GROWTH = 2, 4  # drafted steps before the first plain one, and the growth factor up to _PROBE_EVERY
_OUTLIER = 1.3  # a step counts as at most this multiple of the usual time for its size
_MIN_COUNT = 3  # observations after which an average clips outliers
_PASS_RATE = 0.2  # EMA rate of the times of passes
_CHOICE_RATE = 0.02  # EMA rate of what tokens were chosen


@dataclass(slots=True)
class Ema:
    """An exponential moving average; the plain mean of the first 1 / rate observations.

    Example:
        >>> average = Ema(0.2, clip=2.0)
        >>> [average.add(seconds) for seconds in (1.0, 1.0, 1.0, 9.0)]
        [1.0, 1.0, 1.0, 2.0]
        >>> average.value
        1.25
    """

    rate: float
    clip: float = math.inf  # an observation counts as at most this multiple of the average, or as `least`
    least: float = 0.0
    value: float = 0.0
    count: int = 0  # observations, including those that the initial value represents

    def add(self, observation: float) -> float:
        """Add an observation; returns its clipped value."""
        if self.count >= _MIN_COUNT:
            observation = min(observation, max(self.least, self.clip * self.value))
        self.count += 1
        self.value += max(self.rate, 1.0 / self.count) * (observation - self.value)
        return observation


@dataclass(slots=True)
class PassTimes:
    """Measured seconds for one number of rows; 0 if nothing was measured yet.

    Example:
        >>> times = PassTimes()
        >>> times.draft.add(0.001), times.target.add(0.010)
        (0.001, 0.01)
        >>> [times.pays(tokens=2.0, gain=gain, spent=0.001) for gain in (0.5, 0.1)]
        [True, False]
    """

    draft: Ema = field(default_factory=lambda: Ema(_PASS_RATE))  # one pass of the drafting model over new nodes
    target: Ema = field(default_factory=lambda: Ema(_PASS_RATE))  # from the end of drafting to the end of the step
    agreement: Ema = field(
        default_factory=lambda: Ema(_CHOICE_RATE, value=0.8, count=5)
    )  # 1 if a first choice is right
    others: Ema = field(default_factory=lambda: Ema(_CHOICE_RATE, value=1.0, count=5))  # tokens over promised ones
    is_warm: bool = False  # whether the drafting model has run

    def beats(self, tokens: float, depth: int) -> bool:
        """Whether a draft of at most `depth` passes gives more tokens per second than others that promise `tokens`."""
        if not (self.target.value and self.draft.value):
            return True
        passes = np.arange(1, depth + 1)
        expected = 1.0 + (self.agreement.value**passes).cumsum()
        rates = expected / (self.target.value + self.draft.value * passes)
        return bool(rates.max() * self.target.value > tokens * self.others.value)

    def pays(self, tokens: float, gain: float, spent: float) -> bool:
        """Whether a further pass, expected to add `gain` to `tokens`, raises the tokens per second.

        False until a step of the target is timed, which keeps the first draft small. `spent` are the seconds of
        drafting.
        """
        return self.target.value > 0.0 and gain * (self.target.value + spent) > tokens * self.draft.value


def _price() -> Ema:
    return Ema(0.2, clip=2.0, least=_LEAST_CLIP)


@dataclass(slots=True)
class Budget:
    """Bounds the loss by one source of drafts, for any costs and drafts. Drafting as a whole is a source too.

    The unit is plain steps for drafting as a whole, and tokens per row for any other source.

    - A step pays in the tokens that the source added, and pays out the tokens that decoding without it would have
      emitted in its time. A share `refill` of all work is paid in. The balance starts at 2 and is at most 8.
    - The source is called while the balance covers the usual price of a call, or `enough`. Below, it is called again
      once the refill since its last call covers the price.
    - It is proven while the balance is at least 2: it has saved its cost. While it is not, its steps are charged only
      to its own budget, and drafting as a whole is charged the steps without it.
    - The first step of a row is charged the usual price, since a draft model also reads the prompt then. The time of
      reading becomes a debt: while it exceeds the balance, the source gets no further row. The very first reading is
      free, since it includes warm-up. Earnings beyond the maximum balance repay the debt.

    So beyond its gains a source loses at most the share, the initial 2 and one price. A step delayed by other work
    counts as at most twice the usual price.

    Source: Tanenbaum and Wetherall 2011, "Computer Networks", §5.4.2 (token buckets).

    Example:
        >>> budget = Budget()
        >>> for _ in range(4):  # half the time of a step, for no token
        ...     budget.charge(spent_s=0.005, alone=0.0, tokens=1.0, step_s=0.010)
        >>> budget.affords, budget.begins, budget.is_proven
        (False, False, False)
        >>> budget.settle(4.0, 5.0, is_asked=True)  # four tokens gained in five
        >>> budget.affords, budget.is_proven
        (True, True)
    """

    refill: float = SOURCE_REFILL
    enough: float = START  # balance at which the source is called at any price
    price: Ema = field(default_factory=_price)  # of one call
    balance: float = START
    idle: float = 0.0  # work since the last call of the source
    reading: Ema = field(default_factory=_price)  # of the first step of a row
    owed: float = 0.0

    @property
    def affords(self) -> bool:
        """Whether the source is called."""
        price = self.price.value
        return price <= self.refill * max(1.0, self.idle) or self.balance >= min(self.enough, price)

    @property
    def begins(self) -> bool:
        """Whether the source gets a new row."""
        return self.balance >= self.owed

    @property
    def is_proven(self) -> bool:
        """Whether the source has saved its cost."""
        return self.balance >= START

    def settle(self, gain: float, work: float, *, is_asked: bool) -> None:
        """Count a step: pay in its gain (negative for a loss) and the share of its work."""
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
            spent_s: Seconds of the step that the source took; None if it was not called.
            alone: Emitted tokens per row that only this source offered.
            tokens: Tokens per row that the step emitted, including `alone`.
            step_s: Seconds of the whole step, more than `spent_s`.
            is_first: Whether this is the source's first step after it got a row.
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
    """Turns drafting on and off by its measured savings, separately for batch sizes 1, 2, 3-4, … rows.

    - A `Budget` in plain steps: a step with proposals pays in its savings over plain decoding of its tokens, or pays
      out its loss; 1% of all time is paid in. Every later output starts with 1 to 4. A draft is verified while the
      budget covers its possible loss; a long match may overdraw it by 2. So the time lost stays below 1% plus a few
      plain steps per output, for any costs and drafts.
    - The budget with its overdraft covers the cost of every draft, even if none of it is accepted.
    - Proposers are called while the budget covers the cost of a call, or 1. Below, calls take 1% of the time; with a
      large model that is every step, so no long match is missed.
    - While all steps draft, one in 128 is plain, to keep measuring the plain speed.

    Example:
        >>> budget = DraftingBudget()
        >>> budget.record_plain(rows=1), budget.prices(rows=1)
        (True, (0.05, 4.01))
        >>> for _ in range(3):  # a draft that doubles the time of a step, for no token
        ...     budget.record(1, drafted=True, tokens=1.0, forward=2.0, usual=2.0, proposing=0.05)
        >>> budget.prices(rows=1), budget.verifies(1, speedup=1.1), budget.verifies(1, speedup=1.3)
        (None, False, True)
        >>> budget.begin_output()
        >>> budget.record_plain(rows=1), [round(price, 3) for price in budget.prices(rows=1)]
        (True, [0.05, 3.01])
    """

    def __init__(self) -> None:
        self._states: defaultdict[int, _BatchState] = defaultdict(_BatchState)  # by `(rows - 1).bit_length()`

    def begin_output(self) -> None:
        """Begin a new output: clamp the balance, so that it may lose only part of earlier gains."""
        for state in self._states.values():
            least, most = _LATER_START
            state.budget.balance = max(least, min(most, state.budget.balance))

    def prices(self, rows: int) -> tuple[float, float] | None:
        """The cost of calling the proposers before the next step, and the most that one draft may lose, in plain steps.

        None if they are not called.
        """
        state = self._state_of(rows)
        budget = state.budget
        if state.since_plain >= state.probe_after or not budget.affords:
            return None
        return budget.price.value, budget.balance + OVERDRAFT

    def verifies(self, rows: int, speedup: float, at_risk: float = 0.0) -> bool:
        """Whether to verify a draft that loses `at_risk` plain steps if none of it is accepted."""
        needed = -OVERDRAFT if speedup >= _LONG_MATCH else min(at_risk, 1.0)
        return self._state_of(rows).budget.balance >= needed

    def record_plain(self, rows: int) -> bool:
        """Count a step without proposals; returns whether it is a probe: the first step, or the first after drafts."""
        state = self._state_of(rows)
        is_probe = state.since_plain > 0
        state.budget.settle(0.0, 1.0, is_asked=False)
        if 0 < state.since_plain < math.inf:
            state.probe_after = min(_PROBE_EVERY, _PROBE_GROWTH * state.probe_after)
        state.since_plain = 0
        return is_probe

    def record(
        self, rows: int, *, drafted: bool, tokens: float, forward: float, usual: float, proposing: float
    ) -> None:
        """Count a step with proposals, whether or not a draft was verified.

        Args:
            rows: Rows of the batch.
            drafted: Whether a draft was verified.
            tokens: Plain steps that the emitted tokens would have taken.
            forward: Time of the step without `proposing`, in plain steps.
            usual: Average time of a step of the same size, in plain steps.
            proposing: Time of the proposers, including learning, in plain steps.
        """
        state = self._state_of(rows)
        proposing = state.budget.price.add(proposing)
        took = min(forward, _OUTLIER * usual) + proposing
        state.budget.settle(tokens - took if drafted else -proposing, took, is_asked=True)
        state.since_plain = state.since_plain + 1 if drafted else 0

    def _state_of(self, rows: int) -> _BatchState:
        return self._states[(rows - 1).bit_length()]
