"""Text files: written as a whole or not at all, and read though somebody else may have written them."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from lookahead.ngram.replacing import replacing


def write_atomically(path: Path, text: str) -> None:
    """Write a file beside its place and then move it there, so that nobody meets half of it.

    Raises:
        OSError: It cannot be written.
    """
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def parse_json(text: str | bytes) -> Any:
    """The value that JSON of anybody stands for.

    Raises:
        ValueError: It is no JSON, or nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_regular(path: Path) -> bytes:
    """All bytes of a regular file.

    Raises:
        OSError: It cannot be read, or is a pipe, which would be waited for, a device or a folder.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """The value that a file of JSON holds.

    Raises:
        OSError: It cannot be read, or is no regular file.
        ValueError: It is no JSON.
    """
    return parse_json(read_regular(path).decode("utf-8"))
