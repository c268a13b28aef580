"""Classical extractive summarization: the sentences nearest the centroid of a passage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numba import njit

LEAD_WEIGHT = 0.3
"""Weight of a sentence's position beside its centroid similarity."""

SHORTEST, LONGEST = 8, 90
"""Sentences outside these lengths, in tokens, are picked only when there is nothing else."""


@njit(cache=True)
def _centroid_scores(tokens, starts, weights, lead_weight):
    """Cosine of each sentence with the tf-idf centroid, plus a bonus that falls with its position.

    weights holds the idf of each token id; starts has one entry more than there are sentences.
    """
    count = len(starts) - 1
    centroid = np.zeros(len(weights))
    for position in range(starts[0], starts[count]):
        centroid[tokens[position]] += weights[tokens[position]]
    centroid_norm = np.sqrt(np.sum(centroid * centroid))
    seen = np.zeros(len(weights))
    scores = np.zeros(count)
    for sentence in range(count):
        begin, end = starts[sentence], starts[sentence + 1]
        for position in range(begin, end):
            seen[tokens[position]] += weights[tokens[position]]
        product = 0.0
        square = 0.0
        for position in range(begin, end):
            value = seen[tokens[position]]
            product += value * centroid[tokens[position]]
            square += value * value
            seen[tokens[position]] = 0.0
        if square > 0.0 and centroid_norm > 0.0:
            scores[sentence] = product / (np.sqrt(square) * centroid_norm)
        scores[sentence] += lead_weight / np.sqrt(1.0 + sentence)
    return scores


def extract_size(sentences: int) -> int:
    """How many sentences the extract of a passage has: 1 up to 5, 2 up to 14, then 3."""
    return 1 if sentences <= 5 else 2 if sentences <= 14 else 3


def central_sentences(
    sentences: Sequence[npt.NDArray[np.int32]], idf: npt.NDArray[np.float64], *, count: int | None = None
) -> list[int]:
    """Indices of the most central sentences of a passage in document order; `extract_size` of them by default.

    Source: centroid and position terms of MEAD, Radev et al. 2004, "Centroid-based summarization of
    multiple documents", §3, with subword tokens for words and 1/sqrt(rank) for the position term.
    """
    if not sentences:
        return []
    lengths = np.asarray([len(sentence) for sentence in sentences], dtype=np.int64)
    starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))
    scores = _centroid_scores(np.concatenate(list(sentences)), starts, idf, LEAD_WEIGHT)
    scores[(lengths < SHORTEST) | (lengths > LONGEST)] -= 10.0
    wanted = extract_size(len(sentences)) if count is None else count
    best = np.argsort(-scores, kind="stable")[:wanted]
    return sorted(int(index) for index in best)
