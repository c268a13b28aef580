"""Hash chains over a growing token stream: they find every earlier occurrence of the last tokens.

Source: Ziv & Lempel 1977, "A Universal Algorithm for Sequential Data Compression" (copy from the longest earlier
    match); Deutsch 1996, RFC 1951 §4 (chained hash tables, walked from the most recent string, cut at a limit).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.ngram.raw_arrays import RawArrays, array_at, jit_inline, pointers_at

IntArray = NDArray[np.int32]

LEVELS = 4  # level k has the chains of contexts of 2**k tokens
MAX_CONTEXT = 64  # a match is measured up to this many tokens
SEPARATOR = -1  # between documents; token ids are never negative, so no match crosses it
_FIRST_CAPACITY = 1024
_BLOCK = 1024  # positions linked together
_LENGTH, _CAPACITY, _SLOTS = 3, 4, 5  # after the pointers to arena, heads and links
_POINTERS = 6
_GROWTH = 1.25  # of a full arena; doubling it would leave up to half of it empty


class Chains(RawArrays):
    """Hash chains over an arena of documents. `ChainIndex` grows them, `Pool` maps them from a file.

    `arena` is int32 `[capacity]`, with `SEPARATOR` before each document. `heads`, int32 `[LEVELS, slots]`, holds the
    newest position of each chain, 0 if it is empty; `links`, int32 `[capacity, LEVELS]`, the one before, 0 at its end.
    """

    __slots__ = ("_arena", "_heads", "_length", "_links")

    def __init__(self, arena: IntArray, heads: IntArray, links: IntArray, length: int) -> None:
        super().__init__(_POINTERS)
        self._replace(arena, heads, links, length)

    def __len__(self) -> int:
        """Entries of the arena in use: tokens, and one separator before each document."""
        return self._length

    @property
    def tokens(self) -> IntArray:
        """The used part of the arena, int32 `[len(index)]`, `SEPARATOR` between documents; a read-only view."""
        return self._arena[: self._length]

    @property
    def nbytes(self) -> int:
        """Memory of the arena, the links and the heads, in bytes."""
        return self._arena.nbytes + self._links.nbytes + self._heads.nbytes

    @property
    def state(self) -> tuple[IntArray, IntArray, IntArray, int]:
        """Arena, heads, links and length, as the compiled functions take them."""
        return self._arena, self._heads, self._links, self._length

    def _set_length(self, length: int) -> None:
        self._length = self._pointers[_LENGTH] = length

    def _replace(self, arena: IntArray, heads: IntArray, links: IntArray, length: int) -> None:
        self._arena, self._heads, self._links = arena, heads, links
        self._set_length(length)
        self._point_to(arena, heads, links)
        self._pointers[_CAPACITY], self._pointers[_SLOTS] = arena.size, heads.shape[1]


class ChainIndex(Chains):
    """An index of documents, the last of which is open and grows.

    A match lies within one document. Hashes only name candidates: every match is compared token by token. When
    `max_tokens`, at least 1,024, are full, the oldest half is dropped.

    Example:
        >>> index = ChainIndex()
        >>> index.append([5, 6, 7])
        >>> index.end_document()
        >>> index.append([8])
        >>> index.tokens.tolist()
        [-1, 5, 6, 7, -1, 8]
    """

    __slots__ = ("_max_tokens",)

    def __init__(self, max_tokens: int | None = None) -> None:
        if max_tokens is not None and max_tokens < _FIRST_CAPACITY:
            raise ValueError(f"max_tokens must be at least {_FIRST_CAPACITY}, got {max_tokens}")
        self._max_tokens = max_tokens
        heads = np.zeros((LEVELS, _FIRST_CAPACITY), np.int32)
        links = np.zeros((_FIRST_CAPACITY, LEVELS), np.int32)
        super().__init__(np.full(_FIRST_CAPACITY, SEPARATOR, np.int32), heads, links, length=1)

    def append(self, tokens: Sequence[int] | IntArray) -> None:
        """Add tokens to the open document, amortised O(1) each; the errors are those of `as_tokens`."""
        if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.ndim == 1:
            new = tokens  # `_append` checks for negative ids
        else:
            new = as_tokens(tokens)
        if self._max_tokens is not None and new.size > self._max_tokens // 2:
            new = new[-(self._max_tokens // 2) :]
        if self._length + new.size > self._arena.size or self._max_tokens is not None:
            self._reserve(new.size)
        end = _append(self.address, new, True)
        if end < 0:
            raise ValueError(f"token ids must not be negative, got {int(new.min())}")
        self._length = end

    def append_documents(self, tokens: IntArray) -> None:
        """Close the open document and add several, int32 `[n]` with `SEPARATOR` between; the last one stays open."""
        if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32:
            raise TypeError(f"tokens must be an int32 array, got {getattr(tokens, 'dtype', type(tokens).__name__)}")
        if tokens.ndim != 1 or (self._max_tokens is not None and tokens.size > self._max_tokens // 2):
            raise ValueError(f"tokens must be flat and at most half of max_tokens, got shape {tokens.shape}")
        self.end_document()
        self._reserve(tokens.size)
        self._length = _append(self.address, tokens, False)

    def end_document(self) -> None:
        """Close the open document. Tokens appended later belong to a new one."""
        if self._arena[self._length - 1] != SEPARATOR:
            self._reserve(1)
            self._arena[self._length] = SEPARATOR
            self._set_length(self._length + 1)

    def _reserve(self, extra: int) -> None:
        """Make space for `extra` more entries: drop the oldest half if the size is limited, else grow."""
        if self._max_tokens is not None and self._length + extra > self._max_tokens:
            kept = max(0, min(self._length - 1, self._max_tokens // 2 - extra))
            self._arena[1 : kept + 1] = self._arena[self._length - kept : self._length].copy()
            self._set_length(kept + 1)
            self._heads[:] = 0
            _link_again(self._arena, self._heads, self._links, self._length)
        needed = self._length + extra
        if needed > self._arena.size:
            capacity = max(needed, int(_GROWTH * self._arena.size))
            arena, links = np.zeros(capacity, np.int32), np.zeros((capacity, LEVELS), np.int32)
            arena[: self._arena.size], links[: self._arena.size] = self._arena, self._links
            heads, slots = self._heads, 1 << (capacity.bit_length() - 1)
            if slots > heads.shape[1]:
                heads = np.zeros((LEVELS, slots), np.int32)
                _link_again(arena, heads, links, self._length)
            self._replace(arena, heads, links, self._length)


def as_tokens(tokens: Sequence[int] | IntArray) -> IntArray:
    """Token ids as a flat int32 array; TypeError if they are no whole numbers, ValueError if out of range."""
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1:
        raise ValueError(f"tokens must be a flat sequence, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens must be whole numbers, got {array.dtype}")
    least, most = int(array.min()), int(array.max())
    if least < 0:
        raise ValueError(f"token ids must not be negative, got {least}")
    if most > np.iinfo(np.int32).max:
        raise ValueError(f"token ids must be below 2**31, got {most}")
    return np.ascontiguousarray(array, np.int32)


@jit_inline
def chains_at(address):
    """The arena, heads, links and length of the `Chains` at an address."""
    pointers = pointers_at(address, _POINTERS)
    capacity, slots = pointers[_CAPACITY], pointers[_SLOTS]
    arena = array_at(pointers[0], (capacity,), np.int32)
    heads = array_at(pointers[1], (LEVELS, slots), np.int32)
    links = array_at(pointers[2], (capacity, LEVELS), np.int32)
    return arena, heads, links, pointers[_LENGTH]


@jit_inline
def _mix(code, token):
    """Fold one more token into a hash; every product stays below 2**63."""
    product = (code ^ token) * 0x5BD1E995 + 0x2545F491
    return (product ^ (product >> 29)) & 0x7FFFFFFF


@jit_inline
def _hash_levels(context, end, mask):
    """How many levels the context fills, and the hash of its last 1, 2, 4 and 8 tokens."""
    code, levels = 0, 0
    first, second, third, fourth = 0, 0, 0, 0
    for back in range(1, min(end, 1 << (LEVELS - 1)) + 1):
        token = context[end - back]
        if token < 0:
            break
        code = _mix(code, int(token))
        if back == 1:
            levels, first = 1, code & mask
        elif back == 2:
            levels, second = 2, code & mask
        elif back == 4:
            levels, third = 3, code & mask
        elif back == 8:
            levels, fourth = 4, code & mask
    return levels, first, second, third, fourth


@jit_inline
def _link(arena, heads, links, begin, end):
    """Insert the tokens from `begin` to `end` into the chains of the contexts before them.

    A block of positions is inserted one level at a time. Its slots are scattered over a table larger than the caches,
    so all are read before any is written: reads overlap, dependent writes do not. The digest of the reads is returned
    so that the compiler does not drop them.
    """
    digest = 0
    mask = heads.shape[1] - 1
    codes = np.empty(min(_BLOCK, end - begin), dtype=np.int64)
    for first in range(begin, end, _BLOCK):
        count = min(_BLOCK, end - first)
        for at in range(count):
            codes[at] = 0 if arena[first + at] >= 0 else -1
        back = 1
        for level in range(LEVELS):
            while back <= 1 << level:
                for at in range(count):
                    if codes[at] >= 0:
                        token = int(arena[first + at - back])
                        codes[at] = _mix(codes[at], token) if token >= 0 else -1
                back += 1
            for at in range(count):
                digest ^= heads[level, codes[at] & mask]
            for at in range(count):
                if codes[at] >= 0:
                    slot = codes[at] & mask
                    links[first + at, level] = heads[level, slot]
                    heads[level, slot] = first + at
    return digest


@njit(cache=True, error_model="numpy")
def _link_again(arena, heads, links, length):
    """Insert all tokens into empty chains. Called from Python, `_link` itself would not be compiled."""
    _link(arena, heads, links, 1, length)


@njit(cache=True, error_model="numpy")
def _append(address, tokens, is_one):
    """Append tokens to the `Chains` at an address and link all but separators; returns the new length.

    If they are one document and an id is negative, nothing is written, and -1 is returned.
    """
    if is_one:
        for token in tokens:
            if token < 0:
                return -1
    arena, heads, links, length = chains_at(address)
    end = length + tokens.size
    for at in range(tokens.size):
        arena[length + at] = tokens[at]
    _link(arena, heads, links, length, end)
    pointers_at(address, _POINTERS)[_LENGTH] = end
    return end


@jit_inline
def _match_length(arena, position, context, end, cap):
    """Tokens that agree reading backwards from `position` and from `end`, both exclusive."""
    length = 0
    while length < cap and length < end:
        token = context[end - 1 - length]
        if token < 0 or arena[position - 1 - length] != token:
            break
        length += 1
    return length


@jit_inline
def _is_new(arena, positions, count):
    """Whether the token at the last of `count` positions is at none before it."""
    token = arena[positions[count - 1]]
    for other in range(count - 1):
        if arena[positions[other]] == token:
            return False
    return True


@njit(cache=True, error_model="numpy")
def find_matches(arena, heads, links, length, context, end, shortest, longest, variety, positions, lengths):
    """Find earlier occurrences of the end of a context: walk the chains from the longest context down.

    Fills `positions`, of the next tokens, and `lengths`, of the matches: the longest chain first, and the most recent
    first within a chain. Their size limits the links walked. Stops at `variety` different next tokens. Returns how many
    were found.
    """
    levels, first, second, third, fourth = _hash_levels(context, end, heads.shape[1] - 1)
    budget, count, distinct = positions.size, 0, 0
    for level in range(levels - 1, -1, -1):
        width = 1 << level
        above = 2 * width if level < levels - 1 and 2 * width <= longest else longest + 1
        if width > longest:
            continue
        if above <= shortest:
            break
        # No tuple is indexed: the compiler assumes that this can fail, and code that can fail counts references.
        slot = fourth if level == 3 else (third if level == 2 else (second if level == 1 else first))
        position = heads[level, slot]
        while position > 0 and budget > 0:
            budget -= 1
            agreed = _match_length(arena, position, context, end, longest)
            if max(width, shortest) <= agreed < above:
                positions[count], lengths[count] = position, agreed
                count += 1
                if _is_new(arena, positions, count):
                    distinct += 1
                    if distinct == variety:
                        return count
            position = links[position, level]
    return count
