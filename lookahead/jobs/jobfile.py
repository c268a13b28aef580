"""A job as a TOML file: the options of the command line by their names."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lookahead.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SIMPLE = (str, bool, int, float)


def read_job_file(path: Path, names: Mapping[str, str]) -> dict[str, Any]:
    """The options that a job file sets.

    Args:
        path: The file. `max-new-tokens = 64` and `max_new_tokens = 64` say the same.
        names: The options there are, and what each is called here.

    Returns:
        The values by those latter names.

    Raises:
        ConfigError: The file cannot be read, is no TOML, or holds an option there is not, or a value that is none.
    """
    try:
        with open(path, "rb") as file:
            settings = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"job {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"job {path}: not valid TOML: {error}") from error
    values: dict[str, Any] = {}
    for key, value in settings.items():
        name = key.replace("_", "-")
        if name not in names:
            raise ConfigError(f"job {path}: no option {key!r}; the options are {', '.join(names)}")
        if name == "inputs":
            value = [value] if isinstance(value, str) else value
            is_right, expected = _are_strings(value), "a list of strings"
        else:
            is_right, expected = isinstance(value, _SIMPLE), "a string, a number, true or false"
        if not is_right:
            raise ConfigError(f"job {path}: {key} must be {expected}, got {value!r}")
        values[names[name]] = value
    return values


def _are_strings(value: Any) -> bool:
    """Whether a value is a list of strings."""
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def to_toml(settings: Mapping[str, Any]) -> str:
    """Options as a job file that says the same; those that are `None` are left out."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in settings.items() if value is not None)


def _value(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, int | float):
        return repr(value)
    # A string of JSON is one of TOML, but for the delete character and halves of surrogate pairs.
    text = str(value).encode("utf-8", "replace").decode()
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
