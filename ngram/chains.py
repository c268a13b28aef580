"""Hash chains over a growing token stream, which find earlier occurrences of its last tokens.

Source: Ziv & Lempel 1977, "A Universal Algorithm for Sequential Data Compression" (copy from the longest earlier
    match); Deutsch 1996, RFC 1951 §4 (chained hash tables, walked from the most recent string, cut at a limit).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.ngram.inlining import jit_inline
from lookahead.utils.addresses import KeepsAddresses, addresses_of, array_at
from lookahead.utils.jit import njit

IntArray = NDArray[np.int32]

LEVELS = 4  # level k has the chains of contexts of 2**k tokens
MAX_CONTEXT = 64  # maximum length of a match in tokens
SEPARATOR = -1  # between documents; token ids are never negative, so no match crosses it
_FIRST_CAPACITY = 1024
_GROWTH = 1.25  # of a full arena; doubling would leave up to half of it empty
_FIRST_ROOM = 64  # tokens of a document
_MAX_ENTRIES = 4  # arena entries per token, beyond which all documents are packed
# The record of chains, int64: addresses of the arrays, slots per level, and entries in use and at most.
_ARENA, _HEADS, _LINKS, _SLOTS, LENGTH, _CAPACITY = range(6)


class Chains(KeepsAddresses):
    """Hash chains over an arena of documents. `ChainIndex` grows them, `Pool` maps them from a file.

    Args:
        arena: int32 `[capacity]`, with `SEPARATOR` before each document.
        heads: int32 `[LEVELS, slots]`, the newest position of each chain, 0 if it is empty.
        links: int32 `[capacity, LEVELS]`, the previous position in each chain, 0 at the end.
        length: Entries of the arena in use.
        max_tokens: Maximum number of entries; unlimited if None.

    Example:
        >>> index = ChainIndex()
        >>> index.append([5, 6])
        >>> chains = Chains(*index.state)  # of the same arrays
        >>> len(chains), chains.tokens.tolist()
        (3, [-1, 5, 6])
    """

    __slots__ = ("_arrays", "_max_tokens", "record")

    def __init__(
        self, arena: IntArray, heads: IntArray, links: IntArray, length: int, max_tokens: int | None = None
    ) -> None:
        self._max_tokens = max_tokens
        self.record = np.zeros(6, np.int64)  # for compiled functions; its address is fixed
        self.state = arena, heads, links, length

    def __len__(self) -> int:
        """Entries of the arena in use: tokens, and one separator before each document."""
        return int(self.record[LENGTH])

    @property
    def tokens(self) -> IntArray:
        """The used part of the arena, int32 `[len(index)]`, `SEPARATOR` between documents; a read-only view."""
        return self._arrays[0][: self.record[LENGTH]]

    @property
    def state(self) -> tuple[IntArray, IntArray, IntArray, int]:
        """The arrays, and the number of entries in use."""
        return *self._arrays, len(self)

    @state.setter
    def state(self, state: tuple[IntArray, IntArray, IntArray, int]) -> None:
        self._arrays = state[:3]
        most = state[0].size if self._max_tokens is None else min(state[0].size, self._max_tokens)
        self.record[:] = *addresses_of(self._arrays), state[1].shape[1], state[3], most

    def _readdress(self) -> None:
        arena, heads, links, length = self.state
        arena, heads, links = (np.require(array, requirements=["C", "W"]) for array in (arena, heads, links))
        self.state = arena, heads, links, length


class ChainIndex(Chains):
    """An index of documents, the last of which is open and grows.

    A match lies within one document. Hashes only find candidates: every match is compared token by token. If
    `max_tokens`, at least 1,024, are reached, the oldest half is dropped.

    Example:
        >>> index = ChainIndex()
        >>> index.append([5, 6, 7])
        >>> index.end_document()
        >>> index.append([8])
        >>> index.append_documents(np.array([3, SEPARATOR, 4], np.int32))
        >>> index.tokens.tolist()
        [-1, 5, 6, 7, -1, 8, -1, 3, -1, 4]
    """

    __slots__ = ()

    def __init__(self, max_tokens: int | None = None) -> None:
        if max_tokens is not None and max_tokens < _FIRST_CAPACITY:
            raise ValueError(f"max_tokens must be at least {_FIRST_CAPACITY}, got {max_tokens}")
        heads = np.zeros((LEVELS, _FIRST_CAPACITY), np.int32)
        links = np.zeros((_FIRST_CAPACITY, LEVELS), np.int32)
        super().__init__(np.full(_FIRST_CAPACITY, SEPARATOR, np.int32), heads, links, 1, max_tokens)

    def append(self, tokens: Sequence[int] | IntArray) -> None:
        """Add tokens to the open document, amortised O(1) each; raises the errors of `as_tokens`."""
        new = as_tokens(tokens)
        if self._max_tokens is not None:
            new = new[-(self._max_tokens // 2) :]
        if not add(self.record, new):
            self._add(new)

    def append_documents(self, tokens: IntArray) -> None:
        """Close the open document and add several, int32 `[n]` with `SEPARATOR` between; the last one stays open.

        At most the last `max_tokens // 2` entries are added.
        """
        if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32:
            raise TypeError(f"tokens must be an int32 array, got {getattr(tokens, 'dtype', type(tokens).__name__)}")
        if tokens.ndim != 1:
            raise ValueError(f"tokens must be flat, got shape {tokens.shape}")
        self.end_document()
        self._add(tokens if self._max_tokens is None else tokens[-(self._max_tokens // 2) :])

    def end_document(self) -> None:
        """Close the open document. Tokens appended later belong to a new one."""
        if self.tokens[-1] != SEPARATOR:
            self._add(np.full(1, SEPARATOR, np.int32))

    def _add(self, new: IntArray) -> None:
        """Make room, and add tokens or separators."""
        self.make_room(new.size)
        add(self.record, new)

    def make_room(self, more: int) -> None:
        """Make room for `more` entries: grow, or drop the oldest half."""
        arena, heads, links, length = self.state
        if self._max_tokens is not None and length + more > self._max_tokens:
            kept = max(0, min(length - 1, self._max_tokens // 2 - more))
            arena[1 : kept + 1] = arena[length - kept : length].copy()
            length = kept + 1
            heads[:] = 0
            _link(arena, heads, links, 1, length)
        if length + more > arena.size:
            capacity = max(length + more, int(_GROWTH * arena.size))
            empty = np.zeros((capacity - arena.size, 1 + LEVELS), np.int32)
            arena = np.append(arena, empty[:, 0])
            links = np.append(links, empty[:, 1:], axis=0)
            slots = 1 << (capacity.bit_length() - 1)
            if slots > heads.shape[1]:
                heads = np.zeros((LEVELS, slots), np.int32)
                _link(arena, heads, links, 1, length)
        self.state = arena, heads, links, length


def as_tokens(tokens: Sequence[int] | IntArray) -> IntArray:
    """Token ids as a flat int32 array; TypeError unless they are integers, ValueError if out of range.

    Example:
        >>> as_tokens([5, 6])
        array([5, 6], dtype=int32)
        >>> as_tokens([5, -1])
        Traceback (most recent call last):
        ValueError: token ids must not be negative, got -1
    """
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1:
        raise ValueError(f"tokens must be a flat sequence, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens must be whole numbers, got {array.dtype}")
    if array.min() < 0:
        raise ValueError(f"token ids must not be negative, got {array.min()}")
    if array.dtype != np.int32 and array.max() > np.iinfo(np.int32).max:
        raise ValueError(f"token ids must be below 2**31, got {array.max()}")
    return np.ascontiguousarray(array, np.int32)


@jit_inline
def _mix(code, token):
    """Fold a token into a hash; products stay below 2**63."""
    product = (code ^ token) * 0x5BD1E995 + 0x2545F491
    return (product ^ (product >> 29)) & 0x7FFFFFFF


@jit_inline
def _hash_levels(context, end, mask, slots):
    """Fill `slots` with the slots of the last 1, 2, 4 and 8 tokens of a context; returns the number of levels."""
    code, level, back = 0, 0, 1
    while level < LEVELS and back <= end and context[end - back] >= 0:
        code = _mix(code, int(context[end - back]))
        if back == 1 << level:
            slots[level] = code & mask
            level += 1
        back += 1
    return level


@njit(error_model="numpy")
def _link(arena, heads, links, begin, end):
    """Insert the positions from `begin` to `end` into the chains of the contexts before them."""
    mask, slots = heads.shape[1] - 1, np.empty(LEVELS, np.int64)
    for at in range(begin, end):
        levels = _hash_levels(arena, at, mask, slots) if arena[at] >= 0 else 0
        for level in range(levels):
            links[at, level] = heads[level, slots[level]]
            heads[level, slots[level]] = at


@jit_inline
def chains_at(record):
    """The arena, heads, links and number of entries of chains, given their record.

    Example:
        >>> index = ChainIndex()
        >>> index.append([5, 6])
        >>> arena, _, _, length = chains_at(index.record)
        >>> arena[:length].tolist()
        [-1, 5, 6]
    """
    length, slots = record[LENGTH], record[_SLOTS]
    arena = array_at(record[_ARENA], (record[_CAPACITY],), np.int32)
    heads = array_at(record[_HEADS], (LEVELS, slots), np.int32)
    return arena, heads, array_at(record[_LINKS], (record[_CAPACITY], LEVELS), np.int32), length


@njit(error_model="numpy")
def add(record, new):
    """Add tokens to the open document, and link all except separators; returns False if there is no room.

    Example:
        >>> index = ChainIndex()
        >>> add(index.record, np.array([5, 6], np.int32)), index.tokens.tolist()
        (True, [-1, 5, 6])
    """
    arena, heads, links, length = chains_at(record)
    end = length + new.size
    if end > record[_CAPACITY]:
        return False
    for at in range(new.size):
        arena[length + at] = new[at]
    _link(arena, heads, links, length, end)
    record[LENGTH] = end
    return True


@njit(error_model="numpy")
def put(record, begin, new):
    """Overwrite separators after a document with tokens from `begin` on, and link them.

    Example:
        >>> index = ChainIndex()
        >>> index.append_documents(np.full(3, SEPARATOR, np.int32))
        >>> put(index.record, 1, np.array([5, 6], np.int32))
        >>> index.tokens.tolist()
        [-1, 5, 6, -1]
    """
    arena, heads, links, _ = chains_at(record)
    for at in range(new.size):
        arena[begin + at] = new[at]
    _link(arena, heads, links, begin, begin + new.size)


@jit_inline
def match_length(arena, position, context, end, cap):
    """Tokens that agree reading backwards from `position` and from `end`, both exclusive.

    Example:
        >>> match_length(np.array([-1, 4, 5, 6, 7]), 4, np.array([1, 5, 6]), 3, MAX_CONTEXT)  # 5, 6
        2
    """
    length = 0
    while length < cap and length < end:
        token = context[end - 1 - length]
        if token < 0 or arena[position - 1 - length] != token:
            break
        length += 1
    return length


@njit(error_model="numpy")
def find_matches(chains, context, end, shortest, longest, positions, lengths):
    """Find earlier occurrences of the end of a context: walk the chains from the longest context down.

    Args:
        chains: The state of `Chains`, as from `chains_at`.
        context: int32 `[end or more]`.
        end: Tokens of the context.
        shortest: Tokens of the shortest match, at least 1.
        longest: Tokens of the longest match, at most `MAX_CONTEXT`.
        positions: Integers `[n]`, filled with the positions of the next tokens, longest chain first, most recent first
            within a chain. At most n links are walked.
        lengths: Integers `[n]`, filled with the lengths of the matches.

    Returns:
        The number of matches.

    Example:
        >>> index, (positions, lengths) = ChainIndex(), np.empty((2, 32), np.int32)
        >>> index.append([5, 6, 7, 6, 8, 5, 6])
        >>> count = find_matches(index.state, index.tokens, len(index), 1, MAX_CONTEXT, positions, lengths)
        >>> index.tokens[positions[:count]].tolist(), lengths[:count].tolist()
        ([7, 8], [2, 1])
    """
    arena, heads, links, _ = chains
    slots = np.empty(LEVELS, np.int64)
    levels = _hash_levels(context, end, heads.shape[1] - 1, slots)
    budget, count = positions.size, 0
    for level in range(levels - 1, -1, -1):
        width = 1 << level
        above = 2 * width if level < levels - 1 and 2 * width <= longest else longest + 1
        if width > longest:
            continue
        if above <= shortest:
            break
        position = heads[level, slots[level]]
        while position > 0 and budget > 0:
            budget -= 1
            agreed = match_length(arena, position, context, end, longest)
            if max(width, shortest) <= agreed < above:
                positions[count], lengths[count] = position, agreed
                count += 1
            position = links[position, level]
    return count


class LiveOutputs:
    """Growing documents, one per row, in one index.

    A document without room moves to the end of the arena and gets twice the room, so that a token costs amortised O(1).
    The entries it leaves become separators; if most entries are empty, all documents are packed.

    Attributes:
        chains: The index.

    Example:
        >>> live = LiveOutputs()
        >>> for row, tokens in ((0, [5, 6]), (1, [8]), (0, [7])):
        ...     live.extend(row, np.array(tokens, np.int32))
        >>> live.end(1)
        >>> [live.chains.tokens[slice(*live.span_of(row))].tolist() for row in (0, 1)]
        [[5, 6, 7], []]
    """

    def __init__(self) -> None:
        self.chains = ChainIndex()
        self._spans: dict[int, tuple[int, int, int]] = {}  # by row: begin, end, and the end of its room
        self._used = 0  # tokens of all documents

    def span_of(self, row: int) -> tuple[int, int]:
        """The begin and end (exclusive) of the document of a row; an empty span if it has none."""
        return self._spans.get(row, (0, 0, 0))[:2]

    def extend(self, row: int, tokens: IntArray) -> None:
        """Add tokens, int32 `[n]`, to the document of a row, which is created if necessary."""
        begin, end, limit = self._spans.get(row, (0, 0, 0))
        if end + tokens.size > limit:
            tokens = np.concatenate((self.chains.tokens[begin:end], tokens))
            self.end(row)
            self.chains.end_document()
            begin = end = len(self.chains)
            limit = begin + max(_FIRST_ROOM, 2 * tokens.size)
            self.chains.append_documents(np.full(limit + 1 - begin, SEPARATOR, np.int32))
        put(self.chains.record, end, tokens)
        self._spans[row] = begin, end + tokens.size, limit
        self._used += tokens.size

    def end(self, row: int) -> None:
        """Drop the document of a row, if it has one."""
        begin, end, _ = self._spans.pop(row, (0, 0, 0))
        self.chains.state[0][begin:end] = SEPARATOR
        self._used -= end - begin
        if len(self.chains) > _MAX_ENTRIES * (self._used + _FIRST_ROOM * (1 + len(self._spans))):
            texts = {other: self.chains.tokens[slice(*self.span_of(other))].copy() for other in self._spans}
            self._spans, self._used, self.chains.state = {}, 0, ChainIndex().state
            for other, text in texts.items():
                self.extend(other, text)
