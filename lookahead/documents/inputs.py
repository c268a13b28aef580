"""The files in the arguments of a command: inputs to read, and outputs to write."""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from lookahead.documents.byte_sources import STDIN, ask, file_system, is_url
from lookahead.errors import ConfigError, DocumentError
from lookahead.utils.atomic import check_folder

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
# Optional packages of a format: the error message, the extra that installs them, and their modules.
PACKAGES: dict[Format, tuple[str, str, tuple[str, ...]]] = {
    "html": ("HTML needs trafilatura", "html", ("trafilatura",)),
    "pdf": ("PDF needs pypdf", "documents", ("pypdf",)),
    "docx": ("Word files need python-docx", "documents", ("docx",)),
    "parquet": ("Parquet needs pyarrow", "tables", ("pyarrow", "pyarrow.parquet")),
}
_ONE_TEXT = ("text", "html", "pdf", "docx")
_MANIFEST = ".manifest.json"  # of a job, next to its results
# Suffixes of all files that a job writes.
_OF_JOBS = ("", _MANIFEST, ".rejects.jsonl", ".running.jsonl", ".report.html", ".recovered.jsonl")


@dataclass(frozen=True, slots=True)
class Input:
    """A file, a URL, or standard input."""

    path: str  # as the user wrote it; `"-"` is standard input
    field: str | None = None  # the field with the document in each line or row; `None`: the file is one document
    format: Format = "text"
    id_field: str | None = None  # the field that must hold an id; `None`: the field `id` may hold one
    prediction_field: str | None = None  # the field that may hold a prediction of the output


def find_inputs(
    arguments: Sequence[str],
    field: str | None = None,
    id_field: str | None = None,
    *,
    prediction_field: str | None = None,
    leave_out: Collection[Path] = (),
    on_skip: Skip = lambda words: None,
) -> list[Input]:
    """Resolve paths, folders, URLs, patterns and `-` to inputs, each path once, in the order given.

    A folder stands for all files of known suffixes in it and its subfolders. `**` in a pattern matches folders of any
    depth. The format follows from the suffix; unknown suffixes mean text. Standard input is JSON lines if a field is
    given.

    Args:
        arguments: Paths, folders, URLs, patterns, or `-`.
        field: The field or column with the document; the default is `text`.
        id_field: The field or column that must hold an id; if None, the field `id` may hold one.
        prediction_field: The field or column that may hold a prediction of the output.
        leave_out: Files in folders that are not read, since a job writes them.
        on_skip: Receives the path of every other skipped file in a folder, except hidden files, with the reason.

    Raises:
        DocumentError: A path does not exist, a folder or pattern has no file to read, a field is given but no input has
            fields, or the reader of a format is not installed.
    """
    if "" in (field, id_field, prediction_field):
        raise DocumentError("a field or column must have a name, got ''")
    without = {os.path.realpath(path) for path in leave_out}
    paths = dict.fromkeys(path for argument in arguments for path in _expand(argument, without, on_skip))
    asked = field or id_field or prediction_field
    inputs = []
    for path in paths:
        suffix = _suffix(path.split("?")[0] if is_url(path) else path)
        format: Format = "jsonl" if path == STDIN and asked else SUFFIXES.get(suffix, "text")
        is_table = format not in _ONE_TEXT
        if format in PACKAGES:
            load_packages(format, path)
        named = (field or DEFAULT_FIELD, format, id_field, prediction_field) if is_table else (None, format)
        inputs.append(Input(path, *named))
    if asked and all(source.field is None for source in inputs):
        raise DocumentError(
            f"field {asked!r} is read from JSON lines, CSV or Parquet (.jsonl, .ndjson, .csv, .tsv, .parquet or -), "
            "and no input is any"
        )
    return inputs


def load_packages(format: Format, path: str) -> tuple[Any, ...]:
    """The modules that read a format of `PACKAGES`; DocumentError with the install command if one is missing."""
    needs, extra, modules = PACKAGES[format]
    try:
        return tuple(map(import_module, modules))
    except ImportError as error:
        raise DocumentError(f"{path}: {needs}: pip install 'lookahead-decoding[{extra}]'") from error


def check_output(path: Path, inputs: Sequence[Input], *, overwrite: bool) -> None:
    """Raise a ConfigError, before any work, for an output that cannot be written or would overwrite a file."""
    for source in inputs:
        local = source.path.removeprefix("file://")
        if source.path != STDIN and os.path.exists(local) and path.exists() and path.samefile(local):
            raise ConfigError(f"output {path} is an input as well")
    if path.is_dir():
        raise ConfigError(f"output {path} is a directory")
    if path.is_file() and not overwrite:
        raise ConfigError(f"output {path} exists; pass --overwrite to replace it")
    try:
        if not path.exists():
            check_folder(path.parent)
        elif path.is_file():
            with path.open("ab"):
                pass
        elif not os.access(path, os.W_OK):  # to open a pipe would wait for its reader
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(f"output {path} cannot be written: {error.strerror}") from error


def _expand(argument: str, without: Collection[str], on_skip: Skip) -> list[str]:
    if not argument:
        raise DocumentError("an input is an empty string; name files, folders or URLs, or - for stdin")
    if argument == STDIN:
        return [argument]
    if is_url(argument):
        return _expand_url(argument, on_skip)
    path, hint = Path(argument), ""
    try:
        if path.is_dir():
            return _documents_of(argument, list(_walk(path, on_skip)), without, on_skip)
        if path.exists():
            return [argument]
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            argument, hint = f"{argument[:40]!r}...", "; a text itself is read from stdin with -"
        raise DocumentError(f"{argument}: {error.strerror}{hint}") from error
    if not glob.has_magic(argument):
        raise DocumentError(f"{argument}: no such file")
    matches = sorted(match for match in glob.glob(argument, recursive=True) if not Path(match).is_dir())
    if not matches:
        raise DocumentError(f"{argument}: no file matches this pattern")
    return matches


def _walk(folder: Path, on_skip: Skip) -> Iterator[str]:
    """The regular files in a folder and below, in order, without hidden files and folders."""

    def refuse(error: OSError) -> None:
        if os.path.samefile(error.filename, folder):
            raise DocumentError(f"{folder}: {error.strerror}") from error
        on_skip(f"{error.filename}: {error.strerror}")

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if os.path.islink(path := os.path.normpath(os.path.join(place, name))):
                on_skip(f"{path}: links to folders are not followed")
        for name in sorted(name for name in names if not name.startswith(".")):
            path = os.path.normpath(os.path.join(place, name))
            if os.path.isfile(path):
                yield path
            elif _suffix(name) in SUFFIXES:  # reading a pipe would block
                on_skip(f"{path}: not a regular file, or a broken link")


def _expand_url(url: str, on_skip: Skip) -> list[str]:
    """The URL itself, or the URLs of the files of a folder or pattern if its file system supports them."""
    system, path = file_system(url)
    if url.lower().startswith(("http://", "https://")):
        return [url]  # HTTP has neither folders nor patterns, and a `?` begins a query
    if glob.has_magic(path):
        names = ask(url, lambda: sorted(name for name in system.glob(path) if not system.isdir(name)))
        if not names:
            raise DocumentError(f"{url}: no file matches this pattern")
        return [system.unstrip_protocol(name) for name in names]
    if not ask(url, lambda: system.isdir(path)):
        return [url]  # if it does not exist, reading it fails
    names = ask(url, lambda: sorted(system.find(path)))
    return _documents_of(url, [system.unstrip_protocol(name) for name in names], (), on_skip)


def _documents_of(folder: str, names: Sequence[str], without: Collection[str], on_skip: Skip) -> list[str]:
    """The files of a folder that hold documents, without the files that a job wrote there."""
    jobs = {name.removesuffix(_MANIFEST) for name in names if name.endswith(_MANIFEST)}
    of_jobs = {f"{results}{suffix}" for results in jobs for suffix in _OF_JOBS}
    documents = []
    for name in names:
        is_hidden = name.rsplit("/", 1)[-1].startswith(".")
        if is_hidden or name in of_jobs or (without and os.path.realpath(name) in without):
            continue
        if _suffix(name) in SUFFIXES:
            documents.append(name)
        else:
            suffix = os.path.splitext(name)[1]
            on_skip(f"{name}: files {f'with suffix {suffix}' if suffix else 'without a suffix'} are not read")
    if not documents:
        raise DocumentError(
            f"{folder}: no file to read in this folder; known suffixes are {' '.join(SUFFIXES)}, and files "
            "written by a job are left out"
        )
    return documents


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()
