"""Requests of an engine that passes rows of tokens and no names: each is recognized by its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.ngram.chain_proposer import ChainRequest
from lookahead.ngram.chains import IntArray, chains_at
from lookahead.ngram.raw_arrays import jit_inline

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
        self._addresses: NDArray[np.int64] = np.zeros(0, np.int64)

    def match(self, tokens: IntArray, counts: NDArray[np.int64], wanted: Sequence[object]) -> list[ChainRequest]:
        """Find the request of every row; returns those that left their rows in this call.

        `tokens` are int32 `[rows or more, columns]`, `counts` int64 `[rows]` of them. A request that left may be found
        for a row where `wanted` is true.
        """
        stay = _agree(self._addresses[: counts.size], tokens, counts)
        if len(self.rows) == counts.size and stay.all():
            return []
        rows: list[ChainRequest | None] = [None] * counts.size
        left = []
        for row, request in enumerate(self.rows):
            if request is not None and row < counts.size and stay[row]:
                rows[row] = request
            elif request is not None:
                left.append(request)
        loose = self.aside + left
        for row in range(counts.size):
            if rows[row] is None and wanted[row] and loose:
                found = _find(_addresses_of(loose), tokens[row], counts[row])
                rows[row] = loose.pop(found) if found >= 0 else None
        self.rows, self._addresses = rows, _addresses_of(rows)
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
        self._addresses[row] = request.text.address if request is not None else 0


def _addresses_of(requests: Sequence[ChainRequest | None]) -> NDArray[np.int64]:
    return np.array([request.text.address if request is not None else 0 for request in requests], np.int64)


@jit_inline
def _begins(tokens, count, address, is_sampled):
    """Whether a row begins with the text at an address; of a long text some tokens stand for all, if `is_sampled`."""
    arena, _, _, length = chains_at(address)
    known = length - 1  # entry 0 is a separator
    if known > count:
        return False
    first = max(0, known - _TAIL)
    for at in range(known - 1, first - 1, -1):
        if arena[1 + at] != tokens[at]:
            return False
    step = max(1, first // _SAMPLES) if is_sampled else 1
    for at in range(0, first, step):
        if arena[1 + at] != tokens[at]:
            return False
    return True


@njit(cache=True, error_model="numpy")
def _agree(addresses, tokens, counts):
    """Whether each row still begins with its text; a row without a text (address 0) does not."""
    agrees = np.zeros(addresses.size, np.bool_)
    for row in range(addresses.size):
        if addresses[row] != 0:
            agrees[row] = _begins(tokens[row], counts[row], addresses[row], True)
    return agrees


@njit(cache=True, error_model="numpy")
def _find(addresses, tokens, count):
    """The longest of several texts that a row begins with, -1 if it begins with none."""
    best, longest = -1, 0
    for each in range(addresses.size):
        _, _, _, length = chains_at(addresses[each])
        if length > longest and _begins(tokens, count, addresses[each], False):
            best, longest = each, length
    return best
