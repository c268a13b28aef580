"""Requests of an engine that passes rows of tokens and no names: each is recognized by its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.ngram.chain_proposer import SAMPLES, ChainRequest, begins
from lookahead.ngram.chains import IntArray


class KnownRequests:
    """The requests of the rows of a batch, and those that left it and may come back.

    A row belongs to the request whose tokens it begins with. Of a row that belongs to the same request as before, some
    32 tokens are compared; of others all. A request that is in no row is set aside: it was finished, aborted or
    preempted, and the engine does not tell which. One that comes back is found again. At most `max_aside` of together
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
            if request is None:
                continue
            if row < counts.size and begins(request.address, tokens[row], counts[row], SAMPLES):
                rows[row] = request
            else:
                left.append(request)
        loose = self.aside + left
        for row in range(counts.size):
            if rows[row] is None and wanted[row] and loose:
                whole = tokens[row], counts[row], int(counts[row]) + 1
                found = [request for request in loose if begins(request.address, *whole)]
                rows[row] = max(found, key=len, default=None)
                loose = [request for request in loose if request is not rows[row]]
        self.rows = rows
        gone = [request for request in left if any(request is other for other in loose)]
        # The longest absent requests beyond the limits are forgotten.
        totals = np.cumsum([len(request) for request in reversed(loose)])
        kept = min(self._max_aside, int((totals <= self._aside_tokens).sum()))
        self.aside = loose[len(loose) - kept :]
        return gone
