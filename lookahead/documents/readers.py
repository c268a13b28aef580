"""Read and count documents: one per file, or one per line or row of JSON lines, CSV, TSV and Parquet."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from lookahead.documents.byte_sources import MEGABYTE, bounded_lines, opened, read_bounded, read_errors, too_long
from lookahead.documents.decode_text import Document, DocumentId, Reject, checked, decode_bytes, encoding_of, text_of
from lookahead.documents.inputs import DEFAULT_ID_FIELD, Input, load_packages
from lookahead.errors import DocumentError

DEFAULT_LIMIT = 64 * MEGABYTE
_UNPACKED = 64 << 20  # unpacked bytes up to which a row group is read at any compression ratio
_MAX_UNPACK_RATIO = 100  # maximum compression ratio of a larger row group
_UNPACKS_TOO_FAR = f"a group of rows that unpacks to more than {_MAX_UNPACK_RATIO} times its size is not read"
_BATCH_ROWS = 1024
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_END = "\x1e"  # an extra last row; an unclosed quote swallows it


def read_documents(inputs: Sequence[Input], *, limit: int = DEFAULT_LIMIT) -> Iterator[Document | Reject]:
    """Read the documents of all inputs one at a time. A document that cannot be read becomes a `Reject`.

    `limit` is the maximum size in bytes of a document: a file, a line or a value. No more are read into memory.
    """
    for source in inputs:
        try:
            if source.field is None:
                text = text_of(read_bounded(source.path, limit), source.path, source.format, limit)
                yield Document(source.path, checked(text, source.path))
                continue
            is_empty = True
            for document in _TABLES[source.format](source, source.field, limit):
                is_empty = False
                yield document
            if is_empty:
                raise DocumentError(f"{source.path}: no documents")
        except OSError as error:
            yield Reject(source.path, f"{source.path}: {error.strerror or error}")
        except DocumentError as error:
            yield Reject(source.path, str(error))


def count_documents(inputs: Sequence[Input]) -> int | None:
    """The number of documents, or `None` if counting them would mean reading the inputs."""
    total = 0
    try:
        for source in inputs:
            is_file = os.path.isfile(source.path)
            if source.field is None:
                total += 1
            elif source.format == "parquet" and is_file:
                _, parquet = load_packages("parquet", source.path)
                with open(source.path, "rb") as file:
                    total += parquet.ParquetFile(file).metadata.num_rows
            elif source.format == "jsonl" and is_file:
                with open(source.path, "rb") as file:
                    lines = bounded_lines(file, MEGABYTE)  # a line may be larger than memory
                    total += sum(1 for _, line in lines if line is None or line.strip())
            else:
                return None
    except (OSError, ValueError):
        return None
    return total


def _read_json_lines(source: Input, field: str, limit: int) -> Iterator[Document | Reject]:
    """Read one document per line that is not blank."""
    with opened(source.path) as file:
        for number, (offset, line) in enumerate(_utf8_lines(file, source.path, limit), start=1):
            place = f"{source.path}:{number}"
            if line is None:
                yield Reject(place, too_long(place, limit))
            elif line.strip():
                try:
                    record = json.loads(decode_bytes(line, place, offset).strip())
                except DocumentError as error:
                    yield Reject(place, str(error))
                except (ValueError, RecursionError) as error:
                    what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
                    if isinstance(error, json.JSONDecodeError):
                        what = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
                    yield Reject(place, f"{place}: not valid JSON: {what}")
                else:
                    yield _document(place, source, field, record, limit)


def _read_csv(source: Input, field: str, limit: int) -> Iterator[Document | Reject]:
    """Read one document per row. The first row names the columns. DocumentError if the rest cannot be read."""
    csv.field_size_limit(min(limit, (1 << 31) - 1))
    with opened(source.path) as file:
        wrong: list[DocumentError] = []  # errors in the lines of the current row
        lines = chain(_csv_lines(file, source.path, limit, wrong), [_END])
        rows = csv.reader(lines, delimiter=_DELIMITERS[source.format])
        try:
            names: list[str] = []
            before = 0
            for row in rows:
                if row == [_END]:
                    break
                if row and row[-1].endswith(_END):
                    raise DocumentError(
                        f"{source.path}:{before + 1}: a quote is not closed; the rest of the file is not read"
                    )
                before = rows.line_num
                place = f"{source.path}:{before}"
                if not names:
                    if wrong:
                        raise wrong[0]
                    if row:
                        names = row
                        _check_names(source, field, names, source.path)
                elif wrong:
                    yield Reject(place, str(wrong[0]))
                    wrong.clear()
                elif not any(cell.strip() for cell in row):
                    continue
                elif len(row) != len(names):
                    yield Reject(place, f"{place}: {len(row)} cells, and there are {len(names)} columns")
                else:
                    cells = dict(zip(names[::-1], row[::-1], strict=True))  # of equal names the first wins
                    yield _document(place, source, field, cells, limit)
        except csv.Error as error:
            where = f"{source.path}:{rows.line_num}"
            message = too_long(where, limit) if "field limit" in str(error) else f"{where}: not valid CSV: {error}"
            raise DocumentError(f"{message}; the rest of the file is not read") from error


def _read_parquet(source: Input, field: str, limit: int) -> Iterator[Document | Reject]:
    """Read one document per row. DocumentError if the file is damaged, or the column is missing or holds no text."""
    arrow, parquet = load_packages("parquet", source.path)
    number = 0
    with opened(source.path, seekable=True) as file, read_errors(source.path, "Parquet"):
        table = parquet.ParquetFile(file)
        names: list[str] = table.schema_arrow.names
        _check_names(source, field, names, source.path)
        kind = table.schema_arrow.field(names.index(field)).type
        kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
        if str(kind) not in ("string", "large_string", "string_view"):
            raise DocumentError(f"{source.path}: column {field!r} must hold strings, it holds {kind}")
        asked = dict.fromkeys((field, source.id_field or DEFAULT_ID_FIELD, source.prediction_field))
        columns = [name for name in asked if name in names]
        for rows, batches in _row_groups(table, columns, max(limit, _UNPACKED)):
            if batches is None:
                number += rows
                place = f"{source.path}:{number - rows + 1}-{number}"
                yield Reject(place, f"{place}: {_UNPACKS_TOO_FAR}")
                continue
            for batch in batches:
                number += 1
                cells = {name: _cell(batch, name) for name in columns}
                yield _document(f"{source.path}:{number}", source, field, cells, limit)


def parquet_records(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a local Parquet file, without null fields; DocumentError if they cannot be read."""
    _, parquet = load_packages("parquet", str(path))
    with read_errors(str(path), "Parquet"), open(path, "rb") as file:  # pyarrow opens only names that are text
        for _, batches in _row_groups(parquet.ParquetFile(file), rows=_BATCH_ROWS):
            if batches is None:
                raise DocumentError(f"{path}: {_UNPACKS_TOO_FAR}")
            for batch in batches:
                for row in batch.to_pylist():
                    yield {name: value for name, value in row.items() if value is not None}


def _row_groups(
    table: Any, columns: Sequence[str] | None = None, most: int = _UNPACKED, rows: int = 1
) -> Iterator[tuple[int, Iterator[Any] | None]]:
    """The row groups of an open Parquet file: the number of rows, and batches of at most `rows` rows.

    A group over 64 MiB is read in smaller batches. The batches are `None` for a group that would unpack to more than
    `most` bytes and to more than 100 times its size in the file: a value may be compressed a thousandfold, or repeated
    in every row. The sizes are declared in the file. No value is larger than its unpacked group.
    """
    for number in range(table.num_row_groups):
        group = table.metadata.row_group(number)
        chunks = [group.column(at) for at in range(group.num_columns)]
        if columns is not None:
            chunks = [chunk for chunk in chunks if any(f"{chunk.path_in_schema}.".startswith(f"{c}.") for c in columns)]
        unpacked = sum(chunk.total_uncompressed_size for chunk in chunks)
        if unpacked > max(most, _MAX_UNPACK_RATIO * sum(chunk.total_compressed_size for chunk in chunks)):
            yield group.num_rows, None
        else:
            at_once = max(1, min(rows, _UNPACKED // max(1, unpacked)))
            yield group.num_rows, table.iter_batches(batch_size=at_once, row_groups=[number], columns=columns)


def _cell(batch: Any, name: str) -> object:
    """The value of the first column named `name` in a batch of one row, or the error from decoding it."""
    try:
        return batch.column(batch.schema.names.index(name))[0].as_py()
    except UnicodeDecodeError as error:
        return error


def _utf8_lines(file: io.BufferedReader, path: str, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """The lines of `bounded_lines` as UTF-8, for a file in any Unicode encoding."""
    encoding = encoding_of(file.peek(4)[:4])
    if encoding == "utf-8":
        yield from bounded_lines(file, limit)
        return
    text = io.TextIOWrapper(file, encoding, newline="\n")
    try:
        for _, line in bounded_lines(text, limit):
            yield 0, None if line is None else line.encode("utf-8", "replace")
    except UnicodeError as error:
        raise DocumentError(f"{path}: a line is not {encoding.upper()} text: {error}") from error
    finally:
        text.detach()  # the caller closes the file


def _csv_lines(file: io.BufferedReader, path: str, limit: int, wrong: list[DocumentError]) -> Iterator[str]:
    """The lines of an open file as text.

    A line that is not text is yielded with its bytes escaped, and its error is added to `wrong`. A line that is too
    long raises a DocumentError for the rest of the file, since the start of the next row is unknown.
    """
    for number, (offset, data) in enumerate(_utf8_lines(file, path, limit), start=1):
        place = f"{path}:{number}"
        if data is None:
            raise DocumentError(f"{too_long(place, limit)}; the rest of the file is not read")
        try:
            line = decode_bytes(data, place, offset)
        except DocumentError as error:
            wrong.append(error)
            line = data.replace(b"\0", b"").decode("utf-8", "surrogateescape")  # csv accepts zeros since Python 3.11
        yield line


def _check_names(source: Input, field: str, names: Collection[str], place: str) -> None:
    """Raise a DocumentError if the field of the text, or a named field of the id or the prediction, is missing."""
    named = {"--text-field": field, "--id-field": source.id_field, "--prediction-field": source.prediction_field}
    for option, needed in named.items():
        if needed is not None and needed not in names:
            noun, there = "field" if source.format == "jsonl" else "column", ", ".join(names) or "none"
            raise DocumentError(f"{place}: no {noun} {needed!r}; the {noun}s are {there} ({option} names one)")


def _document(place: str, source: Input, field: str, record: Any, limit: int) -> Document | Reject:
    """The document in a JSON value, or in a row given as a dict by column name."""
    name: DocumentId = place
    try:
        if not isinstance(record, dict):
            raise DocumentError(f"{place}: expected a JSON object, got {type(record).__name__}")
        value = record.get(source.id_field or DEFAULT_ID_FIELD)
        if is_id := isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            name = value
        _check_names(source, field, record, place)
        if source.id_field is not None and not is_id:
            kind = "an empty string" if value == "" else type(value).__name__
            raise DocumentError(f"{place}: field {source.id_field!r} must be a string or a whole number, got {kind}")
        text, where = record[field], f"{place}: {'field' if source.format == 'jsonl' else 'column'} {field!r}"
        if isinstance(text, UnicodeDecodeError):
            raise DocumentError(f"{where} is not UTF-8 text: {text.reason} at byte {text.start}")
        if not isinstance(text, str):
            raise DocumentError(f"{where} must hold a string, got {type(text).__name__}")
        if len(text) > limit // 4 and len(text.encode("utf-8", "replace")) > limit:
            raise DocumentError(too_long(place, limit))
        prediction = None if source.prediction_field is None else record[source.prediction_field]
        if not isinstance(prediction, str | None):
            kind = f"a string or nothing, got {type(prediction).__name__}"
            raise DocumentError(f"{place}: field {source.prediction_field!r} must hold {kind}")
        if prediction is not None:  # no character is refused: a prediction cannot change the output
            prediction = prediction.encode("utf-8", "replace").decode()
        return Document(name, checked(text, place), prediction)
    except DocumentError as error:
        return Reject(name, str(error))


_TABLES = {"jsonl": _read_json_lines, "csv": _read_csv, "tsv": _read_csv, "parquet": _read_parquet}
