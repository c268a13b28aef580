"""Numba's decorators with an on-disk cache that is safe for concurrent processes and has a fallback folder.

Numba numbers the cache files of a function, and writes its index without a lock. If two processes compile a function
concurrently for different types, one can load the code of the other. Here every cache file has a unique name, and an
index is changed under its lock. A function includes compiled code from other files, so an edit of any file with
compiled functions, or another release, invalidates the cache of all functions.

Numba also numbers what it compiles, from 1 in every process. Machine code of two closures with the same name differs
only by these numbers, so if cached code of two processes is loaded, a function can call the wrong closure. Here every
process starts numbering at a random number.
"""

from __future__ import annotations

import functools
import glob
import itertools
import logging
import os
import pickle
import re
import secrets
import uuid
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numba
from numba.core import bytecode, caching, sigutils
from numba.core.ccallback import CFunc

from lookahead.utils.cache_folders import temporary_folder
from lookahead.utils.locks import locked
from lookahead.utils.sources import source_files, sources_digest

_NO_FOLDER = "no locator available"  # in Numba's error message; the error has no special type
_COMPILED = re.compile(rb"numba|llvmlite|utils\.jit|ngram\.inlining")
_UNREADABLE = (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, ImportError, pickle.PickleError)
# Numba has few types.
_NumbasCache: Any = caching.FunctionCache
_NumbasFile: Any = caching.IndexDataCacheFile
_NumbasIdentity: Any = bytecode.FunctionIdentity
_log = logging.getLogger(__name__)
_REMEDY = "set NUMBA_CACHE_DIR to a folder that can be written"


def _number_apart() -> None:
    """Start Numba's numbering of compiled functions at a random number, different in every process."""
    _NumbasIdentity._unique_ids = itertools.count(secrets.randbits(63))


_number_apart()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_number_apart)


@functools.cache
def _stamp() -> tuple[str, bytes]:
    """The dependencies of compiled functions besides their own files: the release and all compiled sources."""
    release = ""
    with suppress(metadata.PackageNotFoundError):  # not installed, run from source
        release = metadata.version("lookahead-decoding")
    return release, sources_digest(compiled_files())


def compiled_files() -> list[Path]:
    """The source files of this package with compiled functions, or with code that is inlined into them."""
    return [path for path in source_files() if _COMPILED.search(path.read_bytes())]


class _CacheFile(_NumbasFile):  # type: ignore[misc]
    """The index of a function's compiled code, and the files with the code."""

    def __init__(self, folder: str, stem: str, stamp: object) -> None:
        super().__init__(folder, stem, stamp)
        self.folder, self.stem = Path(folder), stem

    def save(self, key: Any, data: Any) -> None:
        """Save code. If it cannot be written, every process compiles the function."""
        name = f"{self.stem}.{uuid.uuid4().hex}.nbc"
        try:
            with locked(self.folder / "index"):
                kept = self._load_index()
                self._save_data(name, data)
                kept[key] = name
                self._save_index(kept)
                for file in self.folder.glob(f"{glob.escape(self.stem)}.*.nbc"):
                    if file.name not in kept.values():  # outdated or replaced
                        file.unlink(missing_ok=True)
        except OSError as error:
            _log.info("the compiled code of %s is not kept: %s", self.stem, error)

    def load(self, key: Any) -> Any:
        """The saved code; None if there is none or it cannot be read, and the function will be compiled."""
        code = None
        with suppress(*_UNREADABLE):
            code = super().load(key)
        if code is None:
            _tell()
        return code

    def _load_index(self) -> dict[Any, str]:
        try:
            return dict(super()._load_index())
        except _UNREADABLE:
            return {}


@functools.cache
def _tell() -> None:
    """Say once per process that functions are being compiled."""
    _log.warning("compiling code for drafts and attention, once per installation and kind of model: up to a minute")


class _Cache(_NumbasCache):  # type: ignore[misc]
    """Numba's cache of a function, with a `_CacheFile`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        own = self._impl
        self._cache_file = _CacheFile(self.cache_path, own.filename_base, (own.locator.get_source_stamp(), _stamp()))


def _cache_of(function: Callable[..., Any]) -> Any:
    """The cache of a function; None if there is no folder for it.

    Numba looks for a writable folder: `NUMBA_CACHE_DIR`, `__pycache__` next to the source, and the user's cache folder.
    """
    try:
        return _Cache(function)
    except RuntimeError as error:
        if _NO_FOLDER not in str(error):
            raise
    folder = _temporary_cache()
    if folder is None:
        return None
    numba.config.CACHE_DIR = folder  # type: ignore[attr-defined]
    return _Cache(function)


def njit(**options: Any) -> Any:
    """`numba.njit` with a cache on disk."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher: Any = numba.njit(**options)(function)
        cache = _cache_of(function)
        if cache is not None:
            dispatcher._cache = cache
        return dispatcher

    return decorate


def cfunc(signature: Any, **options: Any) -> Any:
    """`numba.cfunc` with a cache on disk."""

    def decorate(function: Callable[..., Any]) -> Any:
        compiled: Any = CFunc(function, sigutils.normalize_signature(signature), locals={}, options=options)
        cache = _cache_of(function)
        if cache is not None:
            compiled._cache = cache
        compiled.compile()
        return compiled

    return decorate


@functools.cache
def _temporary_cache() -> str | None:
    """The folder of the temporary cache; None, with a warning, if there is none."""
    try:
        return str(temporary_folder("compiled functions", _REMEDY))
    except OSError as error:
        warnings.warn(
            f"compiled functions are not kept, so every process compiles them: {error}; {_REMEDY}", stacklevel=2
        )
        return None
