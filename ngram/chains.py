"""An index of every n-gram of a growing token stream: hash chains, as LZ77 coders use them.

Source: Ziv & Lempel 1977, "A Universal Algorithm for Sequential Data Compression" (copy from the longest earlier
    match); Deutsch 1996, RFC 1951 §4 (chained hash tables, walked from the most recent string, cut at a limit).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.ngram.raw_arrays import RawArrays, array_at, jit_inline, pointers_at
from lookahead.ngram.suffix_match import LEVELS, find_matches, hash_levels, mix

IntArray = NDArray[np.int32]

MAX_CONTEXT = 64  # a match is measured up to this many tokens
SEPARATOR = -1  # between documents; no token is negative, so no match crosses it
_FIRST_CAPACITY = 1024
_BLOCK = 1024  # positions linked together
_FEW = 64  # fewer than this are linked one by one
_LENGTH, _CAPACITY, _SLOTS = 3, 4, 5  # behind the pointers to arena, heads and links
_POINTERS = 6
_GROWTH = 1.25  # of a full arena; doubling it would leave up to half of it empty


class Chains(RawArrays):
    """Hash chains over an arena of documents. `ChainIndex` grows them, `Pool` maps them from a file.

    Args:
        arena: int32 `[capacity]`, documents one after the other, `SEPARATOR` first and between them.
        heads: int32 `[LEVELS, slots]`, the newest position of every chain, 0 where it is empty; `slots` is a power
            of two.
        links: int32 `[capacity, LEVELS]`, the position before each in its chains, 0 at their ends.
        length: Entries of the arena in use.
    """

    __slots__ = ("_arena", "_heads", "_length", "_links")

    def __init__(self, arena: IntArray, heads: IntArray, links: IntArray, length: int) -> None:
        super().__init__(_POINTERS)
        self._arena = arena
        self._heads = heads
        self._links = links
        self._set_length(length)
        self._update_pointers()

    def __len__(self) -> int:
        """Entries of the arena in use: tokens, and one separator before each document."""
        return self._length

    @property
    def tokens(self) -> IntArray:
        """The arena so far, int32 `[len(index)]`, `SEPARATOR` between documents; a view, not to be written."""
        return self._arena[: self._length]

    @property
    def nbytes(self) -> int:
        """Memory held by the arena, the chains and the tables, in bytes."""
        return self._arena.nbytes + self._links.nbytes + self._heads.nbytes

    def _set_length(self, length: int) -> None:
        self._length = self._pointers[_LENGTH] = length

    def _update_pointers(self) -> None:
        self._point_to(self._arena, self._heads, self._links)
        self._pointers[_CAPACITY], self._pointers[_SLOTS] = self._arena.size, self._heads.shape[1]

    @property
    def state(self) -> tuple[IntArray, IntArray, IntArray, int]:
        """Arena, heads, links and length, as the compiled cores take them."""
        return self._arena, self._heads, self._links, self._length

    def find(
        self,
        context: Sequence[int] | IntArray | None = None,
        *,
        min_ngram: int = 1,
        max_ngram: int = MAX_CONTEXT,
        max_links: int = 32,
        max_continuations: int = 4,
    ) -> tuple[IntArray, IntArray]:
        """Find earlier occurrences of the end of a context, and the token after each.

        Args:
            context: Tokens whose end is looked up; `None` means the open document itself.
            min_ngram: Shortest match, in tokens, at least 1.
            max_ngram: Longest context compared, in tokens, from `min_ngram` to 64.
            max_links: Most chain links walked; bounds the time for any content.
            max_continuations: Stop at this many different next tokens.

        Returns:
            Positions in `tokens` of the next tokens, and the lengths of the matches in tokens, both int32: those of
            the longest chain first, in each the most recent first.

        Raises:
            TypeError: `context` does not hold whole numbers.
            ValueError: An argument is out of its range.
        """
        if not 1 <= min_ngram <= max_ngram <= MAX_CONTEXT:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram <= {MAX_CONTEXT}, got {min_ngram} and {max_ngram}")
        if max_links < 1 or max_continuations < 1:
            raise ValueError(f"max_links and max_continuations must be positive, got {max_links}, {max_continuations}")
        tail = self.tokens if context is None else as_tokens(context)
        positions = np.empty(max_links, dtype=np.int32)
        lengths = np.empty(max_links, dtype=np.int32)
        found = find_matches(*self.state, tail, tail.size, min_ngram, max_ngram, max_continuations, positions, lengths)
        return positions[:found], lengths[:found]


class ChainIndex(Chains):
    """Finds earlier occurrences of the last tokens, and so what may follow them.

    Documents lie in one arena, one after the other. The newest is open and grows by `append`. A match is a position of
    the arena whose preceding tokens equal those of the context, within one document. Every match of hashes is confirmed
    token by token.

    Args:
        max_tokens: Most tokens held; beyond them the oldest half is forgotten. `None` keeps all.

    Raises:
        ValueError: `max_tokens` is below 1,024.

    Example:
        >>> index = ChainIndex()
        >>> index.append([5, 6, 7, 8, 5, 6])
        >>> positions, lengths = index.find()
        >>> index.tokens[positions].tolist(), lengths.tolist()  # 7 followed the 2-token match "5 6"
        ([7], [2])
    """

    __slots__ = ("_max_tokens",)

    def __init__(self, max_tokens: int | None = None) -> None:
        if max_tokens is not None and max_tokens < _FIRST_CAPACITY:
            raise ValueError(f"max_tokens must be at least {_FIRST_CAPACITY}, got {max_tokens}")
        self._max_tokens = max_tokens
        arena = np.empty(_FIRST_CAPACITY, dtype=np.int32)
        heads = np.zeros((LEVELS, _FIRST_CAPACITY), dtype=np.int32)
        links = np.zeros((_FIRST_CAPACITY, LEVELS), dtype=np.int32)
        arena[0] = SEPARATOR
        super().__init__(arena, heads, links, length=1)

    def append(self, tokens: Sequence[int] | IntArray) -> None:
        """Add tokens to the open document, amortised O(1) each.

        Raises:
            TypeError: `tokens` are not whole numbers.
            ValueError: `tokens` is not flat, or holds an id that is negative or beyond int32.
        """
        if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.ndim == 1:
            new = tokens  # the core checks for negative ones
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
        """Close the open document and add several, the last of which stays open.

        Args:
            tokens: int32 `[n]`, the documents one after the other, `SEPARATOR` between them.

        Raises:
            TypeError: `tokens` is not an int32 array.
            ValueError: `tokens` is not flat, or is longer than half of `max_tokens`.
        """
        if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32:
            raise TypeError(f"tokens must be an int32 array, got {getattr(tokens, 'dtype', type(tokens).__name__)}")
        if tokens.ndim != 1 or (self._max_tokens is not None and tokens.size > self._max_tokens // 2):
            raise ValueError(f"tokens must be flat and at most half of max_tokens, got shape {tokens.shape}")
        self.end_document()
        self._reserve(tokens.size)
        self._length = _append(self.address, tokens, False)

    def end_document(self) -> None:
        """Close the open document. What is appended next belongs to another, and no match spans the two."""
        if self._arena[self._length - 1] != SEPARATOR:
            self._reserve(1)
            self._arena[self._length] = SEPARATOR
            self._set_length(self._length + 1)

    def _reserve(self, extra: int) -> None:
        """Make room for `extra` more entries: forget the oldest half if capped, else grow."""
        needed = self._length + extra
        if self._max_tokens is not None and needed > self._max_tokens:
            self._forget(extra)
            needed = self._length + extra
        if needed > self._arena.size:
            capacity = max(needed, int(_GROWTH * self._arena.size))
            self._arena = _extended(self._arena, capacity)
            self._links = _extended(self._links, capacity)
            slots = 1 << (capacity.bit_length() - 1)
            if slots > self._heads.shape[1]:
                self._heads = np.zeros((LEVELS, slots), dtype=np.int32)
                _link(self._arena, self._heads, self._links, 1, self._length)
            self._update_pointers()

    def _forget(self, extra: int) -> None:
        """Keep only the newest tokens, so that `extra` more leave the arena at most half full."""
        kept = max(0, min(self._length - 1, (self._max_tokens or 0) // 2 - extra))
        self._arena[1 : kept + 1] = self._arena[self._length - kept : self._length].copy()
        self._set_length(kept + 1)
        self._heads[:] = 0
        _link(self._arena, self._heads, self._links, 1, self._length)


def as_tokens(tokens: Sequence[int] | IntArray) -> IntArray:
    """Return token ids as a flat int32 array, checked.

    Raises:
        TypeError: They are not whole numbers.
        ValueError: They are not flat, or one is negative or beyond int32.
    """
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.ndim != 1:
        raise ValueError(f"tokens must be a flat sequence, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens must be whole numbers, got {array.dtype}")
    if array.dtype != np.int32 and int(array.max()) > np.iinfo(np.int32).max:
        raise ValueError(f"token ids must be below 2**31, got {int(array.max())}")
    if array.dtype.kind == "i" and _has_negative(array):
        raise ValueError(f"token ids must not be negative, got {int(array.min())}")
    return np.ascontiguousarray(array, dtype=np.int32)


def _extended(array: IntArray, capacity: int) -> IntArray:
    larger = np.zeros((capacity, *array.shape[1:]), dtype=array.dtype)
    larger[: array.shape[0]] = array
    return larger


@jit_inline
def chains_at(address):
    """The arena, heads, links and length of the `Chains` at an address."""
    pointers = pointers_at(address, _POINTERS)
    capacity, slots = pointers[_CAPACITY], pointers[_SLOTS]
    arena = array_at(pointers[0], (capacity,), np.int32)
    heads = array_at(pointers[1], (LEVELS, slots), np.int32)
    links = array_at(pointers[2], (capacity, LEVELS), np.int32)
    return arena, heads, links, pointers[_LENGTH]


@njit(cache=True, error_model="numpy")
def _has_negative(tokens):
    """Whether a token is negative; faster than `tokens.min()` for a few tokens."""
    for token in tokens:
        if token < 0:
            return True
    return False


@jit_inline
def _link(arena, heads, links, begin, end):
    """Insert the tokens from `begin` to `end` at the heads of the chains of the contexts before them.

    A block of positions is inserted one level at a time. Its slots are scattered over a table larger than the caches,
    so all are read before any is written: reads overlap, dependent writes do not. Returns a digest of what was read,
    or else the compiler would drop the reads.
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
                        codes[at] = mix(codes[at], token) if token >= 0 else -1
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
def _append(address, tokens, is_one):
    """Append tokens to the arena of the `Chains` at an address and link all but separators; returns the new length.

    If they are of one document and one is negative, nothing is written, and -1 is returned.
    """
    if is_one:
        for token in tokens:
            if token < 0:
                return -1
    arena, heads, links, length = chains_at(address)
    end = length + tokens.size
    for at in range(tokens.size):
        arena[length + at] = tokens[at]
    if tokens.size < _FEW:
        for position in range(length, end):
            _link_one(arena, heads, links, position)
    else:
        _link(arena, heads, links, length, end)
    pointers_at(address, _POINTERS)[_LENGTH] = end
    return end


@jit_inline
def _link_one(arena, heads, links, position):
    if arena[position] < 0:
        return
    levels, first, second, third, fourth = hash_levels(arena, position, heads.shape[1] - 1)
    for level in range(levels):
        slot = fourth if level == 3 else (third if level == 2 else (second if level == 1 else first))
        links[position, level] = heads[level, slot]
        heads[level, slot] = position
