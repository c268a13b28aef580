"""The memory of slots, shared by layers; rows that are copied, and origins, to find rows with equal keys and values."""

from __future__ import annotations

import itertools
import math
import mmap as memory_maps
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.model.state_layers import States

MOST_PARTS = 16  # of a block: a cache that grows needs memory for one block more, not for twice its size

Origin = tuple[tuple[int, int], ...]
"""The texts that computed the keys and values of a row: the number of each, and the end of its tokens, ascending."""

_PRIVATE: dict[str, Any] = {}  # options of memory that is not shared, where these are not the only ones
if sys.platform != "win32":
    _PRIVATE["flags"] = memory_maps.MAP_PRIVATE | memory_maps.MAP_ANONYMOUS
_numbers = itertools.count()


def new_origin(copied: Origin = (), tokens: int = 0) -> Origin:
    """The origin of a row that copies its first `tokens` tokens and computes the others itself."""
    kept = ((number, min(end, tokens)) for i, (number, end) in enumerate(copied) if not i or copied[i - 1][1] < tokens)
    return (*(kept if tokens else ()), (next(_numbers), sys.maxsize))


class SlotForm(NamedTuple):
    """What the parts of a block share."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    dim: int
    window: int | None


RowStates = tuple[Tensor, Tensor]


class RowCopy(NamedTuple):
    """The cached contents of a row, by layer index."""

    kv: dict[int, RowStates]  # keys and values, `[heads, tokens, dim]`
    states: dict[int, States]  # after the last token
    tokens: int
    origin: Origin = ()  # of the keys and values


@dataclass(eq=False, slots=True)
class SlotBlock:
    """The slots of some layers in one tensor, so that one gather moves nodes in all of them.

    A layer has one part for its keys and one for its values.
    """

    form: SlotForm
    whole: Tensor  # `[parts, rows, capacity, heads, dim]`
    used: int = 0  # parts that layers have

    def fit(self, rows: int, capacity: int, used: int, reached: int) -> None:
        """Reallocate for some rows and slots; copy the first `used` rows up to slot `reached` as far as they fit."""
        if self.whole.shape[1:3] == (rows, capacity):
            return
        old, shape = self.whole, (len(self.whole), rows, capacity, *self.whole.shape[3:])
        rows, capacity = min(old.shape[1], rows, used), min(old.shape[2], capacity, reached)
        self.whole = zeros(old, shape)
        self.whole[:, :rows, :capacity] = old[:, :rows, :capacity]


def zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Slots of zeros, since the value of a masked slot is still multiplied by 0.

    On a CPU a slot takes memory when it is written.
    """
    count = math.prod(shape)
    if like.device.type != "cpu" or not count:
        return like.new_zeros(shape)
    return torch.frombuffer(mmap(-1, count * like.dtype.itemsize, **_PRIVATE), dtype=like.dtype).view(shape)


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
    groups: NDArray[np.int64] = np.zeros((len(origins), 2 + most), np.int64)
    group = -1
    for row in sorted(range(len(origins)), key=origins.__getitem__, reverse=True):
        if group >= 0:
            shared, size, first = (int(number) for number in groups[group, :3])
            both = min(shared_tokens(origins[first], origins[row]), starts[row], starts[first]) // step * step
            if size < most and both > shared // 2:  # sharing half the slots or fewer would be a loss
                groups[group, :2], groups[group, 2 + size] = (min(both, shared or both), size + 1), row
                continue
        group += 1
        groups[group, 1:3] = 1, row
    return groups
