"""Tables: CSV, TSV and Parquet, a document a row."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from lookahead.documents.byte_sources import bounded_lines, opened, too_long
from lookahead.documents.decode_text import Document, DocumentId, Reject, checked, decode_bytes, encoding_of, given_id
from lookahead.documents.inputs import DEFAULT_ID_FIELD, Input
from lookahead.errors import DocumentError

_UNPACKED = 64 << 20  # bytes; a group of rows that unpacks to no more is read however small its file is
_MOST_FOLD = 100  # how many times its size in the file a larger group may unpack to
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_END = "\x1e"  # a row behind the last one, unless a quote swallows it


def read_csv(source: Input, field: str, limit: int) -> Iterator[Document | Reject]:
    """Read one document per row; the first row names the columns.

    Raises:
        DocumentError: The column is missing, there is no row, or the rest of the file cannot be read.
        OSError: The file cannot be read.
    """
    is_empty = True
    csv.field_size_limit(min(limit, (1 << 31) - 1))
    with opened(source.path) as file:
        wrong: list[DocumentError] = []  # with the lines of the row that was read last
        lines = chain(_lines(file, source.path, limit, wrong), [_END])
        rows = csv.reader(lines, delimiter=_DELIMITERS[source.format])
        try:
            names = next(filter(None, rows), [])
            if wrong:
                raise wrong[0]
            text_at, id_at = _columns(source, field, names)
            before = rows.line_num
            for row in rows:
                if row == [_END]:
                    break
                if row and row[-1].endswith(_END):
                    raise DocumentError(
                        f"{source.path}:{before + 1}: a quote is not closed; the rest of the file is not read"
                    )
                before = rows.line_num
                place = f"{source.path}:{before}"
                if wrong:
                    is_empty = False
                    yield Reject(place, str(wrong[0]))
                    wrong.clear()
                elif any(cell.strip() for cell in row):
                    is_empty = False
                    yield _csv_row(source, field, row, names, text_at, id_at, place)
        except csv.Error as error:
            where = f"{source.path}:{rows.line_num}"
            message = too_long(where, limit) if "field limit" in str(error) else f"{where}: not valid CSV: {error}"
            raise DocumentError(f"{message}; the rest of the file is not read") from error
    if is_empty:
        raise DocumentError(f"{source.path}: no documents")


def read_parquet(source: Input, field: str, limit: int) -> Iterator[Document | Reject]:
    """Read one document per row, some rows at a time.

    Raises:
        DocumentError: pyarrow is not there, the file is damaged, or the column is missing or holds no text.
        OSError: The file cannot be read.
    """
    arrow, parquet = load_pyarrow(source.path)
    number = 0
    with opened(source.path, seekable=True) as file:
        try:
            table = parquet.ParquetFile(file)
            names: list[str] = table.schema_arrow.names
            text_at, id_at = _columns(source, field, names)
            _check_is_text(arrow, table.schema_arrow.field(text_at).type, source.path, field)
            id_name = None if id_at is None else names[id_at]
            columns = [name for name in (names[text_at], id_name) if name is not None]
            for rows, batches in row_groups(table, columns, max(limit, _UNPACKED)):
                if batches is None:
                    number += rows
                    place = f"{source.path}:{number - rows + 1}-{number}"
                    yield Reject(place, f"{place}: {UNPACKS_TOO_FAR}")
                    continue
                for batch in batches:
                    number += 1
                    yield _parquet_row(source, field, batch, names[text_at], id_name, number, limit)
        except (arrow.ArrowException, OSError) as error:
            message = " ".join(str(error).split())
            raise DocumentError(f"{source.path}: cannot be read as Parquet: {message}") from error
    if number == 0:
        raise DocumentError(f"{source.path}: no documents")


def row_groups(
    table: Any, columns: Sequence[str] | None = None, most: int = _UNPACKED, rows: int = 1
) -> Iterator[tuple[int, Iterator[Any] | None]]:
    """The groups of rows of an open Parquet file, by the sizes that the file declares.

    A file of some kilobytes can stand for gigabytes: one value may be compressed a thousand times, and a value that
    stands in a dictionary once may be repeated in every row. No value is larger than its group unpacked.

    Args:
        table: A `pyarrow.parquet.ParquetFile`.
        columns: Names of those to read; all where `None`.
        most: Bytes that a group may unpack to, however little of the file it takes.
        rows: Most rows of a batch; it has less where they could take more than 64 MiB together, and 1 at least.

    Yields:
        The number of rows of a group and its record batches; `None` in their place where it would unpack to more than
        `most` and 100 times what it takes of the file.
    """
    for number in range(table.num_row_groups):
        group = table.metadata.row_group(number)
        chunks = [group.column(at) for at in range(group.num_columns)]
        read = [chunk for chunk in chunks if columns is None or _belongs(chunk.path_in_schema, columns)]
        unpacked = sum(chunk.total_uncompressed_size for chunk in read)
        if unpacked > max(most, _MOST_FOLD * sum(chunk.total_compressed_size for chunk in read)):
            yield group.num_rows, None
        else:
            at_once = max(1, min(rows, _UNPACKED // max(1, unpacked)))
            yield group.num_rows, table.iter_batches(batch_size=at_once, row_groups=[number], columns=columns)


UNPACKS_TOO_FAR = f"a group of rows that unpacks to more than {_MOST_FOLD} times its size is not read"


def _belongs(path: str, columns: Sequence[str]) -> bool:
    """Whether the values at a path of a Parquet schema are of some columns."""
    return any(path == name or path.startswith(f"{name}.") for name in columns)


def _parquet_row(
    source: Input, field: str, batch: Any, text_name: str, id_name: str | None, number: int, limit: int
) -> Document | Reject:
    """The document of a batch of one row."""
    text, given = (None if name is None else _cell(batch, name) for name in (text_name, id_name))
    return _document(f"{source.path}:{number}", source, field, text, given, limit)


def _cell(batch: Any, name: str) -> object:
    """The value of the first column of a name; what is no text is an error in its place."""
    try:
        return batch.column(batch.schema.names.index(name))[0].as_py()
    except UnicodeDecodeError as error:
        return error


def load_pyarrow(path: str) -> tuple[Any, Any]:
    """The modules pyarrow and pyarrow.parquet.

    Raises:
        DocumentError: They are not installed; the message names the path that needs them.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DocumentError(f"{path}: Parquet needs pyarrow: pip install 'lookahead-decoding[tables]'") from error
    return pyarrow, pyarrow.parquet


def _lines(file: io.BufferedReader, path: str, limit: int, wrong: list[DocumentError]) -> Iterator[str]:
    """The lines of an open file as text; behind one that is too long nobody knows where a row begins.

    What is wrong with a line that is no text is added to `wrong`, and the line comes with its bytes escaped.
    """
    encoding = encoding_of(file.peek(4)[:4])
    if encoding != "utf-8":
        text = io.TextIOWrapper(file, encoding, newline="\n")
        try:
            while line := text.readline(limit + 1):
                if len(line) > limit and not line.endswith("\n"):
                    raise DocumentError(f"{too_long(path, limit)}; the rest of the file is not read")
                yield line
        except UnicodeError as error:
            raise DocumentError(f"{path}: not {encoding.upper()} text from some line on: {error}") from error
        finally:
            text.detach()
        return
    for number, (offset, data) in enumerate(bounded_lines(file, limit), start=1):
        place = f"{path}:{number}"
        if data is None:
            raise DocumentError(f"{too_long(place, limit)}; the rest of the file is not read")
        try:
            line = decode_bytes(data, place, offset)
        except DocumentError as error:
            wrong.append(error)
            line = data.replace(b"\0", b"").decode("utf-8", "surrogateescape")  # before Python 3.11 csv takes no zeros
        yield line


def _columns(source: Input, field: str, names: list[str]) -> tuple[int, int | None]:
    """Where the text and the id stand, the latter `None` where there is no such column and none was asked for."""
    for needed in (field, source.id_field):
        if needed is not None and needed not in names:
            there = ", ".join(names) or "none"
            option = "--id-field" if needed == source.id_field else "--text-field"
            raise DocumentError(f"{source.path}: no column {needed!r}; the columns are {there} ({option} names one)")
    id_name = source.id_field or DEFAULT_ID_FIELD
    return names.index(field), names.index(id_name) if id_name in names else None


def _csv_row(
    source: Input, field: str, row: list[str], names: list[str], text_at: int, id_at: int | None, place: str
) -> Document | Reject:
    """The document of one row."""
    if len(row) != len(names):
        return Reject(place, f"{place}: {len(row)} cells, and there are {len(names)} columns")
    return _document(place, source, field, row[text_at], row[id_at] if id_at is not None else None, None)


def _document(
    place: str, source: Input, field: str, text: object, given: object, limit: int | None
) -> Document | Reject:
    """The document of one row, or what is wrong with it."""
    name: DocumentId = place
    try:
        name = given_id(given, place, source.id_field)
        if isinstance(text, UnicodeDecodeError):
            raise DocumentError(f"{place}: column {field!r} is not UTF-8 text: {text.reason} at byte {text.start}")
        if not isinstance(text, str):
            raise DocumentError(f"{place}: column {field!r} must hold a string, got {type(text).__name__}")
        if limit is not None and len(text) > limit // 4 and len(text.encode("utf-8", "replace")) > limit:
            raise DocumentError(too_long(place, limit))
        return Document(name, checked(text, place))
    except DocumentError as error:
        return Reject(name, str(error))


def _check_is_text(arrow: Any, kind: Any, path: str, field: str) -> None:
    """Refuse a column that holds something else than text."""
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or "string" in str(kind)):
        raise DocumentError(f"{path}: column {field!r} must hold strings, it holds {kind}")
