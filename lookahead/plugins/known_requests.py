"""Requests of an engine that passes rows of tokens without request ids. A request is recognized by its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.ngram.chain_proposer import SAMPLES, ChainRequest, begins
from lookahead.ngram.chains import IntArray


class KnownRequests:
    """The requests in the rows of a batch, and requests that left it and may return.

    A row belongs to the request whose tokens it begins with. If the request of a row is unchanged, about 32 tokens are
    compared, else all. A request that is in no row is set aside, since it may return: the engine does not report
    whether it was finished, aborted or preempted. Beyond `max_aside` requests and `aside_tokens` tokens the longest
    absent go first.
    """

    def __init__(self, max_aside: int, aside_tokens: int) -> None:
        self.rows: list[ChainRequest | None] = []  # None for a row without a request
        self.aside: list[ChainRequest] = []  # requests in no row, the longest absent first
        self._max_aside, self._aside_tokens = max_aside, aside_tokens

    def match(self, tokens: IntArray, counts: NDArray[np.int64], wanted: Sequence[object]) -> list[ChainRequest]:
        """Find the request of every row; returns the requests that left their rows in this call.

        Args:
            tokens: int32 `[rows or more, columns]`, the tokens of each row.
            counts: int64 `[rows]`, the number of tokens of each row.
            wanted: For each row, whether to look for its request among the requests that left.
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
        # Drop the longest absent requests beyond the limits.
        totals = np.cumsum([len(request) for request in reversed(loose)])
        kept = min(self._max_aside, int((totals <= self._aside_tokens).sum()))
        self.aside = loose[len(loose) - kept :]
        return gone
