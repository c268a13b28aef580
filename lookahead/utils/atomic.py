"""Text files: written as a whole or not at all, and read from untrusted sources."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from lookahead.ngram.replacing import replacing


def write_atomically(path: Path, text: str) -> None:
    """Write a temporary file and move it into place, so that nobody reads half of it.

    Raises:
        OSError: The file cannot be written.
    """
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def parse_json(text: str | bytes) -> Any:
    """The value of untrusted JSON.

    Raises:
        ValueError: The text is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_regular(path: Path) -> bytes:
    """All bytes of a regular file.

    Raises:
        OSError: The file cannot be read, or is a folder, a device or a pipe, which could block.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        OSError: The file cannot be read, or is no regular file.
        ValueError: The file holds no JSON.
    """
    return parse_json(read_regular(path).decode("utf-8"))
