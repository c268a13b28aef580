"""Typer commands from functions of one options dataclass."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from itertools import takewhile
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from lookahead.cli.option_files import save_options
from lookahead.cli.options import options_of
from lookahead.cli.terminal import usage_errors
from lookahead.config import refuse_removed
from lookahead.errors import ConfigError

REMOVED_COMMANDS = {
    "calibrate": "commands that decode measure the costs of drafts at the first use of a model, and learn on",
    **dict.fromkeys(
        ("pool verify", "memory verify"),
        "'pool info' and 'memory info' check every byte, and with --model whether the file fits",
    ),
    "pick-draft": "'lookahead bench' measures heads and 'lookahead generate --stats' a draft model; "
    "run them with and without --heads DIR or --draft-model MODEL",
}
"""Commands removed since the last release, with the reason and what to do; each is refused by name for one release."""
_FILES = ("FILE", "FILE.lkm", "FILES", "DIR", "INPUTS")  # metavars of file names that are not of type `Path`


def _parameters_of(options: type) -> list[inspect.Parameter]:
    hints, parameters = get_type_hints(options), []
    for option, owner in options_of(options):
        details = dict(option.metadata)
        flags = details.pop("flags")
        if hints[option.name] is bool and not flags:
            flags = (f"--{option.name.replace('_', '-')}",)  # without --no-...
        if details.pop("argument", False):
            shown: Any = typer.Argument(**details)
        else:
            shown = typer.Option(*flags, rich_help_panel=vars(owner).get("panel"), **details)
        default = inspect.Parameter.empty if option.default is MISSING else option.default
        kind, annotation = inspect.Parameter.KEYWORD_ONLY, Annotated[hints[option.name], shown]
        parameters.append(inspect.Parameter(option.name, kind, default=default, annotation=annotation))
    return parameters


def _unwrapped(text: str) -> str:
    """A docstring with each paragraph on one line, so that a terminal wraps it; indented lines, the examples, stay."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        paragraph if paragraph.startswith(" ") else paragraph.replace("\n", " ") for paragraph in paragraphs
    )


def _check_texts(options: type, values: Mapping[str, Any]) -> None:
    """Refuse a text that the locale could not decode with a ConfigError; names of files may hold any bytes."""
    for option, _ in options_of(options):
        shown, value = option.metadata.get("metavar"), values[option.name]
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and shown not in _FILES and text != text.encode(errors="ignore").decode():
                flag = next(iter(option.metadata["flags"]), f"--{option.name.replace('_', '-')}")
                name, encoding = shown if option.metadata.get("argument") else flag, sys.getfilesystemencoding()
                remedy = "pass UTF-8" if encoding == "utf-8" else "set a UTF-8 locale such as C.UTF-8"
                told = f"argument {name} is not valid text in the locale's encoding ({encoding})"
                raise ConfigError(f"{told}: got {text!a:.60}; {remedy}")


class _Plain:
    """Shows flags without a type in the help, since they take no value, and wrong values in the errors."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # a mixin
        for parameter in parameters:
            if getattr(parameter, "is_bool_flag", False):
                parameter.metavar = ""
        return parameters

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        names = (word[2:].partition("=")[0] for word in takewhile("--".__ne__, args) if word.startswith("--"))
        try:
            with usage_errors():  # of the help and the version too, which are printed here
                refuse_removed(name.replace("-", "_") for name in names)
                return super().parse_args(ctx, args)  # type: ignore[misc]
        except typer.BadParameter as error:
            for fault in getattr(error.__cause__, "errors", list)()[:1]:  # of pydantic, which newer versions use
                got = repr(fault["input"])
                error.message += "" if got in error.message else f", got {got}"
            raise
        except Exception as error:
            if near := getattr(error, "possibilities", None):  # an unknown option: the nearest first
                error.message += f"; did you mean {near[0]}?"  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]  # click shows all, sorted by the alphabet
            raise


class _Command(_Plain, TyperCommand):
    pass


class _Group(_Plain, TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = " ".join([*ctx.command_path.split()[1:], *args[:1]])
        with usage_errors():
            if name in REMOVED_COMMANDS:
                raise ConfigError(f"{name} was removed: {REMOVED_COMMANDS[name]}")
        return super().resolve_command(ctx, args)


class App(typer.Typer):
    """A Typer application whose commands take one options dataclass and print an error as one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=_Group, no_args_is_help=True, **settings)

    def add(self, function: Callable[[Any], None], options: type | None = None, **words: str) -> None:
        """Add a command: a function whose only parameter is its options dataclass, by default that of its annotation.

        The words replace their names in braces in its docstring.
        """
        options = options or next(hint for name, hint in get_type_hints(function).items() if name != "return")

        def run(ctx: typer.Context, **values: Any) -> None:
            with usage_errors(truncates="truncate" in values):
                _check_texts(options, values)
                chosen = options(**values)
                for check in ("check_place", "check_files"):
                    getattr(chosen, check, bool)()
                if values.get("save") is not None:
                    save_options(ctx, values["save"])
                else:
                    function(chosen)

        context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        run.__signature__ = inspect.Signature([context, *_parameters_of(options)])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        run.__doc__ = _unwrapped((function.__doc__ or "").format(**words) if words else function.__doc__ or "")
        self.command(function.__name__.replace("_", "-"), cls=_Command)(run)
