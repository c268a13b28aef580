"""Plain text to train heads with: files, folders and xz archives of them."""

from __future__ import annotations

import io
import lzma
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lookahead.errors import TrainingError
from lookahead.utils.atomic import parse_json

TEXT_FIELDS = ("document", "text")
"""JSON fields that hold a document, in the order they are looked for."""

READABLE = (".txt", ".jsonl", ".txt.xz", ".jsonl.xz", ".tar.xz")
"""File names the reader understands; others inside a folder are passed over."""


@dataclass(frozen=True, slots=True)
class Document:
    """One whole work: a novel, a story, an article."""

    name: str  # where it came from, unique within a corpus
    text: str  # with every whitespace run collapsed by `clean`


def clean(text: str) -> str:
    r"""Collapse every run of whitespace, hard line breaks included, to one space.

    The chat template of the tests' summarizer does the same.

    >>> clean("  a hard\nline  break ")
    'a hard line break'
    """
    return " ".join(text.replace("\ufeff", "").split())


def read_documents(paths: Sequence[Path], fields: Sequence[str] = TEXT_FIELDS) -> list[Document]:
    """Read every document of files (`READABLE`) and of folders at any depth, sorted by name.

    The first of the JSON fields that is present holds a document.
    """
    documents: list[Document] = []
    for path in paths:
        if not path.exists():
            raise TrainingError(f"no such file or folder: {path}")
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and file.name.endswith(READABLE):
                documents.extend(_read_file(file, fields))
            elif not path.is_dir():
                raise TrainingError(f"{file} is none of {', '.join(READABLE)}")
    documents = [document for document in documents if document.text]
    if not documents:
        raise TrainingError(f"no text found under {', '.join(str(path) for path in paths)}")
    return sorted(documents, key=lambda document: document.name)


def _read_file(file: Path, fields: Sequence[str]) -> Iterator[Document]:
    """Yield the documents of one file, whatever its wrapping."""
    try:
        raw = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
        name = file.name.removesuffix(".xz")
        if name.endswith(".tar"):
            yield from _read_tar(raw, name, fields)
        else:
            yield from _read_member(raw, name, fields)
    except (OSError, lzma.LZMAError, tarfile.TarError) as error:
        raise TrainingError(f"cannot read {file}: {error}") from error


def _read_tar(raw: bytes, archive: str, fields: Sequence[str]) -> Iterator[Document]:
    """Yield the documents of every .txt and .jsonl member of a tar archive."""
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.name.endswith((".txt", ".jsonl")) else None
            if stream is not None:
                yield from _read_member(stream.read(), f"{archive}/{member.name}", fields)


def _read_member(raw: bytes, name: str, fields: Sequence[str]) -> Iterator[Document]:
    """Yield the documents of one uncompressed .txt or .jsonl."""
    text = raw.decode("utf-8", errors="replace")
    if not name.endswith(".jsonl"):
        yield Document(name, clean(text))
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise TrainingError(f"{name}, line {number} is not JSON: {error}") from error
        found = next((row[field] for field in fields if isinstance(row, dict) and field in row), None)
        if isinstance(found, str):
            yield Document(f"{name}:{number:06d}", clean(found))
