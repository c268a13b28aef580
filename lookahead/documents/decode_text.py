"""Documents, and the decoding of their bytes to text."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from lookahead.errors import DocumentError

DocumentId = str | int

_BYTE_ORDER_MARKS = (
    # UTF-32 first: its little-endian mark begins with that of UTF-16.
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_KNOWN_FORMATS = (
    (b"%PDF-", "a PDF file", "pdftotext"),
    (b"PK\x03\x04", "a zip, docx or epub file", "pandoc"),
    (b"\x1f\x8b", "a gzip file", "gunzip"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its name.

    The id is the path of a file, `"-"` for standard input; of a line or row its id field, or `path:line`.
    """

    id: DocumentId
    text: str  # not empty


@dataclass(frozen=True, slots=True)
class Reject:
    """A document that could not be read or used."""

    id: DocumentId
    error: str  # in one line
    document: Document | None = None  # if it could be read


def decode_bytes(data: bytes, name: str, start: int = 0) -> str:
    """Decode UTF-8 text, or UTF-16 or UTF-32 text with a byte order mark, that begins at byte `start` of a file.

    DocumentError, with the name of the file and the byte offset in it, if the bytes are something else.
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
    """The encoding that a byte order mark declares, else UTF-8."""
    return next((encoding for mark, encoding in _BYTE_ORDER_MARKS if data.startswith(mark)), "utf-8")


def check_words(text: str, where: str = "") -> None:
    """Refuse a text without a letter or digit with a DocumentError, whose message begins with `where`."""
    if not text.strip():
        raise DocumentError(f"{where}the document is empty")
    if not any(map(str.isalnum, text)):
        length = len(text.strip())
        raise DocumentError(f"{where}the document holds {length} character{'s' * (length > 1)} and no letter or digit")


def checked(text: str, place: str) -> str:
    """The text in valid Unicode, which every tokenizer can encode, if it has words (`check_words`)."""
    check_words(text, f"{place}: ")
    # JSON can hold half of a surrogate pair, which is no character. Such halves are joined or replaced.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def given_id(value: object, place: str, field: str | None) -> DocumentId:
    """The id of a document: its id field, else its place. DocumentError if `field` is named and holds no id."""
    if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
        return value
    if field is None:
        return place
    held = "an empty string" if value == "" else type(value).__name__
    raise DocumentError(f"{place}: field {field!r} must be a string or a whole number, got {held}")
