"""A corpus as hash chains in a file, built once and memory-mapped by every process that drafts from it.

A pool file is a header of 128 bytes and three sections without gaps: heads, links and arena of `Chains`, int32 in the
byte order of the machine that wrote them.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from lookahead.ngram.binary_file import HEADER_BYTES, FileHeader
from lookahead.ngram.chains import LEVELS, SEPARATOR, ChainIndex, Chains, IntArray

MAX_ENTRIES = (1 << 31) - 1  # of an arena: a position is an int32
_READ_AT_ONCE = 1 << 20  # numbers


@dataclass(frozen=True, slots=True)
class PoolHeader(FileHeader):
    """The header of a pool file.

    Example:
        >>> header = PoolHeader(fingerprint=1, length=3, slots=1024, tokens=2, documents=1, largest_token=6)
        >>> header.sizes()
        (16572, True)
    """

    kind, magic, version, owner = "pool", b"LKPOOL\r\n", 1, "tokenizer"
    shown = ("documents", "tokens", "largest_token")

    fingerprint: int  # of the tokenizer
    length: int  # entries of the arena: the tokens, and a separator before each document
    slots: int  # chains of each level, a power of two
    tokens: int  # of all documents, at least 1
    documents: int
    largest_token: int
    checksum: int = 0
    learned: int = 0  # 1 in files of outputs, which jobs of earlier releases made

    def sizes(self) -> tuple[int, bool]:
        """See `FileHeader.sizes`."""
        is_possible = 1 <= self.tokens < self.length <= MAX_ENTRIES and self.slots.bit_count() == 1
        size = HEADER_BYTES + 4 * (LEVELS * self.slots + LEVELS * self.length + self.length)
        return size, is_possible and self.largest_token < 1 << 31 and self.learned <= 1


class Pool(Chains):
    """The memory-mapped chains of a pool file; searched like a `ChainIndex`, never grown.

    Processes share the pages of the file. `write_pool` replaces a file and never changes one, so a mapping stays
    valid. A file changed by another program could crash this process (reading a page beyond its end is a bus error) or
    lead a search out of bounds: `is_intact` is checked before each use. A copy is the same object, and unpickling opens
    the file again.

    Example:
        >>> header = write_pool("a.pool", np.array([5, 6, SEPARATOR, 7], np.int32), fingerprint=1)
        >>> pool = Pool.open("a.pool", fingerprint=1)
        >>> pool.check_fingerprint(1)  # of the tokenizer
        >>> pool.is_intact, pool.header == header, pool.tokens.tolist()
        (True, True, [-1, 5, 6, -1, 7])
    """

    __slots__ = ("__weakref__", "_descriptor", "_is_intact", "_version", "header", "path")

    def __init__(self, path: Path, header: PoolHeader, file: BinaryIO, version: tuple[int, int]) -> None:
        # A private mapping is writable, so its arrays have the same type as an index's, and one compiled function
        # serves both. Unwritten pages stay shared.
        numbers: IntArray = np.asarray(np.memmap(file, np.int32, "c", HEADER_BYTES))
        heads, links, arena = np.split(numbers, np.cumsum([LEVELS * header.slots, LEVELS * header.length]))
        super().__init__(arena, heads.reshape(LEVELS, -1), links.reshape(-1, LEVELS), header.length)
        self.path = path
        self.header = header
        self._version, self._is_intact = version, True
        self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def __deepcopy__(self, memo: object) -> Pool:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reopen, (self.path.absolute(), self.header)

    @property
    def is_intact(self) -> bool:
        """Whether the file's size and modification time are unchanged since opening; if not, the pool is emptied."""
        if self._is_intact and _version_of(self._descriptor) != self._version:
            self._is_intact = False
            self.state = ChainIndex().state
        return self._is_intact

    @classmethod
    def open(cls, path: str | os.PathLike[str], fingerprint: int | None = None) -> Pool:
        """Open a pool file after checking every byte; ValueError if it is damaged, or made with another tokenizer.

        The checksum finds accidental damage. Since a forged file can have a valid checksum, every position and token is
        checked too: no file can lead a search out of bounds, or to a token above the header's largest.
        """
        path = Path(path)
        with PoolHeader.opened(path) as (header, file):
            version, checksum, are_good = _version_of(file.fileno()), xxhash.xxh3_64(), True
            # Read, not mapped: the file may be truncated meanwhile.
            for count, least, most in (
                (LEVELS * (header.slots + header.length), 0, header.length - 1),  # positions
                (1, SEPARATOR, SEPARATOR),
                (header.length - 1, SEPARATOR, header.largest_token),
            ):
                while count > 0:
                    numbers = np.fromfile(file, np.int32, min(count, _READ_AT_ONCE))
                    if not numbers.size:
                        raise ValueError(f"{path}: cut short while it was read")
                    checksum.update(numbers.data)
                    are_good &= least <= int(numbers.min()) and int(numbers.max()) <= most
                    count -= numbers.size
            header.check(path, checksum)
            if not are_good:
                raise ValueError(f"{path}: damaged: it holds positions or tokens out of range")
            pool = cls(path, header, file, version)
        if not pool.is_intact:
            raise ValueError(f"{path}: changed while it was opened")
        if fingerprint is not None:
            pool.check_fingerprint(fingerprint)
        return pool

    def check_fingerprint(self, fingerprint: int) -> None:
        """Raise ValueError unless the pool was made with the tokenizer of this fingerprint."""
        if fingerprint != self.header.fingerprint:
            raise ValueError(
                f"{self.path}: made with another tokenizer: its fingerprint is {self.header.fingerprint:016x}, that of "
                f"this tokenizer is {fingerprint:016x}"
            )


def _reopen(path: Path, header: PoolHeader) -> Pool:
    """Open the file of a pickled pool; ValueError if it was replaced since pickling."""
    pool = Pool.open(path)
    if pool.header != header:
        raise ValueError(f"{path}: replaced since the pool was pickled")
    return pool


def write_pool(path: str | os.PathLike[str], tokens: IntArray, fingerprint: int) -> PoolHeader:
    """Index documents, int32 `[n]` with `SEPARATOR` between them, and write them to a pool file; returns its header.

    A file at `path` is replaced once the new one is completely on disk; a crash before leaves it unchanged.
    `fingerprint` identifies the tokenizer of the documents.

    Example:
        >>> header = write_pool("a.pool", np.array([5, 6, SEPARATOR, 7], np.int32), fingerprint=1)
        >>> header.documents, header.tokens, header.largest_token
        (2, 3, 7)
    """
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32:
        raise TypeError(f"tokens must be an int32 array, got {getattr(tokens, 'dtype', type(tokens).__name__)}")
    if tokens.ndim != 1 or not 1 <= tokens.size < MAX_ENTRIES:
        raise ValueError(f"tokens must be flat, with 1 to {MAX_ENTRIES - 1} of them, got shape {tokens.shape}")
    if tokens.min() < SEPARATOR or tokens.max() < 0:
        raise ValueError(f"tokens must hold ids and {SEPARATOR} between documents, got {tokens.min()}..{tokens.max()}")
    index = ChainIndex()
    index.append_documents(np.ascontiguousarray(tokens))
    arena, heads, links, length = index.state
    arena, links = arena[:length], links[:length]
    is_token = arena >= 0
    header = PoolHeader(
        fingerprint=fingerprint,
        length=length,
        slots=heads.shape[1],
        tokens=int(np.count_nonzero(is_token)),
        documents=int(np.count_nonzero(is_token[1:] & ~is_token[:-1])),
        largest_token=int(tokens.max()),
    )
    return header.write(path, heads, links, arena)


def _version_of(descriptor: int) -> tuple[int, int]:
    """Size in bytes and modification time in ns of an open file."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns
