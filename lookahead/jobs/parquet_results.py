"""Results as a Parquet file, made of the JSON lines at a job's end; and back again, to go on with one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from lookahead.documents.table_files import UNPACKS_TOO_FAR, load_pyarrow, row_groups
from lookahead.errors import ConfigError
from lookahead.jobs.json_results import encode_line
from lookahead.jobs.ordering import Record, records_in
from lookahead.ngram.replacing import replacing
from lookahead.utils.atomic import parse_json

_ROWS_AT_ONCE = 1024
_IDS = ("id", "copy_of")
_AS_JSON = ("stats", "tree", "plain")  # what they hold varies
_NUMBERS = ("document_tokens", "summary_tokens", "parts")
_TEXTS = ("summary", "split", "finish_reason", "document", "model", "fingerprint")


def write_parquet(lines: Path, path: Path) -> None:
    """Make a Parquet file of a file of results; it is there whole or not at all.

    Ids are numbers where all of them are, else strings; `stats`, `tree` and `plain` are JSON as strings.

    Raises:
        DocumentError: pyarrow is not installed.
        OSError: The file cannot be written.
    """
    arrow, parquet = load_pyarrow(str(path))
    is_number = all(_is_small(record[name]) for _, _, record in records_in(lines) for name in _IDS if name in record)
    id_type = arrow.int64() if is_number else arrow.string()
    fields = {
        **dict.fromkeys(_IDS, id_type),
        **{name: arrow.string() for name in (*_TEXTS, *_AS_JSON)},
        **{name: arrow.int64() for name in _NUMBERS},
        "speedup": arrow.float64(),
        "identical": arrow.bool_(),
    }
    names = ["id", "summary", *_NUMBERS, *_TEXTS[1:], "copy_of", *_AS_JSON, "speedup", "identical"]
    schema = arrow.schema([(name, fields[name]) for name in names])
    records = (_row(record, is_number) for _, _, record in records_in(lines))
    with replacing(path) as file, parquet.ParquetWriter(file, schema) as writer:
        for rows in _batches(records):
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))


def read_parquet_lines(path: Path, lines: Path, is_own: Callable[[Record], bool]) -> None:
    """Make the file of results again that a Parquet file was made of.

    Args:
        path: The Parquet file.
        lines: The file to make.
        is_own: Whether a line is of the job that goes on.

    Raises:
        DocumentError: pyarrow is not installed.
        ConfigError: The Parquet file is damaged, or of something else.
        OSError: The lines cannot be written.
    """
    arrow, parquet = load_pyarrow(str(path))
    try:
        records = map(_record, _rows_of(parquet.ParquetFile(path)))
        with replacing(lines) as file:
            for number, record in enumerate(records, start=1):
                if not is_own(record):
                    raise ValueError(f"row {number} is none of this job")
                file.write(encode_line(record))
    except (arrow.ArrowException, ValueError, TypeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        what = " ".join(str(error).split())
        raise ConfigError(f"{path} holds no results to go on with: {what}; pass --overwrite to begin anew") from error


def _rows_of(table: Any) -> Iterator[Record]:
    """The rows of an open Parquet file, some in memory at a time.

    Raises:
        ValueError: It would unpack to far more than it is.
    """
    for _, batches in row_groups(table, rows=_ROWS_AT_ONCE):
        if batches is None:
            raise ValueError(UNPACKS_TOO_FAR)
        for batch in batches:
            yield from batch.to_pylist()


def _record(row: Record) -> Record:
    """The line of a row."""
    record = {name: value for name, value in row.items() if value is not None}
    for name in _AS_JSON:
        if record.get(name) is not None:
            record[name] = parse_json(record[name])
    return record


def _row(record: Record, ids_are_numbers: bool) -> Record:
    """A line as a row; what UTF-8 cannot hold is written as an escape."""
    row = dict(record)
    for name in _IDS:
        if name in row and not ids_are_numbers:
            row[name] = str(row[name])
    for name in _AS_JSON:
        if row.get(name) is not None:
            row[name] = json.dumps(row[name])
    for name, value in row.items():
        if isinstance(value, str):
            row[name] = value.encode("utf-8", "backslashreplace").decode()
    return row


def _is_small(name: Any) -> bool:
    """Whether an id is a number of 64 bits."""
    return isinstance(name, int) and -(1 << 63) <= name < 1 << 63


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Some records at a time."""
    iterator = iter(records)
    while rows := list(islice(iterator, _ROWS_AT_ONCE)):
        yield rows
