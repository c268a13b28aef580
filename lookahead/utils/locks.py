"""Locks of files.

Every file that is read, changed and written is changed under its lock, so that what another process wrote meanwhile is
not lost.
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

_LOCK_S = 60.0  # of waiting for another process, which writes for less than a second


@contextmanager
def locked(path: Path, timeout_s: float = _LOCK_S) -> Iterator[None]:
    """Hold the lock of a file, or of a folder, that is read, changed and written; other processes wait for it.

    The lock has its own file `.NAME.lock` beside it, since the other one is replaced; who may write that may take the
    lock. Without locks in the file system nothing is locked. A negative timeout waits without end.

    Raises:
        TimeoutError: Another process held the lock all the time.
        OSError: The lock cannot be made, since the folder takes no files.
    """
    path = Path(os.path.realpath(path))
    try:  # without this, filelock makes a folder that is missing, and waits where a folder takes no files
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
        what = f"another process has been writing it{f' for {timeout_s:.0f} s' if timeout_s else ''}"
        raise TimeoutError(errno.ETIMEDOUT, what, str(path)) from error
    except NotImplementedError:  # a file system without locks
        pass
    try:
        yield
    finally:
        lock.release()
