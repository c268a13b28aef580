"""Reading documents: which reader serves which input, and how many there are."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

from lookahead.documents.byte_sources import MEGABYTE, STDIN, bounded_lines, read_bounded
from lookahead.documents.decode_text import Document, Reject, checked, decode_bytes
from lookahead.documents.inputs import Input
from lookahead.errors import DocumentError, PromptError

DEFAULT_LIMIT = 64 * MEGABYTE


def read_documents(inputs: Sequence[Input], *, limit: int = DEFAULT_LIMIT) -> Iterator[Document | Reject]:
    """Read the documents of all inputs one at a time; one that cannot be read comes as a `Reject`.

    Args:
        inputs: Where they are.
        limit: Most bytes of a document, of the line or the file it is in; no more are read into memory.
    """
    for source in inputs:
        try:
            yield from _read(source, limit)
        except (DocumentError, OSError) as error:
            yield Reject(source.path, _describe(error, source.path))


def check_readers(inputs: Sequence[Input]) -> None:
    """Refuse inputs whose reader is not installed, before any work is done.

    Raises:
        DocumentError: With what to install.
    """
    formats = {source.format: source.path for source in inputs}
    if "parquet" in formats:
        from lookahead.documents.table_files import load_pyarrow

        load_pyarrow(formats["parquet"])
    if "html" in formats:
        from lookahead.documents.html import load_trafilatura

        load_trafilatura(formats["html"])
    if "pdf" in formats:
        from lookahead.documents.office import load_pypdf

        load_pypdf(formats["pdf"])
    if "docx" in formats:
        from lookahead.documents.office import load_docx

        load_docx(formats["docx"])


def read_prompt(argument: str) -> str:
    """The prompt an argument is, or that standard input holds where it is `-`.

    Raises:
        PromptError: It is empty.
        DocumentError: Standard input is no text.
    """
    prompt = decode_bytes(sys.stdin.buffer.read(), STDIN) if argument == STDIN else argument
    if not prompt:
        raise PromptError("the prompt is empty")
    return prompt


def count_documents(inputs: Sequence[Input]) -> int | None:
    """How many documents the inputs hold, or `None` where that is not told without reading them."""
    total = 0
    for source in inputs:
        if source.field is None:
            total += 1
            continue
        if source.format not in ("jsonl", "parquet") or not os.path.isfile(source.path):
            return None
        try:
            total += _count_rows(source)
        except (OSError, ValueError):
            return None
    return total


def _count_rows(source: Input) -> int:
    """Lines that are not blank, or rows."""
    if source.format == "parquet":
        from lookahead.documents.table_files import load_pyarrow

        _, parquet = load_pyarrow(source.path)
        return int(parquet.ParquetFile(source.path).metadata.num_rows)
    with open(source.path, "rb") as file:
        lines = bounded_lines(file, MEGABYTE)  # a line may be longer than the memory
        return sum(1 for _, line in lines if line is None or line.strip())


def _read(source: Input, limit: int) -> Iterator[Document | Reject]:
    """Read the documents of one input."""
    if source.field is None:
        data = read_bounded(source.path, limit)
        if source.format == "html":
            from lookahead.documents.html import main_text

            text = main_text(data, source.path)
        elif source.format in ("pdf", "docx"):
            from lookahead.documents.office import docx_text, pdf_text

            text = (pdf_text if source.format == "pdf" else docx_text)(data, source.path, limit)
        else:
            text = decode_bytes(data, source.path)
        yield Document(source.path, checked(text, source.path))
    elif source.format == "jsonl":
        from lookahead.documents.json_lines import read_lines

        yield from read_lines(source, source.field, limit)
    elif source.format == "parquet":
        from lookahead.documents.table_files import read_parquet

        yield from read_parquet(source, source.field, limit)
    else:
        from lookahead.documents.table_files import read_csv

        yield from read_csv(source, source.field, limit)


def _describe(error: Exception, path: str) -> str:
    """One line about an error; those of the system get the path in front."""
    return f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)
