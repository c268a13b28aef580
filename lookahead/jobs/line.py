"""A line of results or of rejects: its fields, and the reader of files of lines.

The message of an error about a line is a predicate ("has no id"). Who reads it adds the file and the line number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lookahead.documents.byte_sources import bounded_lines
from lookahead.documents.decode_text import DocumentId
from lookahead.documents.readers import parquet_records
from lookahead.jobs.identity import key_of, shortened
from lookahead.utils.atomic import parse_json

if TYPE_CHECKING:
    from lookahead.jobs.identity import JobIdentity
    from lookahead.summarization.summarizer import Summarized

Record = dict[str, Any]  # a JSON object
TextHash = str
UNBOUNDED = 1 << 62  # bytes of a line


class _Kind(NamedTuple):
    """The type of a field."""

    name: str  # in error messages
    types: tuple[type, ...]  # exact types, since bool is a subclass of int
    column: str  # type of its Parquet column: a pyarrow type, `id`, or `json` for JSON text
    check: Callable[[Any], object] = lambda _: True


def _is_count(number: float) -> bool:
    return 0 <= number < 1 << 63 and number % 1 == 0  # programs that fill gaps with NaN write 5.0


_KINDS = {  # by annotation
    "DocumentId": _Kind("a string or a whole number", (str, int), "id"),
    "TextHash": _Kind("32 hexadecimal digits", (str,), "string", re.compile("[0-9a-f]{32}").fullmatch),
    "str": _Kind("a string", (str,), "string"),
    "int": _Kind("a whole number from 0 to 2**63 - 1", (int, float), "int64", _is_count),
    "float": _Kind("a number below 2**63", (int, float), "float64", lambda value: not abs(value) >= 1 << 63),
    "bool": _Kind("true or false", (bool,), "bool_"),
    "Record": _Kind("an object", (dict,), "json"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The line of a document: its summary, or in a file of rejects its error; `others` has fields of other releases."""

    id: DocumentId
    error: str | None = None  # why the document failed; every line of rejects has it
    summary: str | None = None
    document_tokens: int | None = None
    summary_tokens: int | None = None
    parts: int | None = None  # number of parts of the document, 1 if it fitted
    split: str | None = None  # where it was cut, see `Parts`
    finish_reason: str | None = None  # "length" if the token limit cut the summary off, else "stop"
    loops: bool | None = None  # whether the summary, or the summary of a part, repeats one phrase to its end
    stats: Record | None = None  # counters of the decoding; `None` for a copy
    plain: Record | None = None  # counters of plain decoding, if compared
    speedup: float | None = None  # in tokens per second, over plain decoding
    identical: bool | None = None  # whether plain decoding gave the same tokens
    document: TextHash | None = None  # `None` if its text could not be read
    model: str | None = None
    fingerprint: str | None = None  # of the job
    copy_of: DocumentId | None = None  # the document with the same text whose summary was copied
    others: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, done: Summarized, content: bytes, identity: JobIdentity) -> Line:
        """The line of a document that a job summarized. `content` is its text hash, 16 bytes."""
        job: Record = {"document": content.hex(), "model": identity.model, "fingerprint": identity.fingerprint}
        return cls(id=done.document.id, **done.summary.to_dict(), **job)

    @classmethod
    def from_json(
        cls, record: Mapping[str, Any], *, is_reject: bool = False, job: str | None = None, leaves_gaps: bool = False
    ) -> Line:
        """The line of a JSON object, or of a Parquet row, where objects and lists are JSON text.

        With `leaves_gaps`, missing or wrong values become `None`, or for an id or model their JSON text.

        Raises:
            ValueError: A field is missing or wrong, or `job` is not its fingerprint. The message is a predicate: "has
                no id".
        """
        if not (is_reject or "summary" in record or "stats" in record):
            names = ", ".join(map(repr, islice(record, 4))) or "nothing"
            what = (
                "belongs to a file of rejects" if "error" in record else f"has neither summary nor stats, but {names}"
            )
            raise ValueError(what)
        own = _FIELDS[is_reject]
        values = {name: _value_in(record, name, is_reject, leaves_gaps) for name in own}
        line = cls(**values, others={name: value for name, value in record.items() if name not in own})
        if job not in (None, line.fingerprint):
            raise ValueError(f"belongs to job {line.fingerprint}, not to {job}")
        return line

    def to_json(self) -> Record:
        """The JSON object of the line."""
        nulls = () if self.error is not None else ("stats",) if self.plain is None else ("stats", "speedup")
        values = {name: getattr(self, name) for name in _KIND_OF}
        return {name: value for name, value in values.items() if value is not None or name in nulls} | dict(self.others)

    @property
    def key(self) -> bytes:
        """`key_of` the document."""
        return key_of(self.id, self.document or self.error or "")

    def copied(self, name: DocumentId) -> Line:
        """The line of another document with the same text. Measurements are not copied."""
        first = self.id if self.copy_of is None else self.copy_of
        return replace(self, id=name, stats=None, plain=None, speedup=None, identical=None, copy_of=first)


_KIND_OF = {field.name: _KINDS[str(field.type).partition(" | ")[0]] for field in fields(Line) if field.name != "others"}
_REJECT_FIELDS = ("id", "error", "document")
_FIELDS = {True: _REJECT_FIELDS, False: tuple(name for name in _KIND_OF if name != "error")}  # by `is_reject`
_NEEDED = {True: ("id", "error"), False: ("id", "summary", "document", "fingerprint")}


def _value_in(record: Mapping[str, Any], name: str, is_reject: bool, leaves_gaps: bool) -> Any:
    """The value of a field; ValueError if it is not of the kind of the field."""
    kind, value = _KIND_OF[name], record.get(name)
    if kind.column == "json" and isinstance(value, str):
        with suppress(ValueError):
            value = parse_json(value)
    if (type(value) in kind.types and kind.check(value)) or (value is None and name not in _NEEDED[is_reject]):
        return value
    if leaves_gaps and name in ("id", "model"):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if leaves_gaps and name != "error":
        return None
    if value is None:
        raise ValueError(f"has no {name}")
    raise ValueError(f"has {name} {shortened(value)}, but {name} must be {kind.name}")


def result_columns() -> dict[str, str]:
    """The columns of results and their types, as of `_Kind.column`; those that few lines fill come last."""
    columns = {name: _KIND_OF[name].column for name in _FIELDS[False]}
    return dict(sorted(columns.items(), key=lambda item: item[1] in ("json", "float64", "bool_")))


class Entry(NamedTuple):
    """What a file has in the place of a line: the line, or what is wrong with it."""

    number: int  # from 1
    offset: int  # in bytes; 0 in a Parquet file
    size: int  # in bytes
    line: Line | None
    problem: str = ""  # a predicate: "is not JSON: …"
    is_torn: bool = False  # whether it is not JSON object and the last one, leniently only without a line break


def read_entries(
    path: Path, read: Callable[[Record], Line], *, is_lenient: bool = False, most_bytes: int = UNBOUNDED
) -> Iterator[Entry]:
    """The lines of a file, of at most `most_bytes` bytes; `read` makes a line of a JSON object, or raises a ValueError.

    With `is_lenient` empty lines are skipped, and the last one is read without its line break: the job may be writing
    it.
    """
    with open(path, "rb") as file:
        for number, (offset, encoded) in enumerate(bounded_lines(file, most_bytes), start=1):
            if encoded is None:
                yield Entry(number, offset, 0, None, f"is longer than {most_bytes >> 20} MiB")
            elif encoded.strip() or not is_lenient:
                try:
                    record = parse_line(encoded + b"\n" if is_lenient else encoded)
                except ValueError as error:
                    is_torn = not (encoded.endswith(b"\n") if is_lenient else file.peek(1))
                    yield Entry(number, offset, len(encoded), None, str(error), is_torn)
                else:
                    yield Entry(number, offset, len(encoded), *_read_record(read, record))


def read_rows(path: Path, read: Callable[[Record], Line]) -> Iterator[Entry]:
    """The rows of a Parquet file as `read_entries` yields lines; DocumentError if it is none."""
    for number, record in enumerate(parquet_records(path), start=1):
        yield Entry(number, 0, 0, *_read_record(read, record))


def _read_record(read: Callable[[Record], Line], record: Record) -> tuple[Line | None, str]:
    try:
        return read(record), ""
    except ValueError as error:
        return None, str(error)


def parse_line(line: bytes) -> Record:
    """The JSON object of a line of text; ValueError, whose message is a predicate ("is torn"), if it is none."""
    if not line.endswith(b"\n"):
        raise ValueError("is torn")
    if not line.strip():
        raise ValueError("is blank")
    try:
        record = parse_json(line.decode("utf-8-sig"))
    except ValueError as error:
        if isinstance(error, UnicodeDecodeError):
            raise ValueError(f"is not UTF-8 text, from its byte {error.start + 1} on") from error
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"is a {type(record).__name__}, not a JSON object")
    return record
