"""Whether to draft at all: what drafting saved against plain decoding, measured, decides."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lookahead.drafting.batch_value import Endings

SHARE = 0.01  # of the time, the most that looking for drafts and trying them may cost in the long run
MOST_SAVED = 8.0  # plain steps of gain that are remembered, and may be lost again before drafting is held back
START = 2.0  # plain steps that the first output may lose before anything was gained
_LEAST = 1.0  # that any later one may lose, though the last ones lost
RESERVE = 2.0  # plain steps that long matches may lose beyond that
_PART = 0.25  # of what outputs usually save, that one may lose if that is more
LONG = 1.25  # expected times plain speed of what is likely a long match
_LOOKS = 10  # that the budget must hold before one, or half of what an output begins with
_FIRST_LOOK = 0.05  # plain steps that asking the proposers is taken to cost before it was measured
_FOLLOW = 0.2  # share of a surprise that an average follows
_FORGET = 0.5  # the same of looking that took less than usual
_PROBE_EVERY = 64  # steps between two plain ones, times the speedup: what a plain step forgoes
_FIRST_PROBE, _LATER = 2, 4  # steps before the second plain one, as the first may have been held up; and times more
_SURPRISE = 2.0  # looking that took longer than this many times the usual was held up by something else
_HELD_UP = 1.3  # the same of a step, whose usual time is better known


@dataclass(slots=True)
class Budget:
    """What may be lost on trials: losses are paid from it, gains and a share of all that is done are paid in.

    Attributes:
        balance: What it holds.
        share: What it earns of all that is done.
        least: It never holds less; nor ever more than 8.

    Source: a token bucket, e.g. Tanenbaum and Wetherall 2011, "Computer Networks", §5.4.2.
    """

    balance: float
    share: float = SHARE
    least: float = -math.inf

    def settle(self, gain: float, done: float) -> None:
        """Pay in a gain, or out a loss, and the share of what was done."""
        self.balance = max(self.least, min(MOST_SAVED, self.balance + gain + self.share * done))


@dataclass(slots=True)
class _Lane:
    """What is known for one number of rows; times are in plain steps."""

    budget: Budget = field(default_factory=lambda: Budget(START))
    look: float = _FIRST_LOOK
    speedup: float = 1.0  # of drafted steps over plain decoding, on average
    since_plain: float = math.inf
    probe_after: int = _FIRST_PROBE
    saved: float | None = None  # in this output, once a step of it was counted
    usual: float = 0.0  # saved in one, on average


class Switch:
    """Turns drafting on and off by what it was measured to save, apart for every number of rows (1, 2, 3-4, …).

    - A budget in plain steps. Every step that looked for drafts pays what it took beyond plain decoding of the tokens
      it gave, and is paid what it saved. It earns 1% of all time besides and holds at most 8. It begins with 2. A
      further output goes on with what the last one left of them, at least with 1, or with a quarter of what outputs
      usually save. A draft is verified while the budget holds what it may lose. A long match, expected to go at 1.25
      times the plain speed, may overdraw it by 2. So whatever steps cost and however wrong drafts are, the time lost
      stays below 1% and a few plain steps for every output.
    - Looking for drafts is done while the budget holds ten looks, or 1. Where it takes less than 1% of a plain step, as
      with every large model, it is always done: no long match is missed.
    - Plain probes. While every step drafts, one in 64 does not, so that the plain speed stays known; one in
      64 times the measured speedup, since it forgoes that. The second comes soon, should the first have been held up.

    It reads no clock: what happened is told by `learn`.

    Attributes:
        endings: How outputs ended.
    """

    def __init__(self) -> None:
        self.endings = Endings()
        self._lanes: dict[int, _Lane] = {}

    def begin_output(self) -> None:
        """Let a further output lose a little anew; what earlier ones gained is not lost in it."""
        for lane in self._lanes.values():
            if lane.saved is not None:
                # More than can be handed on is not counted, so that a change is noticed soon.
                lane.usual += _FOLLOW * (min(lane.saved, MOST_SAVED / _PART) - lane.usual)
            kept = max(_LEAST, min(START, lane.budget.balance))
            lane.budget.balance, lane.saved = max(kept, _PART * lane.usual), None

    def looks(self, rows: int) -> bool:
        """Whether the proposers are to be asked before the next step of so many rows."""
        lane = self._lane(rows)
        every = lane.probe_after if lane.probe_after < _PROBE_EVERY else _PROBE_EVERY * max(1.0, lane.speedup)
        return lane.since_plain < every and self.steps_before_look(rows) == 0

    def steps_before_look(self, rows: int) -> int:
        """Plain steps until asking the proposers can be paid; 0 where it can."""
        lane = self._lane(rows)
        if lane.look <= SHARE:
            return 0
        return max(0, math.ceil((min(START / 2, _LOOKS * lane.look) - lane.budget.balance) / SHARE))

    def look(self, rows: int) -> float:
        """What asking the proposers takes, in plain steps."""
        return self._lane(rows).look

    def has_reserve(self, rows: int) -> bool:
        """Whether what may help later drafts alone can be paid: it takes about as long as asking the proposers."""
        return self.steps_before_look(rows) == 0

    def drafts(self, rows: int, speedup: float, stake: float = 0.0) -> bool:
        """Whether a draft is to be verified.

        Args:
            rows: Rows of the step.
            speedup: Times the plain speed that it is expected to go at.
            stake: Plain steps that it loses where none of it is right.
        """
        return self._lane(rows).budget.balance >= (-RESERVE if speedup >= LONG else min(stake, START / 2))

    def pass_by(self, rows: int, steps: int = 1) -> None:
        """Count plain steps before which nothing was looked for."""
        lane = self._lane(rows)
        lane.budget.settle(0.0, steps)
        if 0 < lane.since_plain < math.inf:
            lane.probe_after = min(_PROBE_EVERY, _LATER * lane.probe_after)
        lane.since_plain = 0

    def learn(
        self, rows: int, *, nodes: int, tokens: float, step_s: float, usual_s: float, host_s: float, plain_s: float
    ) -> None:
        """Count a step before which drafts were looked for.

        Args:
            rows: Rows that took it together.
            nodes: Nodes of the largest tree, its root counted; 1 where nothing was drafted.
            tokens: Plain steps that it did the work of.
            step_s: What the step took but for `host_s`.
            usual_s: What a step of such trees takes on average.
            host_s: What looking for drafts took, and learning from what came of it.
            plain_s: What a plain step takes on average.
        """
        lane = self._lane(rows)
        look = min(host_s / plain_s, _SURPRISE * lane.look)
        # The first looks load what they need, which is soon forgotten.
        lane.look += (_FOLLOW if look > lane.look else _FORGET) * (look - lane.look)
        took = min(step_s, _HELD_UP * usual_s) / plain_s + look
        # A step that drafted nothing lost what looking took, whatever else became of it.
        saved = tokens - took if nodes > 1 else -look
        lane.budget.settle(saved, took)
        lane.saved = (lane.saved or 0.0) + saved
        lane.since_plain = 0 if nodes == 1 else lane.since_plain + 1
        if nodes > 1:
            lane.speedup += _FOLLOW * (tokens / took - lane.speedup)

    def _lane(self, rows: int) -> _Lane:
        """What is known for so many rows."""
        return self._lanes.setdefault((rows - 1).bit_length(), _Lane())
