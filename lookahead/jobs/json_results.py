"""JSON lines on disk: a line is there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

from lookahead.documents.decode_text import DocumentId
from lookahead.errors import ConfigError


def encode_line(record: dict[str, Any]) -> bytes:
    """One JSON line with its line break, in UTF-8; what UTF-8 cannot hold is written as a JSON escape."""
    # Paths can hold bytes that are no text, which Python keeps as lone surrogates.
    return (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def copy_of(record: dict[str, Any], name: DocumentId) -> dict[str, Any]:
    """The line of a document with the text of another, which has this line: what was measured stays with the other."""
    kept = {key: value for key, value in record.items() if key not in ("plain", "speedup", "identical")}
    return {**kept, "id": name, "stats": None, "copy_of": record.get("copy_of", record["id"])}


class JsonLinesFile:
    """A file of JSON lines, each written at once and whole.

    A line goes to the file in one unbuffered write, and to the disk before the next one is asked for. When that
    fails half way (no space left) or is interrupted, the file is cut back to its last whole line before the error
    goes on.

    Args:
        path: The file.
        lazy: Create the file with its first line, not at once.
        append: Keep the lines that are there.

    Attributes:
        size: Bytes of whole lines.

    Raises:
        ConfigError: The file cannot be created.
    """

    def __init__(self, path: Path, *, lazy: bool = False, append: bool = False) -> None:
        self.path = path
        self.size = path.stat().st_size if append and path.exists() else 0
        self._mode = "ab" if append else "wb"
        self._file: BinaryIO | None = None if lazy else _create(path, self._mode)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line.

        Raises:
            OSError: The line could not be written; none of it is in the file.
        """
        if self._file is None:
            self._file = _create(self.path, self._mode)
        line = encode_line(record)
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
            _to_disk(self._file)
        except BaseException:
            with contextlib.suppress(OSError):  # a pipe or a device has no length to cut
                self._file.truncate(self.size)
                self._file.seek(self.size)
            raise
        self.size += len(line)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> JsonLinesFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class JsonLinesStdout:
    """Standard output as JSON lines, each written when it is there."""

    def write(self, record: dict[str, Any]) -> None:
        """Write one line.

        Raises:
            OSError: It could not be written: the reader is gone, or there is no space left.
        """
        try:
            sys.stdout.buffer.write(encode_line(record))
            sys.stdout.buffer.flush()
        except OSError:
            # What is still in the buffer cannot be written either; Python would try when it exits, and complain.
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise


def _create(path: Path, mode: str) -> BinaryIO:
    """Open a file without a buffer, which would hold lines back and write them in pieces of its own choosing."""
    try:
        return cast(BinaryIO, open(path, mode, buffering=0))
    except OSError as error:
        raise ConfigError(f"output {path} cannot be written: {error.strerror}") from error


def _to_disk(file: BinaryIO) -> None:
    """Wait until what was written would outlive a loss of power; a pipe or a device has no disk."""
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise
