"""Whether an output loops: ends in one phrase that it repeats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_PHRASE = 64
"""Most tokens of the phrase."""
MIN_TIMES = 3
"""How often it stands at the end, at least."""
MIN_TOKENS = 48
"""Tokens that it takes there in all, at least: rules, equal rows of a table and refrains are shorter."""


def loops(tokens: Sequence[int]) -> bool:
    """Whether an output repeats one phrase up to its end.

    Its last tokens are a phrase of 1 to `MAX_PHRASE` tokens, at least `MIN_TIMES` times in a row and `MIN_TOKENS`
    tokens in all; the last time may be cut off. One token may follow, such as that which ends the sequence.

    Args:
        tokens: The new tokens of the output.
    """
    return _ends_in_repeats(np.asarray(tokens, np.int64)) or _ends_in_repeats(np.asarray(tokens[:-1], np.int64))


def _ends_in_repeats(tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bool:
    for period in range(1, min(MAX_PHRASE, len(tokens) // MIN_TIMES) + 1):
        differs = np.flatnonzero(tokens[period:] != tokens[:-period])
        begin = int(differs[-1]) + 1 if len(differs) else 0  # from here on every token is that one phrase later
        if len(tokens) - begin >= max(MIN_TIMES * period, MIN_TOKENS):
            return True
    return False
