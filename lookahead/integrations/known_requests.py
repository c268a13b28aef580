"""Requests of an engine that passes rows of tokens and no names: each is recognized by its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.ngram.chain_proposer import ChainRequest
from lookahead.ngram.chains import IntArray


class KnownRequests:
    """The requests of the rows of a batch, and those that left it and may come back.

    A row belongs to the request whose tokens it begins with. A request that is in no row is set aside: it was finished,
    aborted or preempted, and the engine does not tell which. One that comes back is found again. At most `max_aside` of
    together `aside_tokens` tokens are kept, and the longest absent are forgotten.
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
        texts = [row[:count] for row, count in zip(tokens, counts, strict=False)]
        rows: list[ChainRequest | None] = [None] * len(texts)
        left = []
        for row, request in enumerate(self.rows):
            if request is not None and row < len(texts) and _begins(texts[row], request):
                rows[row] = request
            elif request is not None:
                left.append(request)
        loose = self.aside + left
        for row, text in enumerate(texts):
            if rows[row] is None and wanted[row]:
                known = max((each for each in loose if _begins(text, each)), key=len, default=None)
                if known is not None:
                    loose.remove(known)
                    rows[row] = known
        self.rows = rows
        gone = [request for request in left if request in loose]
        sizes = np.cumsum([len(request) for request in reversed(loose)])
        kept = min(int((sizes <= self._aside_tokens).sum()), self._max_aside)
        self.aside = loose[len(loose) - kept :]  # the longest absent beyond the limits are forgotten
        return gone


def _begins(tokens: IntArray, request: ChainRequest) -> bool:
    """Whether tokens begin with the text of a request, whose entry 0 is a separator."""
    return np.array_equal(tokens[: len(request)], request.text.tokens[1:])
