"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, text: str) -> None:
    """Write a file beside its place and then move it there, so that nobody meets half of it.

    Raises:
        OSError: It cannot be written.
    """
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside `path` that takes its place once it is whole and on the disk; else it is removed.

    Raises:
        OSError: It cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the name of a new file as lasting as its bytes, where the system can open a folder."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
