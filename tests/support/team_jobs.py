"""Jobs that threads share: each depends on the one before, or counts who takes part."""

from __future__ import annotations

from typing import Any

import numpy as np

from lookahead.kernels import team
from lookahead.kernels.jobs import Job, claim_part, leader, table_of
from lookahead.kernels.team import add
from lookahead.utils.addresses import array_at

PARTS, JOBS = 7, 60


def mix(address: Any) -> None:
    """Each part adds up numbers of other parts of the job before: what comes early or twice changes the result."""
    _, parts, before_at, after_at = array_at(address, (4,), np.int64)
    before, after = array_at(before_at, (parts,), np.int64), array_at(after_at, (parts,), np.int64)
    part = claim_part(address)
    while part < parts:
        after[part] += 3 * before[(part + 1) % parts] + before[(part + 3) % parts] + part
        part = claim_part(address)


def count(address: Any) -> None:
    """Count who takes part, and do parts that take a millisecond or so, each of which leaves a number."""
    _, parts, taking_part_at, out_at = array_at(address, (4,), np.int64)
    add(taking_part_at, 1)
    out = array_at(out_at, (parts,), np.int64)
    part = claim_part(address)
    while part < parts:
        number = part
        for _ in range(500_000):
            number = (number * 1103515245 + 12345) % 2147483648
        out[part] = number + 1
        part = claim_part(address)


def mixing() -> tuple[list[Job], np.ndarray[Any, Any]]:
    """Jobs that depend on one another, and the numbers that they write, a row for each."""
    numbers = np.zeros((JOBS + 1, PARTS), np.int64)
    numbers[0] = np.arange(PARTS)
    rows = [row.ctypes.data for row in numbers]
    return [(mix, PARTS, rows[at : at + 2], numbers) for at in range(JOBS)], numbers


def expected() -> np.ndarray[Any, Any]:
    rows = [np.arange(PARTS)]
    for _ in range(JOBS):
        with np.errstate(over="ignore"):
            rows.append(3 * np.roll(rows[-1], -1) + np.roll(rows[-1], -3) + np.arange(PARTS))
    return np.array(rows)


def by_team(threads: int) -> np.ndarray[Any, Any]:
    of_mixing, numbers = mixing()
    table = np.array(table_of(of_mixing))
    leader()(team.team_of(threads), table.ctypes.data, threads)
    return numbers
