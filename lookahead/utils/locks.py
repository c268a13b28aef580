"""File locks.

Every read-modify-write of a file happens under its lock, so that concurrent changes of other processes are not lost.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

_LOCK_S = 60.0  # seconds to wait for another process, which usually writes for less than a second


@contextmanager
def locked(path: Path, timeout_s: float = _LOCK_S) -> Iterator[None]:
    """Hold the lock of a file or folder. Other processes wait for it.

    The lock is a file `.NAME.lock` next to `path`, since `path` itself may be replaced. It has the permissions of
    `path`, so that every process that can write `path` can lock it. On a file system without locks nothing is locked.
    A negative timeout waits forever.

    Raises:
        TimeoutError: Another process held the lock for `timeout_s` seconds.
        OSError: The lock file cannot be created because the folder is not writable.
    """
    path = Path(os.path.realpath(path))
    try:  # without this check, filelock creates a missing folder, and waits if the folder is not writable
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path.parent)) from error
    rights: dict[str, Any] = {}
    if path.is_file():
        rights["mode"] = stat.S_IMODE(path.stat().st_mode) & 0o666 | 0o600
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=timeout_s, **rights)
    try:
        lock.acquire()
    except Timeout as error:
        since = f" for {timeout_s:.0f} s" if timeout_s else ""
        what = f"another process is writing it{since}; wait for it, or stop it"
        raise TimeoutError(errno.ETIMEDOUT, what, str(path)) from error
    except NotImplementedError:  # a file system without locks
        pass
    try:
        yield
    finally:
        lock.release()
