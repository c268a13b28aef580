"""Memories of recycled contexts that start from a file and are merged into it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lookahead.errors import PoolError, pool_errors
from lookahead.model.facts import decoder_vocabulary
from lookahead.ngram import memory_file
from lookahead.ngram.memory_file import (
    MAX_VOCABULARY,
    MemoryHeader,
    Records,
    merge_records,
    read_memory,
    write_memory,
)
from lookahead.proposers.ngram import Memory
from lookahead.proposers.pool_files import changing
from lookahead.utils.fingerprints import model_fingerprint

EMPTY: Records = np.zeros((0, 5), np.uint64)

MemoryFile = tuple[Memory, MemoryHeader]
"""A memory that started from a file, and the header that binds it to its model."""


def header_of(model: Any, max_contexts: int = memory_file.DEFAULT_CONTEXTS) -> MemoryHeader:
    """The header of an empty memory of a model."""
    vocabulary = decoder_vocabulary(model)
    if vocabulary > MAX_VOCABULARY:
        raise PoolError(f"a memory file takes vocabularies of at most {MAX_VOCABULARY} tokens, got {vocabulary}")
    try:
        fingerprint = int(model_fingerprint(model), 16)
    except (NotImplementedError, RuntimeError) as error:  # weights on the meta device
        raise PoolError("a memory file needs a model whose weights are not offloaded") from error
    return MemoryHeader(fingerprint, vocabulary, 0, max_contexts)


def open_memory_file(path: str, model: Any, opened: dict[str, MemoryFile]) -> Memory:
    """The memory of a model that starts from a file, if there is one; it is read once, and kept in `opened`."""
    place = os.path.realpath(path)
    if place not in opened:
        header, records = header_of(model), EMPTY
        with pool_errors(path):
            if os.path.lexists(path):
                header, records = read_memory(path, header)
        opened[place] = Memory(memory_file.table_of(records)), header
    return opened[place][0]


def merge_into(path: str, header: MemoryHeader, new: Records, old: Records = EMPTY) -> MemoryHeader:
    """Merge records into a file, created if missing, under a lock and atomically.

    The limit of the header applies to a new file. New records replace those of the file, which replace old ones.
    """
    with changing(path):
        entries = EMPTY
        if os.path.lexists(path):
            header, entries = read_memory(path, header)
        parts = new, memory_file.aged(entries), memory_file.aged(old)
        return write_memory(path, header, merge_records(parts, header.max_contexts))


def merge_memories(path: str, sources: Sequence[str], max_contexts: int | None = None) -> MemoryHeader:
    """Merge several memory files of one model. For a context in several files, the last learned one stays.

    At equal age, the first file wins. The default limit is the highest of the files'.
    """
    headers: list[MemoryHeader] = []
    parts = []
    for source in sources:
        with pool_errors(source):
            header, records = read_memory(source, headers[0] if headers else None)
        headers.append(header)
        parts.append(records)
    everything = np.concatenate(parts)
    youngest = everything[np.argsort(everything[:, 0] & np.uint64(memory_file.OLDEST), kind="stable")]
    most = max(header.max_contexts for header in headers) if max_contexts is None else max_contexts
    with changing(path):
        return write_memory(path, replace(headers[0], max_contexts=most), merge_records([youngest], most))
