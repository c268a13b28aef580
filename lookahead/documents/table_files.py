"""Files of one document per line or row: JSON lines, CSV, TSV and Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from lookahead.documents.byte_sources import bounded_lines, opened, read_errors, too_long
from lookahead.documents.decode_text import Document, DocumentId, Reject, checked, decode_bytes, encoding_of, given_id
from lookahead.documents.inputs import DEFAULT_ID_FIELD, Input, load_packages
from lookahead.errors import DocumentError

_UNPACKED = 64 << 20  # bytes; a row group that unpacks to no more is read whatever its size in the file
_MOST_FOLD = 100  # how many times its size in the file a larger row group may unpack to
_UNPACKS_TOO_FAR = f"a group of rows that unpacks to more than {_MOST_FOLD} times its size is not read"
_BATCH_ROWS = 1024
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_END = "\x1e"  # an extra last row: a quote that is not closed swallows it


def read_json_lines(source: Input, field: str, limit: int) -> Iterator[Document | Reject]:
    """Read one document per line that is not blank."""
    with opened(source.path) as file:
        for number, (offset, line) in enumerate(_utf8_lines(file, source.path, limit), start=1):
            place = f"{source.path}:{number}"
            if line is None:
                yield Reject(place, too_long(place, limit))
            elif line.strip():
                yield _json_document(line, place, offset, source, field)


def read_csv(source: Input, field: str, limit: int) -> Iterator[Document | Reject]:
    """Read one document per row; the first names the columns. DocumentError if the rest cannot be read."""
    csv.field_size_limit(min(limit, (1 << 31) - 1))
    with opened(source.path) as file:
        wrong: list[DocumentError] = []  # about the lines of the current row
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
                if not names and wrong:
                    raise wrong[0]
                if not names and row:
                    names = row
                    places = _columns(source, field, names)
                elif wrong:
                    yield Reject(place, str(wrong[0]))
                    wrong.clear()
                elif not any(cell.strip() for cell in row):
                    continue
                elif len(row) != len(names):
                    yield Reject(place, f"{place}: {len(row)} cells, and there are {len(names)} columns")
                else:
                    yield _document(place, source, field, *(row[at] for at in places))
        except csv.Error as error:
            where = f"{source.path}:{rows.line_num}"
            message = too_long(where, limit) if "field limit" in str(error) else f"{where}: not valid CSV: {error}"
            raise DocumentError(f"{message}; the rest of the file is not read") from error


def read_parquet(source: Input, field: str, limit: int) -> Iterator[Document | Reject]:
    """Read one document per row. DocumentError if the file is damaged, or the column is missing or holds no text."""
    arrow, parquet = load_packages("parquet", source.path)
    number = 0
    with opened(source.path, seekable=True) as file, read_errors(source.path, "Parquet"):
        table = parquet.ParquetFile(file)
        names: list[str] = table.schema_arrow.names
        places = _columns(source, field, names)
        kind = table.schema_arrow.field(places[0]).type
        kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
        if str(kind) not in ("string", "large_string", "string_view"):
            raise DocumentError(f"{source.path}: column {field!r} must hold strings, it holds {kind}")
        columns = [names[at] for at in places]
        for rows, batches in _row_groups(table, columns, max(limit, _UNPACKED)):
            if batches is None:
                number += rows
                place = f"{source.path}:{number - rows + 1}-{number}"
                yield Reject(place, f"{place}: {_UNPACKS_TOO_FAR}")
                continue
            for batch in batches:
                number += 1
                cells = (_cell(batch, name) for name in columns)
                yield _document(f"{source.path}:{number}", source, field, *cells, limit=limit)


def parquet_records(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file on this machine, without null fields; DocumentError if they cannot be read."""
    _, parquet = load_packages("parquet", str(path))
    with read_errors(str(path), "Parquet"):
        for _, batches in _row_groups(parquet.ParquetFile(path), rows=_BATCH_ROWS):
            if batches is None:
                raise DocumentError(f"{path}: {_UNPACKS_TOO_FAR}")
            for batch in batches:
                for row in batch.to_pylist():
                    yield {name: value for name, value in row.items() if value is not None}


def _row_groups(
    table: Any, columns: Sequence[str] | None = None, most: int = _UNPACKED, rows: int = 1
) -> Iterator[tuple[int, Iterator[Any] | None]]:
    """The row groups of an open Parquet file: the number of rows, and batches of at most `rows` rows or 64 MiB.

    They are `None` for a group that would unpack to more than `most` bytes and more than 100 times its size in the
    file: a value may be compressed a thousandfold, or be repeated in every row. The sizes are those that the file
    declares, and no value is larger than its unpacked group.
    """
    for number in range(table.num_row_groups):
        group = table.metadata.row_group(number)
        chunks = [group.column(at) for at in range(group.num_columns)]
        if columns is not None:
            chunks = [chunk for chunk in chunks if any(f"{chunk.path_in_schema}.".startswith(f"{c}.") for c in columns)]
        unpacked = sum(chunk.total_uncompressed_size for chunk in chunks)
        if unpacked > max(most, _MOST_FOLD * sum(chunk.total_compressed_size for chunk in chunks)):
            yield group.num_rows, None
        else:
            at_once = max(1, min(rows, _UNPACKED // max(1, unpacked)))
            yield group.num_rows, table.iter_batches(batch_size=at_once, row_groups=[number], columns=columns)


def _cell(batch: Any, name: str) -> object:
    """The value of the first column of a name in a batch of one row, or the error that decoding it raises."""
    try:
        return batch.column(batch.schema.names.index(name))[0].as_py()
    except UnicodeDecodeError as error:
        return error


def _utf8_lines(file: io.BufferedReader, path: str, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """The lines as of `bounded_lines`, in UTF-8 whatever Unicode encoding the file has."""
    encoding = encoding_of(file.peek(4)[:4])
    if encoding == "utf-8":
        yield from bounded_lines(file, limit)
        return
    text = io.TextIOWrapper(file, encoding, newline="\n")
    try:
        while line := text.readline(limit + 1):
            is_whole = len(line) <= limit or line.endswith("\n")
            yield 0, line.encode("utf-8", "replace") if is_whole else None
            while not is_whole and not line.endswith("\n") and (line := text.readline(limit + 1)):
                pass
    except UnicodeError as error:
        raise DocumentError(f"{path}: a line is not {encoding.upper()} text: {error}") from error
    finally:
        text.detach()  # the caller closes the file


def _csv_lines(file: io.BufferedReader, path: str, limit: int, wrong: list[DocumentError]) -> Iterator[str]:
    """The lines of an open file as text; one that is none is added to `wrong` and yielded with its bytes escaped.

    A line that is too long ends the file, since it is unknown where the next row begins.
    """
    for number, (offset, data) in enumerate(_utf8_lines(file, path, limit), start=1):
        place = f"{path}:{number}"
        if data is None:
            raise DocumentError(f"{too_long(place, limit)}; the rest of the file is not read")
        try:
            line = decode_bytes(data, place, offset)
        except DocumentError as error:
            wrong.append(error)
            line = data.replace(b"\0", b"").decode("utf-8", "surrogateescape")  # csv takes zeros from Python 3.11 on
        yield line


def _columns(source: Input, field: str, names: list[str]) -> list[int]:
    """The index of the column of the text, and that of the id if there is an id column."""
    for needed in (field, source.id_field):
        if needed is not None and needed not in names:
            there = ", ".join(names) or "none"
            option = "--id-field" if needed == source.id_field else "--text-field"
            raise DocumentError(f"{source.path}: no column {needed!r}; the columns are {there} ({option} names one)")
    id_name = source.id_field or DEFAULT_ID_FIELD
    return [names.index(name) for name in (field, id_name) if name in names]


def _json_document(line: bytes, place: str, offset: int, source: Input, field: str) -> Document | Reject:
    try:
        record = json.loads(decode_bytes(line, place, offset).strip())
    except DocumentError as error:
        return Reject(place, str(error))
    except RecursionError:
        return Reject(place, f"{place}: not valid JSON: nested too deeply")
    except json.JSONDecodeError as error:
        what = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        return Reject(place, f"{place}: not valid JSON: {what}")
    except ValueError as error:  # a number of too many digits
        return Reject(place, f"{place}: not valid JSON: {error}")
    if not isinstance(record, dict):
        return Reject(place, f"{place}: expected a JSON object, got {type(record).__name__}")
    given = record.get(source.id_field or DEFAULT_ID_FIELD)
    for needed in (field, source.id_field):
        if needed is not None and needed not in record:
            there = ", ".join(record) or "none"
            return Reject(given_id(given, place, None), f"{place}: no field {needed!r}; the fields are {there}")
    return _document(place, source, field, record[field], given)


def _document(
    place: str, source: Input, field: str, text: object, given: object = None, *, limit: int | None = None
) -> Document | Reject:
    name: DocumentId = place
    where = f"{place}: {'field' if source.format == 'jsonl' else 'column'} {field!r}"
    try:
        name = given_id(given, place, source.id_field)
        if isinstance(text, UnicodeDecodeError):
            raise DocumentError(f"{where} is not UTF-8 text: {text.reason} at byte {text.start}")
        if not isinstance(text, str):
            raise DocumentError(f"{where} must hold a string, got {type(text).__name__}")
        if limit is not None and len(text) > limit // 4 and len(text.encode("utf-8", "replace")) > limit:
            raise DocumentError(too_long(place, limit))
        return Document(name, checked(text, place))
    except DocumentError as error:
        return Reject(name, str(error))
