"""Opening and describing pool files, with the errors of this package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from lookahead.config import LookaheadConfig
from lookahead.errors import PoolError
from lookahead.ngram.pool_file import VERSION, Pool, PoolHeader, read_header


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


def read_pool_header(path: str) -> PoolHeader:
    """The header of a pool file, without reading its contents."""
    with pool_errors(path):
        return read_header(path)


def header_rows(path: str, header: PoolHeader) -> list[tuple[str, str]]:
    """The name and the value of each figure in the header of a pool file."""
    return [
        ("pool", path),
        ("documents", f"{header.documents:,}"),
        ("tokens", f"{header.tokens:,}"),
        ("largest token id", str(header.largest_token)),
        ("bytes", f"{header.file_bytes:,}"),
        ("bytes per token", f"{header.file_bytes / header.tokens:.1f}"),
        ("tokenizer", f"{header.fingerprint:016x}"),
        ("checksum", f"{header.checksum:016x}"),
        ("format", f"version {VERSION}"),
    ]


def describe_pool(path: str, header: PoolHeader) -> str:
    """The size of a pool in one line."""
    return f"{path}: {header.tokens:,} tokens in {count_of_documents(header.documents)}"


def count_of_documents(number: int) -> str:
    """`1 document` or `2 documents`."""
    return f"{number:,} document{'' if number == 1 else 's'}"


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


@lru_cache(maxsize=8)
def _open(path: str, version: tuple[int, ...]) -> Pool:
    """Open a file; the cache tells its versions apart."""
    return Pool.open(path)
