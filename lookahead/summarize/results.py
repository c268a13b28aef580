"""JSON lines on disk: a line is there whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from lookahead.errors import ConfigError
from lookahead.files.inputs import Input
from lookahead.files.outputs import check_output


def encode_line(record: dict[str, Any]) -> bytes:
    """One JSON line with its line break, in UTF-8; what UTF-8 cannot hold is written as a JSON escape."""
    # Paths can hold bytes that are no text, which Python keeps as lone surrogates.
    return (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """Where a job writes.

    Attributes:
        results: The file for the summaries; `None` where they are shown instead.
        rejects: The file for documents that failed; `None` is `RESULTS.rejects.jsonl`, or none without results.
        overwrite: Whether files that exist may be replaced.
    """

    results: Path | None = None
    rejects: Path | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.rejects is None and self.results is not None:
            object.__setattr__(self, "rejects", Path(f"{self.results}.rejects.jsonl"))

    def check(self, inputs: Sequence[Input]) -> None:
        """Refuse a path that cannot be written or would destroy a file, before any work is done.

        Raises:
            ConfigError: With the path and what is wrong about it.
        """
        paths = [path for path in (self.results, self.rejects) if path is not None]
        if len(paths) == 2 and paths[0].resolve() == paths[1].resolve():
            raise ConfigError(f"output {paths[0]} cannot hold both the summaries and the rejects")
        for path in paths:
            check_output(path, inputs, overwrite=self.overwrite)

    def clear_rejects(self) -> None:
        """Remove the rejects of an earlier job, which would pass for this one's; call it after `check`."""
        if self.overwrite and self.rejects is not None and self.rejects.is_file():
            self.rejects.unlink()


class JsonLinesFile:
    """A new file of JSON lines, each written at once and whole.

    A line goes to the file in one unbuffered write. When that fails half way (no space left) or is interrupted,
    the file is cut back to its last whole line before the error goes on.

    Args:
        path: The file.
        lazy: Create the file with its first line, not at once.

    Raises:
        ConfigError: The file cannot be created.
    """

    def __init__(self, path: Path, *, lazy: bool = False) -> None:
        self.path = path
        self._size = 0
        self._file: BinaryIO | None = None if lazy else _create(path)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line.

        Raises:
            OSError: The line could not be written; none of it is in the file.
        """
        if self._file is None:
            self._file = _create(self.path)
        line = encode_line(record)
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except BaseException:
            with contextlib.suppress(OSError):  # a pipe or a device has no length to cut
                self._file.truncate(self._size)
                self._file.seek(self._size)
            raise
        self._size += len(line)

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


def _create(path: Path) -> BinaryIO:
    """Open a new file without a buffer, which would hold lines back and write them in pieces of its own choosing."""
    try:
        return open(path, "wb", buffering=0)
    except OSError as error:
        raise ConfigError(f"output {path} cannot be written: {error.strerror}") from error
