"""Whether one proposer among several is worth its time: what it took, against what only it foretold."""

from __future__ import annotations

from dataclasses import dataclass

from lookahead.drafting.budget import Budget

_START = 2.0  # tokens that may be lost before anything was gained
_SHARE = 0.005  # of the tokens, the most that it may cost in the long run
_FOLLOW = 0.2  # share of a new price that is believed
_FORGET = 0.1  # share of what it earned that is forgotten with every question
_KNOWN = 3  # prices after which one far beyond is taken for a disturbance
_SURPRISE = 2.0  # and counts as so many times the usual
_MOST_OWED = 32.0  # tokens that rows may have lost; beyond them a new attempt would be put off for too long


@dataclass(slots=True)
class _Price:
    """What one question takes, in tokens."""

    usual: float = 0.0
    count: int = 0

    def take(self, price: float, *, is_steady: bool) -> float:
        """What a new one counts; the usual follows it."""
        if self.count >= _KNOWN and not is_steady:
            price = min(price, _SURPRISE * self.usual)
        self.usual += (_FOLLOW if self.count and not is_steady else 1.0) * (price - self.usual)
        self.count += 1
        return price


class Ledger:
    """Two accounts in tokens a row, so that a costly proposer does not eat up what others save.

    Every step pays in 0.5% of the tokens it gave. A step before which the proposer was asked also pays in the accepted
    tokens that nobody else offered, and pays out those that would have been had in the time it took, at the speed of
    that step without it: it is worth asking as long as its share of the tokens is its share of the time.

    - The account of questions holds at most 8 tokens; while it does not hold the price of one, at most 2, the proposer
      is not asked. A row's first question costs what others did: a draft model reads the prompt then, which is done
      with however the next questions turn out.
    - The account of rows bears that reading as well, but for the very first one, when much is done for the first time.
      While it is overdrawn, by 32 tokens at most, the proposer is not shown another row.

    It reads no clock: what happened is told.
    """

    def __init__(self) -> None:
        self._questions, self._of_rows = Budget(_START, _SHARE), Budget(_START, _SHARE, -_MOST_OWED)
        self._price, self._reading = _Price(), _Price()
        self._earned = 0.0

    @property
    def affords(self) -> bool:
        """Whether the proposer is to be asked."""
        return self._questions.balance >= min(self._price.usual, _START)

    @property
    def begins(self) -> bool:
        """Whether the proposer is to be shown a new row."""
        return self._of_rows.balance >= 0.0

    @property
    def is_filled(self) -> bool:
        """Whether it holds as much as at first, or more."""
        return self._questions.balance >= _START

    @property
    def earns(self) -> bool:
        """Whether the last questions gave more than they took."""
        return self._earned > 0.0

    def settle(
        self,
        *,
        spent_s: float | None,
        alone: float,
        tokens: float,
        step_s: float,
        is_steady: bool = False,
        is_first: bool = False,
    ) -> None:
        """Count a step.

        Args:
            spent_s: What the proposer took of it; None where it was not asked.
            alone: Accepted tokens a row that only it offered.
            tokens: Tokens a row emitted.
            step_s: What the whole step took, more than `spent_s`.
            is_steady: Whether times are averages, which no disturbance of a single step explains.
            is_first: Whether it was asked for the first time since it was shown a row.
        """
        gain = of_row = 0.0
        if spent_s is not None:
            price = spent_s * (tokens - alone) / (step_s - spent_s)
            if is_first:
                gain = min(0.0, alone - self._price.usual)
                is_known = self._reading.count > 0
                reading = self._reading.take(price, is_steady=is_steady)
                of_row = alone - reading if is_known else gain
            else:
                gain = of_row = alone - self._price.take(price, is_steady=is_steady)
                self._earned += _FORGET * (gain - self._earned)
        self._questions.settle(gain, tokens)
        self._of_rows.settle(of_row, tokens)
