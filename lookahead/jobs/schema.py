"""The lines of results and of rejects: their fields and types.

All code that writes, reads or shows a line uses these classes. The message of an error about a line is a predicate
("has no id"). The reader adds the file and the line number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lookahead.documents.decode_text import DocumentId
from lookahead.jobs.identity import key_of, shortened
from lookahead.utils.atomic import parse_json

if TYPE_CHECKING:
    from lookahead.jobs.identity import JobIdentity
    from lookahead.summarization.summarizer import Summarized

Record = dict[str, Any]  # a JSON object
TextHash = str


class _Kind(NamedTuple):
    """The type of a field."""

    name: str  # in error messages
    types: tuple[type, ...]  # exact types, since bool is a subclass of int
    column: str  # type of its Parquet column: a pyarrow type, `id`, or `json` for JSON text
    check: Callable[[Any], object] = lambda _: True

    def holds(self, value: Any) -> bool:
        """Whether a value is of this kind."""
        return type(value) in self.types and bool(self.check(value))


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
    "list[Any]": _Kind("a list", (list,), "json"),
}
LineT = TypeVar("LineT", bound="Line")


def _as_text(value: Any) -> str:
    """Text unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


class _LineField(NamedTuple):
    name: str
    kind: _Kind
    is_required: bool
    gap: Callable[[Any], str | None] | None  # replaces a wrong value with `leaves_gaps`

    def value_in(self, record: Mapping[str, Any], *, leaves_gaps: bool) -> Any:
        """The value in a JSON object; ValueError if it is not of the kind."""
        value = record.get(self.name)
        if self.kind.column == "json" and isinstance(value, str):
            with suppress(ValueError):
                value = parse_json(value)
        if self.kind.holds(value) or (value is None and not self.is_required):
            return value
        if leaves_gaps and self.gap is not None:
            return self.gap(value)
        if value is None:
            raise ValueError(f"has no {self.name}")
        raise ValueError(f"has {self.name} {shortened(value)}, but {self.name} must be {self.kind.name}")


@cache
def _fields_of(declared: tuple[Field[Any], ...]) -> dict[str, _LineField]:
    """The fields of a dataclass by name, in line order."""
    found = {}
    for each in declared:
        if each.name != "others":
            annotation, _, none = str(each.type).partition(" | ")
            gap = each.metadata.get("gap", (lambda _: None) if none else None)
            found[each.name] = _LineField(each.name, _KINDS[annotation], not none, gap)
    return found


def _is_result(record: Mapping[str, Any]) -> bool:
    return "summary" in record or "stats" in record


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line about a document. Fields unknown to this release are kept in `others`."""

    id: DocumentId = field(metadata={"gap": _as_text})
    others: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls: type[LineT], record: Mapping[str, Any], *, leaves_gaps: bool = False) -> LineT:
        """The line of a JSON object, or of a Parquet row, where objects and lists are JSON text.

        Args:
            record: The values of its fields; `None` stands for a missing field.
            leaves_gaps: Replace missing or wrong values by `None`, empty text, or for an id or model its JSON text.

        Raises:
            ValueError: A field is missing or wrong. The message is a predicate: "has no id".
        """
        known = _fields_of(fields(cls))
        values = {name: each.value_in(record, leaves_gaps=leaves_gaps) for name, each in known.items()}
        return cls(**values, others={name: value for name, value in record.items() if name not in known})

    def to_json(self) -> Record:
        """The JSON object of the line."""
        values = {name: getattr(self, name) for name in _fields_of(fields(self))}
        nulls = self._nulls
        return {name: value for name, value in values.items() if value is not None or name in nulls} | dict(self.others)

    @property
    def _nulls(self) -> tuple[str, ...]:
        """Fields that are written even if they are `None`."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLine(Line):
    """A line of results: the summary of a document."""

    summary: str | None = None
    document_tokens: int | None = None
    summary_tokens: int | None = None
    parts: int | None = None  # number of parts of the document, 1 if it fitted
    split: str | None = None  # where it was cut, see `Parts`
    finish_reason: str | None = None  # "length" if the token limit cut the summary off, else "stop"
    loops: bool | None = None  # whether the summary, or the summary of a part, repeats one phrase to its end
    stats: Record | None = None  # counters of the decoding; `None` for a copy
    tree: list[Any] | None = None  # summaries of the parts, level by level, if kept
    plain: Record | None = None  # counters of plain decoding, if compared
    speedup: float | None = None  # in tokens per second, over plain decoding
    identical: bool | None = None  # whether plain decoding gave the same tokens
    document: TextHash = field(metadata={"gap": lambda _: ""})
    model: str | None = field(default=None, metadata={"gap": _as_text})
    fingerprint: str = field(metadata={"gap": lambda _: ""})  # of the job
    copy_of: DocumentId | None = None  # the document with the same text whose summary was copied

    @classmethod
    def of(cls, done: Summarized, content: bytes, identity: JobIdentity) -> ResultLine:
        """The line of a document that a job summarized. `content` is its text hash, 16 bytes."""
        return cls(
            id=done.document.id,
            document=content.hex(),
            model=identity.model,
            fingerprint=identity.fingerprint,
            **done.summary.to_dict(),
        )

    @classmethod
    def from_json(cls, record: Mapping[str, Any], *, leaves_gaps: bool = False) -> ResultLine:
        """See `Line.from_json`. A line of results has a summary or stats.

        Raises:
            ValueError: The line has neither, or a field is missing or wrong.
        """
        if not _is_result(record):
            names = ", ".join(map(repr, islice(record, 4))) or "nothing"
            is_reject = "error" in record
            raise ValueError("is of a file of rejects" if is_reject else f"has neither summary nor stats, but {names}")
        return super(ResultLine, cls).from_json(record, leaves_gaps=leaves_gaps)

    @property
    def _nulls(self) -> tuple[str, ...]:
        return ("stats",) if self.plain is None else ("stats", "speedup")

    @property
    def key(self) -> bytes:
        """`key_of` the document."""
        return key_of(self.id, self.document)

    def copied(self, name: DocumentId) -> ResultLine:
        """The line of another document with the same text. Measurements are not copied."""
        first = self.id if self.copy_of is None else self.copy_of
        return replace(self, id=name, stats=None, plain=None, speedup=None, identical=None, copy_of=first)


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectLine(Line):
    """A line of rejects: a document that failed."""

    error: str
    document: TextHash | None = None  # `None` if its text could not be read

    @property
    def key(self) -> bytes:
        """`key_of` the document."""
        return key_of(self.id, self.error if self.document is None else self.document)


def parse_line(line: bytes) -> Record:
    """The JSON object of a line of text.

    Raises:
        ValueError: The line is not a JSON object, or has no line break. The message is a predicate: "is no JSON: …".
    """
    if not line.endswith(b"\n"):
        raise ValueError("is torn")
    try:
        record = parse_json(line.decode("utf-8-sig"))
    except ValueError as error:
        what = "UTF-8 text" if isinstance(error, UnicodeDecodeError) else "JSON"
        raise ValueError(f"is no {what}: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"is no JSON object but a {type(record).__name__}")
    return record


def read_line(line: bytes) -> ResultLine | RejectLine:
    """A line of results or of rejects; ValueError, with a predicate as its message, if it is neither."""
    record = parse_line(line)
    is_reject = "error" in record and not _is_result(record)
    return RejectLine.from_json(record) if is_reject else ResultLine.from_json(record)


def parquet_columns() -> dict[str, str]:
    """The columns of results and their types: a pyarrow type, `id`, or `json` for JSON text.

    JSON, float and boolean columns, which few lines fill, come last.
    """
    columns = {name: each.kind.column for name, each in _fields_of(fields(ResultLine)).items()}
    return dict(sorted(columns.items(), key=lambda each: each[1] in ("json", "float64", "bool_")))
