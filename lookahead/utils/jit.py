"""Numba's decorators for functions whose compiled code is kept on disk, also where Numba finds no folder for it.

Numba numbers the files of a function, and writes its index of them without a lock. So of two processes that compile it
at once, for different types or with different parts, one can load the code of the other for its own. Here a file has a
name that no other has, and an index is changed under its lock. The code of parts in other files is compiled in, so that
an edit of any file with such code, or another release, makes all functions be compiled again.

Numba also numbers what it compiles, from 1 in every process, and the numbers are all that tells the machine code of
two closures of one name apart. Where code of two processes is loaded, one function then calls the part of another. So
here every process numbers from a place of its own.
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
import time
import uuid
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numba
from numba.core import bytecode, caching, event, sigutils
from numba.core.ccallback import CFunc

from lookahead.utils.cache_folders import temporary_folder
from lookahead.utils.locks import locked
from lookahead.utils.shipped import source_files, sources_digest

_NO_FOLDER = "no locator available"  # in Numba's error, which has no type of its own
_COMPILED = re.compile(rb"numba|llvmlite|utils\.jit|ngram\.inlining")
_UNREADABLE = (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, ImportError, pickle.PickleError)
# Numba has few types.
_NumbasCache: Any = caching.FunctionCache
_NumbasFile: Any = caching.IndexDataCacheFile
_NumbasIdentity: Any = bytecode.FunctionIdentity
_log = logging.getLogger(__name__)
_SILENT_S = 1.0  # compilation that takes less is not told
_REMEDY = "set NUMBA_CACHE_DIR to a folder that can be written"


def _number_apart() -> None:
    """Let Numba number what it compiles from a place that no other process has."""
    _NumbasIdentity._unique_ids = itertools.count(secrets.randbits(63))


_number_apart()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_number_apart)


@functools.cache
def _stamp() -> tuple[str, bytes]:
    """What compiled functions depend on beside their own files."""
    release = ""
    with suppress(metadata.PackageNotFoundError):  # it runs from its sources
        release = metadata.version("lookahead-decoding")
    return release, sources_digest(compiled_files())


def compiled_files() -> list[Path]:
    """The source files of this package that hold compiled functions, or parts of those of other files."""
    return [each for each in source_files() if _COMPILED.search(each.read_bytes())]


class _CacheFile(_NumbasFile):  # type: ignore[misc]
    """The index of the compiled code of a function, and the files with that code."""

    def __init__(self, folder: str, stem: str, stamp: object) -> None:
        super().__init__(folder, stem, stamp)
        self.folder, self.stem = Path(folder), stem

    def save(self, key: Any, data: Any) -> None:
        """Keep code. Where it cannot be written, every process compiles it."""
        name = f"{self.stem}.{uuid.uuid4().hex}.nbc"
        try:
            with locked(self.folder / "index"):
                kept = self._load_index()
                self._save_data(name, data)
                kept[key] = name
                self._save_index(kept)
                for file in self.folder.glob(f"{glob.escape(self.stem)}.*.nbc"):
                    if file.name not in kept.values():  # of other sources, or replaced
                        file.unlink(missing_ok=True)
        except OSError as error:
            _log.info("the compiled code of %s is not kept: %s", self.stem, error)

    def load(self, key: Any) -> Any:
        """The code that was kept; None if there is none, or it cannot be read."""
        try:
            return super().load(key)
        except _UNREADABLE:
            return None

    def _load_index(self) -> dict[Any, str]:
        try:
            return dict(super()._load_index())
        except _UNREADABLE:
            return {}


class _Cache(_NumbasCache):  # type: ignore[misc]
    """What Numba keeps of a function, in files of our own names."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        own = self._impl
        self._cache_file = _CacheFile(self.cache_path, own.filename_base, (own.locator.get_source_stamp(), _stamp()))


def _cache_of(function: Callable[..., Any]) -> Any:
    """The cache of a function; None where there is no folder for one.

    Numba looks for a folder that can be written: the one that `NUMBA_CACHE_DIR` names, `__pycache__` beside the source,
    and the cache folder of the user.
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


class _Compilation(event.Listener):
    """Says once in a process that functions of this package are compiled, where that takes more than a second."""

    tell: Callable[[str], object] = staticmethod(_log.warning)  # which Python shows on stderr; commands have their own
    _is_told, _depth, _began, _spent_s = False, 0, 0.0, 0.0

    def on_start(self, event: Any) -> None:
        if self._depth or event.data["dispatcher"].py_func.__module__.startswith("lookahead."):
            self._began = self._began if self._depth else time.perf_counter()
            self._depth += 1

    def on_end(self, event: Any) -> None:
        if not self._depth:
            return
        self._depth -= 1
        now = time.perf_counter()
        if not self._is_told and self._spent_s + now - self._began > _SILENT_S:
            self._is_told = True
            self.tell("compiling what drafts and attends, once after an install: about 20 s")
        if not self._depth:
            self._spent_s += now - self._began


compilation = _Compilation()
event.register("numba:compile", compilation)
