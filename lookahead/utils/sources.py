"""The source files of this package, and a digest of source files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

import xxhash

_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep


def sources_digest(files: Iterable[Path]) -> bytes:
    """16 bytes that depend on the names and contents of source files. For a missing file only the name counts."""
    digest = xxhash.xxh3_128()
    for file in sorted(files):
        digest.update(file.name.encode())
        with suppress(OSError):
            digest.update(file.read_bytes())
    return digest.digest()


@cache
def source_files() -> list[Path]:
    """The source files of this package, including folders that are linked into it."""
    folders = os.walk(_OWN, followlinks=True)
    return [Path(place, name) for place, _, names in folders for name in names if name.endswith(".py")]
