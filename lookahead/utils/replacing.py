"""Atomic replacement of files."""

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
    """Write a temporary file beside `path` that replaces it once it is complete and on the disk.

    On an error it is removed. Files left by killed processes are removed first.
    """
    path = Path(os.path.realpath(path))  # a link stays a link
    with contextlib.suppress(OSError):
        remove_leftovers(path)
    while True:
        written = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        file = open(written, "xb")  # noqa: SIM115 - closed below
        is_locked = _lock(file.fileno(), waits=True)
        if not is_locked or os.fstat(file.fileno()).st_nlink:
            break
        file.close()  # another process removed it as a leftover before it was locked
    lock = os.dup(file.fileno()) if is_locked else None  # held until the file has its place
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, path)
    except BaseException:
        with contextlib.suppress(OSError):
            written.unlink()
        raise
    finally:
        if lock is not None:
            os.close(lock)
    sync_folder(path.parent)


def remove_leftovers(path: Path) -> None:
    """Remove temporary files left beside `path` by processes that were killed while replacing it.

    A process that is still writing holds a lock on its file. On file systems without locks nothing is removed.
    """
    path = Path(os.path.realpath(path))
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        with contextlib.suppress(FileNotFoundError), open(left, "rb") as file:
            if _lock(file.fileno(), waits=False):
                left.unlink()


def _lock(descriptor: int, *, waits: bool) -> bool:
    """Lock an open file; False if another process holds the lock, or there are no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that the name of a new file survives a crash; does nothing on Windows."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
