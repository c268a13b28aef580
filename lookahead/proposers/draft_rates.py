"""How far the probabilities of a draft model can be trusted, learned while decoding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.proposal import IntArray
from lookahead.ngram.acceptance import children_along

FloatArray = NDArray[np.float64]

_RANKS = 4  # the likeliest, the second, the third, and all others
_STARTS = np.array([0.0, 0.01, 0.03, 0.07, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93, 0.98])
_PSEUDO_COUNTS = 8.0
_MEMORY = 400.0
# The first guess of a drawn token: how likely the first, second, … draw at a place is accepted.
_OF_DRAWS = np.array([0.6, 0.15, 0.06, 0.02])


class DraftRates:
    """The chance that the target chooses a candidate of a draft model, by its rank and the draft's own probability.

    That probability is the first guess, worth 8 trials; hits are counted for every rank and range of probabilities,
    and halved at 400 trials, so that a change of text is followed.

    Args:
        of_draws: The candidates are drawn, not the likeliest: their rank is the order of the draws, and the first
            guess depends on it alone.

    Attributes:
        table: float64 `[features, 2]`: hits, trials.

    Source: the Beta-Bernoulli model with a decaying memory, e.g. Gelman et al. 2013, "Bayesian Data Analysis", §2.4.
    """

    __slots__ = ("_of_draws", "table")

    def __init__(self, *, of_draws: bool = False) -> None:
        self.table: FloatArray = np.zeros((_RANKS * len(_STARTS), 2))
        self._of_draws = of_draws

    def chances(self, probabilities: FloatArray) -> tuple[FloatArray, IntArray]:
        """What candidates are worth.

        Args:
            probabilities: float64 `[n, k]`; the draft's own, for the k candidates of n places in the order of rank.

        Returns:
            float64 `[n, k]`, the chance of each to be chosen once its parent is; int32 `[n, k]`, its feature.
        """
        ranks = np.minimum(np.arange(probabilities.shape[1]), _RANKS - 1)
        features = ranks * len(_STARTS) + np.searchsorted(_STARTS, probabilities, side="right") - 1
        hits, trials = self.table[features, 0], self.table[features, 1]
        guess = np.broadcast_to(_OF_DRAWS[ranks], probabilities.shape) if self._of_draws else probabilities
        return (_PSEUDO_COUNTS * guess + hits) / (_PSEUDO_COUNTS + trials), features.astype(np.int32)

    def learn(self, parents: IntArray, tokens: IntArray, features: IntArray, emitted: IntArray) -> None:
        """Count every candidate whose parent was emitted: a hit where its token was what came next.

        Args:
            parents: int32 `[k]`, a tree whose root is node 0 and whose parents come before their children.
            tokens: int32 `[k]`, the token of each node.
            features: int32 `[k]`, the feature each node was scored by; that of the root is not read.
            emitted: int32 `[n]`, what the target chose after the root.
        """
        nodes, hits = children_along(parents, tokens, emitted)
        np.add.at(self.table, features[nodes], np.stack((hits, np.ones(len(hits))), -1))
        self.table[self.table[:, 1] > _MEMORY] *= 0.5
