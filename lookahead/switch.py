"""Whether to draft at all: what drafting saved against plain decoding, measured, decides."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lookahead.progress import Endings

SHARE = 0.005  # of the time, the most that looking for drafts and trying them may cost in the long run
MOST_SAVED = 8.0  # plain steps of gain that are remembered, and may be lost again before drafting is held back
_START = 0.5  # plain steps that an output may lose before anything was gained in it, where outputs save nothing
_PART = 0.25  # of what outputs usually save, that may be lost likewise
_FOLLOW = 0.3  # share of a surprise that the usual follows
_FIRST_LOOK = 0.05  # plain steps that asking the proposers is taken to cost before it was measured
_MARGIN = 1.04  # times the seconds a token of plain decoding takes; beyond it drafting loses
_TRIAL = 8  # drafted steps that are judged together at least
_FADE = 1 - 1 / 16  # what a drafted step still counts after one more
_SHORTEST_PAUSE, _LONGEST_PAUSE = 16, 1024  # steps without drafts after a loss, doubled with every loss in a row
LONG = 1.5  # expected times plain speed of what is likely a long match, which ends a pause at once
_PROBE_EVERY = 64  # steps between two plain ones, times the speedup: what a plain step forgoes
_SURPRISE = 2.0  # a step that took longer than this many times the expected was held up by something else


@dataclass(slots=True)
class _Lane:
    """What is known for one number of rows; times are in plain steps."""

    balance: float = _START
    saved: float = 0.0  # in this output
    has_learned: bool = False  # in this output
    usual: float = 0.0  # saved in one, on average
    look: float = _FIRST_LOOK
    since_plain: int = _PROBE_EVERY * 1024
    spent: float = 0.0
    worth: float = 0.0
    trial: int = 0
    pause: int = 0
    next_pause: int = _SHORTEST_PAUSE

    @property
    def speedup(self) -> float:
        """Measured, over plain decoding; 1 where it is not known or less."""
        return max(1.0, self.worth / self.spent) if self.spent > 0 else 1.0


class Switch:
    """Turns drafting on and off by what it was measured to save, apart for every number of rows (1, 2, 3-4, …).

    Three rules, each simple:

    - An account, in plain steps. Every step that looked for drafts pays what it took beyond plain decoding of the
      tokens it gave, and is paid what it saved. It earns 0.5% of all time besides, and holds at most 8. An output
      begins with a quarter of what outputs usually save, at least with 0.5 where it is not overdrawn. While it is,
      nothing is looked for. So whatever the costs and however wrong the drafts, the time lost stays below 0.5%, a few
      plain steps and the one step that overdrew it.
    - A comparison. Drafted steps are compared with plain ones in seconds per committed token. Where the last ones
      (at least 8) took 4% longer, drafting pauses for 16 steps, twice as many after every further loss, up to 1024.
      Proposers are still asked: a draft expected to go at 1.5 times the plain speed, a long match, ends a pause.
    - Plain probes. While every step drafts, one in 64 does not, so that the plain speed stays known; one in
      64 times the measured speedup, since it forgoes that.

    It reads no clock: what happened is told by `learn`.

    Attributes:
        endings: How outputs ended.

    Source: the account is a token bucket, e.g. Tanenbaum and Wetherall 2011, "Computer Networks", §5.4.2.
    """

    def __init__(self) -> None:
        self.endings = Endings()
        self._lanes: dict[int, _Lane] = {}

    def begin_output(self) -> None:
        """Begin with a part of what outputs usually save; where they save nothing, their gains are not lost again."""
        for lane in self._lanes.values():
            if lane.has_learned:
                # More than can be handed on is not counted, so that a change is noticed soon.
                lane.usual += _FOLLOW * (min(lane.saved, MOST_SAVED / _PART) - lane.usual)
            lane.balance = max(min(lane.balance, _START), _PART * lane.usual)
            lane.saved, lane.has_learned = 0.0, False

    def looks(self, rows: int) -> bool:
        """Whether the proposers are to be asked before the next step of so many rows."""
        lane = self._lane(rows)
        if lane.since_plain >= _PROBE_EVERY * lane.speedup:
            return False
        return lane.balance >= min(lane.look, _START)

    def steps_before_look(self, rows: int) -> int:
        """Plain steps until the account holds what asking the proposers takes; 0 where it does."""
        lane = self._lane(rows)
        return max(0, math.ceil((min(lane.look, _START) - lane.balance) / SHARE))

    def look(self, rows: int) -> float:
        """What asking the proposers takes, in plain steps."""
        return self._lane(rows).look

    def has_reserve(self, rows: int) -> bool:
        """Whether the account holds half of what an output begins with."""
        return self._lane(rows).balance >= _START / 2

    def drafts(self, rows: int, speedup: float, stake: float = 0.0) -> bool:
        """Whether a draft is to be verified.

        Args:
            rows: Rows of the step.
            speedup: Times the plain speed that it is expected to go at.
            stake: Plain steps that it loses where none of it is right. Unless it is a long match, the account has to
                hold that, or half of what an output begins with.
        """
        lane = self._lane(rows)
        return (lane.pause == 0 and lane.balance >= min(stake, _START / 2)) or speedup >= LONG

    def pass_by(self, rows: int, steps: int = 1) -> None:
        """Count plain steps before which nothing was looked for."""
        lane = self._lane(rows)
        lane.balance = min(MOST_SAVED, lane.balance + SHARE * steps)
        lane.pause = max(0, lane.pause - steps)
        lane.since_plain = 0

    def learn(
        self, rows: int, *, nodes: int, tokens: float, seconds: float, host_s: float, expected_s: float, plain_s: float
    ) -> None:
        """Count a step before which drafts were looked for.

        Args:
            rows: Rows that took it together.
            nodes: Nodes of the largest tree, its root counted; 1 where nothing was drafted.
            tokens: Plain steps that it did the work of.
            seconds: What the step took, looking for drafts included.
            host_s: What looking for drafts took, and learning from what came of it.
            expected_s: What a step of such trees was expected to take without that.
            plain_s: What a plain step takes.
        """
        lane = self._lane(rows)
        took = min(seconds / plain_s, _SURPRISE * (expected_s / plain_s + lane.look))
        look = min(host_s / plain_s, _SURPRISE * lane.look)
        lane.look += 0.2 * (look - lane.look)
        # A step that drafted nothing lost what looking took, whatever held up the rest of it.
        saved = tokens - took if nodes > 1 else -look
        lane.balance = min(MOST_SAVED, lane.balance + saved + SHARE * took)
        lane.saved, lane.has_learned = lane.saved + saved, True
        lane.pause = max(0, lane.pause - 1)
        lane.since_plain = 0 if nodes == 1 else lane.since_plain + 1
        if nodes > 1:
            self._judge(lane, tokens, took)

    def _judge(self, lane: _Lane, tokens: float, took: float) -> None:
        """Compare the last drafted steps with plain ones."""
        lane.spent = _FADE * lane.spent + took
        lane.worth = _FADE * lane.worth + tokens
        lane.trial += 1
        if lane.trial < _TRIAL:
            return
        if lane.spent > _MARGIN * lane.worth:
            lane.pause, lane.next_pause = lane.next_pause, min(_LONGEST_PAUSE, 2 * lane.next_pause)
            lane.spent = lane.worth = 0.0
            lane.trial = 0
        elif lane.spent < lane.worth:
            lane.next_pause = _SHORTEST_PAUSE

    def _lane(self, rows: int) -> _Lane:
        """What is known for so many rows."""
        key = (rows - 1).bit_length()
        if key not in self._lanes:
            self._lanes[key] = _Lane()
        return self._lanes[key]
