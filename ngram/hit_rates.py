"""Acceptance rates of drafted tokens, learned while decoding.

Source: the Beta-Bernoulli model with decaying counts, e.g. Gelman et al. 2013, "Bayesian Data Analysis", §2.4; the
    odds factors of kinds are the intercept of an online logistic regression, e.g. Bottou 1998, "Online Learning and
    Stochastic Approximations", §3.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.ngram.chains import IntArray
from lookahead.ngram.features import COPY_OF, FIRST_GUESS, KIND_OF, NO_COPY, OWN_COPY, PRIOR
from lookahead.ngram.inlining import jit_inline
from lookahead.utils.addresses import array_at
from lookahead.utils.jit import njit

Float32Array = NDArray[np.float32]

_TABLE_RANKS = 5  # the first four ranks, and all others
_PROB_EDGES = np.array([0.01, 0.03, 0.1, 0.3, 0.6, 0.85], np.float32)
_PSEUDO_HITS = 2.0
_EXPECTED_MEMORY = 64.0  # expected hits at which counts are halved, to forget old text
_MAX_PROBABILITY = 0.99

_PSEUDO_COUNTS = 16.0
_MEMORY = 400.0
# Fisher information of the odds of a kind or a depth: before any trial, and the maximum added by trials.
_FIRST_INFORMATION, _MAX_INFORMATION = 8.0, 50.0
_MIN_ODDS, _MAX_ODDS = 0.1, 16.0

_COUNTED = 64  # tokens whose frequency is counted
_MAX_COUNT = 4096
_FIRST_KIND = len(KIND_OF)  # table rows of features come first, then the odds of the kinds
_FIRST_DEPTH = _FIRST_KIND + KIND_OF.max() + 1  # then those of depths 1, 2, later: of predictions, copies, others
_DEPTHS = 3
_ROWS = _FIRST_DEPTH + 3 * _DEPTHS
_GROUP_OF = np.where(np.arange(_FIRST_KIND) >= FIRST_GUESS, 2, COPY_OF != NO_COPY)
_DEPTH_ROW_OF = _FIRST_DEPTH + _DEPTHS * _GROUP_OF - 1  # by feature, to which the depth is added


@njit()
def children_along(parents, tokens, emitted):
    """Follow emitted tokens down a tree from its root.

    Returns the children of every node on the path, int32 `[m]`, the root's first; and whether they hold the emitted
    token, bool `[m]`, which marks the accepted path without its root.

    Example:
        >>> parents, tokens = np.array([[0, 0, 0, 1], [5, 6, 7, 8]], np.int32)
        >>> nodes, hits = children_along(parents, tokens, np.array([6, 9], np.int32))
        >>> nodes.tolist(), hits.tolist()
        ([1, 2, 3], [True, False, False])
    """
    nodes, hits = np.empty(len(tokens), np.int32), np.zeros(len(tokens), np.bool_)
    count, node = 0, 0
    for token in emitted:
        chosen = 0
        for child in range(node + 1, len(tokens)):
            if parents[child] == node:
                nodes[count], hits[count] = child, tokens[child] == token
                chosen = child if hits[count] else chosen
                count += 1
        if chosen == 0:
            break
        node = chosen
    return nodes[:count], hits[:count]


class AcceptanceTable:
    """Calibrates the probabilities of a draft model or a head by the acceptance of similar tokens.

    Tokens are counted by level (the head, or the depth in the tree), rank among the tokens after their parent, and
    bucket of the draft probability. The factor is hits over expected hits, both with the same pseudo-count.

    Source: the Gamma-Poisson model with decaying counts, e.g. Gelman et al. 2013, "Bayesian Data Analysis", §2.6.

    Example:
        >>> table, draft_probs = AcceptanceTable(), np.array([1.0, 0.5], np.float32)
        >>> parents, tokens = np.array([[0, 0], [5, 6]], np.int32)
        >>> kinds = np.zeros((2, 2), np.int32)
        >>> before = table.calibrate(kinds, draft_probs)
        >>> table.learn(parents, tokens, kinds, draft_probs, np.array([6], np.int32))  # the target chose the token
        >>> before[1].item(), round(table.calibrate(kinds, draft_probs)[1].item(), 2)
        (0.5, 0.6)
    """

    __slots__ = ("_counts",)

    def __init__(self, levels: int = 1) -> None:
        self._counts = np.zeros((levels, _TABLE_RANKS, len(_PROB_EDGES) + 1, 2))  # hits, expected hits

    def calibrate(self, kinds: IntArray, draft_probs: Float32Array) -> Float32Array:
        """Probabilities that tokens are accepted once their parent is, at most 0.99; 0 for NaN.

        `kinds` holds the level and the rank of each token, int32 `[..., 2]`; `draft_probs` is float32 `[...]`.
        """
        counts = self._counts[self._cells(kinds, draft_probs)] + _PSEUDO_HITS
        probs = np.minimum(_MAX_PROBABILITY, draft_probs * counts[..., 0] / counts[..., 1])
        calibrated: Float32Array = np.nan_to_num(probs).astype(np.float32)  # heads give NaN on overflow
        return calibrated

    def learn(
        self, parents: IntArray, tokens: IntArray, kinds: IntArray, draft_probs: Float32Array, emitted: IntArray
    ) -> None:
        """Count every node of a tree whose parent was emitted: a hit if its token was emitted next.

        Args:
            parents: int32 `[k]`; a parent comes before its children.
            tokens: int32 `[k]`.
            kinds: int32 `[k, 2]`, the level and the rank of each token.
            draft_probs: float32 `[k]`, uncalibrated.
            emitted: int32 `[n]`, the tokens after the root.
        """
        nodes, hits = children_along(parents, tokens, emitted)
        trials = np.stack((hits, draft_probs[nodes]), -1)
        np.add.at(self._counts, self._cells(kinds[nodes], draft_probs[nodes]), trials)
        self._counts[self._counts[..., 1] > _EXPECTED_MEMORY] *= 0.5

    def _cells(self, kinds: IntArray, draft_probs: Float32Array) -> tuple[Any, ...]:
        buckets = np.searchsorted(_PROB_EDGES, draft_probs)
        return kinds[..., 0], np.minimum(kinds[..., 1], _TABLE_RANKS - 1), buckets


class HitRates:
    """The probability that the target chooses a candidate, by features of the candidate.

    Features are buckets of: the length of the match, its rank, and the agreement of its occurrences; the length of the
    known recycled context, whether this request learned it, and the probability stored there; for a recycled token
    without a match, the longest match for another token; for a frequent token, its rank. Each starts at a prior worth
    16 trials and halves its counts at 400 trials, to follow changes of text. Features of one kind share a factor on
    their odds, as do features at one depth in the tree; both factors are updated at every trial.

    Example:
        >>> rates = HitRates()
        >>> parents, tokens, features = np.array([[0, 0], [5, 6], [0, 0]], np.int32)
        >>> before = hit_rate(rates.table, 0, 1)
        >>> rates.learn(parents, tokens, features, np.array([6], np.int32))  # the target chose the token
        >>> bool(hit_rate(rates.table, 0, 1) > before)
        True
    """

    __slots__ = ("frequent", "prior", "table")

    def __init__(self) -> None:
        self.prior = PRIOR  # float64 `[features]`
        # Per feature: the probability before any factor, hits, and trials. Per kind and per depth: the factor on the
        # odds, and its Fisher information.
        self.table = np.zeros((_ROWS, 3))
        self.table[:_FIRST_KIND, 0] = self.prior
        self.table[_FIRST_KIND:, 0] = 1.0
        self.frequent = np.tile(np.array([-1, 0]), (_COUNTED, 1))  # tokens, -1 for none, and counts, descending

    def learn(self, parents: IntArray, tokens: IntArray, features: IntArray, emitted: IntArray) -> None:
        """Count every candidate of a `Trie` whose parent was emitted: a hit if its token was emitted next.

        `emitted`, int32 `[n]`, are the tokens after the root.
        """
        count_hits((self.table, self.prior, self.frequent), (parents, tokens, features), emitted, False)


@njit(error_model="numpy")
def _count(frequent, tokens):
    """Count tokens, the most frequent first. A new token replaces the rarest and keeps its count.

    Source: Metwally, Agrawal & El Abbadi 2005, "Efficient Computation of Frequent and Top-k Elements in Data
        Streams", §3.1 (space saving).
    """
    for token in tokens:
        at = 0
        while at < frequent.shape[0] - 1 and frequent[at, 0] != token:
            at += 1
        if frequent[at, 1] == _MAX_COUNT:
            for other in range(frequent.shape[0]):
                frequent[other, 1] //= 2
        count = frequent[at, 1] + 1
        while at > 0 and frequent[at - 1, 1] < count:
            frequent[at, 0], frequent[at, 1] = frequent[at - 1, 0], frequent[at - 1, 1]
            at -= 1
        frequent[at, 0], frequent[at, 1] = token, count


@jit_inline
def rates_at(addresses):
    """The table, the prior and the frequent tokens of hit rates, given their addresses.

    Example:
        >>> from lookahead.utils.addresses import addresses_of
        >>> rates = HitRates()
        >>> table, _, _ = rates_at(addresses_of([rates.table, rates.prior, rates.frequent]))
        >>> bool((table == rates.table).all())
        True
    """
    table = array_at(addresses[0], (_ROWS, 3), np.float64)
    prior = array_at(addresses[1], (_FIRST_KIND,), np.float64)
    return table, prior, array_at(addresses[2], (_COUNTED, 2), np.int64)


@jit_inline
def _factors_of(feature, depth):
    """The table rows of the odds of a candidate's kind and of its depth."""
    return _FIRST_KIND + KIND_OF[feature], _DEPTH_ROW_OF[feature] + min(depth, _DEPTHS)


@jit_inline
def hit_rate(table, feature, depth):
    """The probability of a candidate by its feature and its depth, which is 1 for the root's children.

    Example:
        >>> round(float(hit_rate(HitRates().table, 0, depth=1)), 2)
        0.24
    """
    of_kind, of_depth = _factors_of(feature, depth)
    prob, factor = table[feature, 0], table[of_kind, 0] * table[of_depth, 0]
    return prob * factor / (1.0 - prob + prob * factor)


@njit(error_model="numpy")
def count_hits(rates, trie, emitted, counts):
    """The core of `HitRates.learn`. If `counts`, the frequency of the emitted tokens is counted too.

    `rates` are the table, the prior and the frequent tokens of `HitRates`; `trie` are parents, tokens and features of
    candidates, int32 `[k]`, of which a parent comes before its children.

    Example:
        >>> rates = HitRates()
        >>> parents, tokens, features = np.array([[0, 0, 0], [5, 6, 7], [0, 0, 1]], np.int32)
        >>> learned = rates.table, rates.prior, rates.frequent
        >>> count_hits(learned, (parents, tokens, features), np.array([6], np.int32), True)
        >>> rates.table[:2, 1:].tolist(), rates.frequent[0].tolist()  # hits and trials; a token and its count
        ([[1.0, 1.0], [0.0, 1.0]], [6, 1])
    """
    (table, prior, frequent), (parents, tokens, features) = rates, trie
    if counts:
        _count(frequent, emitted)
    nodes, hits = children_along(parents, tokens, emitted)
    depth = 0
    for i in range(len(nodes)):
        if i == 0 or parents[nodes[i]] != parents[nodes[i - 1]]:
            depth += 1
        feature = features[nodes[i]]
        row, prob = table[feature], hit_rate(table, feature, depth)
        # The odds of the kind and of the depth take a Newton step towards the result.
        for at in _factors_of(feature, depth):
            odds = table[at]
            odds[1] = min(_MAX_INFORMATION, odds[1] + prob * (1.0 - prob))
            factor = odds[0] * np.exp((hits[i] - prob) / (_FIRST_INFORMATION + odds[1]))
            odds[0] = min(_MAX_ODDS, max(_MIN_ODDS, factor))
        row[1] += hits[i]
        row[2] += 1.0
        if row[2] >= _MEMORY:
            row[1], row[2] = 0.5 * row[1], 0.5 * row[2]
        row[0] = (_PSEUDO_COUNTS * prior[feature] + row[1]) / (_PSEUDO_COUNTS + row[2])


@njit(error_model="numpy")
def copied(trie, placed, argmax):
    """The nodes of a verified tree after which the target continues a copy of the row's own text, bool `[nodes]`.

    Also True for a childless node at which a copy ends.

    Args:
        trie: As for `count_hits`.
        placed: int32 `[k]`, the node of the verified tree that each candidate became, 0 if it was left out.
        argmax: int32 `[nodes]`, the target's likeliest token after every node of that tree.

    Example:
        >>> from lookahead.ngram.features import feature_of_match, support_of
        >>> copy = feature_of_match(8, 0, support_of(0, 1, 1))
        >>> trie = tuple(np.array([[0, 0, 1], [5, 6, 7], [0, copy, copy]], np.int32))  # parents, tokens, features
        >>> placed, argmax = np.array([[0, 1, 2], [6, 9, 9]], np.int32)
        >>> copied(trie, placed, argmax).tolist()  # after the second node the target leaves it
        [True, False, True]
    """
    parents, tokens, features = trie
    nodes, has_child = np.zeros(argmax.size, np.bool_), np.zeros(argmax.size, np.bool_)
    for node in range(parents.size - 1, 0, -1):
        feature, at = features[node], placed[node]
        if at == 0 or COPY_OF[feature] != OWN_COPY:
            continue
        before = placed[parents[node]]
        has_child[before] = True
        nodes[before] |= argmax[before] == tokens[node]
        nodes[at] |= not has_child[at]
    return nodes
