"""Making, opening and describing pool files, with the errors of this package."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead.config import LookaheadConfig
from lookahead.documents.decode_text import Document, Reject
from lookahead.documents.inputs import Input
from lookahead.documents.readers import DEFAULT_LIMIT, read_documents
from lookahead.errors import PoolError, count, one_line
from lookahead.ngram.chains import SEPARATOR, IntArray
from lookahead.ngram.pool_file import Pool, PoolHeader, write_pool
from lookahead.utils.fingerprints import tokenizer_fingerprint
from lookahead.utils.locks import locked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_pool(path: str, *, fingerprint: int | None = None, vocabulary: int | None = None) -> Pool:
    """Open a pool to draft from. An open pool is reused unless its file was replaced.

    It is checked against the fingerprint of the tokenizer, or the number of token ids of the model, where given.
    """
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
    """The pool that a configuration names, opened as by `open_pool`; `None` if it names none."""
    if config.pool is None:
        return None
    return open_pool(os.fspath(config.pool), fingerprint=fingerprint, vocabulary=vocabulary)


def describe_pool(path: str, header: PoolHeader) -> str:
    """The size of a pool in one line."""
    return f"{path}: {header.tokens:,} tokens in {count(header.documents, 'document')}"


def check_folder(path: str) -> None:
    """PoolError if there is no folder for a file to be written to."""
    folder = os.path.dirname(os.path.realpath(path))
    if not os.access(folder, os.W_OK):
        raise PoolError(f"{path}: cannot be written: there is no folder {folder} that can be written to")


@contextmanager
def pool_errors(path: str) -> Iterator[None]:
    """Turn the errors of a pool file into a `PoolError` that names it."""
    try:
        yield
    except OSError as error:
        raise PoolError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise PoolError(str(error)) from error


@contextmanager
def changing(path: str) -> Iterator[None]:
    """Hold the lock of a pool or memory file while it is read, changed and written; its errors are `PoolError`s."""
    check_folder(path)
    with pool_errors(path), locked(Path(path)):
        yield


@dataclass(slots=True)
class PoolTotals:
    """What was read for a pool so far."""

    documents: int = 0
    tokens: int = 0
    rejected: int = 0  # documents that could not be read or have no tokens
    is_read: bool = False  # whether all documents were read, and the file is written next
    is_full: bool = False  # whether documents were left out because the pool has its most tokens

    def __str__(self) -> str:
        skipped = f", {self.rejected:,} skipped" if self.rejected else ""
        full = "; the pool has its most tokens, and the rest was not read" if self.is_full else ""
        of = f" of {count(self.documents, 'document')}" if self.documents else ""
        return f"{self.tokens:,} tokens{of} taken{skipped}{full}"


# Is told of every document, with the reject if it was left out, and when all of them are read.
PoolObserver = Callable[[PoolTotals, Reject | None], None]


def build_pool(
    path: str,
    inputs: Sequence[Input],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add: bool = False,
    max_tokens: int | None = None,
    limit: int = DEFAULT_LIMIT,
    totals: PoolTotals,
    observer: PoolObserver,
) -> PoolHeader:
    """Make a pool of the documents of all inputs. An existing file is replaced when the new one is complete.

    Args:
        path: The file.
        inputs: The documents.
        tokenizer: The tokenizer of the models that will draft from the pool.
        add: Keep the documents of the existing pool, and those that other processes add meanwhile.
        max_tokens: The document that exceeds so many new tokens is cut, and later ones are not read.
        limit: The most bytes of a document.
        totals: Is updated with what was read.
        observer: Is called after every document, and when all are read.

    Raises:
        PoolError: No document could be used, the file cannot be written, or with `add` it cannot be read or was made
            with another tokenizer.
    """
    fingerprint = tokenizer_fingerprint(tokenizer)
    with pool_errors(path):
        if add:  # refuse a file that cannot be used before the documents are read
            Pool.open(path, fingerprint)
    documents = list(read_tokens(inputs, tokenizer, max_tokens, limit, totals, observer))
    if not documents:
        raise PoolError(f"{path}: no document to {'add' if add else 'make it of'}, {totals.rejected} could not be used")
    with changing(path):
        pool = Pool.open(path, fingerprint) if add else None
        before = [] if pool is None else [np.array(pool.tokens[1:])]
        is_learned = pool is not None and pool.header.learned == 1  # it stays a memory, to which jobs add
        return write_pool(path, join_documents(before + documents), fingerprint, is_learned=is_learned)


def join_documents(documents: Sequence[IntArray]) -> IntArray:
    """At least one document, int32 `[tokens]` each, as one array with `SEPARATOR` between them."""
    separator = np.array([SEPARATOR], np.int32)
    joined: IntArray = np.concatenate([part for document in documents for part in (separator, document)][1:])
    return joined


def read_tokens(
    inputs: Sequence[Input],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None,
    limit: int,
    totals: PoolTotals,
    observer: PoolObserver,
) -> Iterator[IntArray]:
    """The documents of all inputs as int32 `[tokens]` each.

    Args:
        inputs: The documents.
        tokenizer: The tokenizer, which adds no special tokens.
        max_tokens: The most tokens of all documents together, or None.
        limit: The most bytes of a document.
        totals: Is updated with what was read.
        observer: Is called after every document, and when all are read.
    """
    for document in read_documents(inputs, limit=limit):
        ids = document if isinstance(document, Reject) else _tokens_of(document, tokenizer)
        if isinstance(ids, Reject):
            totals.rejected += 1
            observer(totals, ids)
            continue
        if max_tokens is not None and totals.tokens + ids.size > max_tokens:
            totals.is_full = True
            ids = ids[: max_tokens - totals.tokens]
        if ids.size > 0:
            yield ids
            totals.documents += 1
            totals.tokens += ids.size
            observer(totals, None)
        if totals.is_full:
            break
    totals.is_read = True
    observer(totals, None)


def _tokens_of(document: Document, tokenizer: PreTrainedTokenizerBase) -> IntArray | Reject:
    try:
        ids: Any = tokenizer(document.text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # any error, such as a panic of a Rust tokenizer: the other documents go on
        return Reject(document.id, f"{document.id}: {type(error).__name__}: {one_line(error)}")
    if not ids:
        return Reject(document.id, f"{document.id}: the document has no tokens")
    return np.array(ids, np.int32)


@lru_cache(maxsize=8)
def _open(path: str, version: tuple[int, ...]) -> Pool:
    return Pool.open(path)  # the cache tells versions of the file apart
