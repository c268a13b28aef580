"""Requests of an engine that passes rows of tokens and no names: each is recognized by its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.ngram.chain_proposer import ChainRequest
from lookahead.ngram.chains import IntArray

_TAIL, _SAMPLES = 16, 16  # tokens compared at the end of a known text, and places spread over the rest


class KnownRequests:
    """The requests of the rows of a batch, and those that left it and may come back.

    A row belongs to the request whose tokens it begins with. Of a row that belongs to the same request as before, 32
    tokens are compared; of others all. A request that is in no row is set aside: it was finished, aborted or preempted,
    and the engine does not tell which. One that comes back is found again. At most `max_aside` of together
    `aside_tokens` tokens are kept, and the longest absent are forgotten.
    """

    def __init__(self, max_aside: int, aside_tokens: int) -> None:
        self.rows: list[ChainRequest | None] = []  # None where a row has none
        self.aside: list[ChainRequest] = []  # those in no row, the longest absent first
        self._max_aside, self._aside_tokens = max_aside, aside_tokens

    def match(self, tokens: IntArray, counts: NDArray[np.int64], wanted: Sequence[object]) -> list[ChainRequest]:
        """Find the request of every row; returns those that left their rows in this call.

        `tokens` are int32 `[rows or more, columns]`, `counts` int64 `[rows]` of them. A request that left may be found
        for a row where `wanted` is true.
        """
        rows: list[ChainRequest | None] = [None] * counts.size
        left = []
        for row, request in enumerate(self.rows):
            if request is not None and row < counts.size and _begins(tokens[row], counts[row], request, True):
                rows[row] = request
            elif request is not None:
                left.append(request)
        if rows == self.rows and None not in rows:
            return []
        loose = self.aside + left
        for row in range(counts.size):
            if rows[row] is None and wanted[row] and loose:
                found = [request for request in loose if _begins(tokens[row], counts[row], request, False)]
                rows[row] = max(found, key=len, default=None)
                loose = [request for request in loose if request is not rows[row]]
        self.rows = rows
        gone = [request for request in left if any(request is other for other in loose)]
        kept, total = 0, 0  # the longest absent requests beyond the limits are forgotten
        for request in reversed(loose):
            total += len(request)
            if kept == self._max_aside or total > self._aside_tokens:
                break
            kept += 1
        self.aside = loose[len(loose) - kept :]
        return gone

    def enter(self, row: int, request: ChainRequest | None) -> None:
        """Set the request of a row; None: it has none any more."""
        self.rows[row] = request


def _begins(tokens: IntArray, count: int, request: ChainRequest, is_sampled: bool) -> bool:
    """Whether a row begins with a known text; of a long text some tokens stand for all, if `is_sampled`."""
    return len(request) <= count and bool(_agree(tokens, request.text.tokens[1:], is_sampled))


@njit(cache=True, error_model="numpy")
def _agree(tokens, known, is_sampled):
    first = max(0, known.size - _TAIL)
    for at in range(known.size - 1, first - 1, -1):
        if known[at] != tokens[at]:
            return False
    step = max(1, first // _SAMPLES) if is_sampled else 1
    for at in range(0, first, step):
        if known[at] != tokens[at]:
            return False
    return True
