"""Results and rejects files, read leniently. A malformed line is counted and named; a missing field is `None`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from lookahead.documents.table_files import UNPACKS_TOO_FAR, load_pyarrow, row_groups
from lookahead.errors import DocumentError

MOST_TEXT = 1200  # characters kept of a summary
MOST_NAME = 200  # characters kept of an id
MOST = 1e15  # largest number accepted
MOST_BYTES = 64 << 20  # of a line
MOST_COMPLAINTS = 5
PATIENCE = 1000  # malformed lines after which a file without a good one is given up
_ROWS_AT_ONCE = 1024
_AS_JSON = ("stats", "plain")  # columns that a Parquet file holds as JSON strings
_LENGTH = re.compile("[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """Draft nodes of one proposer."""

    drafted: float = 0.0
    accepted: float = 0.0
    expected: float = 0.0

    def __add__(self, other: SourceCounts) -> SourceCounts:
        return SourceCounts(
            self.drafted + other.drafted, self.accepted + other.accepted, self.expected + other.expected
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One document's line. What the line does not hold, or holds with another type, is `None`.

    Attributes:
        name: Its id.
        text: Its summary, up to `MOST_TEXT` characters.
        document_tokens: Tokens of the document.
        summary_tokens: Tokens of the summary.
        forwards: Forward passes after the prefill.
        decoded: Tokens those passes gave.
        drafted: Draft nodes verified.
        accepted: Draft nodes accepted.
        prefill_s: Seconds until the first token.
        decode_s: Seconds after it.
        acceptance_length: Mean tokens per forward pass.
        plain_decoded: Tokens of plain decoding's passes.
        plain_decode_s: Seconds those took.
        speedup: Tokens per second over those of plain decoding.
        identical: Whether plain decoding gave the same summary.
        is_cut: Whether the token limit cut the summary off.
        is_copy: Whether it has the summary of an equal document, and so no statistics.
        model: The model.
        sources: Draft nodes by proposer.
    """

    name: str
    text: str
    document_tokens: float | None
    summary_tokens: float | None
    forwards: float | None
    decoded: float | None
    drafted: float | None
    accepted: float | None
    prefill_s: float | None
    decode_s: float | None
    acceptance_length: float | None
    plain_decoded: float | None
    plain_decode_s: float | None
    speedup: float | None
    identical: bool | None
    is_cut: bool | None
    is_copy: bool
    model: str | None
    sources: dict[str, SourceCounts] = field(default_factory=dict)

    @property
    def seconds(self) -> float | None:
        """Seconds of prefill and decoding."""
        return None if self.prefill_s is None or self.decode_s is None else self.prefill_s + self.decode_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first per decode second."""
        return self.decoded / self.decode_s if self.decoded and self.decode_s else None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Result:
        """Take the fields that are there and valid."""
        stats, plain = _mapping(record.get("stats")), _mapping(record.get("plain"))
        decode_s, plain_decode_s = _number(stats.get("decode_s")), _number(plain.get("decode_s"))
        identical, text, reason = record.get("identical"), record.get("summary"), record.get("finish_reason")
        return cls(
            name=as_text(record.get("id"))[:MOST_NAME],
            text=_shorten(text) if isinstance(text, str) else "",
            document_tokens=_number(record.get("document_tokens")),
            summary_tokens=_number(record.get("summary_tokens")),
            forwards=_number(stats.get("target_forwards")),
            decoded=_decoded(stats, decode_s),
            drafted=_number(stats.get("drafted_tokens")),
            accepted=_number(stats.get("accepted_tokens")),
            prefill_s=_number(stats.get("prefill_s")),
            decode_s=decode_s,
            acceptance_length=(_number(stats.get("mean_acceptance_length")) or None),
            plain_decoded=_product(_number(plain.get("tokens_per_s")), plain_decode_s),
            plain_decode_s=plain_decode_s,
            speedup=_number(record.get("speedup")),
            identical=identical if isinstance(identical, bool) else None,
            is_cut=None if reason not in ("stop", "length") else reason == "length",
            is_copy=record.get("copy_of") is not None,
            model=as_text(record["model"])[:MOST_NAME] if record.get("model") is not None else None,
            sources=_sources(stats),
        )


def as_text(value: Any) -> str:
    """A field of any type as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _number(value: Any) -> float | None:
    """A number from 0 to `MOST`, or `None`; below 1 / `MOST` it is 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    if not 0 <= number <= MOST:  # false for NaN too
        return None
    return number if number >= 1 / MOST else 0.0


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _shorten(text: str) -> str:
    return text if len(text) <= MOST_TEXT else text[:MOST_TEXT].rstrip() + " […]"


def _product(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left * right


def _decoded(stats: Mapping[str, Any], decode_s: float | None) -> float | None:
    """Tokens of the forward passes: exactly from the histogram, else from the speed."""
    histogram = stats.get("acceptance_histogram")
    if not isinstance(histogram, Mapping):
        return _product(_number(stats.get("tokens_per_s")), decode_s)
    counts = [(key, _number(passes) or 0.0) for key, passes in histogram.items() if _LENGTH.fullmatch(str(key))]
    return sum(int(length) * passes for length, passes in counts)


def _sources(stats: Mapping[str, Any]) -> dict[str, SourceCounts]:
    columns = [_mapping(stats.get(f"{which}_by_source")) for which in ("drafted", "accepted", "expected")]
    return {
        str(name)[:MOST_NAME]: SourceCounts(*(_number(column.get(name)) or 0.0 for column in columns))
        for name in columns[0]
    }


@dataclass(slots=True)
class Reading:
    """What was read of a file.

    Attributes:
        taken: Lines of the expected kind.
        malformed: Other lines.
        complaints: What is wrong with the first of those.
        is_torn: Whether the last line is incomplete.
    """

    taken: int = 0
    malformed: int = 0
    complaints: list[str] = field(default_factory=list)
    is_torn: bool = False

    def complain(self, number: int, what: str) -> None:
        """Count a malformed line; `number` counts from 1."""
        self.malformed += 1
        if len(self.complaints) < MOST_COMPLAINTS:
            self.complaints.append(f"line {number} {what}")

    @property
    def is_hopeless(self) -> bool:
        """Whether the first `PATIENCE` lines are all malformed."""
        return not self.taken and self.malformed >= PATIENCE

    def describe(self) -> str:
        """What could not be read; empty where all could."""
        if not self.malformed:
            return ""
        more = "; …" if self.malformed > len(self.complaints) else ""
        torn = " The last line is incomplete: the job was stopped, or is writing it." if self.is_torn else ""
        lines = "1 line was" if self.malformed == 1 else f"{self.malformed:,} lines were"
        return f"{lines} left out: {'; '.join(self.complaints)}{more}.{torn}"


def read_results(path: Path, reading: Reading) -> Iterator[Result]:
    """The lines of a results file: JSON lines, or Parquet where the name ends in `.parquet`.

    Args:
        path: The file.
        reading: Counts the lines.

    Raises:
        DocumentError: The file holds no results, or is Parquet and cannot be read.
        OSError: The file cannot be read.
    """
    rows = _parquet_rows(path) if path.suffix.lower() == ".parquet" else _json_lines(path, reading)
    for number, record in rows:
        if "summary" in record or "stats" in record:
            reading.taken += 1
            yield Result.from_record(record)
        else:
            reading.complain(number, _other_kind(record))
        if reading.is_hopeless:
            break
    if not reading.taken and reading.malformed:
        raise DocumentError(
            f"{path} holds no results of 'lookahead summarize', which have id, summary and stats: "
            f"{reading.complaints[0]}"
        )


def read_rejects(path: Path, reading: Reading) -> Iterator[dict[str, Any]]:
    """The lines of a rejects file.

    Raises:
        OSError: The file cannot be read.
    """
    for number, record in _json_lines(path, reading):
        if isinstance(record.get("error"), str):
            reading.taken += 1
            yield record
        else:
            reading.complain(number, "has no error")


def _other_kind(record: dict[str, Any]) -> str:
    if "error" in record:
        return "is of a file of rejects"
    return f"has neither summary nor stats, but {', '.join(map(repr, islice(record, 4))) or 'nothing'}"


def _check_is_file(path: Path) -> None:
    """Refuse devices, and pipes, which would block."""
    if path.exists() and not path.is_file():
        raise DocumentError(f"{path}: not a regular file")


def _json_lines(path: Path, reading: Reading) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON lines file with their line numbers; empty lines are skipped."""
    _check_is_file(path)
    with open(path, "rb") as file:
        number = 0
        while not reading.is_hopeless and (line := file.readline(MOST_BYTES)):
            number += 1
            is_whole = line.endswith(b"\n")
            if not is_whole and len(line) == MOST_BYTES:
                _skip_line(file)
                reading.complain(number, f"is longer than {MOST_BYTES >> 20} MiB")
            elif line.strip():
                record, problem = _parse(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
                if record is not None:
                    yield number, record
                elif is_whole:
                    reading.complain(number, problem)
                else:
                    reading.is_torn = True
                    reading.complain(number, "is torn, the last one")


def _parse(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """The object of a line, or what is wrong with the line."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return None, f"is no UTF-8 text: {error.reason} at byte {error.start}"
    except (ValueError, RecursionError) as error:
        return None, f"is no JSON: {error}"
    if not isinstance(record, dict):
        return None, f"is no JSON object but a {type(record).__name__}"
    return record, ""


def _skip_line(file: BinaryIO) -> None:
    while (piece := file.readline(MOST_BYTES)) and not piece.endswith(b"\n"):
        pass


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a Parquet file, numbered from 1, without null fields."""
    _check_is_file(path)
    open(path, "rb").close()  # a missing file raises the same error as for JSON lines
    arrow, parquet = load_pyarrow(str(path))
    number = 0
    try:
        for _, batches in row_groups(parquet.ParquetFile(path), rows=_ROWS_AT_ONCE):
            if batches is None:
                raise DocumentError(f"{path}: {UNPACKS_TOO_FAR}")
            for row in (row for batch in batches for row in batch.to_pylist()):
                number += 1
                yield number, {name: _decode_column(name, value) for name, value in row.items() if value is not None}
    except arrow.ArrowException as error:
        raise DocumentError(f"{path} is no Parquet file that can be read: {' '.join(str(error).split())}") from error


def _decode_column(name: str, value: Any) -> Any:
    if name in _AS_JSON and isinstance(value, str):
        return _parse(value.encode("utf-8", "replace"))[0]
    return value
