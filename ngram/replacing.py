"""Files that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file beside `path` that takes its place once it is whole and on the disk; else it is removed.

    Raises:
        OSError: It cannot be written.
    """
    path = Path(os.path.realpath(path))  # a link stays a link
    written = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(written, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, path)
    except BaseException:
        with contextlib.suppress(OSError):
            written.unlink()
        raise
    sync_folder(path.parent)


def remove_leftovers(path: Path) -> None:
    """Remove what processes that were killed while they replaced `path` left beside it; none may be at it now.

    Raises:
        OSError: One cannot be removed.
    """
    path = Path(os.path.realpath(path))
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        left.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the name of a new file as lasting as its bytes, where the system can open a folder."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
