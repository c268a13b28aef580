"""Text files, written atomically and read from untrusted sources."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from lookahead.utils.replacing import replacing


def write_atomically(path: Path, text: str) -> None:
    """Write a temporary file and move it into place, so that no reader sees half of it."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def parse_json(text: str | bytes) -> Any:
    """The value of untrusted JSON; ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_regular(path: Path) -> bytes:
    """All bytes of a regular file; OSError for a folder, a device or a pipe, which could block."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """The value of a JSON file; OSError if it cannot be read, ValueError if it is invalid."""
    return parse_json(read_regular(path).decode("utf-8"))
