"""The files of a job: JSON lines that are written atomically, sorted, and converted to Parquet and back."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
from codecs import BOM_UTF8
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from io import FileIO
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lookahead.documents.inputs import load_packages
from lookahead.errors import ConfigError, ResultsError, count
from lookahead.jobs.line import Entry, Line, Record, parse_line, read_entries, read_rows, result_columns
from lookahead.utils.atomic import replacing, sync_folder

RECOVERED = ".recovered.jsonl"  # suffix of the file with the lines of a results file that was replaced
_BATCH_ROWS = 1024


def encode_line(record: Record) -> bytes:
    """A record as one line of JSON in UTF-8, including the line break."""
    # Python represents invalid bytes in file names as lone surrogates. They become JSON escapes.
    return (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


class Sorted(NamedTuple):
    """What sorting the lines of a file did with them."""

    kept: int
    doubled: int  # dropped: another line of the same document and text was kept
    outdated: int  # dropped for another reason
    unnamed: int  # of those kept, the ones without a key in the order


class LineFile(ExitStack):
    """A file of lines. Each line is written atomically: in one unbuffered write, synced to disk.

    If a write fails (no space left) or is interrupted, the file is truncated to its last whole line. Existing lines are
    kept. With `lazy`, the file is created with its first line, and removed if it ends up empty. `read` makes a line of
    a JSON object, or raises a ValueError.

    Raises:
        ConfigError: The file cannot be created.
        ResultsError: Another program changed the file; raised before the next line and at the end. Its content is kept
            as far as possible.
    """

    def __init__(self, path: Path, read: Callable[[Record], Line] = Line.from_json, *, lazy: bool = False) -> None:
        super().__init__()
        self.path, self._read = path, read
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

    def line_at(self, offset: int, content: bytes) -> Line:
        """The line of a text at an offset; ResultsError if another program changed it. `content` is the text hash."""
        self.check()
        with open(self.path, "rb") as file:
            file.seek(offset)
            try:
                line = self._read(parse_line(file.readline()))
                if line.document != content.hex():
                    raise ValueError("belongs to another text")
            except ValueError as error:
                file.seek(0)
                raise self._damage(file.read(offset).count(b"\n") + 1, str(error)) from error
        return line

    def check(self, line: bytes = b"") -> None:
        """Raise a ResultsError if another program changed the file. Its content and `line` are kept; writing ends.

        A deleted file is written again. If its name is taken, the lines go to a file next to it.
        """
        if self._file is None or self._is_released:
            return
        status, is_there = os.fstat(self._file.fileno()), False
        with suppress(FileNotFoundError, NotADirectoryError):
            is_there = os.path.samestat(os.stat(self.path), status)
        if (is_there and status.st_size == self.whole[0]) or not stat.S_ISREG(status.st_mode):
            return
        self._is_released = True
        raise self._repair(self._file, line) if is_there else ResultsError(self._recover(self._file, line))

    def release(self) -> None:
        """Check the file for the last time. After this call it may be replaced."""
        self.check()
        self._is_released = True

    def sort(self, order: Iterable[bytes], is_outdated: Callable[[Line], bool], *, newest_only: bool = False) -> Sorted:
        """Sort the lines by the order of their keys, lines without a key in it last; a key may repeat.

        The released file is replaced atomically, and only if a line moves or is dropped: one that `is_outdated`,
        without a key in `order`, and with `newest_only` all but the last line of each key.

        Raises:
            OSError: The file cannot be written; it is unchanged.
            ResultsError: A line is damaged; the file is unchanged.
        """
        places: defaultdict[bytes, deque[tuple[int, int, bool]]] = defaultdict(deque)  # offset, length, is outdated
        number = 0
        for number, offset, size, line, problem, _ in read_entries(self.path, self._read):
            if line is None:
                raise self._damage(number, problem)
            if newest_only:
                places[line.key].clear()
            places[line.key].append((offset, size, is_outdated(line)))
        keys = [*order]
        named = [places[key].popleft() for key in keys if places.get(key)]
        names = {*keys}
        others = sorted((place, key in names) for key, rest in places.items() for place in rest)
        kept = named + [place for place, _ in others if not place[2]]
        doubled = sum(is_known and place[2] for place, is_known in others)
        if len(kept) < number or any(after[0] < before[0] for before, after in pairwise(kept)):
            with open(self.path, "rb") as source, replacing(self.path) as target:
                for offset, size, _ in kept:
                    source.seek(offset)
                    target.write(source.read(size))
        return Sorted(len(kept), doubled, number - len(kept) - doubled, len(kept) - len(named))

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

    def _repair(self, file: FileIO, line: bytes) -> ResultsError:
        """Append a line after the last whole line of a changed file; the error names the place of the change."""
        file.seek(0)
        content = file.readall()
        file.truncate(content.rfind(b"\n") + 1)
        file.write(line)
        _sync(file)
        for entry in read_entries(self.path, self._read):
            if entry.problem:
                return self._damage(entry.number, entry.problem)
        if len(content) < self.whole[0]:
            number = content.count(b"\n") + 1
            return ResultsError(f"{self.path}:{number}: another program cut off the file here while the job ran")
        return ResultsError(f"{self.path}: another program wrote to the file while the job ran")

    def _damage(self, number: int, problem: str) -> ResultsError:
        """The error about a line that another program changed while the job ran; `number` begins at 1."""
        changed = "another program changed it while the job ran"
        return ResultsError(f"{self.path}:{number}: not a line of this job: it {problem}; {changed}; remove the line")

    def _remove_if_empty(self) -> None:
        with suppress(OSError):
            if self.path.is_file() and not self.path.stat().st_size:
                self.path.unlink()

    def _open(self) -> FileIO:
        """Open the file without a buffer, since a buffer could write parts of lines."""
        with write_errors(self.path):
            is_new = not self.path.exists()
            is_regular = is_new or self.path.is_file()  # a pipe cannot be opened for reading as well
            file = self.enter_context(FileIO(self.path, "ab+" if is_regular else "ab"))
            self.callback(self.release)
            if is_new:  # a power failure could otherwise lose the name of the file
                sync_folder(self.path.parent)
            return file


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn the errors of an output that cannot be written into a ConfigError that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"output {path} cannot be written: {error.strerror}") from error


def _sync(file: FileIO) -> None:
    try:
        os.fsync(file.fileno())
    except OSError as error:  # pipes, devices and some network drives do not support it
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise


def read_earlier(path: Path, read: Callable[[Record], Line], notes: list[str]) -> Iterator[tuple[Line, int]]:
    """The lines that earlier runs wrote and their byte offsets. A torn last line, as after a crash, is cut off.

    What an editor leaves is mended: a byte order mark before the first line, no line break after the last one.

    Raises:
        ConfigError: A line is not of this job.
    """
    if not path.exists():
        return
    with open(path, "rb") as source:
        if source.read(len(BOM_UTF8)) == BOM_UTF8:
            with replacing(path) as target:
                shutil.copyfileobj(source, target)
            notes.append(f"{path}: removed the byte order mark that an editor wrote before the first line")
    for entry in read_entries(path, read):
        if entry.is_torn and (line := _complete(path, entry, read)) is not None:
            yield line, entry.offset
        elif entry.is_torn:
            with open(path, "r+b") as file:
                file.truncate(entry.offset)
                os.fsync(file.fileno())
            was = "blank" if entry.problem == "is blank" else "torn"
            notes.append(f"{path}: cut off its last line, which was {was} ({entry.size} bytes)")
        elif entry.line is None:
            raise ConfigError(
                f"{path}:{entry.number}: not a line of this job: it {entry.problem}; remove the line, or pass "
                "--overwrite to start over"
            )
        else:
            yield entry.line, entry.offset


def _complete(path: Path, entry: Entry, read: Callable[[Record], Line]) -> Line | None:
    """The last line of a file that lacks only its line break, which is written; `None` if it lacks more."""
    with open(path, "r+b") as file, suppress(ValueError):
        file.seek(entry.offset)
        encoded = file.read(entry.size)
        line = read(parse_line(encoded + b"\n"))
        file.write(b"\n")
        os.fsync(file.fileno())
        return line
    return None


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


def write_parquet(lines: Path, path: Path) -> None:
    """Write results as Parquet. Ids are int64 if all fit, else strings. Objects and lists are JSON text."""
    arrow, parquet = load_packages("parquet", str(path))
    columns = result_columns()
    read = partial(read_entries, lines, Line.from_json)
    ids = [name for name, column in columns.items() if column == "id"]
    named = (getattr(entry.line, name) for entry in read() for name in ids)
    are_numbers = all(isinstance(value, int) and -(1 << 63) <= value < 1 << 63 for value in named if value is not None)
    columns |= dict.fromkeys(ids, "int64" if are_numbers else "string")
    types = {name: getattr(arrow, "string" if column == "json" else column)() for name, column in columns.items()}
    schema = arrow.schema(list(types.items()))
    with replacing(path) as file, parquet.ParquetWriter(file, schema) as writer:
        rows = ({name: _cell(getattr(entry.line, name), columns[name]) for name in columns} for entry in read())
        while batch := list(islice(rows, _BATCH_ROWS)):
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))


def unpack_parquet(path: Path, lines: Path, read: Callable[[Record], Line]) -> None:
    """Convert a Parquet file back to JSON lines; ConfigError if it cannot be read, or a row is not of this job."""
    try:
        status = path.stat()
        with replacing(lines, like=status) as file:
            for entry in read_rows(path, read) if status.st_size else ():  # an empty file was emptied to start over
                if entry.line is None:
                    raise ValueError(f"row {entry.number} is not of this job: it {entry.problem}")
                file.write(encode_line(entry.line.to_json()))
    except (ValueError, TypeError) as error:  # a TypeError: a column of another program has a type that is not JSON
        what = " ".join(str(error).removeprefix(f"{path}: ").split())
        raise ConfigError(f"{path} holds no results to continue: {what}; pass --overwrite to start over") from error


def _cell(value: Any, column: str) -> Any:
    """A value converted to the type of its column. Lone surrogates, which Parquet cannot hold, become escapes."""
    if value is None or column in ("float64", "bool_"):
        return value
    if column == "int64":
        return int(value)
    return json.dumps(value) if column == "json" else str(value).encode("utf-8", "backslashreplace").decode()
