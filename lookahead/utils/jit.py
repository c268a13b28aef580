"""Numba's decorators for functions that are cached on disk, also where Numba finds no folder for its cache."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import numba
from numba.core import event

from lookahead.utils.cache_folders import temporary_folder

_NO_FOLDER = "no locator available"  # in Numba's error, which has no type of its own
_log = logging.getLogger(__name__)
_REMEDY = "set NUMBA_CACHE_DIR to a folder that can be written"


def _with_any_cache(decorator: Callable[..., Any]) -> Any:
    """A decorator that goes on with a temporary cache, and without one at last, where Numba's own raises.

    Numba looks for a folder that can be written: the one that `NUMBA_CACHE_DIR` names, `__pycache__` beside the source,
    and the cache folder of the user.
    """

    @functools.wraps(decorator)
    def decorate(*arguments: Any, **options: Any) -> Any:
        def compile(function: Any) -> Any:
            try:
                return decorator(*arguments, **options)(function)
            except RuntimeError as error:
                if _NO_FOLDER not in str(error):
                    raise
            folder = _temporary_cache()
            if folder is not None:
                numba.config.CACHE_DIR = folder  # type: ignore[attr-defined]
            return decorator(*arguments, **{**options, "cache": folder is not None})(function)

        return compile

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


class _FirstCompilation(event.Listener):
    """Says in the log, once in a process, that functions of this package are compiled, which takes a while."""

    is_said = False

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        if not self.is_said and function.__module__.startswith("lookahead."):
            self.is_said = True
            _log.info("compiling what drafts and attends, once after an install: about 20 s")

    def on_end(self, event: Any) -> None:
        pass


_first = _FirstCompilation()
event.register("numba:compile", _first)
njit: Any = _with_any_cache(numba.njit)
cfunc: Any = _with_any_cache(numba.cfunc)
