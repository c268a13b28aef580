"""How far guesses of heads can be trusted, learned while decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from lookahead.heads.guess_tree import FloatArray, GuessTree, IntArray

_RANKS = 5  # the likeliest guess, the second, the third, the fourth, all later ones
_EDGES = np.array([0.01, 0.03, 0.1, 0.3, 0.6, 0.85], np.float32)
_PSEUDO_HITS = 2.0
_MEMORY = 64.0  # promised hits, at which both counts are halved, so that old text is forgotten
_CEILING = 0.99


class HeadRates:
    """What guesses turned out to be worth, over what their heads promised.

    A guess is known by its head, its rank among the head's guesses, and how sure the head was. A head that guesses
    without seeing the tokens between is surer than it should be, or less sure: once the guess before its own was
    right, so is its own more often than it says.

    Args:
        heads: How many heads guess, or how deep a tree of guesses is.

    Source: the Gamma-Poisson model with a decaying memory, e.g. Gelman et al. 2013, "Bayesian Data Analysis", §2.6:
        hits over promised hits, both with the same pseudo-count.
    """

    def __init__(self, heads: int) -> None:
        self._counts = np.zeros((heads, _RANKS, len(_EDGES) + 1, 2))

    def calibrate(self, kinds: IntArray, promised: FloatArray) -> FloatArray:
        """Chances that guesses are right, given that the guess before was.

        Args:
            kinds: int32 `[n, 2]`, the head of each guess, and its rank among the head's guesses.
            promised: float32 `[n]`, the probability its head gives it.

        Returns:
            float32 `[n]`, each at most 0.99.
        """
        chances: FloatArray = _calibrate(self._counts, kinds, promised)
        return chances

    def learn(self, tree: GuessTree, right: IntArray) -> None:
        """Count which guesses were right, where the one before was.

        Args:
            tree: What was guessed.
            right: int32 `[n]`, the tokens that follow the root.
        """
        _learn(self._counts, tree.tokens, tree.parents, tree.kinds, tree.draft_probs, right)


@njit(cache=True)
def _bucket(counts, kind, promised):
    """Hits and promised hits of a kind of guess that was so sure."""
    return counts[kind[0], min(kind[1], _RANKS - 1), np.searchsorted(_EDGES, promised)]


@njit(cache=True)
def _calibrate(counts, kinds, promised):
    chances = np.empty_like(promised)
    for i in range(len(promised)):
        hits, sum_of = _bucket(counts, kinds[i], promised[i])
        chances[i] = min(_CEILING, promised[i] * (hits + _PSEUDO_HITS) / (sum_of + _PSEUDO_HITS))
    return chances


@njit(cache=True)
def _learn(counts, tokens, parents, kinds, promised, right):
    at = 0
    for token in right:
        found = 0
        for node in range(at + 1, len(tokens)):
            if parents[node] == at:
                count = _bucket(counts, kinds[node], promised[node])
                count[1] += promised[node]
                if tokens[node] == token:
                    count[0] += 1.0
                    found = node
                if count[1] > _MEMORY:
                    count *= 0.5
        if found == 0:
            return
        at = found
