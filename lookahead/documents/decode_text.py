"""Documents, and the extraction of text from files of any supported format."""

from __future__ import annotations

import codecs
import io
import logging
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lookahead.documents.byte_sources import is_url, read_errors, too_long
from lookahead.documents.inputs import Format, load_packages
from lookahead.errors import DocumentError, count, one_line

DocumentId = str | int

_BYTE_ORDER_MARKS = {  # UTF-32 first: its little-endian mark begins with the UTF-16 mark
    "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
_KNOWN_FORMATS = (
    (b"%PDF-", "a PDF file", "pdftotext"),
    (b"PK\x03\x04", "a zip, docx or epub file", "pandoc"),
    (b"\x1f\x8b", "a gzip file", "gunzip"),
)
_OLD_WORD = b"\xd0\xcf\x11\xe0"  # begins .doc files, and .docx files with a password
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"  # repeats the text before it
_BREAKS = {f"{_WORD}p": "\n\n", f"{_WORD}br": "\n", f"{_WORD}cr": "\n", f"{_WORD}tab": "\t"}


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its id.

    The id is the path of the file, or `"-"` for standard input. For a line or row it is the id field, or `path:line`.
    """

    id: DocumentId
    text: str  # not empty
    prediction: str | None = None  # a text that the output will largely repeat


@dataclass(frozen=True, slots=True)
class Reject:
    """A document that could not be read or used."""

    id: DocumentId
    error: str  # in one line
    document: Document | None = None  # if it could be read


def decode_bytes(data: bytes, name: str, start: int = 0) -> str:
    """Decode text in UTF-8, or in UTF-16 or UTF-32 with a byte order mark; `start` is its byte offset in the file.

    Raises:
        DocumentError: The bytes are not text. The message has the name of the file and the byte offset.
    """
    for magic, what, tool in _KNOWN_FORMATS:
        if data.startswith(magic):
            raise DocumentError(f"{name}: {what}, not text; extract its text first, for example with {tool}")
    encoding = encoding_of(data)
    if encoding == "utf-8" and b"\0" in data:
        raise DocumentError(f"{name}: a binary file, not text (a zero byte at byte offset {start + data.index(0)})")
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{name}: not {encoding.upper()} text: byte 0x{data[error.start]:02x} at byte offset "
            f"{start + error.start}; convert it first, for example with iconv -f latin1 -t utf-8"
        ) from error


def encoding_of(data: bytes) -> str:
    """The encoding of the byte order mark, else UTF-8."""
    return next((encoding for encoding, marks in _BYTE_ORDER_MARKS.items() if data.startswith(marks)), "utf-8")


def check_words(text: str, where: str = "") -> None:
    """Raise a DocumentError for a text without a letter or digit. The message begins with `where`."""
    if not text.strip():
        raise DocumentError(f"{where}the document is empty")
    if not any(map(str.isalnum, text)):
        size = count(len(text.strip()), "character")
        raise DocumentError(f"{where}the document holds {size} and no letter or digit")


def checked(text: str, place: str) -> str:
    """The text in valid Unicode, which every tokenizer can encode; DocumentError if it has no words (`check_words`)."""
    check_words(text, f"{place}: ")
    # JSON can hold halves of surrogate pairs. They are joined, or replaced if the other half is missing.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def text_of(data: bytes, path: str, format: Format, limit: int) -> str:
    """The text in the bytes of a text file, web page, PDF or Word file; DocumentError if it unpacks to over `limit`."""
    if format == "text" and is_url(path):  # most web addresses have no suffix
        begin = data[:1024].removeprefix(codecs.BOM_UTF8).lstrip().lower()
        is_page = begin.startswith(b"<") and re.search(rb"<(!doctype )?html\b", begin)
        format = "pdf" if begin.startswith(b"%pdf-") else "html" if is_page else "text"
    if format not in _EXTRACTORS:
        return decode_bytes(data, path)
    name, extract = _EXTRACTORS[format]
    (package,) = load_packages(format, path)
    with read_errors(path, name):
        return extract(package, data, path, limit)


def _html_text(trafilatura: Any, data: bytes, path: str, limit: int) -> str:
    """The main text of a web page without menus, advertisements and footers. The encoding is declared in the page."""
    text: str | None = trafilatura.extract(data, include_comments=False, favor_recall=True)
    if not text:
        raise DocumentError(f"{path}: no main text found in this page")
    return text


def _pdf_text(pypdf: Any, data: bytes, path: str, limit: int) -> str:
    pages: list[str] = []
    size = 0
    log = logging.getLogger("pypdf")  # it logs every damaged page
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
        raise DocumentError(f"{path}: this PDF is encrypted; save a copy that is not ({one_line(error)})") from error
    finally:
        log.setLevel(level)
    text = "\n\n".join(page for page in pages if page)
    if not text:
        what = f"its {len(pages)} pages hold" if len(pages) != 1 else "its page holds"
        raise DocumentError(f"{path}: {what} no text; scanned pages need OCR first, for example with ocrmypdf")
    return text


def _docx_text(docx: Any, data: bytes, path: str, limit: int) -> str:
    """The text of a Word file with tables, without headers and footers. The file may unpack to `limit` bytes."""
    if data.startswith(_OLD_WORD):
        raise DocumentError(f"{path}: an old or encrypted Word file; save it as .docx without a password")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:  # an entry never yields more bytes than it declares
        if sum(entry.file_size for entry in archive.infolist()) > limit:
            raise DocumentError(too_long(f"{path}, unpacked", limit))
    text = "".join(_body_text(docx.Document(io.BytesIO(data)).element.body)).strip()
    if not text:
        raise DocumentError(f"{path}: this Word file has no text")
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


_EXTRACTORS = {"html": ("HTML", _html_text), "pdf": ("PDF", _pdf_text), "docx": ("a Word file", _docx_text)}
