"""Features of candidates, and their prior probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.ngram.chains import IntArray
from lookahead.ngram.inlining import jit_inline
from lookahead.ngram.successors import ORDERS

FloatArray = NDArray[np.float64]

RANKS = 16
CEILING = 0.999  # maximum sum of the probabilities of a node's children

# A match without a recycled context: by its length (in buckets), its rank, and the agreement of its occurrences.
_LENGTH_STARTS = (1, 2, 3, 4, 5, 7, 10, 16, 24)
_LENGTH_PRIOR = (0.24, 0.38, 0.48, 0.57, 0.60, 0.72, 0.80, 0.90, 0.96)
# Support: occurrences in the first text, the row's own; in others only; in others while the first text has another
# token after a shorter match, or after one as long. For each: one occurrence, all of few, all of many, most, or fewer.
_SUPPORT_ODDS = np.outer((1.0, 0.8, 0.3, 0.3), (1.0, 3.0, 6.0, 0.7, 0.4)).reshape(-1)
_AGREEMENTS = 5
_CONTRADICTED = 3 * _AGREEMENTS  # the first support with another token in the first text after a match as long
_CONTRADICTED_PRIOR = 0.12  # maximum for any length
_LATER_RANK = 0.6
_LENGTHS, _SUPPORTS = len(_LENGTH_STARTS), len(_SUPPORT_ODDS)
_LENGTH_OF = np.searchsorted(_LENGTH_STARTS, np.arange(129), side="right").clip(1) - 1
COPY = 4  # minimum tokens of a match that counts as a copy
NO_COPY, FOREIGN_COPY, OWN_COPY = range(3)


# The bucket of a recycled token: its rank among the successors of the longest known context (first, second, later) and
# its probability. 0: it is not among them.
_BUCKET_STARTS = np.array([[0.0, 0.3, 0.5, 0.7, 0.9], [0.0, 0.1, 0.2, 0.3, np.inf], [0.0, 0.01, 0.03, 0.07, 0.15]])
_BUCKET_PRIOR = np.array([0.4, 0.52, 0.6, 0.7, 0.93, 0.07, 0.11, 0.19, 0.22, 0.008, 0.018, 0.035, 0.075, 0.17])
_FIRST_BUCKET = np.array([1, 6, 10])
_BUCKETS = 1 + len(_BUCKET_PRIOR)
_ORDER_SHARE = np.array([0.65, 0.85, 0.9, 1.0])  # factor for a known context of 1 to 4 tokens

# A match of one token with a recycled context: by its rank (first, second, later), its support, the known context
# (of this request or foreign, short or long), and the bucket of the recycled token.
_BOTH_RANKS = 3
_BOTH_CONTEXTS = 4
_FOREIGN_SHARE = np.array([1.0, 0.8])  # factor for a context that another request learned
# A longer match with a recycled context: by its length, its first ranks, its support, whether the context is foreign,
# and the standing of its token among the successors of that context: first and sure, first, later, or not among them.
STANDINGS = 4
_SURE = 0.8  # least probability
# Factors on the odds of a match without a context: short ones, copies, and long copies.
_STANDING_ODDS = np.array([[8.0, 1.5, 0.25, 0.1], [5.0, 1.0, 0.16, 0.15], [1.0, 0.8, 0.06, 0.14]])
_STANDING_STARTS = (1, 4, 7)  # tokens
# A recycled token alone: by the known context, its bucket, and the longest match, which is for another token.
_COMPETING_STARTS = (0, 1, 2, 3, 5, 10)
_COMPETING_SHARE = np.array([1.0, 0.75, 0.75, 0.7, 0.5, 0.2])
_COMPETING_BUCKETS = len(_COMPETING_STARTS)
_COMPETING_OF = np.searchsorted(_COMPETING_STARTS, np.arange(129), side="right") - 1
# A frequent token, without a recycled context: by its rank and the longest match for others.
FREQUENT = 8
_FREQUENT_PRIOR = 0.06 * 0.88 ** np.arange(FREQUENT)
_FREQUENT_SHARE = np.array([1.0, 0.5, 0.25, 0.15, 0.1, 0.05])

# A token of a prediction: by the tokens that agree before its place, the shift of that from where the cursor is, its
# rank among such tokens, whether the row's own text says so, and what the recycled context does.
_ALIGNED_STARTS = np.array([0, 1, 2, 3, 4, 6, 9, 14, 20, 32, 64, 128, 256])
# As measured on edits of Python files, and falling with the distance from the cursor.
_ALIGNED_PRIOR = np.array(
    [
        (0.08, 0.08, 0.07, 0.07, 0.06, 0.05, 0.06, 0.05, 0.05, 0.04, 0.50),
        (0.66, 0.45, 0.40, 0.30, 0.18, 0.14, 0.24, 0.18, 0.05, 0.05, 0.80),
        (0.90, 0.82, 0.78, 0.70, 0.52, 0.36, 0.50, 0.45, 0.30, 0.15, 0.90),
        (0.91, 0.86, 0.84, 0.80, 0.70, 0.55, 0.62, 0.60, 0.55, 0.50, 0.93),
        (0.92, 0.90, 0.89, 0.87, 0.81, 0.67, 0.75, 0.74, 0.70, 0.62, 0.95),
        (0.94, 0.93, 0.92, 0.91, 0.87, 0.79, 0.85, 0.82, 0.81, 0.78, 0.96),
        (0.97, 0.96, 0.96, 0.95, 0.92, 0.89, 0.92, 0.91, 0.90, 0.87, 0.97),
        (0.98, 0.97, 0.97, 0.97, 0.96, 0.95, 0.96, 0.95, 0.94, 0.93, 0.98),
        *(np.full((5, 11), 1.0) * np.array([[0.990], [0.995], [0.997], [0.998], [0.9985]])).tolist(),
    ]
)
_SHIFTS = _ALIGNED_PRIOR.shape[1]
START = 1 << 40  # the shift of the first entry of a prediction
_SHIFT_STARTS = np.array([0, 1, 2, 5, 17, 65])
_ALIGNED_RANKS, _OWN_VIEWS, _RECYCLED_VIEWS = 3, 3, 4
_OWN_ODDS, _RECYCLED_ODDS = np.array([1.0, 2.0, 0.5]), np.array([1.0, 3.0, 0.8, 0.3])
_ALIGNED_LATER = 0.4

_FIRST_BOTH = _LENGTHS * RANKS * _SUPPORTS
_FIRST_STANDING = _FIRST_BOTH + _BOTH_RANKS * _SUPPORTS * _BOTH_CONTEXTS * _BUCKETS
_FIRST_MEMORY = _FIRST_STANDING + _LENGTHS * _BOTH_RANKS * _SUPPORTS * 2 * STANDINGS
_FIRST_FREQUENT = _FIRST_MEMORY + 2 * ORDERS * (_BUCKETS - 1) * _COMPETING_BUCKETS
_FIRST_ALIGNED = _FIRST_FREQUENT + FREQUENT * _COMPETING_BUCKETS


def _tables() -> tuple[IntArray, FloatArray, IntArray]:
    """Of every feature its kind, its prior probability, and whether it is of a copy: each `[features]`.

    The order is that of the functions `feature_of_…`.

    Kinds are: short and long matches, in the first text and in others; recycled tokens by bucket, with and without a
    match, of this request and foreign; all frequent tokens; and short and long matches by their standing.
    """
    foreign, buckets = (np.arange(_SUPPORTS) >= _AGREEMENTS).astype(np.int32), np.arange(_BUCKETS)
    likely = np.array(_LENGTH_PRIOR)[:, None, None].repeat(_SUPPORTS, 2)
    likely[..., _CONTRADICTED:] = likely[..., _CONTRADICTED:].clip(max=_CONTRADICTED_PRIOR)
    top = _prob(_SUPPORT_ODDS * likely / (1.0 - likely))
    match = top * ((1.0 - top) * _LATER_RANK) ** np.arange(RANKS)[:, None]
    match_kind = 2 * (np.arange(_LENGTHS) >= _LENGTH_OF[COPY])[:, None, None] + foreign

    # A token that is first in a match and in the recycled table is likelier than in either. Otherwise the prior is
    # between theirs, nearer to that of the table, and not below that of a token that the table does not hold.
    length = _LENGTH_PRIOR[0]
    prob = length * ((1.0 - length) * _LATER_RANK) ** np.arange(_BOTH_RANKS)
    single = (prob / (1.0 - prob))[:, None, None, None] * np.sqrt(_SUPPORT_ODDS)[:, None, None]
    prob = np.outer(_FOREIGN_SHARE, _ORDER_SHARE[[1, -1]]).reshape(-1, 1) * _BUCKET_PRIOR
    known = prob / (1.0 - prob)
    odds = np.empty((_BOTH_RANKS, _SUPPORTS, _BOTH_CONTEXTS, _BUCKETS))
    odds[..., 0] = 0.3 * single[..., 0]
    odds[..., 1:] = np.maximum(odds[..., :1], single**0.25 * known**0.75)
    firsts = slice(_FIRST_BUCKET[0], _FIRST_BUCKET[1])
    odds[0, ..., firsts] = 1.3 * known[:, :5] * np.maximum(1.0, np.sqrt(single[0]))
    both_kind = 4 + _BUCKETS * (np.arange(_BOTH_CONTEXTS) // 2)[:, None] + buckets
    both_kind = np.where(buckets == 0, foreign[:, None, None], both_kind)

    factors = _STANDING_ODDS[np.searchsorted(_STANDING_STARTS, _LENGTH_STARTS, side="right") - 1]
    likely = match[:, :_BOTH_RANKS, :, None, None]
    # On the logarithm of the odds, a context that another request learned counts half.
    factors = factors[:, None, None, None] ** np.array([[1.0], [0.5]])
    standing = _prob(likely / (1.0 - likely) * factors)
    standing_kind = 3 + 4 * _BUCKETS + match_kind[..., None, None] + 4 * np.arange(STANDINGS)

    memory = np.outer(_FOREIGN_SHARE, _ORDER_SHARE)[..., None, None] * _BUCKET_PRIOR[:, None] * _COMPETING_SHARE
    memory_kind = 4 + 2 * _BUCKETS + np.arange(2 * (_BUCKETS - 1)).reshape(2, 1, -1, 1)
    frequent = _FREQUENT_PRIOR[:, None] * _FREQUENT_SHARE
    ranks = _ALIGNED_LATER ** np.arange(_ALIGNED_RANKS)[:, None, None]
    likely = (_ALIGNED_PRIOR[..., None, None, None] * ranks).clip(max=0.9995)
    aligned = _prob(likely / (1.0 - likely) * _OWN_ODDS[:, None] * _RECYCLED_ODDS)
    views = np.arange(_OWN_VIEWS * _RECYCLED_VIEWS).reshape(_OWN_VIEWS, _RECYCLED_VIEWS)
    classes = np.searchsorted((1, 3, 9), _ALIGNED_STARTS, side="right")
    aligned_kind = standing_kind.max() + 1 + classes[:, None, None, None, None] * views.size + views
    is_copied = np.where(_ALIGNED_STARTS >= COPY, OWN_COPY, NO_COPY)[:, None, None, None, None]
    copy = np.where(match_kind < 2, NO_COPY, np.where(foreign, FOREIGN_COPY, OWN_COPY))
    blocks = (
        (match_kind, match, copy),
        (both_kind, _prob(odds), NO_COPY),
        (standing_kind, standing, copy[..., None, None]),
        (memory_kind, memory, NO_COPY),
        (2 + 4 * _BUCKETS, frequent, NO_COPY),
        (aligned_kind, aligned, is_copied),
    )
    kinds, priors, copies = zip(*(map(np.ravel, np.broadcast_arrays(*block)) for block in blocks), strict=True)
    return np.concatenate(kinds).astype(np.int32), np.concatenate(priors), np.concatenate(copies).astype(np.int32)


def _prob(odds: Any) -> Any:
    return odds / (1.0 + odds)


KIND_OF, PRIOR, COPY_OF = _tables()
ALIGNED = _ALIGNED_PRIOR.ravel()  # of every cell of `alignment_of`


@jit_inline
def support_of(kind, agreeing, total):
    """The bucket of how many of `total` occurrences agree on a token.

    Kind 0 are those in the first text. Those in others are kind 1; 2 if the first text has another token; 3 if it has
    that after a match as long.
    """
    agreement = 3 if 2 * agreeing >= total else 4
    if agreeing == total:
        agreement = 0 if total == 1 else (1 if total < 4 else 2)
    return kind * _AGREEMENTS + agreement


@jit_inline
def is_own(support):
    """Whether the first text supports a candidate."""
    return support < _AGREEMENTS


@jit_inline
def bucket_of(rank, prob):
    """The bucket of the recycled token of a rank, from 0 on, and a probability; at least 1."""
    row = min(rank, 2)
    bucket = 0
    while bucket + 1 < _BUCKET_STARTS.shape[1] and prob >= _BUCKET_STARTS[row, bucket + 1]:
        bucket += 1
    return _FIRST_BUCKET[row] + bucket


@jit_inline
def feature_of_match(length, rank, support):
    """The row of `HitRates.table` for a match of `length` tokens without a recycled context."""
    return (_LENGTH_OF[min(length, _LENGTH_OF.size - 1)] * RANKS + rank) * _SUPPORTS + support


@jit_inline
def feature_of_both(rank, support, order, is_foreign, bucket):
    """The row for a match of one token with a recycled context.

    Args:
        rank: Rank of the match, from 0.
        support: Agreement of its occurrences, from `support_of`.
        order: Tokens of the recycled context, 1 to 4.
        is_foreign: 1 if another request stored it, else 0.
        bucket: Of the token among the successors of the context, from `bucket_of`; 0 if it is not one of them.
    """
    row = min(rank, _BOTH_RANKS - 1) * _SUPPORTS + support
    return _FIRST_BOTH + (row * _BOTH_CONTEXTS + 2 * is_foreign + (order > 2)) * _BUCKETS + bucket


@jit_inline
def standing_of(rank, prob):
    """The standing of a token by its rank among the successors of a context, -1 for none, and its probability there."""
    if rank == 0:
        return 0 if prob >= _SURE else 1
    return 2 if rank > 0 else 3


@jit_inline
def feature_of_standing(length, rank, support, is_foreign, standing):
    """The row for a match of at least two tokens with a recycled context, and the standing of its token there."""
    row = (_LENGTH_OF[min(length, _LENGTH_OF.size - 1)] * _BOTH_RANKS + min(rank, _BOTH_RANKS - 1)) * _SUPPORTS
    return _FIRST_STANDING + ((row + support) * 2 + is_foreign) * STANDINGS + standing


@jit_inline
def feature_of_memory(order, is_foreign, bucket, competing_match_len):
    """The row for a recycled token; the longest match for other tokens has `competing_match_len` tokens (0: none)."""
    row = (ORDERS * is_foreign + order - 1) * (_BUCKETS - 1) + bucket - 1
    return _FIRST_MEMORY + row * _COMPETING_BUCKETS + _COMPETING_OF[min(competing_match_len, _COMPETING_OF.size - 1)]


@jit_inline
def feature_of_frequent(rank, competing_match_len):
    """The row for the frequent token of a rank; the longest match for other tokens has `competing_match_len` tokens."""
    return _FIRST_FREQUENT + rank * _COMPETING_BUCKETS + _COMPETING_OF[min(competing_match_len, _COMPETING_OF.size - 1)]


@jit_inline
def shift_of(entries):
    """The bucket of how far a place in a prediction is from where the cursor is."""
    if entries == START:
        return _SHIFTS - 1
    bucket = 0
    while bucket + 1 < _SHIFT_STARTS.size and abs(entries) >= _SHIFT_STARTS[bucket + 1]:
        bucket += 1
    return bucket if entries >= 0 else 4 + max(2, bucket)


@jit_inline
def alignment_of(agreed, shift):
    """The cell of a place in a prediction, by the tokens that agree before it and the bucket of its shift."""
    bucket = 0
    while bucket + 1 < _ALIGNED_STARTS.size and agreed >= _ALIGNED_STARTS[bucket + 1]:
        bucket += 1
    return bucket * _SHIFTS + shift


@jit_inline
def feature_of_prediction(cell, rank, own_view, recycled_view):
    """The row for a token of a prediction.

    Args:
        cell: Of its likeliest place, from `alignment_of`.
        rank: Among the tokens of predictions, from 0.
        own_view: 0 where the row's own text has no match, 1 where it has this token, 2 where only others.
        recycled_view: 0 without a known context, 1 for its first token, 2 for a later one, 3 for another.
    """
    row = (cell * _ALIGNED_RANKS + min(rank, _ALIGNED_RANKS - 1)) * _OWN_VIEWS + own_view
    return _FIRST_ALIGNED + row * _RECYCLED_VIEWS + recycled_view


@jit_inline
def agreed_of(cell):
    """The least tokens that agree before a place of a cell."""
    return _ALIGNED_STARTS[cell // _SHIFTS]
