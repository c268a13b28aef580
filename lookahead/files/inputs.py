"""Which files an invocation names."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lookahead.errors import DocumentError

STDIN = "-"
DEFAULT_FIELD = "text"
JSONL_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Input:
    """One file, or standard input.

    Attributes:
        path: The path as the user wrote it; `"-"` is standard input.
        field: The field of each JSON line that holds the document; `None` where the whole file is one document.
    """

    path: str
    field: str | None = None

    @property
    def is_stdin(self) -> bool:
        """Whether this is standard input."""
        return self.path == STDIN


def find_inputs(arguments: Sequence[str], field: str | None = None) -> list[Input]:
    """Resolve paths, patterns and `-` to inputs, each path once, in the order given.

    Args:
        arguments: Paths of files, patterns such as `"notes/*.md"` (`**` reaches into folders; folders that match
            are passed over), or `"-"` for standard input.
        field: The field that holds the document in JSON lines; `"text"` where `None`. Files that end in `.jsonl`
            or `.ndjson` are JSON lines, and standard input is where `field` is given.

    Raises:
        DocumentError: A path does not exist or is a directory, a pattern matches no file, or `field` is given
            and no input is JSON lines.
    """
    paths = dict.fromkeys(path for argument in arguments for path in _expand(argument))
    inputs = [Input(path, _field_of(path, field)) for path in paths]
    if field is not None and all(source.field is None for source in inputs):
        raise DocumentError(f"field {field!r} is read from JSON lines (.jsonl, .ndjson or -), and no input is any")
    return inputs


def _field_of(path: str, field: str | None) -> str | None:
    """The field to read from `path`, `None` where it is text."""
    if path == STDIN:
        return field
    return (field or DEFAULT_FIELD) if path.lower().endswith(JSONL_SUFFIXES) else None


def _expand(argument: str) -> list[str]:
    """The files that one argument names."""
    if argument == STDIN:
        return [argument]
    path = Path(argument)
    try:
        if path.is_dir():
            raise DocumentError(f"{argument} is a directory; name its files, for example '{path / '*.txt'}'")
        if path.exists():
            return [argument]
    except OSError as error:  # above all the text itself, given in place of a file
        raise DocumentError(
            f"{argument[:40]!r}...: {error.strerror}; a text itself is read from stdin with -"
        ) from error
    if not glob.has_magic(argument):
        raise DocumentError(f"{argument}: no such file")
    matches = sorted(match for match in glob.glob(argument, recursive=True) if not Path(match).is_dir())
    if not matches:
        raise DocumentError(f"{argument}: no file matches this pattern")
    return matches
