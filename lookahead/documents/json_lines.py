"""JSON lines: a document each."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

from lookahead.documents.byte_sources import bounded_lines, opened, too_long
from lookahead.documents.decode_text import Document, DocumentId, Reject, checked, decode_bytes, encoding_of, given_id
from lookahead.documents.inputs import DEFAULT_ID_FIELD, Input
from lookahead.errors import DocumentError


def read_lines(source: Input, field: str, limit: int) -> Iterator[Document | Reject]:
    """Read one document per line that is not blank.

    Raises:
        DocumentError: There is none, or a URL cannot be read.
        OSError: The file cannot be read.
    """
    is_empty = True
    with opened(source.path) as file:
        for number, (offset, line) in enumerate(_lines(file, source.path, limit), start=1):
            place = f"{source.path}:{number}"
            if line is None:
                yield Reject(place, too_long(place, limit))
            elif line.strip():
                yield _parse_line(line, place, offset, field, source.id_field)
            else:
                continue
            is_empty = False
    if is_empty:
        raise DocumentError(f"{source.path}: no documents")


def _lines(file: io.BufferedReader, path: str, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """The lines of an open file in UTF-8, whatever Unicode encoding it is in."""
    encoding = encoding_of(file.peek(4)[:4])
    if encoding == "utf-8":
        yield from bounded_lines(file, limit)
        return
    text = io.TextIOWrapper(file, encoding, newline="\n")
    try:
        while line := text.readline(limit + 1):
            is_whole = len(line) <= limit or line.endswith("\n")
            while not line.endswith("\n") and (line := text.readline(limit + 1)):
                pass
            yield 0, line.encode("utf-8", "replace") if is_whole else None
    except UnicodeError as error:
        raise DocumentError(f"{path}: not {encoding.upper()} text from some line on: {error}") from error
    finally:
        text.detach()  # the file is another's to close


def _parse_line(line: bytes, place: str, offset: int, field: str, id_field: str | None) -> Document | Reject:
    """Read the document of one JSON line that stands at `place`, from byte `offset` of its file on."""
    name: DocumentId = place
    try:
        record = _parse_object(decode_bytes(line, place, offset).strip(), place)
        name = given_id(record.get(id_field or DEFAULT_ID_FIELD), place, None)
        for needed in (field, id_field):
            if needed is not None and needed not in record:
                raise DocumentError(f"{place}: no field {needed!r}; the fields are {', '.join(record) or 'none'}")
        if id_field is not None:
            given_id(record[id_field], place, id_field)
        text = record[field]
        if not isinstance(text, str):
            raise DocumentError(f"{place}: field {field!r} must be a string, got {type(text).__name__}")
        return Document(name, checked(text, place))
    except DocumentError as error:
        return Reject(name, str(error))


def _parse_object(line: str, place: str) -> dict[str, Any]:
    """Parse one line as a JSON object."""
    try:
        record = json.loads(line)
    except RecursionError as error:
        raise DocumentError(f"{place}: not valid JSON: nested too deeply") from error
    except ValueError as error:
        what = str(error)
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        raise DocumentError(f"{place}: not valid JSON: {what}") from error
    if not isinstance(record, dict):
        raise DocumentError(f"{place}: a JSON object is expected, got {type(record).__name__}")
    return record
