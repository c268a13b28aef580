"""Text files that are there as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

from lookahead.ngram.replacing import replacing


def write_atomically(path: Path, text: str) -> None:
    """Write a file beside its place and then move it there, so that nobody meets half of it.

    Raises:
        OSError: It cannot be written.
    """
    with replacing(path) as file:
        file.write(text.encode("utf-8"))
