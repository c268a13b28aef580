"""Options of a command that are kept in a file of TOML: `--save` writes it, `-t` takes them."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import typer

from lookahead.cli.habits import kept, kept_folder
from lookahead.cli.options import option
from lookahead.cli.terminal import show_line, usage_errors
from lookahead.config import refuse_removed
from lookahead.errors import ConfigError
from lookahead.utils.atomic import read_regular, write_atomically

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NAME = re.compile(r"\w[\w.-]*")
_OF_ONE_CALL = {"prompt", "prompt_text", "save", "template"}


def _file_of(name: str) -> Path:
    if name.endswith(".toml"):
        return Path(name)
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"options are kept in a file *.toml, or under a name of letters, digits, . _ -, got {name!r}")
    return kept("options") / f"{name}.toml"


def _keys_of(context: typer.Context) -> dict[str, Any]:
    """The parameters that a file may hold, by their keys: their longest flag without dashes."""
    shown = [option for option in context.command.params if option.name not in _OF_ONE_CALL]
    return {max(option.opts, key=len).lstrip("-").replace("_", "-"): option for option in shown}


def _as_typed(value: Any, parameter: Any) -> Any:
    """A value of TOML as the words of a command line, which are checked as such."""
    words = value if isinstance(value, list) else [value]
    words = [str(word).lower() if isinstance(word, bool) else str(word) for word in words]
    return words if parameter.nargs == -1 or getattr(parameter, "multiple", False) else " ".join(words)


def _take_options(context: typer.Context, name: str | None) -> str | None:
    # A name that is no text is refused as that of any other option.
    if name is not None and name == name.encode(errors="ignore").decode():
        with usage_errors():
            context.default_map = _read(_file_of(name), name, context)
    return name


def _read(file: Path, name: str, context: typer.Context) -> dict[str, Any]:
    """The options in a file, by parameters; ConfigError with the file and what is wrong in it."""
    try:
        table = tomllib.loads(read_regular(file).decode("utf-8"))
    except FileNotFoundError as error:
        names = ", ".join(sorted(path.stem for path in kept("options").glob("*.toml")))
        raise ConfigError(f"no options are kept as {name!r}; the names that are kept: {names or 'none'}") from error
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error
    refuse_removed((key.replace("-", "_") for key in table), f"{file}: ")
    keys, values = _keys_of(context), {key.replace("_", "-"): value for key, value in table.items()}
    if unknown := sorted(values.keys() - keys.keys()):
        told = f"'lookahead {context.info_name}' has no {', '.join(unknown)}; its options are {', '.join(keys)}"
        raise ConfigError(f"{file}: {told}")
    if len(values) < len(table):
        raise ConfigError(f"{file}: an option is given twice, with - and with _")
    return {keys[key].name: _as_typed(value, keys[key]) for key, value in values.items()}


def save_options(context: typer.Context, name: str) -> None:
    """Keep the options that a command was called with, those of a file that it took among them."""
    file, lines = _file_of(name), ""
    if file.parent == kept("options"):
        kept_folder("options")
    for key, parameter in _keys_of(context).items():
        source, value = context.get_parameter_source(parameter.name), context.params[parameter.name]
        if source is not None and source.name != "DEFAULT" and value is not None:
            lines += f"{key} = {json.dumps(value, ensure_ascii=False, default=str)}\n"
    # JSON values are TOML values, except for the delete character and lone surrogates in strings.
    write_atomically(file, lines.replace("\x7f", "\\u007f").encode("utf-8", "replace").decode())
    show_line(sys.stderr, f"-t {name} takes these options from {file}")


@dataclass(frozen=True, kw_only=True)
class KeptOptions:
    panel: ClassVar[str] = "Options"

    template: str | None = option(
        None, "Take the options that --save keeps under this name, or those of a file of TOML.", "--template", "-t",
        metavar="NAME|FILE.toml", callback=_take_options, is_eager=True,
    )  # fmt: skip
    save: str | None = option(
        None, "Keep these options under a name or in a file, and do nothing else.", metavar="NAME|FILE.toml"
    )
