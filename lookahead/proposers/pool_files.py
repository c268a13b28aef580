"""Builds, opens and describes pool files, with the errors of this package."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead.config import LookaheadConfig
from lookahead.documents.decode_text import Document, Reject
from lookahead.documents.inputs import Input
from lookahead.documents.readers import read_documents
from lookahead.errors import PoolError, count, one_line, pool_errors
from lookahead.ngram.chains import SEPARATOR, IntArray
from lookahead.ngram.pool_file import Pool, PoolHeader, write_pool
from lookahead.utils.atomic import check_folder
from lookahead.utils.fingerprints import tokenizer_fingerprint
from lookahead.utils.locks import locked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_pool(path: str, *, fingerprint: int | None = None, vocabulary: int | None = None) -> Pool:
    """Open a pool, or reuse it if its file was not replaced, and check it against a tokenizer and a vocabulary."""
    with pool_errors(path):
        status = os.stat(path)
        version = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        pool = _open(path, version)
        if not pool.is_intact:  # the file changed after it was opened
            _open.cache_clear()
            pool = _open(path, version)
        if fingerprint is not None:
            pool.check_fingerprint(fingerprint)
    largest = pool.header.largest_token
    if vocabulary is not None and largest >= vocabulary:
        raise PoolError(
            f"{path}: made with another tokenizer: it holds token id {largest}, and the ids of this model are "
            f"0 to {vocabulary - 1}"
        )
    return pool


def pool_of(config: LookaheadConfig, *, fingerprint: int | None = None, vocabulary: int | None = None) -> Pool | None:
    """The pool of a configuration, opened as by `open_pool`; `None` without one."""
    if config.pool is None:
        return None
    return open_pool(os.fspath(config.pool), fingerprint=fingerprint, vocabulary=vocabulary)


@contextmanager
def changing(path: str) -> Iterator[None]:
    """Hold the lock of a pool or memory file while it is read, changed and written; errors become `PoolError`."""
    with pool_errors(f"{path}: cannot be written"):
        check_folder(Path(os.path.realpath(path)).parent)
    with pool_errors(path), locked(Path(path)):
        yield


@dataclass(slots=True)
class PoolTotals:
    """Counts of documents read so far for a pool."""

    documents: int = 0
    tokens: int = 0
    rejected: int = 0  # documents that could not be read or have no tokens
    is_read: bool = False  # whether all documents were read, and the file is written next
    is_full: bool = False  # whether documents were skipped because the pool is full

    def __str__(self) -> str:
        skipped = f", {self.rejected:,} skipped" if self.rejected else ""
        full = "; the pool has its most tokens, and the rest was not read" if self.is_full else ""
        of = f" of {count(self.documents, 'document')}" if self.documents else ""
        return f"{self.tokens:,} tokens{of} taken{skipped}{full}"


@dataclass(slots=True)
class TokenSource:
    """Iterates over the documents of inputs as int32 `[tokens]`, without special tokens, and counts them.

    Attributes:
        observer: Called after every document, with the reject if it was skipped, and when all are read.
        max_tokens: Maximum tokens: the document that exceeds them is cut, and later ones are not read; None for no
            limit.
        limit: Maximum bytes of a document.
    """

    inputs: Sequence[Input]
    tokenizer: PreTrainedTokenizerBase
    observer: Callable[[PoolTotals, Reject | None], None]
    max_tokens: int | None
    limit: int
    totals: PoolTotals = field(default_factory=PoolTotals)

    def __iter__(self) -> Iterator[IntArray]:
        totals = self.totals
        for document in read_documents(self.inputs, limit=self.limit):
            ids = document if isinstance(document, Reject) else _tokens_of(document, self.tokenizer)
            if isinstance(ids, Reject):
                totals.rejected += 1
                self.observer(totals, ids)
                continue
            if self.max_tokens is not None and totals.tokens + ids.size > self.max_tokens:
                totals.is_full = True
                ids = ids[: self.max_tokens - totals.tokens]
            if ids.size > 0:
                yield ids
                totals.documents += 1
                totals.tokens += ids.size
                self.observer(totals, None)
            if totals.is_full:
                break
        totals.is_read = True
        self.observer(totals, None)


def build_pool(path: str, source: TokenSource, *, adds: bool = False) -> PoolHeader:
    """Build a pool from documents. An existing file is replaced when the new one is complete.

    With `adds` its documents are kept, including those other processes added meanwhile. PoolError if no document could
    be used, the file cannot be read or written, or it was made with another tokenizer.
    """
    fingerprint = tokenizer_fingerprint(source.tokenizer)
    with pool_errors(path):
        if adds:  # refuse a file that cannot be used before the documents are read
            Pool.open(path, fingerprint)
    documents = list(source)
    if not documents:
        what = f"no document to {'add' if adds else 'make it of'}"
        raise PoolError(f"{path}: {what}, {source.totals.rejected} could not be used")
    with changing(path):
        before = [_read_pool(path, fingerprint)[0]] if adds else []
        return _write_texts(path, [*before, *documents], fingerprint)


def merge_pools(path: str, sources: Sequence[str]) -> PoolHeader:
    """Write the documents of several pools of one tokenizer to one, in this order."""
    texts, fingerprint = list[IntArray](), None
    for source in sources:
        with pool_errors(source):
            text, fingerprint = _read_pool(source, fingerprint)
            texts.append(text)
    assert fingerprint is not None
    with changing(path):
        return _write_texts(path, texts, fingerprint)


def _read_pool(path: str, fingerprint: int | None) -> tuple[IntArray, int]:
    """A copy of the documents of a pool, which is closed again: Windows cannot replace an open file."""
    pool = Pool.open(path, fingerprint)
    return np.array(pool.tokens[1:]), pool.header.fingerprint


def _write_texts(path: str, texts: Sequence[IntArray], fingerprint: int) -> PoolHeader:
    separator = np.array([SEPARATOR], np.int32)
    return write_pool(path, np.concatenate([part for text in texts for part in (separator, text)][1:]), fingerprint)


def _tokens_of(document: Document, tokenizer: PreTrainedTokenizerBase) -> IntArray | Reject:
    try:
        ids: Any = tokenizer(document.text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # any error, such as a panic of a Rust tokenizer: other documents continue
        return Reject(document.id, f"{document.id}: {type(error).__name__}: {one_line(error)}")
    if not ids:
        return Reject(document.id, f"{document.id}: the document has no tokens")
    return np.array(ids, np.int32)


@lru_cache(maxsize=8)
def _open(path: str, version: tuple[int, ...]) -> Pool:
    return Pool.open(path)  # the cache distinguishes versions of the file
