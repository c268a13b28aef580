"""What is known of a candidate, as one number, and first guesses of what each such number is worth."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.ngram.chains import IntArray
from lookahead.ngram.raw_arrays import jit_inline
from lookahead.ngram.recycled import ORDERS

FloatArray = NDArray[np.float64]

RANKS = 16
CEILING = 0.999  # the children of a node never claim all of the chance

# A match where the memory knows nothing: by its length (in buckets), its rank, how far the occurrences agree, and,
# where it is long, the risk that a copy ends here.
_LENGTH_STARTS = (1, 2, 3, 4, 5, 7, 10, 16, 24)
_LENGTH_GUESS = (0.24, 0.38, 0.48, 0.57, 0.60, 0.72, 0.80, 0.90, 0.96)
# By the first text, the row's own; by others alone; by others while the first text says otherwise, after a shorter
# match or one as long: in each case one occurrence, all of few, all of many, most, or fewer.
_SUPPORT_ODDS = np.outer((1.0, 0.8, 0.3, 0.3), (1.0, 3.0, 6.0, 0.7, 0.4)).reshape(-1)
_AGREEMENTS = 5
_CONTRADICTED = 3 * _AGREEMENTS  # the first of those that the first text contradicts after a match as long
_CONTRADICTED_GUESS = 0.12  # whatever their length
_LATER_RANK = 0.6
_LENGTHS, _SUPPORTS = len(_LENGTH_STARTS), len(_SUPPORT_ODDS)
_LENGTH_OF = np.searchsorted(_LENGTH_STARTS, np.arange(129), side="right").clip(1) - 1
COPY = 4  # tokens of a match that is a copy
# The risk of a token: no copy reached it yet; few did, or many, and none ended behind it; or some of them ended, a good
# part, or most.
_RISK_ODDS = np.array([1.0, 1.5, 4.0, 1.0, 0.4, 0.15])
_RISKS = len(_RISK_ODDS)
# The place of a match too short to be a copy: anywhere, or a little or close ahead of the last copy's source; and, no
# match at all, that source itself, as if the tokens since stood for some of it. As many as risks, whose room they take.
_PLACE_ODDS = np.array([0.8, 1.2, 3.0, 0.1, 1.0, 1.0])
PLACE_WEIGHT = np.array([0.0, 0.5, 1.5, 0.0])  # tokens; what a place counts for in ranking
RESUMED = 3
_AHEAD, _CLOSE = 48, 8  # tokens

# What the target thought of a token after the longest known context: its rank among the likeliest (first, second,
# later) and its probability. 0 is a token that was not among them.
_STANDING_STARTS = np.array([[0.0, 0.3, 0.5, 0.7, 0.9], [0.0, 0.1, 0.2, 0.3, np.inf], [0.0, 0.01, 0.03, 0.07, 0.15]])
_STANDING_GUESS = np.array([0.45, 0.5, 0.62, 0.75, 0.93, 0.04, 0.1, 0.14, 0.2, 0.003, 0.01, 0.02, 0.05, 0.13])
_FIRST_STANDING = np.array([1, 6, 10])
_STANDINGS = 1 + len(_STANDING_GUESS)
_ORDER_SHARE = np.array([0.5, 0.8, 0.9, 1.0])  # how much of it a known context of 1 to 4 tokens is worth

# Both, where the match is of one token: by its rank (first, second, later), its support, its place, the known context
# (short, long), and the standing.
_BOTH_RANKS = 3
_BOTH_PLACES = 3
_BOTH_ORDERS = 2
# The memory alone: by the known context, the standing, and the longest match, which says otherwise.
_BESIDE_STARTS = (0, 1, 2, 3, 5, 10)
_BESIDE_SHARE = np.array([1.0, 0.75, 0.75, 0.7, 0.5, 0.2])
_BESIDES = len(_BESIDE_STARTS)
_BESIDE_OF = np.searchsorted(_BESIDE_STARTS, np.arange(129), side="right") - 1
# A token that is merely frequent, where the memory knows nothing: by its rank and the longest match for others.
FREQUENT = 8
_FREQUENT_GUESS = 0.06 * 0.88 ** np.arange(FREQUENT)
_FREQUENT_SHARE = np.array([1.0, 0.5, 0.25, 0.15, 0.1, 0.05])

_FIRST_COPY = _LENGTH_OF[COPY] * RANKS * _SUPPORTS * _RISKS
_FIRST_BOTH = _LENGTHS * RANKS * _SUPPORTS * _RISKS
_FIRST_MEMORY = _FIRST_BOTH + _BOTH_RANKS * _SUPPORTS * _BOTH_PLACES * _BOTH_ORDERS * _STANDINGS
_FIRST_FREQUENT = _FIRST_MEMORY + ORDERS * (_STANDINGS - 1) * _BESIDES


def _kinds() -> IntArray:
    """The kind of every feature, int32 `[features]`.

    Kinds are short and long matches, of the first text and of others; tokens of one standing in the memory, with a
    match and without; and all that are frequent.
    """
    is_foreign = np.arange(_SUPPORTS).repeat(_RISKS) >= _AGREEMENTS
    is_copy = np.arange(_LENGTHS * RANKS) >= _LENGTH_OF[COPY] * RANKS
    match = 2 * is_copy[:, None] + is_foreign
    shape = (_BOTH_RANKS, _SUPPORTS, _BOTH_PLACES, _BOTH_ORDERS, _STANDINGS)
    both = np.broadcast_to(4 + np.arange(_STANDINGS), shape).copy()
    both[..., 0] = is_foreign[::_RISKS, None, None]
    memory = 4 + _STANDINGS + np.tile(np.arange(_STANDINGS - 1).repeat(_BESIDES), ORDERS)
    frequent = np.full(FREQUENT * _BESIDES, 3 + 2 * _STANDINGS)
    return np.concatenate((match.reshape(-1), both.reshape(-1), memory, frequent)).astype(np.int32)


KIND_OF = _kinds()


def first_guesses() -> FloatArray:
    """The chance of every feature before any trial, float64 `[features]`."""
    return np.concatenate((_of_matches(), _of_both(), _of_memory(), _of_frequent()))


def _chance(odds: Any) -> Any:
    """Odds as a chance."""
    return odds / (1.0 + odds)


def _of_matches() -> FloatArray:
    """First guesses of matches alone, in the order of `feature_of_match`."""
    odds = np.empty((_LENGTHS, RANKS, _SUPPORTS, _RISKS))
    for length, chance in enumerate(_LENGTH_GUESS):
        for support, factor in enumerate(_SUPPORT_ODDS):
            likely = chance if support < _CONTRADICTED else min(chance, _CONTRADICTED_GUESS)
            top = _chance(factor * likely / (1.0 - likely))
            later = top * ((1.0 - top) * _LATER_RANK) ** np.arange(RANKS)
            is_copy = length >= _LENGTH_OF[COPY]
            factors = _RISK_ODDS if is_copy else (_PLACE_ODDS if support < _AGREEMENTS else 1.0)
            odds[length, :, support] = (later / (1.0 - later))[:, None] * factors
    guess: FloatArray = _chance(odds).reshape(-1)
    return guess


def _of_both() -> FloatArray:
    """First guesses of what a match and the memory offer together, in the order of `feature_of_both`.

    What is first for both is likelier than for either; where they differ, the guess lies between theirs, and is not
    below that of what the memory does not name.
    """
    length = _LENGTH_GUESS[0]
    chance = length * ((1.0 - length) * _LATER_RANK) ** np.arange(_BOTH_RANKS)
    support = np.sqrt(_SUPPORT_ODDS)[:, None] * np.ones(_BOTH_PLACES)
    support[:_AGREEMENTS] *= _PLACE_ODDS[:_BOTH_PLACES]
    match = (chance / (1.0 - chance))[:, None, None, None, None] * support[..., None, None]
    chance = _ORDER_SHARE[[1, -1], None] * _STANDING_GUESS
    memory = chance / (1.0 - chance)
    odds = np.empty((_BOTH_RANKS, _SUPPORTS, _BOTH_PLACES, _BOTH_ORDERS, _STANDINGS))
    odds[..., 0] = 0.6 * match[..., 0]
    odds[..., 1:] = np.maximum(odds[..., :1], np.sqrt(match * memory))
    firsts = slice(_FIRST_STANDING[0], _FIRST_STANDING[1])
    odds[0, ..., firsts] = 1.3 * memory[:, :5] * np.maximum(1.0, np.sqrt(match[0]))
    guess: FloatArray = _chance(odds).reshape(-1)
    return guess


def _of_memory() -> FloatArray:
    """First guesses of what the memory alone offers, in the order of `feature_of_memory`."""
    guess: FloatArray = _ORDER_SHARE[:, None, None] * _STANDING_GUESS[:, None] * _BESIDE_SHARE
    return guess.reshape(-1)


def _of_frequent() -> FloatArray:
    """First guesses of tokens that are frequent, in the order of `feature_of_frequent`."""
    guess: FloatArray = _FREQUENT_GUESS[:, None] * _FREQUENT_SHARE
    return guess.reshape(-1)


@jit_inline
def support_of(kind, agreeing, total):
    """How far the `total` occurrences in the first text (kind 0) or the others agree on a token.

    The others are of kind 1, of 2 where the first text says otherwise, and of 3 where it does after a match as long.
    """
    agreement = 3 if 2 * agreeing >= total else 4
    if agreeing == total:
        agreement = 0 if total == 1 else (1 if total < 4 else 2)
    return kind * _AGREEMENTS + agreement


@jit_inline
def is_copy(feature):
    """Whether a feature is that of a match long enough to be a copy."""
    return _FIRST_COPY <= feature < _FIRST_BOTH


@jit_inline
def is_own_copy(feature):
    """Whether it is one of the first text."""
    return is_copy(feature) and is_own(feature // _RISKS % _SUPPORTS)


@jit_inline
def is_own(support):
    """Whether the first text supports a candidate."""
    return support < _AGREEMENTS


@jit_inline
def standing_of(rank, chance):
    """The bucket of the target's likeliest token but `rank`, at the probability it had; at least 1."""
    row = min(rank, 2)
    standing = 0
    while standing + 1 < _STANDING_STARTS.shape[1] and chance >= _STANDING_STARTS[row, standing + 1]:
        standing += 1
    return _FIRST_STANDING[row] + standing


@jit_inline
def place_of(distance):
    """The bucket of how many tokens ahead of the last copy's source a match stands."""
    if distance <= 0 or distance > _AHEAD:
        return 0
    return 1 if distance > _CLOSE else 2


@jit_inline
def feature_of_match(length, rank, support, risk, place):
    """The row of `HitRates.table` for a match of `length` tokens where the memory knows nothing.

    What counts of a copy is its risk, of a shorter match its place.
    """
    row = (_LENGTH_OF[min(length, _LENGTH_OF.size - 1)] * RANKS + rank) * _SUPPORTS + support
    return row * _RISKS + (risk if length >= COPY else place)


@jit_inline
def feature_of_both(rank, support, place, order, standing):
    """The row for a match of one token where the memory knows a context of `order` tokens, 1 to 4."""
    row = (min(rank, _BOTH_RANKS - 1) * _SUPPORTS + support) * _BOTH_PLACES + place
    return _FIRST_BOTH + (row * _BOTH_ORDERS + (order > 2)) * _STANDINGS + standing


@jit_inline
def feature_of_memory(order, standing, beside):
    """The row for a token the memory alone offers, beside a match of `beside` tokens (0: none) for others."""
    row = (order - 1) * (_STANDINGS - 1) + standing - 1
    return _FIRST_MEMORY + row * _BESIDES + _BESIDE_OF[min(beside, _BESIDE_OF.size - 1)]


@jit_inline
def feature_of_frequent(rank, beside):
    """The row for the most frequent token but `rank`, beside a match of `beside` tokens (0: none) for others."""
    return _FIRST_FREQUENT + rank * _BESIDES + _BESIDE_OF[min(beside, _BESIDE_OF.size - 1)]
