"""Origins of the keys and values of rows, to find rows that hold equal ones."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Origin = tuple[tuple[int, int], ...]
"""The texts that computed the keys and values of a row: the number of each, and the end of its tokens, ascending."""

_numbers = itertools.count()


def new_origin(copied: Origin = (), tokens: int = 0) -> Origin:
    """The origin of a row that copies its first `tokens` tokens and computes the others itself."""
    kept = ((number, min(end, tokens)) for i, (number, end) in enumerate(copied) if not i or copied[i - 1][1] < tokens)
    return (*(kept if tokens else ()), (next(_numbers), sys.maxsize))


def shared_tokens(some: Origin, others: Origin) -> int:
    """Number of first tokens for which two rows have the keys and values of the same texts."""
    tokens = 0
    for (number, end), (other, other_end) in zip(some, others, strict=False):
        if number != other:
            break
        tokens = min(end, other_end)
        if end != other_end:
            break
    return tokens


def sharing_groups(origins: Sequence[Origin], starts: Sequence[int], *, most: int, step: int) -> NDArray[np.int64]:
    """Group rows that share the first slots of a cache.

    Args:
        origins: The origin of every row.
        starts: The number of slots with committed tokens, for every row.
        most: Maximum rows per group.
        step: Shared slots are a multiple of it.

    Returns:
        `[rows, 2 + most]`: for each group the shared slots, the number of rows, and the rows; zeros at the end.
    """
    found: NDArray[np.int64] = np.zeros((len(origins), 2 + most), np.int64)
    group = -1
    for row in sorted(range(len(origins)), key=origins.__getitem__, reverse=True):
        if group >= 0:
            shared, size, first = (int(each) for each in found[group, :3])
            both = min(shared_tokens(origins[first], origins[row]), starts[row], starts[first]) // step * step
            if size < most and both > shared // 2:  # sharing half the slots or fewer would be a loss
                found[group, :2], found[group, 2 + size] = (min(both, shared or both), size + 1), row
                continue
        group += 1
        found[group, 1:3] = 1, row
    return found
