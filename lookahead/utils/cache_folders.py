"""Cache folders, and a temporary folder that replaces them if they cannot be written."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import stat
import tempfile
import warnings
from pathlib import Path


@functools.cache
def temporary_folder(contents: str, remedy: str) -> Path:
    """A private temporary folder, the same in every process of a user. A warning names it once.

    Args:
        contents: The kind of files, for the warning: `"compiled functions"`.
        remedy: How to choose another folder: `"set NUMBA_CACHE_DIR to a folder that can be written"`.

    Raises:
        OSError: There is no folder for temporary files.
    """
    folder = _private_folder() / contents.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    warnings.warn(f"no cache folder can be written, so {contents} are kept in {folder}; {remedy}", stacklevel=3)
    return folder


def writable_folder(folder: Path, contents: str) -> Path:
    """A cache folder, created if it is missing; `temporary_folder` if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return temporary_folder(contents, f"let {folder} be written ({error.strerror}), or set XDG_CACHE_HOME")
    return folder


def _private_folder() -> Path:
    """A folder that no other user can write, since its files are run as code."""
    owner = os.getuid() if hasattr(os, "getuid") else 0  # Windows has a temporary folder for each user
    folder = Path(tempfile.gettempdir()) / f"lookahead-{owner}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        is_private = os.name == "nt" or status.st_mode & 0o077 == 0
        if stat.S_ISDIR(status.st_mode) and status.st_uid == owner and is_private and os.access(folder, os.W_OK):
            return folder
    except FileExistsError:
        pass
    made = Path(tempfile.mkdtemp(prefix="lookahead-"))  # another user has taken the name
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
