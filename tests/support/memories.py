"""Small memories without a model, valid and manipulated."""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from lookahead.ngram.memory_file import MemoryHeader, Records, records_of, table_of
from lookahead.ngram.successors import SuccessorTable
from lookahead.proposers.memory_files import EMPTY

HEADER = 128
MODEL = MemoryHeader(fingerprint=77, vocabulary=101, contexts=0, max_contexts=64)


def taught(*contexts: list[int], first: int = 10) -> SuccessorTable:
    """A table that expects the tokens `first`, `first` + 1, ... after each context."""
    table = table_of(EMPTY, 256)
    top = np.arange(first, first + 8, dtype=np.int32)[None]
    chances = np.array([[0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001, 0.0]], np.float32)
    for context in contexts:
        before = np.array(context, np.int32)
        table.store(before, np.zeros(1, np.int32), before[-1:], top, chances)
    return table


def learned(*contexts: list[int], first: int = 10) -> Records:
    """The records of a `taught` table."""
    return records_of(taught(*contexts, first=first), MODEL.vocabulary)[0]


def forged(data: bytes) -> bytes:
    """A file with both checksums recomputed for its content, as an attacker would do."""
    header = data[:48] + struct.pack("=Q", xxhash.xxh3_64_intdigest(data[HEADER:])) + data[56 : HEADER - 8]
    return header + xxhash.xxh3_64_digest(header) + data[HEADER:]
