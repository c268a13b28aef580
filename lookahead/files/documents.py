"""Reading documents: bytes to text, with a clear word about what cannot be read."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from lookahead.errors import DocumentError, PromptError
from lookahead.files.inputs import STDIN, Input

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
    """A text.

    Attributes:
        id: The path of a text file, `"-"` for standard input; of a JSON line its `id` field, a string or a whole
            number, else `path:line`.
        text: The text, not empty.
    """

    id: DocumentId
    text: str


@dataclass(frozen=True, slots=True)
class Reject:
    """A document that could not be read or used.

    Attributes:
        id: As that of a document.
        error: What went wrong, in one line.
    """

    id: DocumentId
    error: str


def read_documents(inputs: Sequence[Input]) -> Iterator[Document | Reject]:
    """Read the documents of all inputs one at a time; one that cannot be read comes as a `Reject`."""
    for source in inputs:
        try:
            if source.field is None:
                yield Document(source.path, _checked(decode_bytes(_read(source), source.path), source.path))
            else:
                yield from _read_json_lines(source, source.field)
        except (DocumentError, OSError) as error:
            yield Reject(source.path, _describe(error, source.path))


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
    """How many documents the inputs hold, or `None` where a pipe or an unreadable file does not tell beforehand."""
    total = 0
    for source in inputs:
        if source.field is None:
            total += 1
            continue
        if not os.path.isfile(source.path):
            return None
        try:
            with open(source.path, "rb") as file:
                total += sum(1 for line in file if line.strip())
        except OSError:
            return None
    return total


def decode_bytes(data: bytes, name: str, start: int = 0) -> str:
    """Decode text that is UTF-8, or UTF-16 or UTF-32 with a byte order mark.

    Args:
        data: The bytes of a file, or of one line of it.
        name: The file, for the message.
        start: Where in the file the bytes begin, for the message.

    Raises:
        DocumentError: The bytes are in another encoding or no text at all; the message names the byte offset.
    """
    for magic, what, tool in _KNOWN_FORMATS:
        if data.startswith(magic):
            raise DocumentError(f"{name}: {what}, not text; extract its text first, for example with {tool}")
    encoding = _encoding_of(data)
    if encoding == "utf-8" and b"\0" in data:
        raise DocumentError(f"{name}: a binary file, not text (a zero byte at byte offset {start + data.index(0)})")
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{name}: not {encoding.upper()} text: byte 0x{data[error.start]:02x} at byte offset "
            f"{start + error.start}; convert it first, for example with iconv -f latin1 -t utf-8"
        ) from error


def _encoding_of(data: bytes) -> str:
    """The encoding that a byte order mark names, else UTF-8."""
    return next((encoding for mark, encoding in _BYTE_ORDER_MARKS if data.startswith(mark)), "utf-8")


def _read(source: Input) -> bytes:
    """All bytes of an input."""
    if source.is_stdin:
        return sys.stdin.buffer.read()
    with open(source.path, "rb") as file:
        return file.read()


def _read_json_lines(source: Input, field: str) -> Iterator[Document | Reject]:
    """Read one document per line that is not blank."""
    if source.is_stdin:
        yield from _parse_lines(io.BytesIO(_read(source)), source, field)
        return
    with open(source.path, "rb") as file:
        yield from _parse_lines(file, source, field)


def _parse_lines(file: BinaryIO, source: Input, field: str) -> Iterator[Document | Reject]:
    """Parse the lines of an open file; only a file in UTF-16 or UTF-32 is read into memory whole."""
    encoding = _encoding_of(file.read(4))
    file.seek(0)
    if encoding in ("utf-16", "utf-32"):
        file = io.BytesIO(decode_bytes(file.read(), source.path).encode("utf-8", "replace"))
    offset = 0
    is_empty = True
    for number, line in enumerate(file, start=1):
        if line.strip():
            is_empty = False
            yield _parse_line(line, f"{source.path}:{number}", offset, field)
        offset += len(line)
    if is_empty:
        raise DocumentError(f"{source.path}: no documents")


def _parse_line(line: bytes, place: str, offset: int, field: str) -> Document | Reject:
    """Read the document of one JSON line that stands at `place`, from byte `offset` of its file on."""
    name: DocumentId = place
    try:
        record = _parse_object(decode_bytes(line, place, offset), place)
        given = record.get("id")
        if isinstance(given, str | int) and not isinstance(given, bool) and given != "":
            name = given
        if field not in record:
            raise DocumentError(f"{place}: no field {field!r}; the fields are {', '.join(record) or 'none'}")
        text = record[field]
        if not isinstance(text, str):
            raise DocumentError(f"{place}: field {field!r} must be a string, got {type(text).__name__}")
        return Document(name, _checked(text, place))
    except DocumentError as error:
        return Reject(name, str(error))


def _parse_object(line: str, place: str) -> dict[str, Any]:
    """Parse one line as a JSON object."""
    try:
        record = json.loads(line)
    except RecursionError as error:
        raise DocumentError(f"{place}: not valid JSON: nested too deeply") from error
    except ValueError as error:
        raise DocumentError(f"{place}: not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise DocumentError(f"{place}: a JSON object is expected, got {type(record).__name__}")
    return record


def _checked(text: str, place: str) -> str:
    """Refuse an empty text, and make one that no tokenizer can choke on."""
    if not text.strip():
        raise DocumentError(f"{place}: the document is empty")
    # JSON can hold half of a surrogate pair, which is no character: such halves are joined or replaced.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _describe(error: Exception, path: str) -> str:
    """One line about an error; those of the system get the path in front."""
    return f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)
