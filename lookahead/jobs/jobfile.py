"""Job files: the options of `lookahead summarize` in TOML."""

from __future__ import annotations

import json
import sys
from dataclasses import Field
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from lookahead.errors import ConfigError
from lookahead.jobs.job_options import JobOptions, options_of
from lookahead.utils.atomic import read_regular

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# How errors name the type of an option, and the TOML types it accepts. Click converts a number to a string: window = 7.
_TYPES: dict[type, tuple[str, tuple[type, ...]]] = {
    str: ("a string", (str, int)),
    Path: ("a string", (str, int)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    bool: ("true or false", (bool,)),
    list: ("a list of strings", (list,)),
}


def read_job_file(path: Path) -> dict[str, Any]:
    """The options in a job file, by the fields of `JobOptions`; ConfigError with the file and what is wrong in it.

    `max-new-tokens = 64` and `max_new_tokens = 64` are the same.
    """
    try:
        table = tomllib.loads(read_regular(path).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"job {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"job {path}: not valid TOML: {error}") from error
    names, hints, values = _names(), get_type_hints(JobOptions), {}
    for name, value in table.items():
        option = names.get(name.replace("_", "-"))
        if option is None:
            raise ConfigError(f"job {path}: no option {name!r}; the options are {', '.join(names)}")
        if option.name in values:
            raise ConfigError(f"job {path}: {name} stands there twice, with - and with _")
        hint = hints[option.name]
        hint = next((each for each in get_args(hint) if each is not NoneType), hint)  # `int` of `int | None`
        kind = get_origin(hint) or hint
        if kind is list and isinstance(value, str):
            value = [value]
        least, most = option.metadata.get("min"), option.metadata.get("max")
        is_right = type(value) in _TYPES[kind][1]  # exactly, since bool is a subclass of int
        if is_right and kind is list:
            is_right = all(isinstance(each, str) for each in value)
        elif is_right and least is not None:
            is_right = least <= value and (most is None or value <= most)
        if not is_right:
            allowed = _TYPES[kind][0]
            if least is not None:
                allowed += f" of at least {least}" if most is None else f" from {least} to {most}"
            received = str(value).lower() if isinstance(value, bool) else repr(value)
            raise ConfigError(f"job {path}: {name} must be {allowed}, got {received}")
        values[option.name] = value
    return values


def to_toml(options: JobOptions) -> str:
    """All options as a job file, without those that are `None`."""
    values = {name: getattr(options, option.name) for name, option in _names().items()}
    set_values = ((name, value) for name, value in values.items() if value is not None)
    lines = "".join(f"{name} = {json.dumps(value, ensure_ascii=False, default=str)}\n" for name, value in set_values)
    # JSON values are TOML values, except for the delete character and lone surrogates in strings.
    return lines.replace("\x7f", "\\u007f").encode("utf-8", "replace").decode()


def _names() -> dict[str, Field[Any]]:
    """The options by their keys in a job file: the longest flag without dashes."""
    named = [(max(each.metadata["flags"] or (each.name,), key=len), each) for each, _ in options_of(JobOptions)]
    return {name.lstrip("-").replace("_", "-"): each for name, each in named}
