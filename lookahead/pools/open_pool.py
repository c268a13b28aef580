"""Opening pool files: once per process, and with errors of this package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from lookahead.config import LookaheadConfig
from lookahead.errors import PoolError
from lookahead.ngram.pool_file import Pool, PoolHeader, read_header


def open_pool(path: str, *, fingerprint: int | None = None, vocabulary: int | None = None) -> Pool:
    """Open a pool to draft from; one that is open already is not opened again, unless its file was replaced.

    Args:
        path: The file.
        fingerprint: Of the tokenizer whose ids are looked up, see `tokenizer_fingerprint`; `None` where there is none.
        vocabulary: How many token ids the model knows, where no tokenizer tells more.

    Raises:
        PoolError: It cannot be read, it is damaged, or it was made with another tokenizer.
    """
    with pool_errors(path):
        status = os.stat(path)
        version = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        pool = _open(path, version)
        if not pool.is_intact:  # and since then what it was when it was opened
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
    """The pool that a configuration names, opened as by `open_pool`; None where it names none."""
    if config.pool is None:
        return None
    return open_pool(os.fspath(config.pool), fingerprint=fingerprint, vocabulary=vocabulary)


def read_pool_header(path: str) -> PoolHeader:
    """What a pool file says of itself; its contents are not read.

    Raises:
        PoolError: It cannot be read, it is no pool, or its header or its size is wrong.
    """
    with pool_errors(path):
        return read_header(path)


@lru_cache(maxsize=8)
def _open(path: str, version: tuple[int, ...]) -> Pool:
    """Open the version of a file that `version` tells from others."""
    return Pool.open(path)


@contextmanager
def pool_errors(path: str) -> Iterator[None]:
    """Turn what goes wrong with a pool file into an error of this package that names it."""
    try:
        yield
    except OSError as error:
        raise PoolError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise PoolError(str(error)) from error
