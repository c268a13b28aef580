"""Lines that came as they were finished, put in the order of the inputs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from lookahead.ngram.replacing import replacing
from lookahead.utils.atomic import parse_json

Record = dict[str, Any]


def records_in(path: Path) -> Iterator[tuple[int, int, Record]]:
    """The whole lines of a file with the byte offset and length of each.

    Raises:
        ValueError: A line is no JSON object.
    """
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            record = parse_json(line)
            if not isinstance(record, dict):
                raise ValueError("no JSON object")
            yield offset, len(line), record
            offset += len(line)


def arrange(
    path: Path,
    order: Iterable[bytes],
    is_outdated: Callable[[Record], bool],
    key_of_record: Callable[[Record], bytes],
    *,
    newest_only: bool = False,
) -> int:
    """Put the lines of a file in order; a new file takes its place at once, unless they stand in it already.

    Args:
        path: The file.
        order: The key of every line there should be, in order; a key may come more than once.
        is_outdated: Whether a line that no key names is dropped, since its document has changed; else it comes last.
        key_of_record: The key of a line.
        newest_only: Whether of several lines of a key only the last is kept.

    Returns:
        How many lines were dropped.

    Raises:
        OSError: The new file cannot be written; the old one is left as it was.
    """
    places: defaultdict[bytes, deque[tuple[int, int, bool]]] = defaultdict(deque)
    count = 0
    for offset, length, record in records_in(path):
        alike = places[key_of_record(record)]
        if newest_only:
            alike.clear()
        alike.append((offset, length, is_outdated(record)))
        count += 1
    wanted = [places[key].popleft() for key in order if places.get(key)]
    left = sorted(place for rest in places.values() for place in rest)
    kept = wanted + [place for place in left if not place[2]]
    if len(kept) < count or any(after[0] < before[0] for before, after in pairwise(kept)):
        with open(path, "rb") as source, replacing(path) as target:
            for offset, length, _ in kept:
                source.seek(offset)
                target.write(source.read(length))
    return count - len(kept)
