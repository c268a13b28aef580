"""Reading and counting the documents of inputs of any format."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator, Sequence

from lookahead.documents.byte_sources import MEGABYTE, bounded_lines, is_url, read_bounded
from lookahead.documents.decode_text import Document, Reject, checked, decode_bytes
from lookahead.documents.extract_text import docx_text, html_text, pdf_text
from lookahead.documents.inputs import PACKAGES, Input, load_packages
from lookahead.documents.table_files import read_csv, read_json_lines, read_parquet
from lookahead.errors import DocumentError

DEFAULT_LIMIT = 64 * MEGABYTE
_EXTRACTORS = {"html": html_text, "pdf": pdf_text, "docx": docx_text}
_TABLES = {"jsonl": read_json_lines, "csv": read_csv, "tsv": read_csv, "parquet": read_parquet}


def read_documents(inputs: Sequence[Input], *, limit: int = DEFAULT_LIMIT) -> Iterator[Document | Reject]:
    """Read the documents of all inputs one at a time; one that cannot be read becomes a `Reject`.

    `limit` is the most bytes of a document, which is a file, a line or a value. No more are read into memory.
    """
    for source in inputs:
        try:
            if source.field is None:
                data, format = read_bounded(source.path, limit), source.format
                if format == "text" and is_url(source.path):  # most web addresses have no suffix
                    begin = data[:1024].removeprefix(codecs.BOM_UTF8).lstrip().lower()
                    is_page = begin.startswith(b"<") and re.search(rb"<(!doctype )?html\b", begin)
                    format = "pdf" if begin.startswith(b"%pdf-") else "html" if is_page else "text"
                extract = _EXTRACTORS.get(format)
                text = decode_bytes(data, source.path) if extract is None else extract(data, source.path, limit)
                yield Document(source.path, checked(text, source.path))
                continue
            is_empty = True
            for document in _TABLES[source.format](source, source.field, limit):
                is_empty = False
                yield document
            if is_empty:
                raise DocumentError(f"{source.path}: no documents")
        except OSError as error:
            yield Reject(source.path, f"{source.path}: {error.strerror or error}")
        except DocumentError as error:
            yield Reject(source.path, str(error))


def check_readers(inputs: Sequence[Input]) -> None:
    """Refuse inputs whose reader is not installed with a DocumentError, before any work is done."""
    for format, path in {source.format: source.path for source in inputs}.items():
        if format in PACKAGES:
            load_packages(format, path)


def count_documents(inputs: Sequence[Input]) -> int | None:
    """The number of documents, or `None` where only reading the inputs would tell."""
    total = 0
    for source in inputs:
        if source.field is None:
            total += 1
        elif source.format not in ("jsonl", "parquet") or not os.path.isfile(source.path):
            return None
        else:
            try:
                if source.format == "parquet":
                    _, parquet = load_packages("parquet", source.path)
                    total += parquet.ParquetFile(source.path).metadata.num_rows
                    continue
                with open(source.path, "rb") as file:
                    lines = bounded_lines(file, MEGABYTE)  # a line may be longer than the memory
                    total += sum(1 for _, line in lines if line is None or line.strip())
            except (OSError, ValueError):
                return None
    return total
