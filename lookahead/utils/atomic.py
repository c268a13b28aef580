"""Files that are replaced atomically, with their mode and owner, and files that are read from untrusted sources."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_PRIVATE = 0o600  # mode of a file that nobody else may read or write


def check_folder(folder: Path) -> None:
    """OSError, in the words of the system, if a folder does not exist or takes no new file.

    Only an attempt tells a read-only file system from a missing permission.
    """
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {folder}", str(folder))
    with tempfile.TemporaryFile(dir=folder):
        pass


@contextmanager
def replacing(path: Path, like: os.stat_result | None = None) -> Iterator[BinaryIO]:
    """Write a temporary file next to `path` that replaces it once it is complete and synced to disk.

    From the beginning it has the mode and the owner of the file that it replaces, or of `like` if there is none. On an
    error it is removed. Files left by killed processes are removed first. A device or a pipe raises OSError: the file
    would take its place.
    """
    path = Path(os.path.realpath(path))  # a link stays a link
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with contextlib.suppress(OSError):
        remove_leftovers(path)
    with contextlib.suppress(FileNotFoundError):
        like = os.stat(path)
    while True:
        written = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        file = _create(written, like)
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


def _create(path: Path, like: os.stat_result | None) -> BinaryIO:
    """Create a file with the mode and, if this process may set them, the owner and group of another file.

    It is never more accessible than the other file: if the group cannot be set, it gets no more rights than others.
    """
    if like is None or not hasattr(os, "fchown"):  # Windows
        return open(path, "xb")
    file = open(path, "xb", opener=lambda name, flags: os.open(name, flags, _PRIVATE))  # noqa: SIM115 - returned
    mode = stat.S_IMODE(like.st_mode) & 0o777
    for owner in ((like.st_uid, -1), (-1, like.st_gid)):
        with contextlib.suppress(OSError):
            os.fchown(file.fileno(), *owner)
    if os.fstat(file.fileno()).st_gid != like.st_gid:
        mode &= 0o707 | (mode & 0o007) << 3
    with contextlib.suppress(OSError):  # a file system without modes
        os.fchmod(file.fileno(), mode)
    return file


def remove_leftovers(path: Path) -> None:
    """Remove temporary files left next to `path` by processes that were killed while replacing it.

    A process that is still writing holds a lock on its file. On file systems without locks nothing is removed.
    """
    path = Path(os.path.realpath(path))
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        with contextlib.suppress(FileNotFoundError), open(left, "rb") as file:
            if _lock(file.fileno(), waits=False):
                left.unlink()


def _lock(descriptor: int, *, waits: bool) -> bool:
    """Lock an open file; False if another process holds the lock, or locks are not supported."""
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
    """Sync a folder to disk, so that the name of a new file survives a crash. Does nothing on Windows."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
