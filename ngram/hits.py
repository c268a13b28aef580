"""How often a kind of candidate turns out right, learned while decoding.

Source: the Beta-Bernoulli model with a decaying memory, e.g. Gelman et al. 2013, "Bayesian Data Analysis", §2.4.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.ngram.chains import IntArray

FloatArray = NDArray[np.float64]

RANKS = 8  # the likeliest continuation of a node has rank 0
SUPPORTS = 5  # kinds of agreement among the occurrences, see `support_of`
_BUCKET_STARTS = (1, 2, 3, 4, 5, 7, 10, 16, 24)
_FIRST_GUESS = (0.20, 0.38, 0.50, 0.62, 0.65, 0.77, 0.80, 0.91, 0.94)
_SUPPORT_ODDS = (1.0, 1.3, 2.0, 0.9, 0.6)
_LATER_RANK = 0.6
_PSEUDO_COUNTS = 8.0
_MEMORY = 400.0
_FOLLOWERS = 4096
_PSEUDO_HITS = 4.0
_MOST_FACTOR = 1.1
CEILING = 0.99  # the children of a node never claim all of the chance
_BUCKET_OF = np.searchsorted(_BUCKET_STARTS, np.arange(129), side="right").clip(1) - 1


class HitRates:
    """The chance that a candidate is what the target chooses, by the features of the candidate.

    A feature joins the length of the match behind the candidate (in buckets), its rank among its siblings and
    how far the occurrences agree on it. Each feature starts at a first guess worth 8 trials, adds what it sees,
    and halves its counts at 400 trials, so that it follows a change of text.

    Copies end at particular tokens: a summary takes a sentence and goes on elsewhere. So the hits after each token
    are also counted against what the features promised, and their ratio is a factor on the chances of what follows.

    Attributes:
        prior: float64 `[features]`: the first guesses.
        table: float64 `[features, 3]`: the chance now, hits, trials.
        follows: float64 `[4096, 3]`: the factor after a token (by its id modulo 4096), hits, hits promised.
    """

    __slots__ = ("follows", "prior", "table")

    def __init__(self) -> None:
        self.prior = _first_guesses()
        self.table = np.zeros((self.prior.size, 3))
        self.table[:, 0] = self.prior
        self.follows = np.zeros((_FOLLOWERS, 3))
        self.follows[:, 0] = 1.0

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
        _learn(self.table, self.prior, self.follows, parents, tokens, features, emitted)


def _first_guesses() -> FloatArray:
    """The chance of every feature before anything was seen, float64 `[features]`."""
    guess = np.empty((len(_FIRST_GUESS), RANKS, SUPPORTS))
    for bucket, chance in enumerate(_FIRST_GUESS):
        for support, factor in enumerate(_SUPPORT_ODDS):
            odds = factor * chance / (1.0 - chance)
            top = odds / (1.0 + odds)
            guess[bucket, :, support] = top * ((1.0 - top) * _LATER_RANK) ** np.arange(RANKS)
    return guess.reshape(-1)


@njit(cache=True)
def support_of(agreeing, total):
    """How far `total` occurrences agree on a candidate: alone, all of few, all of many, most, or fewer."""
    if agreeing == total:
        return 0 if total == 1 else (1 if total < 4 else 2)
    return 3 if 2 * agreeing >= total else 4


@njit(cache=True)
def feature_of(length, rank, support):
    """The row of `HitRates.table` for a match of `length` tokens."""
    return (_BUCKET_OF[min(length, _BUCKET_OF.size - 1)] * RANKS + rank) * SUPPORTS + support


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
def _learn(table, prior, follows, parents, tokens, features, emitted):
    """Follow the emitted tokens down the tree, counting the children of every node passed."""
    node = 0
    for token in emitted:
        chosen, promised = 0, 0.0
        for child in range(node + 1, tokens.size):
            if parents[child] != node:
                continue
            row = features[child]
            promised += table[row, 0]
            table[row, 2] += 1.0
            if tokens[child] == token:
                table[row, 1] += 1.0
                chosen = child
            if table[row, 2] >= _MEMORY:
                table[row, 1] *= 0.5
                table[row, 2] *= 0.5
            table[row, 0] = (_PSEUDO_COUNTS * prior[row] + table[row, 1]) / (_PSEUDO_COUNTS + table[row, 2])
        if promised > 0.0:
            _learn_follow(follows, tokens[node], min(promised, CEILING), 1.0 if chosen > 0 else 0.0)
        if chosen == 0:
            return
        node = chosen
