"""Which files an invocation names."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lookahead.documents.byte_sources import STDIN, file_system, in_time, is_url
from lookahead.errors import DocumentError

Format = Literal["text", "html", "pdf", "docx", "jsonl", "csv", "tsv", "parquet"]
Skip = Callable[[str], None]

DEFAULT_FIELD = "text"
DEFAULT_ID_FIELD = "id"
SUFFIXES: dict[str, Format] = {
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".rst"), "text"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    ".pdf": "pdf",
    ".docx": "docx",
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_ONE_TEXT = ("text", "html", "pdf", "docx")
_MANIFEST = ".manifest.json"  # beside the results of a job, by their name
_OF_JOBS = ("", _MANIFEST, ".rejects.jsonl", ".running.jsonl", ".report.html")  # what else stands there by that name


@dataclass(frozen=True, slots=True)
class Input:
    """One file, URL, or standard input.

    Attributes:
        path: The path as the user wrote it; `"-"` is standard input.
        field: The field of each line or row that holds the document; `None` where the whole file is one document.
        format: What the file holds.
        id_field: The field of each line or row that must name the document; `None` where `id` names it if it does.
    """

    path: str
    field: str | None = None
    format: Format = "text"
    id_field: str | None = None

    @property
    def is_stdin(self) -> bool:
        """Whether this is standard input."""
        return self.path == STDIN

    @property
    def is_url(self) -> bool:
        """Whether this is to be read by fsspec."""
        return is_url(self.path)


def find_inputs(
    arguments: Sequence[str],
    field: str | None = None,
    id_field: str | None = None,
    *,
    leave_out: Collection[Path] = (),
    on_skip: Skip = lambda words: None,
) -> list[Input]:
    """Resolve paths, folders, URLs, patterns and `-` to inputs, each path once, in the order given.

    Args:
        arguments: Paths of files, folders, which stand for all files of known suffixes in them and below, patterns
            such as `"notes/*.md"` (`**` reaches into folders; folders that match are passed over), URLs of either
            kind, or `"-"` for standard input.
        field: The field that holds the document in a line or row; `"text"` where `None`. A file's suffix tells its
            format, what has no known one is text, and standard input is JSON lines where a field is given.
        id_field: The field that names the document.
        leave_out: Files that are not taken from a folder: what a job writes there.
        on_skip: Told of every other file of a folder that is not taken, hidden ones apart: its path, and why.

    Raises:
        DocumentError: A path does not exist, a folder or pattern holds no file to read, or a field is given and no
            input has fields.
    """
    without = {os.path.realpath(path) for path in leave_out}
    paths = dict.fromkeys(path for argument in arguments for path in _expand(argument, without, on_skip))
    has_field = field is not None or id_field is not None
    inputs = [_input(path, field, id_field, is_lines=has_field) for path in paths]
    if has_field and all(source.field is None for source in inputs):
        name = field if field is not None else id_field
        raise DocumentError(
            f"field {name!r} is read from JSON lines, CSV or Parquet (.jsonl, .ndjson, .csv, .tsv, .parquet or -), "
            "and no input is any"
        )
    return inputs


def _input(path: str, field: str | None, id_field: str | None, *, is_lines: bool) -> Input:
    """How one path is read."""
    if path == STDIN:
        format: Format = "jsonl" if is_lines else "text"
    else:
        format = SUFFIXES.get(os.path.splitext(path.split("?")[0] if is_url(path) else path)[1].lower(), "text")
    if format in _ONE_TEXT:
        return Input(path, None, format)
    return Input(path, field or DEFAULT_FIELD, format, id_field)


def _expand(argument: str, without: Collection[str], on_skip: Skip) -> list[str]:
    """The files that one argument names."""
    if not argument:
        raise DocumentError("an input is an empty string; name files, folders or URLs, or - for stdin")
    if argument == STDIN:
        return [argument]
    if is_url(argument):
        return _expand_url(argument, on_skip)
    path = Path(argument)
    try:
        if path.is_dir():
            return _some(argument, list(_walk(path, on_skip)), without, on_skip)
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


def _walk(folder: Path, on_skip: Skip) -> Iterator[str]:
    """The regular files in a folder and below, in order; hidden folders are passed over."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = os.path.normpath(os.path.join(place, name))
            if os.path.isfile(path):
                yield path
            elif _is_known(name):  # a pipe would be waited for
                on_skip(f"{path}: no regular file, or a link to nothing")


def _expand_url(url: str, on_skip: Skip) -> list[str]:
    """The files that a URL names: itself, or those of a folder or pattern where its system knows such."""
    system, path = file_system(url)
    if url.lower().startswith(("http://", "https://")):
        return [url]  # a server has neither folders nor patterns, and a `?` begins its query
    try:
        if glob.has_magic(path):
            found = [name for name in in_time(lambda: sorted(system.glob(path))) if not system.isdir(name)]
            if not found:
                raise DocumentError(f"{url}: no file matches this pattern")
        elif in_time(lambda: system.isdir(path)):
            names = in_time(lambda: sorted(system.find(path)))
            return _some(url, [system.unstrip_protocol(name) for name in names], (), on_skip)
        else:
            return [url]  # whether it can be read is told when it is
    except DocumentError:
        raise
    except Exception as error:  # drivers raise what they like: no network, no credentials
        message = " ".join(str(error).split()) or type(error).__name__
        raise DocumentError(f"{url}: cannot be read: {message}") from error
    return [system.unstrip_protocol(name) for name in found]


def _some(folder: str, names: Sequence[str], without: Collection[str], on_skip: Skip) -> list[str]:
    """The files of a folder that are documents, if there are any: not what a job wrote there, nor a page about it."""
    jobs = {name.removesuffix(_MANIFEST) for name in names if name.endswith(_MANIFEST)}
    of_jobs = {f"{results}{suffix}" for results in jobs for suffix in _OF_JOBS}
    others = [name for name in names if not (name in of_jobs or (without and os.path.realpath(name) in without))]
    known = [name for name in others if _is_known(name)]
    for name in others:
        if not _is_known(name) and not _is_hidden(name):
            suffix = os.path.splitext(name)[1]
            on_skip(f"{name}: files {f'of suffix {suffix}' if suffix else 'without a suffix'} are not read")
    if not known:
        raise DocumentError(
            f"{folder}: no file to read in this folder; known suffixes are {' '.join(SUFFIXES)}, and what a job wrote "
            "is left out"
        )
    return known


def _is_known(name: str) -> bool:
    """Whether a file of a folder is taken, by its name."""
    return not _is_hidden(name) and os.path.splitext(name)[1].lower() in SUFFIXES


def _is_hidden(name: str) -> bool:
    """Whether a file of a folder is hidden, by its name."""
    return name.rsplit("/", 1)[-1].startswith(".")
