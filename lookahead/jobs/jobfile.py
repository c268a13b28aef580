"""A job as a TOML file: the options of the command line by their names."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookahead.errors import ConfigError
from lookahead.utils.atomic import read_regular

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# By the kind of an option: what it is called, and what is one. The command line reads text, and so a number is as good
# as its text: window = 7.
_KINDS: dict[type, tuple[str, tuple[type, ...]]] = {
    str: ("a string", (str, int)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    bool: ("true or false", (bool,)),
    list: ("a list of strings", (list,)),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What a job file may set.

    Attributes:
        key: What the option is called here.
        kind: Of its value: `str`, `int`, `float`, `bool`, or `list` for a list of strings.
        least: A number must be at least this; `None` for no bound.
        most: Likewise at most.
    """

    key: str
    kind: type
    least: float | None = None
    most: float | None = None

    @property
    def allowed(self) -> str:
        """What it must be, in words."""
        words = _KINDS[self.kind][0]
        if self.least is None:
            return words
        return f"{words} of at least {self.least}" if self.most is None else f"{words} from {self.least} to {self.most}"

    def allows(self, value: Any) -> bool:
        """Whether a value of TOML is one."""
        if type(value) not in _KINDS[self.kind][1]:  # for isinstance true is a number
            return False
        if self.kind is list:
            return all(isinstance(each, str) for each in value)
        is_enough = self.least is None or value >= self.least
        return bool(is_enough and (self.most is None or value <= self.most))


def read_job_file(path: Path, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The options that a job file sets.

    Args:
        path: The file. `max-new-tokens = 64` and `max_new_tokens = 64` say the same.
        settings: What it may set, by the names of the options.

    Returns:
        The values by the keys of their settings.

    Raises:
        ConfigError: The file cannot be read, is no TOML, or holds an option there is not or a wrong value.
    """
    try:
        table = tomllib.loads(read_regular(path).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"job {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"job {path}: not valid TOML: {error}") from error
    values: dict[str, Any] = {}
    for name, value in table.items():
        setting = settings.get(name.replace("_", "-"))
        if setting is None:
            raise ConfigError(f"job {path}: no option {name!r}; the options are {', '.join(settings)}")
        if setting.kind is list and isinstance(value, str):
            value = [value]
        if not setting.allows(value):
            received = str(value).lower() if isinstance(value, bool) else repr(value)
            raise ConfigError(f"job {path}: {name} must be {setting.allowed}, got {received}")
        values[setting.key] = value
    return values


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
