"""Whether one proposer among several is worth its time: what it took, against what only it foretold."""

from __future__ import annotations

from lookahead.switch import MOST_SAVED, SHARE

_START = 2.0  # tokens that may be lost before anything was gained
_FOLLOW = 0.2  # share of a new price that is believed
_FORGET = 0.1  # share of what it earned that is forgotten with every question
_KNOWN = 3  # prices after which one far beyond is taken for a disturbance
_SURPRISE = 2.0  # and counts as so many times the usual


class Ledger:
    """An account in tokens a row, so that a costly proposer does not eat up what others save.

    Every step pays in 0.5% of the tokens it gave. A step before which the proposer was asked also pays in the accepted
    tokens that nobody else offered, and pays out those that would have been had in the time it took, at the speed of
    that step without it: it is worth asking as long as its share of the tokens is its share of the time. The account
    holds at most 8 tokens; while it does not hold the price of a question, at most 2, the proposer is not asked. The
    first question of a call costs what others did, since a draft model reads the prompt then; nothing, before any.

    It reads no clock: what happened is told.
    """

    def __init__(self) -> None:
        self._balance = _START
        self._price = 0.0
        self._prices = 0
        self._earned = 0.0

    @property
    def affords(self) -> bool:
        """Whether the proposer is to be asked."""
        return self._balance >= min(self._price, _START)

    @property
    def is_filled(self) -> bool:
        """Whether it holds as much as at first, or more."""
        return self._balance >= _START

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
            is_first: Whether it was asked for the first time in a call.
        """
        self._balance += SHARE * tokens
        if spent_s is not None and is_first:
            self._balance += min(0.0, alone - self._price)
        elif spent_s is not None:
            price = spent_s * (tokens - alone) / (step_s - spent_s)
            if self._prices >= _KNOWN and not is_steady:
                price = min(price, _SURPRISE * self._price)
            self._price += (_FOLLOW if self._prices and not is_steady else 1.0) * (price - self._price)
            self._prices += 1
            self._balance += alone - price
            self._earned += _FORGET * (alone - price - self._earned)
        self._balance = min(MOST_SAVED, self._balance)
