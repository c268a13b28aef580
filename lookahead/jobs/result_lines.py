"""Files of results and rejects: JSON lines written atomically, sorted, and converted to Parquet and back."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from io import FileIO
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from lookahead.documents.inputs import load_packages
from lookahead.documents.readers import parquet_records
from lookahead.errors import ConfigError, ResultsError, count
from lookahead.jobs.schema import Record, RejectLine, ResultLine, parquet_columns, parse_line, read_line
from lookahead.utils.replacing import replacing, sync_folder

RECOVERED = ".recovered.jsonl"  # suffix of the file with the lines of a results file that was replaced
_BATCH_ROWS = 1024


def encode_line(record: Record) -> bytes:
    """A record as one line of JSON in UTF-8, including the line break."""
    # Python represents invalid bytes in file names as lone surrogates. They become JSON escapes.
    return (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


class JsonLinesFile(ExitStack):
    """A file of JSON lines. Each line is written atomically: in one unbuffered write, synced to disk.

    If a write fails (no space left) or is interrupted, the file is truncated to its last whole line. Existing lines are
    kept. With `lazy`, the file is created with its first line, and removed if it ends up empty.

    Raises:
        ConfigError: The file cannot be created.
        ResultsError: Another program changed the file; raised before the next line and at the end. Its content is kept
            as far as possible.
    """

    def __init__(self, path: Path, *, lazy: bool = False) -> None:
        super().__init__()
        self.path = path
        # Bytes of whole lines, and lines of this run. One tuple, so that an interrupt cannot separate them.
        self.whole = (path.stat().st_size if path.exists() else 0, 0)
        self._is_released = False
        if lazy:
            self.callback(self._remove_if_empty)
        self._file: FileIO | None = None if lazy and not path.exists() else self._open()

    def write(self, record: Record) -> None:
        """Append one line; after an OSError the file is unchanged."""
        if self._file is None:
            self._file = self._open()
        line = encode_line(record)
        self.check(line)
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
            _sync(self._file)
            self.whole = (self.whole[0] + len(line), self.whole[1] + 1)
        except BaseException:
            with suppress(OSError):  # a pipe or a device cannot be truncated
                self._file.truncate(self.whole[0])
            raise

    def check(self, line: bytes = b"") -> None:
        """Raise a ResultsError if another program changed the file. Its content and `line` are kept; writing ends.

        A deleted file is written again. If its name is taken, the lines go to a file next to it.
        """
        if self._file is None or self._is_released:
            return
        held, is_there = os.fstat(self._file.fileno()), False
        with suppress(FileNotFoundError, NotADirectoryError):
            is_there = os.path.samestat(os.stat(self.path), held)
        if (is_there and held.st_size == self.whole[0]) or not stat.S_ISREG(held.st_mode):
            return
        self._is_released = True
        raise ResultsError(self._repair(self._file, line) if is_there else self._recover(self._file, line))

    def release(self) -> None:
        """Check the file for the last time. After this call it may be replaced."""
        self.check()
        self._is_released = True

    def _recover(self, file: FileIO, line: bytes) -> str:
        """Write the lines of a deleted file again; returns a message with the result."""
        what = f"{self.path} was deleted or replaced by another program while the job ran"
        place = Path(f"{self.path}{RECOVERED}")
        try:
            earlier = place.read_bytes() if place.exists() else b""  # of an earlier recovery
            with replacing(place, like=os.fstat(file.fileno())) as copy:
                copy.write(earlier)
                file.seek(0)
                shutil.copyfileobj(file, copy)
                copy.write(line)
        except OSError as error:
            return f"{what}, and its lines are lost: {place} cannot be written: {error.strerror}"
        lines = count(place.read_bytes().count(b"\n"), "line")
        if not earlier:
            with suppress(OSError):  # the name is taken, or the file system has no links
                os.link(place, self.path)
                place.unlink()
                return f"{what}; its content was written again ({lines})"
        return f"{what}; its content is in {place} ({lines}): move that to {self.path} to continue with it"

    def _repair(self, file: FileIO, line: bytes) -> str:
        """Append a line after the last whole line of a changed file; returns a message with the place of the change."""
        file.seek(0)
        *lines, torn = file.readall().split(b"\n")
        size = sum(len(each) + 1 for each in lines)
        file.truncate(size)
        file.write(line)
        _sync(file)
        for number, each in enumerate(lines, start=1):
            try:
                read_line(each + b"\n")
            except ValueError as error:
                return describe_damage(self.path, number, str(error))
        if size + len(torn) < self.whole[0]:
            return f"{self.path}:{len(lines) + 1}: another program cut off the file here while the job ran"
        return f"{self.path}: another program wrote to the file while the job ran"

    def _remove_if_empty(self) -> None:
        with suppress(OSError):
            if self.path.is_file() and not self.path.stat().st_size:
                self.path.unlink()

    def _open(self) -> FileIO:
        """Open the file without a buffer, since a buffer could write parts of lines."""
        try:
            is_new = not self.path.exists()
            is_regular = is_new or self.path.is_file()  # a pipe cannot be opened for reading as well
            file = self.enter_context(FileIO(self.path, "ab+" if is_regular else "ab"))
            self.callback(self.release)
            if is_new:  # a power failure could otherwise lose the name of the file
                sync_folder(self.path.parent)
            return file
        except OSError as error:
            raise ConfigError(f"output {self.path} cannot be written: {error.strerror}") from error


def describe_damage(path: Path, number: int, what: str) -> str:
    """The error message for a line that another program changed while a job ran; `number` begins at 1."""
    changed = "another program changed it while the job ran"
    return f"{path}:{number}: no line of this job: it {what}; {changed}; remove the line"


def _sync(file: FileIO) -> None:
    try:
        os.fsync(file.fileno())
    except OSError as error:  # pipes, devices and some network drives do not support it
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise


def print_line(record: Record) -> None:
    """Write one line to standard output and flush it."""
    try:
        sys.stdout.buffer.write(encode_line(record))
        sys.stdout.buffer.flush()
    except OSError:
        # Without this, Python would flush the buffer at exit and print the same error again.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def sort_lines(
    path: Path,
    order: Iterable[bytes],
    is_outdated: Callable[[ResultLine | RejectLine], bool],
    *,
    newest_only: bool = False,
) -> tuple[int, int]:
    """Sort the lines of a file. It is replaced atomically, and only if a line moves or is dropped.

    Args:
        path: The file.
        order: Keys of lines in the wanted order; a key may repeat. Lines without a key in it come last.
        is_outdated: Whether to drop a line without a key in `order`.
        newest_only: Whether only the last line of each key is kept.

    Returns:
        The number of lines kept and the number dropped.

    Raises:
        OSError: The file cannot be written; it is unchanged.
        ResultsError: A line is damaged; the file is unchanged.
    """
    places: defaultdict[bytes, deque[tuple[int, int, bool]]] = defaultdict(deque)  # offset, length, is outdated
    number = offset = 0
    with open(path, "rb") as file:
        for number, encoded in enumerate(file, start=1):
            try:
                line = read_line(encoded)
            except ValueError as error:
                raise ResultsError(describe_damage(path, number, str(error))) from error
            alike = places[line.key]
            if newest_only:
                alike.clear()
            alike.append((offset, len(encoded), is_outdated(line)))
            offset += len(encoded)
    named = [places[key].popleft() for key in order if places.get(key)]
    others = sorted(place for rest in places.values() for place in rest)
    kept = named + [place for place in others if not place[2]]
    if len(kept) < number or any(after[0] < before[0] for before, after in pairwise(kept)):
        with open(path, "rb") as source, replacing(path) as target:
            for offset, length, _ in kept:
                source.seek(offset)
                target.write(source.read(length))
    return len(kept), number - len(kept)


def write_parquet(lines: Path, path: Path) -> None:
    """Write results as Parquet. Ids are int64 if all fit, else strings. Objects and lists are JSON text."""
    arrow, parquet = load_packages("parquet", str(path))
    columns = parquet_columns()
    ids = [name for name, column in columns.items() if column == "id"]
    with open(lines, "rb") as source:
        named = (getattr(line, name) for line in map(_result, source) for name in ids)
        are_numbers = all(isinstance(each, int) and -(1 << 63) <= each < 1 << 63 for each in named if each is not None)
    columns |= dict.fromkeys(ids, "int64" if are_numbers else "string")
    types = {name: getattr(arrow, "string" if column == "json" else column)() for name, column in columns.items()}
    schema = arrow.schema(list(types.items()))
    with open(lines, "rb") as source, replacing(path) as file, parquet.ParquetWriter(file, schema) as writer:
        rows = ({name: _cell(getattr(line, name), columns[name]) for name in columns} for line in map(_result, source))
        while batch := list(islice(rows, _BATCH_ROWS)):
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))


def unpack_parquet(path: Path, lines: Path, read: Callable[[Record], ResultLine]) -> None:
    """Convert a Parquet file back to JSON lines. `read` raises a ValueError for a row of another job.

    Raises:
        ConfigError: A row is not of this job, or the file cannot be read.
    """
    try:
        with replacing(lines, like=path.stat()) as file:
            for number, record in enumerate(parquet_records(path), start=1):
                try:
                    line = read(record)
                except ValueError as error:
                    raise ValueError(f"row {number} is not of this job: it {error}") from error
                file.write(encode_line(line.to_json()))
    except (ValueError, TypeError) as error:  # a TypeError: a column of another program has a type that is not JSON
        what = " ".join(str(error).removeprefix(f"{path}: ").split())
        raise ConfigError(f"{path} holds no results to continue: {what}; pass --overwrite to start over") from error


def _result(line: bytes) -> ResultLine:
    return ResultLine.from_json(parse_line(line))


def _cell(value: Any, column: str) -> Any:
    """A value converted to the type of its column. Lone surrogates, which Parquet cannot hold, become escapes."""
    if value is None or column in ("float64", "bool_"):
        return value
    if column == "int64":
        return int(value)
    return json.dumps(value) if column == "json" else str(value).encode("utf-8", "backslashreplace").decode()
