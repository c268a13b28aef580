"""Lines of results and of rejects from disk, read leniently: what is no line is counted and named, not fatal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from lookahead.documents.table_files import UNPACKS_TOO_FAR, load_pyarrow, row_groups
from lookahead.errors import DocumentError

Record = dict[str, Any]

MOST_BYTES = 64 << 20  # of a line
MOST_COMPLAINTS = 5
PATIENCE = 1000  # lines of another kind, before a file is one of another kind
_ROWS_AT_ONCE = 1024
_AS_JSON = ("stats", "plain")  # which a Parquet file holds as strings


@dataclass(slots=True)
class Reading:
    """How reading a file went.

    Attributes:
        taken: Lines that hold what was looked for.
        malformed: Lines that do not.
        complaints: The first of those, in words.
        is_torn: Whether the last line ends in its middle.
    """

    taken: int = 0
    malformed: int = 0
    complaints: list[str] = field(default_factory=list)
    is_torn: bool = False

    def complain(self, number: int, what: str) -> None:
        """Count a line, from 1, that does not hold what was looked for."""
        self.malformed += 1
        if len(self.complaints) < MOST_COMPLAINTS:
            self.complaints.append(f"line {number} {what}")

    @property
    def is_hopeless(self) -> bool:
        """Whether nothing was found in so many lines that nothing will be."""
        return not self.taken and self.malformed >= PATIENCE

    def describe(self) -> str:
        """What could not be read, in words; nothing where all could."""
        if not self.malformed:
            return ""
        more = "; …" if self.malformed > len(self.complaints) else ""
        torn = " A torn line ends in its middle: the job was stopped, or is writing it." if self.is_torn else ""
        lines = "1 line was" if self.malformed == 1 else f"{self.malformed:,} lines were"
        return f"{lines} left out: {'; '.join(self.complaints)}{more}.{torn}"


def read_results(path: Path, reading: Reading) -> Iterator[Record]:
    """The lines of a file of results, JSON lines or, by its suffix, Parquet.

    Args:
        path: The file.
        reading: Told how it goes.

    Raises:
        DocumentError: The file holds something else, or is Parquet and cannot be read as such.
        OSError: The file cannot be read.
    """
    rows = _parquet_rows(path) if path.suffix.lower() == ".parquet" else _json_lines(path, reading)
    for number, record in rows:
        if "summary" in record or "stats" in record:
            reading.taken += 1
            yield record
        else:
            reading.complain(number, _other_kind(record))
        if reading.is_hopeless:
            break
    if not reading.taken and reading.malformed:
        raise DocumentError(
            f"{path} holds no results of 'lookahead summarize', which have id, summary and stats: "
            f"{reading.complaints[0]}"
        )


def read_rejects(path: Path, reading: Reading) -> Iterator[Record]:
    """The lines of a file of rejects.

    Raises:
        OSError: The file cannot be read.
    """
    for number, record in _json_lines(path, reading):
        if isinstance(record.get("error"), str):
            reading.taken += 1
            yield record
        else:
            reading.complain(number, "has no error")


def _other_kind(record: Record) -> str:
    """What a line holds that is no result."""
    if "error" in record:
        return "is of a file of rejects"
    return f"has neither summary nor stats, but {', '.join(map(repr, islice(record, 4))) or 'nothing'}"


def _check_is_file(path: Path) -> None:
    """Refuse a pipe, which would be waited for, and a device."""
    if path.exists() and not path.is_file():
        raise DocumentError(f"{path}: not a regular file")


def _json_lines(path: Path, reading: Reading) -> Iterator[tuple[int, Record]]:
    """The objects of a file of JSON lines, with the number of their line; empty lines are passed over."""
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


def _parse(line: bytes) -> tuple[Record | None, str]:
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
    """Read on to the end of a line."""
    while (piece := file.readline(MOST_BYTES)) and not piece.endswith(b"\n"):
        pass


def _parquet_rows(path: Path) -> Iterator[tuple[int, Record]]:
    """The rows of a Parquet file, numbered from 1, without what is null."""
    _check_is_file(path)
    open(path, "rb").close()  # a file that is not there is told as elsewhere
    arrow, parquet = load_pyarrow(str(path))
    number = 0
    try:
        for _, batches in row_groups(parquet.ParquetFile(path), rows=_ROWS_AT_ONCE):
            if batches is None:
                raise DocumentError(f"{path}: {UNPACKS_TOO_FAR}")
            for row in (row for batch in batches for row in batch.to_pylist()):
                number += 1
                yield number, {name: _unpacked(name, value) for name, value in row.items() if value is not None}
    except arrow.ArrowException as error:
        raise DocumentError(f"{path} is no Parquet file that can be read: {' '.join(str(error).split())}") from error


def _unpacked(name: str, value: Any) -> Any:
    """A field of a row; those that hold JSON are objects again."""
    if name in _AS_JSON and isinstance(value, str):
        return _parse(value.encode("utf-8", "replace"))[0]
    return value
