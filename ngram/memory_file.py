"""Recycled contexts of a model in a file, for later processes.

A memory file is a header of 128 bytes and a record of 40 bytes per context, sorted by the hash of the context: the
hash, whose lowest byte is the age, 8 tokens of 3 bytes, and 8 square roots of probabilities of 1 byte.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from lookahead.ngram.binary_file import HEADER_BYTES, FileHeader
from lookahead.ngram.successors import ENTRY, TOP, UNIT, WAYS, SuccessorTable, group_of

DEFAULT_CONTEXTS = 1 << 18
MAX_CONTEXTS = 1 << 26
MAX_VOCABULARY = (1 << 24) - 1  # token ids are below it
_BINDING = (("fingerprint", "016x"), ("vocabulary", "d"))  # fields that bind a file to its model
OLDEST = 255  # age of a context: merges since it was last learned
_NONE = MAX_VOCABULARY  # stored for no token
_RECORD = np.dtype([("word", np.uint64), ("tokens", np.uint8, (TOP, 3)), ("probs", np.uint8, TOP)])
_WORDS = _RECORD.itemsize // 8

Records = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class MemoryHeader(FileHeader):
    """The header of a memory file.

    Example:
        >>> header = MemoryHeader(fingerprint=1, vocabulary=9, contexts=1, max_contexts=8)
        >>> header.sizes(), len(header.pack())
        ((168, True), 128)
    """

    kind, magic, version, owner = "memory", b"LKMEM\r\n\x1a", 1, "model"
    shown = ("contexts", "max_contexts", "vocabulary")

    fingerprint: int  # of the model
    vocabulary: int  # token ids of the model; those in the file are below
    contexts: int
    max_contexts: int  # limit of the file; the oldest are dropped beyond it
    checksum: int = 0

    def sizes(self) -> tuple[int, bool]:
        """See `FileHeader.sizes`."""
        is_possible = self.contexts <= self.max_contexts <= MAX_CONTEXTS and self.vocabulary <= MAX_VOCABULARY
        return HEADER_BYTES + 8 * _WORDS * self.contexts, is_possible


def read_memory(path: str | os.PathLike[str], fits: MemoryHeader | None = None) -> tuple[MemoryHeader, Records]:
    """Read the header and the records, uint64 `[contexts, 5]`, of a memory file after checking every byte.

    The checksum finds accidental damage; token ids are checked too, since a forged file may have a valid checksum.
    Raises ValueError if the file is damaged, or does not fit the header of the model in use.

    Example:
        >>> header = MemoryHeader(fingerprint=1, vocabulary=9, contexts=0, max_contexts=8)
        >>> header = write_memory("a.memory", header, np.array([[256, 0, 0, 0, 0]], np.uint64))
        >>> read_memory("a.memory", fits=header)[1].tolist()
        [[256, 0, 0, 0, 0]]
    """
    path = Path(path)
    with MemoryHeader.opened(path) as (header, file):
        for name, form in _BINDING if fits is not None else ():
            expected, value = getattr(fits, name), getattr(header, name)
            if value != expected:
                numbers = f"must be {expected:{form}}, got {value:{form}}"
                raise ValueError(f"{path}: learned from another model: its {name} {numbers}")
        records: Records = np.fromfile(file, np.uint64, _WORDS * header.contexts)
    header.check(path, xxhash.xxh3_64(records.data))
    records = records.reshape(-1, _WORDS)
    largest = int(_tokens_of(records).max(initial=-1))
    if largest >= header.vocabulary:
        raise ValueError(f"{path}: damaged: token ids must be below {header.vocabulary}, got {largest}")
    return header, records


def write_memory(path: str | os.PathLike[str], header: MemoryHeader, records: Records) -> MemoryHeader:
    """Write records to a memory file, atomically; returns its header, with the number of records and the checksum.

    Example:
        >>> header = MemoryHeader(fingerprint=1, vocabulary=9, contexts=0, max_contexts=8)
        >>> write_memory("a.memory", header, np.zeros((3, 5), np.uint64)).contexts
        3
    """
    if not 1 <= header.vocabulary <= MAX_VOCABULARY:
        raise ValueError(f"{path}: the vocabulary must be from 1 to {MAX_VOCABULARY}, got {header.vocabulary}")
    return replace(header, contexts=len(records)).write(path, records)


def merge_records(parts: Sequence[Records], most: int) -> Records:
    """Merge records, of each context the first one; returns at most `most`, the youngest, sorted.

    Example:
        >>> new, old = np.array([[[256, 0, 0, 0, 0]], [[257, 0, 0, 0, 0]]], np.uint64)  # one context, of age 0 and 1
        >>> merge_records([new, old], most=8)[:, 0].tolist()
        [256]
    """
    everything = np.concatenate(parts)
    words = everything[:, 0]
    _, first = np.unique(words >> np.uint64(8), return_index=True)
    if len(first) > most:
        # Ties in age are broken by the low bits of the hash, so that all sets of a table lose equally many.
        order = (words[first] & np.uint64(OLDEST)) << np.uint64(56) | words[first] << np.uint64(32) >> np.uint64(8)
        first = first[np.sort(np.argsort(order)[:most])]
    return everything[first]


def aged(records: Records) -> Records:
    """The same records one merge later.

    Example:
        >>> aged(np.array([[256, 0, 0, 0, 0]], np.uint64))[:, 0].tolist()
        [257]
    """
    older = records.copy()
    older[:, 0] += (older[:, 0] & np.uint64(OLDEST)) < OLDEST
    return older


def table_of(records: Records, contexts: int = DEFAULT_CONTEXTS) -> SuccessorTable:
    """A table of at least `contexts` entries that holds `records`, with room for as many new ones.

    Example:
        >>> table = table_of(np.array([[256, 0, 0, 0, 0]], np.uint64), contexts=8)
        >>> table.entries["key"][table.entries["key"] > 0].tolist()
        [257]
    """
    size = max(contexts, 2 * len(records))
    table = SuccessorTable(-(-size // WAYS) * WAYS)
    entries = np.zeros(len(records), ENTRY)
    entries["key"] = records[:, 0] & ~np.uint64(OLDEST) | np.uint64(1)
    entries["time"] = OLDEST + 1 - (records[:, 0] & np.uint64(OLDEST)).astype(np.int64)
    entries["tokens"] = _tokens_of(records)
    entries["probs"] = np.square(records.view(_RECORD)["probs"][:, 0] / 255.0) * UNIT + 0.5
    table.now[0] = OLDEST + 1
    # Sets that would overflow drop their oldest records.
    groups = group_of(table.entries, entries["key"])
    order = np.lexsort((-entries["time"], groups))
    groups = groups[order]
    ways = np.arange(len(order)) - np.searchsorted(groups, groups)
    kept = ways < WAYS
    table.entries[groups[kept], ways[kept]] = entries[order[kept]]
    return table


def records_of(table: SuccessorTable, vocabulary: int) -> tuple[Records, Records]:
    """The records of a table: those stored since it was made, with age 0, and those it was made from.

    Example:
        >>> table = table_of(np.array([[256, 0, 0, 0, 0]], np.uint64), contexts=8)
        >>> new, old = records_of(table, vocabulary=9)
        >>> len(new), old.tolist()
        (0, [[256, 0, 0, 0, 0]])
    """
    entries = table.entries[table.entries["key"] != 0]
    records = np.zeros((len(entries), _WORDS), np.uint64)
    record = records.view(_RECORD)[:, 0]
    ages = np.clip(OLDEST + 1 - entries["time"], 0, OLDEST).astype(np.uint64)
    record["word"] = entries["key"] - np.uint64(1) + ages
    ids = np.where((entries["tokens"] < 0) | (entries["tokens"] >= vocabulary), _NONE, entries["tokens"])
    record["tokens"] = ids[..., None] >> np.array([0, 8, 16]) & 0xFF
    record["probs"] = np.sqrt(entries["probs"] / UNIT) * 255 + 0.5
    is_new = entries["time"] > OLDEST + 1
    return records[is_new], records[~is_new]


def _tokens_of(records: Records) -> NDArray[np.int32]:
    """The tokens of records, int32 `[contexts, 8]`, -1 for none."""
    tokens = records.view(_RECORD)["tokens"][:, 0].astype(np.int32) @ np.array([1, 1 << 8, 1 << 16], np.int32)
    return np.where(tokens == _NONE, np.int32(-1), tokens)
