"""Detects outputs that loop: they end in one repeated phrase."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_PHRASE = 64
"""Maximum tokens of the phrase."""
MIN_TIMES = 3
"""Minimum repeats of the phrase at the end."""
MIN_TOKENS = 48
"""Minimum tokens of all repeats: rules, equal rows of a table and refrains are shorter."""


def loops(tokens: Sequence[int]) -> bool:
    """Whether an output repeats one phrase up to its end.

    Its last tokens are a phrase of 1 to `MAX_PHRASE` tokens, at least `MIN_TIMES` times in a row and `MIN_TOKENS`
    tokens in total; the last repeat may be cut off. One token may follow, such as an end-of-sequence token.

    Args:
        tokens: The new tokens of the output.
    """
    return _ends_in_repeats(np.asarray(tokens, np.int64)) or _ends_in_repeats(np.asarray(tokens[:-1], np.int64))


def _ends_in_repeats(tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bool:
    for period in range(1, min(MAX_PHRASE, len(tokens) // MIN_TIMES) + 1):
        differs = np.flatnonzero(tokens[period:] != tokens[:-period])
        begin = int(differs[-1]) + 1 if len(differs) else 0  # from here on the tokens repeat with this period
        if len(tokens) - begin >= max(MIN_TIMES * period, MIN_TOKENS):
            return True
    return False
