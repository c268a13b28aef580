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

# A match without a recycled context: by its length (bucketed), its rank, and the agreement of its occurrences.
_LENGTH_STARTS = (1, 2, 3, 4, 5, 7, 10, 16, 24)
_LENGTH_PRIOR = (0.24, 0.38, 0.48, 0.57, 0.60, 0.72, 0.80, 0.90, 0.96)
# Support: occurrences in the first text, the row's own; only in other texts; only in others, while the first text has
# another token after a shorter match, or after an equally long one. Each splits into: the only occurrence, all of few,
# all of many, most, or fewer.
_SUPPORT_ODDS = np.outer((1.0, 0.8, 0.3, 0.3), (1.0, 3.0, 6.0, 0.7, 0.4)).reshape(-1)
_AGREEMENTS = 5
_CONTRADICTED = 3 * _AGREEMENTS  # the first support contradicted by an equally long match in the first text
_CONTRADICTED_PRIOR = 0.12  # maximum for any length
_LATER_RANK = 0.6
_LENGTHS, _SUPPORTS = len(_LENGTH_STARTS), len(_SUPPORT_ODDS)
_LENGTH_OF = np.searchsorted(_LENGTH_STARTS, np.arange(129), side="right").clip(1) - 1
COPY = 4  # minimum length of a copy in tokens
NO_COPY, FOREIGN_COPY, OWN_COPY = range(3)


# The bucket of a recycled token: its rank among the successors of the longest known context (first, second, later) and
# its probability. 0: not a successor.
_BUCKET_STARTS = np.array([[0.0, 0.3, 0.5, 0.7, 0.9], [0.0, 0.1, 0.2, 0.3, np.inf], [0.0, 0.01, 0.03, 0.07, 0.15]])
_BUCKET_PRIOR = np.array([0.4, 0.52, 0.6, 0.7, 0.93, 0.07, 0.11, 0.19, 0.22, 0.008, 0.018, 0.035, 0.075, 0.17])
_FIRST_BUCKET = np.array([1, 6, 10])
_BUCKETS = 1 + len(_BUCKET_PRIOR)
_ORDER_SHARE = np.array([0.65, 0.85, 0.9, 1.0])  # factor for a known context of 1 to 4 tokens

# A match of one token with a recycled context: by its rank (first, second, later), its support, the known context
# (of this request or foreign, short or long), and the bucket of the recycled token.
_BOTH_RANKS = 3
_BOTH_CONTEXTS = 4
_FOREIGN_SHARE = np.array([1.0, 0.8])  # factor for a context learned by another request
# A longer match with a recycled context: by its length, its first ranks, its support, whether the context is foreign,
# and the standing of its token among the context's successors: first and sure, first, later, or not among them.
STANDINGS = 4
_SURE = 0.8  # minimum probability
# Factors on the odds of a match without a context: short matches, copies, and long copies.
_STANDING_ODDS = np.array([[8.0, 1.5, 0.25, 0.1], [5.0, 1.0, 0.16, 0.15], [1.0, 0.8, 0.06, 0.14]])
_STANDING_STARTS = (1, 4, 7)  # tokens
# A recycled token without a match: by the known context, its bucket, and the longest match for another token.
_COMPETING_STARTS = (0, 1, 2, 3, 5, 10)
_COMPETING_SHARE = np.array([1.0, 0.75, 0.75, 0.7, 0.5, 0.2])
_COMPETING_BUCKETS = len(_COMPETING_STARTS)
_COMPETING_OF = np.searchsorted(_COMPETING_STARTS, np.arange(129), side="right") - 1
# A frequent token, without a recycled context: by its rank and the longest match for another token.
FREQUENT = 8
_FREQUENT_PRIOR = 0.06 * 0.88 ** np.arange(FREQUENT)
_FREQUENT_SHARE = np.array([1.0, 0.5, 0.25, 0.15, 0.1, 0.05])

# A token of a prediction: by the number of agreeing tokens before it, its place (at the cursor; after a brief insertion
# or replacement; ahead of the cursor, near, far and very far; before it, near and far; after a long insertion or
# replacement), how the prediction fared so far (unknown, badly, partly, well), its rank among the prediction's tokens
# (only, first, later), and the verdicts of matches and of the recycled table.
_GUESS_STARTS = (0, 1, 2, 3, 4, 6, 9, 14, 24, 48, 96)
_GUESS_LENGTHS, PLACES, FARES, _GUESS_RANKS = len(_GUESS_STARTS), 10, 4, 3
_GUESS_OF = np.searchsorted(_GUESS_STARTS, np.arange(129), side="right") - 1
UNKNOWN, BADLY = 0, 1  # how a prediction fared, of `FARES`
VERDICTS = 4  # of a match: none, first, later, against it
KNOWN_VERDICTS = 3  # of the recycled table: none, first, not first
# A match that contradicts a prediction after an agreement at least as long: by the lengths of match and agreement.
_OPPOSED_STARTS = (COPY, 9, 24)
_OPPOSED = len(_OPPOSED_STARTS)
_GUESS_PRIOR = (0.05, 0.5, 0.75, 0.83, 0.92, 0.945, 0.97, 0.98, 0.99, 0.995, 0.999)
_PLACE_ODDS = (4.0, 2.0, 2.0, 1.0, 0.4, 0.2, 0.6, 0.2, 0.4, 0.8)
_FARE_ODDS = (1.0, 0.08, 0.6, 1.0)
_GUESS_RANK_ODDS = (1.0, 0.5, 0.25)
_VERDICT_ODDS = (1.0, 1.0, 0.3, 0.6)
_KNOWN_ODDS = (1.0, 2.0, 0.5)

_FIRST_BOTH = _LENGTHS * RANKS * _SUPPORTS
_FIRST_STANDING = _FIRST_BOTH + _BOTH_RANKS * _SUPPORTS * _BOTH_CONTEXTS * _BUCKETS
_FIRST_MEMORY = _FIRST_STANDING + _LENGTHS * _BOTH_RANKS * _SUPPORTS * 2 * STANDINGS
_FIRST_FREQUENT = _FIRST_MEMORY + 2 * ORDERS * (_BUCKETS - 1) * _COMPETING_BUCKETS
FIRST_GUESS = _FIRST_FREQUENT + FREQUENT * _COMPETING_BUCKETS
_FIRST_OPPOSED = FIRST_GUESS + _GUESS_LENGTHS * PLACES * FARES * _GUESS_RANKS * VERDICTS * KNOWN_VERDICTS


def _tables() -> tuple[IntArray, FloatArray, IntArray]:
    """The kind, the prior probability and the copy class of every feature, `[features]` each.

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
    # between theirs, nearer to the table's, and at least that of a token that the table does not hold.
    length = _LENGTH_PRIOR[0]
    prob = length * ((1.0 - length) * _LATER_RANK) ** np.arange(_BOTH_RANKS)
    single = (prob / (1.0 - prob))[:, None, None, None] * np.sqrt(_SUPPORT_ODDS)[:, None, None]
    prob = np.outer(_FOREIGN_SHARE, _ORDER_SHARE[[1, -1]]).reshape(-1, 1) * _BUCKET_PRIOR
    odds_of_one = prob / (1.0 - prob)
    odds = np.empty((_BOTH_RANKS, _SUPPORTS, _BOTH_CONTEXTS, _BUCKETS))
    odds[..., 0] = 0.3 * single[..., 0]
    odds[..., 1:] = np.maximum(odds[..., :1], single**0.25 * odds_of_one**0.75)
    firsts = slice(_FIRST_BUCKET[0], _FIRST_BUCKET[1])
    odds[0, ..., firsts] = 1.3 * odds_of_one[:, :5] * np.maximum(1.0, np.sqrt(single[0]))
    both_kind = 4 + _BUCKETS * (np.arange(_BOTH_CONTEXTS) // 2)[:, None] + buckets
    both_kind = np.where(buckets == 0, foreign[:, None, None], both_kind)

    factors = _STANDING_ODDS[np.searchsorted(_STANDING_STARTS, _LENGTH_STARTS, side="right") - 1]
    likely = match[:, :_BOTH_RANKS, :, None, None]
    # On the logarithm of the odds, a context learned by another request counts half.
    factors = factors[:, None, None, None] ** np.array([[1.0], [0.5]])
    standing = _prob(likely / (1.0 - likely) * factors)
    standing_kind = 3 + 4 * _BUCKETS + match_kind[..., None, None] + 4 * np.arange(STANDINGS)

    memory = np.outer(_FOREIGN_SHARE, _ORDER_SHARE)[..., None, None] * _BUCKET_PRIOR[:, None] * _COMPETING_SHARE
    memory_kind = 4 + 2 * _BUCKETS + np.arange(2 * (_BUCKETS - 1)).reshape(2, 1, -1, 1)
    frequent = _FREQUENT_PRIOR[:, None] * _FREQUENT_SHARE
    copy = np.where(match_kind < 2, NO_COPY, np.where(foreign, FOREIGN_COPY, OWN_COPY))
    blocks = (
        (match_kind, match, copy),
        (both_kind, _prob(odds), NO_COPY),
        (standing_kind, standing, copy[..., None, None]),
        (memory_kind, memory, NO_COPY),
        (2 + 4 * _BUCKETS, frequent, NO_COPY),
        *_guess_tables(int(standing_kind.max()) + 1),
    )
    kinds, priors, copies = zip(*(map(np.ravel, np.broadcast_arrays(*block)) for block in blocks), strict=True)
    return np.concatenate(kinds).astype(np.int32), np.concatenate(priors), np.concatenate(copies).astype(np.int32)


def _guess_tables(kind: int) -> tuple[Any, ...]:
    """Kinds, priors and copy classes of prediction tokens, and of matches that contradict them; `kind` is the first.

    Kinds of prediction tokens are: how the prediction fared, short and long agreements, and the verdicts of others.
    """
    likely = np.array(_GUESS_PRIOR)
    odds = (likely / (1.0 - likely))[:, None, None, None, None, None]
    for axis, factors in enumerate((_PLACE_ODDS, _FARE_ODDS, _GUESS_RANK_ODDS, _VERDICT_ODDS, _KNOWN_ODDS)):
        odds = odds * np.array(factors).reshape(-1, *(1,) * (4 - axis))
    is_long = (np.arange(_GUESS_LENGTHS) >= _GUESS_OF[COPY]).astype(np.int32)[:, None, None, None, None, None]
    others = np.arange(VERDICTS * KNOWN_VERDICTS).reshape(VERDICTS, KNOWN_VERDICTS)
    fares = np.arange(FARES).reshape(-1, 1, 1, 1)
    kinds = kind + (2 * fares + is_long) * VERDICTS * KNOWN_VERDICTS + others
    opposed = np.full((_LENGTHS, _OPPOSED), 0.05), kind + 2 * FARES * VERDICTS * KNOWN_VERDICTS
    return (kinds, _prob(odds), np.where(is_long, OWN_COPY, NO_COPY)), (opposed[1], opposed[0], NO_COPY)


def _prob(odds: Any) -> Any:
    return odds / (1.0 + odds)


KIND_OF, PRIOR, COPY_OF = _tables()


@jit_inline
def support_of(kind, agreeing, total):
    """The bucket of the number of occurrences, `agreeing` of `total`, that agree on a token.

    Kind 0 is the first text. Other texts are kind 1; kind 2 if the first text has another token; kind 3 if it has one
    after an equally long match.

    Example:
        >>> support_of(0, 1, 1), support_of(0, 3, 3), support_of(0, 2, 3), support_of(1, 1, 1)
        (0, 1, 3, 5)
    """
    agreement = 3 if 2 * agreeing >= total else 4
    if agreeing == total:
        agreement = 0 if total == 1 else (1 if total < 4 else 2)
    return kind * _AGREEMENTS + agreement


@jit_inline
def bucket_of(rank, prob):
    """The bucket of a recycled token by its rank, from 0 on, and its probability; at least 1.

    Example:
        >>> int(bucket_of(0, 0.95)), int(bucket_of(0, 0.1)), int(bucket_of(1, 0.15))
        (5, 1, 7)
    """
    row = min(rank, 2)
    bucket = 0
    while bucket + 1 < _BUCKET_STARTS.shape[1] and prob >= _BUCKET_STARTS[row, bucket + 1]:
        bucket += 1
    return _FIRST_BUCKET[row] + bucket


@jit_inline
def feature_of_match(length, rank, support):
    """The row of `HitRates.table` for a match of `length` tokens without a recycled context.

    Example:
        >>> likely = [PRIOR[feature_of_match(length, 0, support_of(0, 1, 1))] for length in (1, 2, 24)]
        >>> np.round(likely, 2).tolist()
        [0.24, 0.38, 0.96]
    """
    return (_LENGTH_OF[min(length, _LENGTH_OF.size - 1)] * RANKS + rank) * _SUPPORTS + support


@jit_inline
def feature_of_both(rank, support, order, is_foreign, bucket):
    """The row for a match of one token with a recycled context.

    Args:
        rank: Rank of the match, from 0.
        support: Agreement of its occurrences, from `support_of`.
        order: Tokens of the recycled context, 1 to 4.
        is_foreign: 1 if another request stored it, else 0.
        bucket: Bucket of the token as a successor of the context, from `bucket_of`; 0 if it is not one.

    Example:
        >>> match = support_of(0, 1, 1)
        >>> likely = [PRIOR[feature_of_both(0, match, 4, 0, bucket)] for bucket in (0, bucket_of(0, 0.95))]
        >>> np.round(likely, 2).tolist()
        [0.09, 0.95]
    """
    row = min(rank, _BOTH_RANKS - 1) * _SUPPORTS + support
    return _FIRST_BOTH + (row * _BOTH_CONTEXTS + 2 * is_foreign + (order > 2)) * _BUCKETS + bucket


@jit_inline
def standing_of(rank, prob):
    """The standing of a token by its rank among a context's successors, -1 if absent, and its probability there.

    Example:
        >>> standing_of(0, 0.9), standing_of(0, 0.5), standing_of(3, 0.1), standing_of(-1, 0.0)
        (0, 1, 2, 3)
    """
    if rank == 0:
        return 0 if prob >= _SURE else 1
    return 2 if rank > 0 else 3


@jit_inline
def feature_of_standing(length, rank, support, is_foreign, standing):
    """The row for a match of at least two tokens with a recycled context, by its token's standing there.

    Example:
        >>> match = support_of(0, 1, 1)
        >>> likely = [PRIOR[feature_of_standing(4, 0, match, 0, standing)] for standing in range(STANDINGS)]
        >>> np.round(likely, 2).tolist()
        [0.87, 0.57, 0.17, 0.17]
    """
    row = (_LENGTH_OF[min(length, _LENGTH_OF.size - 1)] * _BOTH_RANKS + min(rank, _BOTH_RANKS - 1)) * _SUPPORTS
    return _FIRST_STANDING + ((row + support) * 2 + is_foreign) * STANDINGS + standing


@jit_inline
def feature_of_memory(order, is_foreign, bucket, competing_match_len):
    """The row for a recycled token; the longest match for other tokens has `competing_match_len` tokens (0: none).

    Example:
        >>> likely = [PRIOR[feature_of_memory(4, 0, bucket_of(0, 0.95), longest)] for longest in (0, 10)]
        >>> np.round(likely, 2).tolist()
        [0.93, 0.19]
    """
    row = (ORDERS * is_foreign + order - 1) * (_BUCKETS - 1) + bucket - 1
    return _FIRST_MEMORY + row * _COMPETING_BUCKETS + _COMPETING_OF[min(competing_match_len, _COMPETING_OF.size - 1)]


@jit_inline
def feature_of_frequent(rank, competing_match_len):
    """The row for the frequent token of a rank; the longest match for other tokens has `competing_match_len` tokens.

    Example:
        >>> np.round([PRIOR[feature_of_frequent(0, longest)] for longest in (0, 10)], 3).tolist()
        [0.06, 0.003]
    """
    return _FIRST_FREQUENT + rank * _COMPETING_BUCKETS + _COMPETING_OF[min(competing_match_len, _COMPETING_OF.size - 1)]


@jit_inline
def place_of(place, fared):
    """The place of a prediction's token relative to the cursor, combined with how the prediction fared.

    Example:
        >>> place_of(0, UNKNOWN), place_of(0, BADLY), place_of(1, UNKNOWN)
        (0, 1, 4)
    """
    return place * FARES + fared


@jit_inline
def feature_of_guess(length, place, rank, verdict, standing):
    """The row for a token of a prediction.

    Args:
        length: Number of agreeing tokens before it.
        place: From `place_of`.
        rank: Rank among the prediction's tokens: 0 for the only one, 1 for the first, 2 for later ones.
        verdict: Of a match: 0 if there is none, 1 if this is its first token, 2 if a later one, 3 if it is no match's.
        standing: 0 without a recycled context, 1 if this is its likeliest token, else 2.

    Example:
        >>> likely = [PRIOR[feature_of_guess(length, place_of(3, UNKNOWN), 0, 0, 0)] for length in (0, 9, 96)]
        >>> np.round(likely, 3).tolist()
        [0.05, 0.97, 0.999]
    """
    row = _GUESS_OF[min(length, _GUESS_OF.size - 1)] * PLACES * FARES + place
    return FIRST_GUESS + ((row * _GUESS_RANKS + rank) * VERDICTS + verdict) * KNOWN_VERDICTS + standing


@jit_inline
def feature_of_opposed(length, agreed):
    """The row for a match of `length` tokens that contradicts a prediction after `agreed` tokens.

    Example:
        >>> round(float(PRIOR[feature_of_opposed(3, 9)]), 2)
        0.05
    """
    bucket = (agreed >= _OPPOSED_STARTS[1]) + (agreed >= _OPPOSED_STARTS[2])
    return _FIRST_OPPOSED + _LENGTH_OF[min(length, _LENGTH_OF.size - 1)] * _OPPOSED + bucket
