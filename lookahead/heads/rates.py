"""How far guesses of heads can be trusted, learned while decoding."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]

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

    def calibrate(self, promised: FloatArray, first: int = 0) -> FloatArray:
        """Chances that guesses are right, given that the guess before was.

        Args:
            promised: float32 `[heads, guesses]`, the probabilities the heads give, the likeliest guess first.
            first: Head of the first row.

        Returns:
            float32 `[heads, guesses]`, each at most 0.99.
        """
        chances: FloatArray = _calibrate(self._counts, promised, first)
        return chances

    def learn(
        self, tokens: IntArray, parents: IntArray, guesses: IntArray, promised: FloatArray, right: IntArray
    ) -> None:
        """Count which guesses were right, where the one before was.

        Args:
            tokens: int32 `[nodes]`, a tree of guesses, its root first.
            parents: int32 `[nodes]`, of each node; a parent comes before its child.
            guesses: int32 `[nodes, 2]`, the head of each node, and its rank among the head's guesses.
            promised: float32 `[nodes]`, the probability its head gave it.
            right: int32 `[n]`, the tokens that follow the root.
        """
        _learn(self._counts, tokens, parents, guesses, promised, right)


@njit(cache=True)
def _calibrate(counts, promised, first):
    chances = np.empty_like(promised)
    for head in range(promised.shape[0]):
        for rank in range(promised.shape[1]):
            p = promised[head, rank]
            hits, sum_of = counts[first + head, min(rank, _RANKS - 1), np.searchsorted(_EDGES, p)]
            chances[head, rank] = min(_CEILING, p * (hits + _PSEUDO_HITS) / (sum_of + _PSEUDO_HITS))
    return chances


@njit(cache=True)
def _learn(counts, tokens, parents, guesses, promised, right):
    at = 0
    for token in right:
        found = 0
        for node in range(at + 1, len(tokens)):
            if parents[node] == at:
                head, rank = guesses[node]
                count = counts[head, min(rank, _RANKS - 1), np.searchsorted(_EDGES, promised[node])]
                count[1] += promised[node]
                if tokens[node] == token:
                    count[0] += 1.0
                    found = node
                if count[1] > _MEMORY:
                    count *= 0.5
        if found == 0:
            return
        at = found
