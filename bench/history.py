"""Real edits without external data: the changes of Python files in the commits of a repository."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

LINES = range(30, 221)
"""Allowed lines of a file before its edit."""
CHANGED = range(2, 41)
"""Allowed sum of added and removed lines."""
HALVES = ("dev", "held-out")
"""Halves of the commits, by the last bit of their hash: one for choosing settings, the other for confirming them."""


class Edit(NamedTuple):
    """The change of one file in one commit."""

    commit: str
    path: str
    instruction: str  # the subject of the commit
    before: str
    after: str


def read_edits(repository: Path, half: str, revision: str = "HEAD") -> list[Edit]:
    """The edits of one half of a history, ordered by commit hash, so that the first ones are spread over time.

    Args:
        repository: A folder in the repository.
        half: One of `HALVES`.
        revision: The newest commit.
    """
    log = ("log", "--no-merges", "--no-renames", "--numstat", "--format=%x00%H %s", revision, "--", "*.py")
    touched = [
        (commit, path, subject)
        for entry in _git(repository, *log).decode("utf-8", "replace").split("\0")[1:]
        for commit, subject, path, changed in _touched(entry)
        if int(commit[-1], 16) % 2 == HALVES.index(half) and changed in CHANGED
    ]
    touched.sort()
    names = [f"{commit}{parent}:{path}" for commit, path, _ in touched for parent in ("^", "")]
    texts = _contents(repository, names)
    return [
        Edit(commit, path, subject, before, after)
        for (commit, path, subject), before, after in zip(touched, texts[::2], texts[1::2], strict=True)
        if before and after and before.count("\n") in LINES
    ]


def _touched(entry: str) -> Iterator[tuple[str, str, str, int]]:
    """Commit, subject, path and number of changed lines of every file of a commit, except binary files."""
    head, *files = entry.strip().splitlines()
    commit, _, subject = head.partition(" ")
    for added, removed, path in (line.split("\t") for line in files if line):
        if added.isdecimal() and removed.isdecimal():
            yield commit, subject, path, int(added) + int(removed)


def _contents(repository: Path, names: Sequence[str]) -> list[str | None]:
    """The texts of files named `COMMIT:PATH`; None for a missing file."""
    output, texts, at = _git(repository, "cat-file", "--batch", given="\n".join(names).encode()), list[str | None](), 0
    for _ in names:
        end = output.index(b"\n", at)
        size = output[at:end].rpartition(b" ")[2]  # or the word "missing"
        at, is_there = end + 1, size.isdigit()
        texts.append(output[at : at + int(size)].decode("utf-8", "replace") if is_there else None)
        at += int(size) + 1 if is_there else 0
    return texts


def _git(repository: Path, *arguments: str, given: bytes = b"") -> bytes:
    """The output of git; the run ends if there is no git or no history."""
    try:
        done = subprocess.run(["git", *arguments], cwd=repository, input=given, capture_output=True)
    except FileNotFoundError:
        sys.exit("git is missing: the edits are those of a history")
    if done.returncode:
        sys.exit(f"no history at {repository}: {done.stderr.decode('utf-8', 'replace').strip()}")
    return done.stdout
