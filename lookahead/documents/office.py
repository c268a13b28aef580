"""PDF and Word files: their text, or a clear word about why there is none."""

from __future__ import annotations

import io
import logging
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lookahead.documents.byte_sources import too_long
from lookahead.errors import DocumentError

_OLD_WORD = b"\xd0\xcf\x11\xe0"  # begins .doc files, and .docx files with a password
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"  # says again what stands before it
_BREAKS = {f"{_WORD}p": "\n\n", f"{_WORD}br": "\n", f"{_WORD}cr": "\n", f"{_WORD}tab": "\t"}


def pdf_text(data: bytes, path: str, limit: int) -> str:
    """The text of a PDF file, page after page, by pypdf.

    Raises:
        DocumentError: It needs a password, is damaged, holds no text, or more than `limit` bytes of it.
    """
    pypdf = load_pypdf(path)
    pages: list[str] = []
    with _quiet("pypdf"):
        try:
            reader = pypdf.PdfReader(io.BytesIO(data))
            if reader.is_encrypted and not reader.decrypt(""):
                raise DocumentError(f"{path}: this PDF needs a password; save a copy without one")
            size = 0
            for page in reader.pages:
                pages.append(page.extract_text().strip())
                size += len(pages[-1].encode("utf-8", "surrogatepass"))
                if size > limit:
                    raise DocumentError(too_long(path, limit))
        except DocumentError:
            raise
        except pypdf.errors.DependencyError as error:
            raise DocumentError(f"{path}: this PDF is encrypted; save a copy that is not ({_line(error)})") from error
        except Exception as error:  # a damaged file meets any line of the reader: dozens of types
            raise DocumentError(f"{path}: cannot be read as PDF: {_line(error)}") from error
    text = "\n\n".join(page for page in pages if page)
    if not text:
        what = f"its {len(pages)} pages hold" if len(pages) != 1 else "its page holds"
        raise DocumentError(f"{path}: {what} no text; scanned pages need OCR first, for example with ocrmypdf")
    return text


def docx_text(data: bytes, path: str, limit: int) -> str:
    """The text of a Word file, tables included, headers and footers left out, by python-docx.

    Raises:
        DocumentError: It is no .docx, is damaged, or holds no text, or unpacks to more than `limit` bytes.
    """
    docx = load_docx(path)
    if data.startswith(_OLD_WORD):
        raise DocumentError(f"{path}: an old or encrypted Word file; save it as .docx without a password")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:  # which gives no more bytes than it declares
            if sum(entry.file_size for entry in archive.infolist()) > limit:
                raise DocumentError(too_long(f"{path}, unpacked", limit))
        body = docx.Document(io.BytesIO(data)).element.body
    except DocumentError:
        raise
    except Exception as error:  # of zipfile, lxml and python-docx, of many types
        raise DocumentError(f"{path}: cannot be read as a Word file: {_line(error)}") from error
    text = "".join(_words(body)).strip()
    if not text:
        raise DocumentError(f"{path}: this Word file holds no text")
    return text


def _words(body: Any) -> Iterator[str]:
    """The text of a document's body; what was deleted with changes tracked is left out."""
    for fallback in list(body.iter(_FALLBACK)):
        fallback.getparent().remove(fallback)
    for element in body.iter():
        is_stop = element.tag == f"{_WORD}tab" and element.getparent().tag != f"{_WORD}r"  # where a tab reaches
        if element.tag == f"{_WORD}t":
            yield element.text or ""
        elif element.tag in _BREAKS and not is_stop:
            yield _BREAKS[element.tag]


def load_pypdf(path: str) -> Any:
    """The module pypdf.

    Raises:
        DocumentError: It is not installed; the message names the path that needs it.
    """
    try:
        import pypdf
    except ImportError as error:
        raise DocumentError(f"{path}: PDF needs pypdf: pip install 'lookahead-decoding[documents]'") from error
    return pypdf


def load_docx(path: str) -> Any:
    """The module of python-docx.

    Raises:
        DocumentError: It is not installed; the message names the path that needs it.
    """
    try:
        import docx
    except ImportError as error:
        extra = "pip install 'lookahead-decoding[documents]'"
        raise DocumentError(f"{path}: Word files need python-docx: {extra}") from error
    return docx


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Keep what a library logs about a damaged file, page by page, off stderr."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _line(error: Exception) -> str:
    """An error in one line, with its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
