"""Reading and counting the documents of inputs of any format."""

from __future__ import annotations

import codecs
import io
import logging
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

from lookahead.documents.byte_sources import MEGABYTE, bounded_lines, is_url, read_bounded, read_errors, too_long
from lookahead.documents.decode_text import Document, Reject, checked, decode_bytes
from lookahead.documents.inputs import PACKAGES, Input, load_packages
from lookahead.documents.table_files import read_csv, read_json_lines, read_parquet
from lookahead.errors import DocumentError, one_line

DEFAULT_LIMIT = 64 * MEGABYTE
_OLD_WORD = b"\xd0\xcf\x11\xe0"  # begins .doc files, and .docx files with a password
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"  # repeats the text before it
_BREAKS = {f"{_WORD}p": "\n\n", f"{_WORD}br": "\n", f"{_WORD}cr": "\n", f"{_WORD}tab": "\t"}


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
    try:
        for source in inputs:
            is_file = os.path.isfile(source.path)
            if source.field is None:
                total += 1
            elif source.format == "parquet" and is_file:
                _, parquet = load_packages("parquet", source.path)
                total += parquet.ParquetFile(source.path).metadata.num_rows
            elif source.format == "jsonl" and is_file:
                with open(source.path, "rb") as file:
                    lines = bounded_lines(file, MEGABYTE)  # a line may be longer than the memory
                    total += sum(1 for _, line in lines if line is None or line.strip())
            else:
                return None
    except (OSError, ValueError):
        return None
    return total


def _html_text(data: bytes, path: str, limit: int) -> str:
    """The main text of a web page without menus, advertisements and footers. The page declares its own encoding."""
    (trafilatura,) = load_packages("html", path)
    with read_errors(path, "HTML"):
        text = trafilatura.extract(data, include_comments=False, favor_recall=True)
    if not text:
        raise DocumentError(f"{path}: no main text found in this page")
    return str(text)


def _pdf_text(data: bytes, path: str, limit: int) -> str:
    """The text of all pages of a PDF file, of at most `limit` bytes."""
    (pypdf,) = load_packages("pdf", path)
    pages: list[str] = []
    size = 0
    log = logging.getLogger("pypdf")  # it says something about every damaged page
    with read_errors(path, "PDF"):
        level = log.level
        log.setLevel(logging.CRITICAL)
        try:
            reader = pypdf.PdfReader(io.BytesIO(data))
            if reader.is_encrypted and not reader.decrypt(""):
                raise DocumentError(f"{path}: this PDF needs a password; save a copy without one")
            for page in reader.pages:
                pages.append(page.extract_text().strip())
                size += len(pages[-1].encode("utf-8", "surrogatepass"))
                if size > limit:
                    raise DocumentError(too_long(path, limit))
        except pypdf.errors.DependencyError as error:
            reason = one_line(error)
            raise DocumentError(f"{path}: this PDF is encrypted; save a copy that is not ({reason})") from error
        finally:
            log.setLevel(level)
    text = "\n\n".join(page for page in pages if page)
    if not text:
        what = f"its {len(pages)} pages hold" if len(pages) != 1 else "its page holds"
        raise DocumentError(f"{path}: {what} no text; scanned pages need OCR first, for example with ocrmypdf")
    return text


def _docx_text(data: bytes, path: str, limit: int) -> str:
    """The text of a Word file with its tables, without headers and footers; it may unpack to `limit` bytes."""
    (docx,) = load_packages("docx", path)
    if data.startswith(_OLD_WORD):
        raise DocumentError(f"{path}: an old or encrypted Word file; save it as .docx without a password")
    with read_errors(path, "a Word file"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:  # an entry never yields more bytes than it declares
            if sum(entry.file_size for entry in archive.infolist()) > limit:
                raise DocumentError(too_long(f"{path}, unpacked", limit))
        body = docx.Document(io.BytesIO(data)).element.body
    text = "".join(_body_text(body)).strip()
    if not text:
        raise DocumentError(f"{path}: this Word file holds no text")
    return text


def _body_text(body: Any) -> Iterator[str]:
    """The text of a Word document's body without tracked deletions."""
    for fallback in list(body.iter(_FALLBACK)):
        fallback.getparent().remove(fallback)
    for element in body.iter():
        is_tab_stop = element.tag == f"{_WORD}tab" and element.getparent().tag != f"{_WORD}r"
        if element.tag == f"{_WORD}t":
            yield element.text or ""
        elif element.tag in _BREAKS and not is_tab_stop:
            yield _BREAKS[element.tag]


_EXTRACTORS = {"html": _html_text, "pdf": _pdf_text, "docx": _docx_text}
_TABLES = {"jsonl": read_json_lines, "csv": read_csv, "tsv": read_csv, "parquet": read_parquet}
