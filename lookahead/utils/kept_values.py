"""Small results that are cached for later processes: JSON files of values by name, in the cache folder.

A file with other content is ignored and rewritten. If the folder cannot be written, every process computes its own
results.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from platformdirs import user_cache_path

from lookahead.utils.atomic import read_json, write_atomically
from lookahead.utils.locks import locked

T = TypeVar("T")
Parse = Callable[[Any], T]
"""Converts a JSON value to a result; KeyError, TypeError or ValueError if it is invalid."""

_NOT_SUCH = (KeyError, TypeError, ValueError)
_log = logging.getLogger(__name__)


def truth(value: Any) -> bool:
    """Parse a boolean result; TypeError for any other value."""
    if not isinstance(value, bool):
        raise TypeError(f"it must be true or false, got {value!r}")
    return value


def kept_file(kind: str, name: str) -> Path:
    """The cache file `name` of a kind of results."""
    return user_cache_path("lookahead", appauthor=False) / kind / f"{name}.json"


def kept(file: Path, name: str, parse: Parse[T], make: Callable[[], T]) -> T:
    """The cached result of a name; if there is none, it is made and cached."""
    value = find_kept(file, name, parse)
    return keep(file, name, make(), parse) if value is None else value


def find_kept(file: Path, name: str, parse: Parse[T]) -> T | None:
    """The cached result of a name; None if there is none."""
    try:
        return _parsed(_read(file), name, parse)
    except OSError:
        return None


def keep(file: Path, name: str, result: T, parse: Parse[T]) -> T:
    """Cache a result, a JSON type or a dataclass. Returns it, or the result that another process cached first."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file):
            values = _read(file)
            if (first := _parsed(values, name, parse)) is not None:
                return first
            write_atomically(file, json.dumps({"values": {**values, name: result}}, indent=1, default=asdict))
    except OSError as error:
        _log.info("%s of %s is not kept: %s", name, file, error)
    return result


def _read(file: Path) -> dict[str, Any]:
    """The values in a file; empty if the file is missing or has other content."""
    with suppress(FileNotFoundError, *_NOT_SUCH):
        return {str(name): value for name, value in dict(read_json(file)["values"]).items()}
    return {}


def _parsed(values: dict[str, Any], name: str, parse: Parse[T]) -> T | None:
    with suppress(*_NOT_SUCH):
        return parse(values[name])
    return None
