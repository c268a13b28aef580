"""Text files: written as a whole or not at all, and read from untrusted sources."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from lookahead.utils.replacing import replacing


def write_atomically(path: Path, text: str) -> None:
    """Write a temporary file and move it into place, so that nobody reads half of it."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def parse_json(text: str | bytes) -> Any:
    """The value of untrusted JSON; ValueError if it is none, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_regular(path: Path) -> bytes:
    """All bytes of a regular file; OSError also for a folder, a device or a pipe, which could block."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """The value of a JSON file; OSError or ValueError if it holds none."""
    return parse_json(read_regular(path).decode("utf-8"))
