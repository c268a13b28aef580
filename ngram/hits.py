"""How often a kind of candidate turns out right, learned while decoding.

Source: the Beta-Bernoulli model with a decaying memory, e.g. Gelman et al. 2013, "Bayesian Data Analysis", §2.4.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.ngram.chains import IntArray
from lookahead.ngram.recycled import ORDERS

FloatArray = NDArray[np.float64]

RANKS = 16
CEILING = 0.99  # the children of a node never claim all of the chance
_PSEUDO_COUNTS = 8.0
_MEMORY = 400.0
_FOLLOWERS = 4096
_PSEUDO_HITS = 4.0
_MOST_FACTOR = 1.3

# A match where the memory knows nothing: by its length (in buckets), its rank, and how far the occurrences agree.
_LENGTH_STARTS = (1, 2, 3, 4, 5, 7, 10, 16, 24)
_LENGTH_GUESS = (0.24, 0.38, 0.48, 0.57, 0.60, 0.72, 0.80, 0.90, 0.96)
# By the first text, the row's own; by others alone; by others while the first text says otherwise: in each case
# one occurrence, all of few, all of many, most, or fewer.
_SUPPORT_ODDS = np.outer((1.0, 0.8, 0.3), (1.0, 3.0, 6.0, 0.7, 0.4)).reshape(-1)
_AGREEMENTS = 5
_LATER_RANK = 0.6
_LENGTHS, _SUPPORTS = len(_LENGTH_STARTS), len(_SUPPORT_ODDS)
_LENGTH_OF = np.searchsorted(_LENGTH_STARTS, np.arange(129), side="right").clip(1) - 1

# What the target thought of a token after the longest known context: its rank among the likeliest (first, second,
# later) and its probability. 0 is a token that was not among them.
_STANDING_STARTS = np.array([[0.0, 0.3, 0.5, 0.7, 0.9], [0.0, 0.1, 0.2, 0.3, np.inf], [0.0, 0.01, 0.03, 0.07, 0.15]])
_STANDING_GUESS = np.array([0.45, 0.5, 0.62, 0.75, 0.93, 0.04, 0.1, 0.14, 0.2, 0.003, 0.01, 0.02, 0.05, 0.13])
_FIRST_STANDING = np.array([1, 6, 10])
_STANDINGS = 1 + len(_STANDING_GUESS)
_ORDER_SHARE = np.array([0.5, 0.8, 0.9, 1.0])  # how much of it a known context of 1 to 4 tokens is worth

# Both: by the length of the match, its rank (first, second, later), its support, the known context (short, long), and
# the standing.
_BOTH_RANKS = 3
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
_COUNTED = 64  # tokens whose frequency is followed
_MOST_COUNT = 4096

_FIRST_BOTH = _LENGTHS * RANKS * _SUPPORTS
_FIRST_MEMORY = _FIRST_BOTH + _LENGTHS * _BOTH_RANKS * _SUPPORTS * _BOTH_ORDERS * _STANDINGS
_FIRST_FREQUENT = _FIRST_MEMORY + ORDERS * (_STANDINGS - 1) * _BESIDES


def _families() -> IntArray:
    """The family of every feature, int32 `[features]`.

    Matches of a length, a rank and a text are one, tokens of one standing in the memory, and all that are frequent.
    """
    ranks = np.minimum(np.arange(RANKS), _BOTH_RANKS - 1)
    texts = np.arange(_SUPPORTS) // _AGREEMENTS
    kinds = _SUPPORTS // _AGREEMENTS
    match = (np.arange(_LENGTHS)[:, None, None] * _BOTH_RANKS + ranks[:, None]) * kinds + texts
    both = (np.arange(_LENGTHS * _BOTH_RANKS)[:, None] * kinds + texts).reshape(-1)
    first = _LENGTHS * _BOTH_RANKS * kinds
    memory = np.tile(np.repeat(first + np.arange(_STANDINGS - 1), _BESIDES), ORDERS)
    frequent = np.full(FREQUENT * _BESIDES, first + _STANDINGS - 1)
    parts = (match.reshape(-1), np.repeat(both, _BOTH_ORDERS * _STANDINGS), memory, frequent)
    return np.concatenate(parts).astype(np.int32)


_FAMILY_OF = _families()
_MEMBERS = np.argsort(_FAMILY_OF, kind="stable").astype(np.int32)
_MEMBERS_START = np.searchsorted(_FAMILY_OF[_MEMBERS], np.arange(_FAMILY_OF.max() + 2)).astype(np.int32)


class HitRates:
    """The chance that a candidate is what the target chooses, by the features of the candidate.

    A feature joins what is known of a candidate: the length of the match behind it (in buckets), its rank among
    what matches offer and how far they agree; how long a context the target's memory knows here, and how likely it
    thought this token then; for a candidate from that memory alone, the longest match that says otherwise. Where
    nothing is known, the tokens chosen most often are candidates by their rank. Each feature starts at a first
    guess worth 8 trials, adds what it sees, and halves its counts at 400 trials, so that it follows a change of
    text. Features are many and texts short: so those of a family (matches of one length and rank, tokens the memory
    thought equally likely) share what they see, as a factor on the odds of all their first guesses.

    Copies end at particular tokens: a summary takes a sentence and goes on elsewhere. So the hits after each token
    are also counted against what the features promised, and their ratio is a factor on the chances of what follows.
    A trial under a factor counts as much as the factor, so that the two together promise what comes true.

    Attributes:
        prior: float64 `[features]`: the first guesses.
        table: float64 `[features, 3]`: the chance now, hits, trials.
        families: float64 `[families, 3]`: hits, hits promised by first guesses, trials.
        follows: float64 `[4096, 3]`: the factor after a token (by its id modulo 4096), hits, hits promised.
        frequent: int64 `[64, 2]`: tokens chosen often and how often, the most frequent first; -1 is no token.
    """

    __slots__ = ("families", "follows", "frequent", "prior", "table")

    def __init__(self) -> None:
        self.prior = np.concatenate((_of_matches(), _of_both(), _of_memory(), _of_frequent()))
        self.frequent = np.tile(np.array([-1, 0]), (_COUNTED, 1))
        self.table = np.zeros((self.prior.size, 3))
        self.table[:, 0] = self.prior
        self.families = np.zeros((_MEMBERS_START.size - 1, 3))
        self.follows = np.zeros((_FOLLOWERS, 3))
        self.follows[:, 0] = 1.0

    def count(self, tokens: IntArray) -> None:
        """Count tokens the target chose (int32 `[n]`), so that those it chooses often are known."""
        _count(self.frequent, tokens)

    def learn(self, parents: IntArray, tokens: IntArray, features: IntArray, emitted: IntArray) -> None:
        """Count every candidate whose parent was emitted: a hit where its token was what came next.

        Args:
            parents: int32 `[k]`, a tree whose root is node 0 and whose parents come before their children.
            tokens: int32 `[k]`, the token of each node.
            features: int32 `[k]`, the feature each node was scored by; that of the root is not read.
            emitted: int32 `[n]`, what the target chose after the root.
        """
        if not parents.size == tokens.size == features.size:
            raise ValueError(f"a tree of {tokens.size} tokens has {parents.size} parents, {features.size} features")
        _learn(self.table, self.prior, self.families, self.follows, parents, tokens, features, emitted)


def _of_matches() -> FloatArray:
    """First guesses of matches alone, in the order of `feature_of_match`."""
    guess = np.empty((_LENGTHS, RANKS, _SUPPORTS))
    for length, chance in enumerate(_LENGTH_GUESS):
        for support, factor in enumerate(_SUPPORT_ODDS):
            odds = factor * chance / (1.0 - chance)
            top = odds / (1.0 + odds)
            guess[length, :, support] = top * ((1.0 - top) * _LATER_RANK) ** np.arange(RANKS)
    return guess.reshape(-1)


def _of_both() -> FloatArray:
    """First guesses of what a match and the memory offer together, in the order of `feature_of_both`.

    What is first for both is likelier than for either; where they differ, the guess lies between theirs.
    """
    length = np.array(_LENGTH_GUESS)[:, None]
    chance = length * ((1.0 - length) * _LATER_RANK) ** np.arange(_BOTH_RANKS)
    match = (chance / (1.0 - chance))[:, :, None, None, None] * np.sqrt(_SUPPORT_ODDS)[:, None, None]
    chance = _ORDER_SHARE[[1, -1], None] * _STANDING_GUESS
    memory = chance / (1.0 - chance)
    odds = np.empty((_LENGTHS, _BOTH_RANKS, _SUPPORTS, _BOTH_ORDERS, _STANDINGS))
    odds[..., 0] = match[..., 0] * np.where(np.arange(_LENGTHS)[:, None] < 4, 0.25, 1.0)[..., None, None]
    odds[..., 1:] = np.sqrt(match * memory)
    firsts = slice(_FIRST_STANDING[0], _FIRST_STANDING[1])
    odds[:, 0, ..., firsts] = 1.3 * memory[:, :5] * np.maximum(1.0, np.sqrt(match[:, 0]))
    guess: FloatArray = odds / (1.0 + odds)
    return guess.reshape(-1)


def _of_memory() -> FloatArray:
    """First guesses of what the memory alone offers, in the order of `feature_of_memory`."""
    guess: FloatArray = _ORDER_SHARE[:, None, None] * _STANDING_GUESS[:, None] * _BESIDE_SHARE
    return guess.reshape(-1)


def _of_frequent() -> FloatArray:
    """First guesses of tokens that are frequent, in the order of `feature_of_frequent`."""
    guess: FloatArray = _FREQUENT_GUESS[:, None] * _FREQUENT_SHARE
    return guess.reshape(-1)


@njit(cache=True)
def support_of(kind, agreeing, total):
    """How far the `total` occurrences in the first text (kind 0) or the others (1; 2 beside it) agree on a token."""
    agreement = 3 if 2 * agreeing >= total else 4
    if agreeing == total:
        agreement = 0 if total == 1 else (1 if total < 4 else 2)
    return kind * _AGREEMENTS + agreement


@njit(cache=True)
def standing_of(rank, chance):
    """The bucket of the target's likeliest token but `rank`, at the probability it had; at least 1."""
    row = min(rank, 2)
    standing = 0
    while standing + 1 < _STANDING_STARTS.shape[1] and chance >= _STANDING_STARTS[row, standing + 1]:
        standing += 1
    return _FIRST_STANDING[row] + standing


@njit(cache=True)
def feature_of_match(length, rank, support):
    """The row of `HitRates.table` for a match of `length` tokens where the memory knows nothing."""
    return (_LENGTH_OF[min(length, _LENGTH_OF.size - 1)] * RANKS + rank) * _SUPPORTS + support


@njit(cache=True)
def feature_of_both(length, rank, support, order, standing):
    """The row for a match of `length` tokens where the memory knows a context of `order` tokens, 1 to 4."""
    row = _LENGTH_OF[min(length, _LENGTH_OF.size - 1)] * _BOTH_RANKS + min(rank, _BOTH_RANKS - 1)
    return _FIRST_BOTH + ((row * _SUPPORTS + support) * _BOTH_ORDERS + (order > 2)) * _STANDINGS + standing


@njit(cache=True)
def feature_of_memory(order, standing, beside):
    """The row for a token the memory alone offers, beside a match of `beside` tokens (0: none) for others."""
    row = (order - 1) * (_STANDINGS - 1) + standing - 1
    return _FIRST_MEMORY + row * _BESIDES + _BESIDE_OF[min(beside, _BESIDE_OF.size - 1)]


@njit(cache=True)
def feature_of_frequent(rank, beside):
    """The row for the most frequent token but `rank`, beside a match of `beside` tokens (0: none) for others."""
    return _FIRST_FREQUENT + rank * _BESIDES + _BESIDE_OF[min(beside, _BESIDE_OF.size - 1)]


@njit(cache=True)
def _count(frequent, tokens):
    """Count tokens, the most frequent first; a new one takes the place and the count of the rarest.

    Source: Metwally, Agrawal & El Abbadi 2005, "Efficient Computation of Frequent and Top-k Elements in Data
        Streams", §3.1 (space saving).
    """
    for token in tokens:
        at = 0
        while at < frequent.shape[0] - 1 and frequent[at, 0] != token:
            at += 1
        if frequent[at, 1] == _MOST_COUNT:
            frequent[:, 1] //= 2
        count = frequent[at, 1] + 1
        while at > 0 and frequent[at - 1, 1] < count:
            frequent[at, 0], frequent[at, 1] = frequent[at - 1, 0], frequent[at - 1, 1]
            at -= 1
        frequent[at, 0], frequent[at, 1] = token, count


@njit(cache=True)
def follow_factor(follows, token):
    """What the chances of all that may follow `token` are multiplied with."""
    return follows[token % _FOLLOWERS, 0]


@njit(cache=True)
def _learn_follow(follows, token, promised, hit):
    """Count whether anything offered after `token` was right, where the features promised a chance."""
    row = follows[token % _FOLLOWERS]
    row[1] += hit
    row[2] += promised
    if row[2] >= _MEMORY:
        row[1] *= 0.5
        row[2] *= 0.5
    row[0] = min(_MOST_FACTOR, (_PSEUDO_HITS + row[1]) / (_PSEUDO_HITS + row[2]))


@njit(cache=True)
def _count_trial(counts, hits, promised, trials):
    """Add to hits, (promised hits,) trials; all are halved when there are many."""
    counts[0] += hits
    counts[1] += promised
    counts[2] += trials
    if counts[2] >= _MEMORY:
        counts *= 0.5


@njit(cache=True)
def _refresh(table, prior, families, family):
    """Work out the chances of a family's features from their own counts and the family's."""
    hits, promised, trials = families[family]
    more = (_PSEUDO_HITS + hits) / (_PSEUDO_HITS + promised)
    fewer = (_PSEUDO_HITS + max(0.0, trials - hits)) / (_PSEUDO_HITS + trials - promised)
    for at in range(_MEMBERS_START[family], _MEMBERS_START[family + 1]):
        row = _MEMBERS[at]
        odds = more / fewer * prior[row] / (1.0 - prior[row])
        table[row, 0] = (_PSEUDO_COUNTS * odds / (1.0 + odds) + table[row, 1]) / (_PSEUDO_COUNTS + table[row, 2])


@njit(cache=True)
def _learn(table, prior, families, follows, parents, tokens, features, emitted):
    """Follow the emitted tokens down the tree, counting the children of every node passed."""
    node = 0
    touched = np.zeros(families.shape[0], np.bool_)
    for token in emitted:
        chosen, promised = 0, 0.0
        factor = follow_factor(follows, tokens[node])
        for child in range(node + 1, tokens.size):
            if parents[child] != node:
                continue
            row = features[child]
            hit = 1.0 if tokens[child] == token else 0.0
            chosen = child if hit > 0.0 else chosen
            promised += table[row, 0]
            table[row, 1] += hit
            table[row, 2] += factor
            if table[row, 2] >= _MEMORY:
                table[row, 1] *= 0.5
                table[row, 2] *= 0.5
            _count_trial(families[_FAMILY_OF[row]], hit, factor * prior[row], factor)
            touched[_FAMILY_OF[row]] = True
        if promised > 0.0:
            _learn_follow(follows, tokens[node], min(promised, CEILING), 1.0 if chosen > 0 else 0.0)
        if chosen == 0:
            break
        node = chosen
    for family in range(touched.size):
        if touched[family]:
            _refresh(table, prior, families, family)
