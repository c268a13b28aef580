"""The text of web pages (trafilatura), PDF files (pypdf) and Word files (python-docx).

A file without text, or that the library cannot read, is a DocumentError that names it.
"""

from __future__ import annotations

import io
import logging
import zipfile
from collections.abc import Iterator
from typing import Any

from lookahead.documents.byte_sources import read_errors, too_long
from lookahead.documents.inputs import load_packages
from lookahead.errors import DocumentError, one_line

_OLD_WORD = b"\xd0\xcf\x11\xe0"  # begins .doc files, and .docx files with a password
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"  # repeats the text before it
_BREAKS = {f"{_WORD}p": "\n\n", f"{_WORD}br": "\n", f"{_WORD}cr": "\n", f"{_WORD}tab": "\t"}


def html_text(data: bytes, path: str, limit: int) -> str:
    """The main text of a web page without menus, advertisements and footers. The page declares its own encoding."""
    (trafilatura,) = load_packages("html", path)
    with read_errors(path, "HTML"):
        text = trafilatura.extract(data, include_comments=False, favor_recall=True)
    if not text:
        raise DocumentError(f"{path}: no main text found in this page")
    return str(text)


def pdf_text(data: bytes, path: str, limit: int) -> str:
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


def docx_text(data: bytes, path: str, limit: int) -> str:
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
