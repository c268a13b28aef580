"""How often a kind of candidate turns out right, learned while decoding.

Source: the Beta-Bernoulli model with a decaying memory, e.g. Gelman et al. 2013, "Bayesian Data Analysis", §2.4; the
    odds of a kind are the intercept of an online logistic regression, e.g. Bottou 1998, "Online Learning and Stochastic
    Approximations", §3.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lookahead.ngram.chains import IntArray
from lookahead.ngram.features import KIND_OF, first_guesses, is_copy, is_own_copy
from lookahead.ngram.raw_arrays import Placed, array_at, jit_inline, places_at

_PSEUDO_COUNTS = 16.0
_MEMORY = 400.0
# Information (Fisher's) that the odds of a kind rest on: before any trial, and at most added.
_FIRST_KNOWN, _MOST_KNOWN = 8.0, 50.0
_LEAST_ODDS, _MOST_ODDS = 0.1, 16.0
_MANY = 4.0
_ENDING_SHARES = (0.08, 0.3)
_FOLLOWED = 4096  # tokens whose copies are counted, by their id modulo this
_MOST_COPIES = 64.0
_COUNTED = 64  # tokens whose frequency is followed
_MOST_COUNT = 4096
_FIRST_KIND = len(KIND_OF)  # rows of the table behind those of the features: the odds of the kinds
_FIRST_FOLLOWED = _FIRST_KIND + KIND_OF.max() + 1  # and the copies by the tokens they reached


class HitRates(Placed):
    """The chance that a candidate is what the target chooses, by the features of the candidate.

    A feature joins what is known of a candidate: the length of the match behind it (in buckets), its rank among
    what matches offer and how far they agree; how long a context the target's memory knows here, and how likely it
    thought this token then; for a candidate from that memory alone, the longest match that says otherwise. Where
    nothing is known, the tokens chosen most often are candidates by their rank. Each feature starts at a first
    guess worth 16 trials, adds what it sees, and halves its counts at 400 trials, so that it follows a change of
    text. Features are many and texts short: so those of one kind share a factor on their odds, which follows every
    surprise at once.

    Copies end at particular tokens: a summary takes a sentence and goes on elsewhere. So it is counted after which
    tokens they end, and the risk of that is a feature of long matches. It goes on a little further down the text, or
    with one word changed for another: so where short matches stand, seen from the last copy, is a feature too.

    Attributes:
        prior: float64 `[features]`: the first guesses.
        table: float64 `[features + kinds + 4096, 3]`: of every feature the chance before its kind's odds, hits, and
            trials; of every kind the factor on the odds, and the information it rests on; of tokens (by their id
            modulo 4096) how many long matches reached them, and how many ended there.
        frequent: int64 `[64, 2]`: tokens chosen often and how often, the most frequent first; -1 is no token.
    """

    __slots__ = ("frequent", "prior", "table")

    def __init__(self) -> None:
        self.prior = first_guesses()
        self.table = np.zeros((_FIRST_FOLLOWED + _FOLLOWED, 3))
        self.table[:_FIRST_KIND, 0] = self.prior
        self.table[_FIRST_KIND:_FIRST_FOLLOWED, 0] = 1.0
        self.frequent = np.tile(np.array([-1, 0]), (_COUNTED, 1))
        super().__init__(2)
        self._place(self.table, self.frequent)

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
        _learn(self.table, self.prior, parents, tokens, features, emitted)


@jit_inline
def rates_at(address):
    """The table and the frequent tokens of the `HitRates` at an address."""
    places = places_at(address, 2)
    table = array_at(places[0], (_FIRST_FOLLOWED + _FOLLOWED, 3), np.float64)
    return table, array_at(places[1], (_COUNTED, 2), np.int64)


@jit_inline
def risk_of(table, token):
    """The bucket of how often copies end behind a token."""
    row = _FIRST_FOLLOWED + token % _FOLLOWED
    reached, ended = table[row, 0], table[row, 1]
    if ended == 0.0:
        return 0 if reached == 0.0 else (1 if reached < _MANY else 2)
    risk = 3
    for share in _ENDING_SHARES:
        risk += ended >= share * reached
    return risk


@njit(cache=True, error_model="numpy")
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
            for other in range(frequent.shape[0]):
                frequent[other, 1] //= 2
        count = frequent[at, 1] + 1
        while at > 0 and frequent[at - 1, 1] < count:
            frequent[at, 0], frequent[at, 1] = frequent[at - 1, 0], frequent[at - 1, 1]
            at -= 1
        frequent[at, 0], frequent[at, 1] = token, count


@jit_inline
def hit_rate(table, feature):
    """The chance of a candidate by its feature."""
    chance = table[feature, 0]
    factor = table[_FIRST_KIND + KIND_OF[feature], 0]
    return chance * factor / (1.0 - chance + chance * factor)


@jit_inline
def _count_trial(table, prior, feature, hit):
    """Count one candidate; the odds of its kind take a Newton step towards what was seen."""
    kind = _FIRST_KIND + KIND_OF[feature]
    chance = hit_rate(table, feature)
    table[kind, 1] = min(_MOST_KNOWN, table[kind, 1] + chance * (1.0 - chance))
    odds = table[kind, 0] * np.exp((hit - chance) / (_FIRST_KNOWN + table[kind, 1]))
    table[kind, 0] = min(_MOST_ODDS, max(_LEAST_ODDS, odds))
    row = table[feature]
    row[1] += hit
    row[2] += 1.0
    if row[2] >= _MEMORY:
        row[1] *= 0.5
        row[2] *= 0.5
    row[0] = (_PSEUDO_COUNTS * prior[feature] + row[1]) / (_PSEUDO_COUNTS + row[2])


@njit(cache=True, error_model="numpy")
def copied(parents, tokens, features, placed, chosen):
    """After which nodes of a verified tree the target goes on with a copy of the row's own text.

    Args:
        parents: int32 `[k]`, a tree of candidates.
        tokens: int32 `[k]`.
        features: int32 `[k]`, by which they were scored.
        placed: int32 `[k]`, the node of the verified tree that each became, 0 where it was left out.
        chosen: int32 `[nodes]`, what the target thinks likeliest after every node of the verified tree.

    Returns:
        bool `[nodes]`. After a copied node behind which nothing was offered, the copy is taken to go on.
    """
    nodes, has_child = np.zeros(chosen.size, np.bool_), np.zeros(chosen.size, np.bool_)
    for node in range(parents.size - 1, 0, -1):
        feature, at = features[node], placed[node]
        if at == 0 or not is_own_copy(feature):
            continue
        before = placed[parents[node]]
        has_child[before] = True
        nodes[before] |= chosen[before] == tokens[node]
        nodes[at] |= not has_child[at]
    return nodes


@jit_inline
def _count_copy(table, token, has_ended):
    """Count a copy that reached a token."""
    row = table[_FIRST_FOLLOWED + token % _FOLLOWED]
    row[0] += 1.0
    row[1] += has_ended
    if row[0] >= _MOST_COPIES:
        row[0] *= 0.5
        row[1] *= 0.5
        row[2] *= 0.5


@njit(cache=True, error_model="numpy")
def _learn(table, prior, parents, tokens, features, emitted):
    """Follow the emitted tokens down the tree, counting the children of every node passed."""
    node = 0
    for token in emitted:
        chosen, has_copy = 0, False
        for child in range(node + 1, tokens.size):
            if parents[child] == node:
                is_hit = tokens[child] == token
                chosen = child if is_hit else chosen
                has_copy = has_copy or is_copy(features[child])
                _count_trial(table, prior, features[child], 1.0 if is_hit else 0.0)
        if has_copy:
            _count_copy(table, tokens[node], 1.0 if chosen == 0 else 0.0)
        if chosen == 0:
            break
        node = chosen
