"""Results as a Parquet file: written from the JSON lines when a job ends, and read back when it is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from lookahead.documents.inputs import load_packages
from lookahead.documents.table_files import parquet_records
from lookahead.errors import ConfigError
from lookahead.jobs.result_lines import Record, encode_line, records_in
from lookahead.ngram.replacing import replacing
from lookahead.utils.atomic import parse_json

_BATCH_ROWS = 1024
_IDS = ("id", "copy_of")
_AS_JSON = ("stats", "tree", "plain")  # their fields vary
_NUMBERS = ("document_tokens", "summary_tokens", "parts")
_TEXTS = ("split", "finish_reason", "document", "model", "fingerprint")


def write_parquet(lines: Path, path: Path) -> None:
    """Write a file of results as Parquet, atomically.

    Ids are numbers if all of them are, else strings; `stats`, `tree` and `plain` are JSON strings.
    """
    arrow, parquet = load_packages("parquet", str(path))
    is_number = all(_is_int64(record[name]) for record in records_in(lines) for name in _IDS if name in record)
    id_type, text, number = arrow.int64() if is_number else arrow.string(), arrow.string(), arrow.int64()
    columns = {"id": id_type, "summary": text} | dict.fromkeys(_NUMBERS, number) | dict.fromkeys(_TEXTS, text)
    columns |= {"copy_of": id_type} | dict.fromkeys(_AS_JSON, text)
    schema = arrow.schema([*columns.items(), ("speedup", arrow.float64()), ("identical", arrow.bool_())])
    rows = (_row(record, is_number) for record in records_in(lines))
    with replacing(path) as file, parquet.ParquetWriter(file, schema) as writer:
        while batch := list(islice(rows, _BATCH_ROWS)):
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))


def read_parquet_lines(path: Path, lines: Path, is_own: Callable[[Record], bool]) -> None:
    """Write the JSON lines that a Parquet file was made of, all of them of the job that is resumed (`is_own`)."""
    try:
        with replacing(lines) as file:
            for number, record in enumerate(parquet_records(path), start=1):
                record |= {name: parse_json(record[name]) for name in _AS_JSON if name in record}
                if not is_own(record):
                    raise ValueError(f"row {number} is none of this job")
                file.write(encode_line(record))
    except (ValueError, TypeError) as error:
        what = " ".join(str(error).removeprefix(f"{path}: ").split())
        raise ConfigError(f"{path} holds no results to go on with: {what}; pass --overwrite to begin anew") from error


def _row(record: Record, ids_are_numbers: bool) -> Record:
    """A line as a row. Lone surrogates, which Parquet cannot hold, become escapes."""
    row = dict(record)
    for name, value in record.items():
        if name in _IDS and not ids_are_numbers:
            row[name] = str(value)
        elif name in _AS_JSON and value is not None:
            row[name] = json.dumps(value)
        if isinstance(row[name], str):
            row[name] = row[name].encode("utf-8", "backslashreplace").decode()
    return row


def _is_int64(name: Any) -> bool:
    return isinstance(name, int) and -(1 << 63) <= name < 1 << 63
