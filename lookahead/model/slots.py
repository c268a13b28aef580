"""The slots of a cache: which of them a pass writes and reads, the memory of all layers, and origins of rows.

Origins find rows that hold equal keys and values.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GROWTH = 1.5  # of the slots per row, if they are too few
MOST_PARTS = 16  # of a block: a cache that grows needs memory for one block more, not for twice its size

Origin = tuple[tuple[int, int], ...]
"""The texts that computed the keys and values of a row: the number of each, and the end of its tokens, ascending."""

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


@dataclass(eq=False, slots=True)
class SlotBlock:
    """The slots of some layers in one tensor, so that one gather moves nodes in all of them.

    A layer has one part for its keys and one for its values.
    """

    form: SlotForm
    whole: Tensor  # `[parts, rows, capacity, heads, dim]`
    used: int = 0  # parts that layers have

    def fit(self, slots: TreeSlots) -> None:
        """Reallocate for the rows and capacity of the slots, and copy the rows in use as far as they fit."""
        if self.whole.shape[1:3] == (slots.rows, slots.capacity):
            return
        old, shape = self.whole, (len(self.whole), slots.rows, slots.capacity, *self.whole.shape[3:])
        rows, capacity = min(old.shape[1], slots.rows, slots.first + slots.active), min(old.shape[2], slots.capacity)
        self.whole = old.new_zeros(shape)
        self.whole[:, :rows, :capacity] = old[:, :rows, :capacity]


class TreeSlots:
    """The slots that the rows of a batch use, shared by all layers.

    Args:
        rows: Rows of the batch.
        capacity: Initial slots per row.
        windows: Positions that a query sees in each layer with slots; None for all.
    """

    def __init__(self, rows: int, capacity: int, windows: Iterable[int | None] = ()) -> None:
        self.lengths: NDArray[np.int64] = np.zeros(rows, np.int64)  # committed tokens, with KV in slots 0..length-1
        self.origins = [new_origin() for _ in range(rows)]
        self.rows, self.capacity = rows, capacity  # slots per row
        self.first, self.active = 0, rows  # the rows of a pass: first..first+active-1, numbered from 0 by `lengths`
        self.width = self.kv_length = 0  # nodes the running pass writes per row, and slots its queries may look at
        self.is_even, self.start = True, 0  # all active rows write from the same slot on; that of the first row
        self.is_plain = False  # the model uses its own masks and attention in the running pass
        self.is_fixed = False  # it is a fixed-shape pass
        self.index: Tensor | None = None  # int64 `[active * width]`, the slots of uneven rows, numbered over all rows
        self._moved: tuple[Tensor | None, dict[torch.device, Tensor]] = None, {}  # an index on other devices
        self.allocations = 0  # by layers so far; when it grows, old addresses are invalid
        self.blocks: list[SlotBlock] = []  # the memory of all layers
        self.reached = 0  # slots that passes may have written, of any row
        self.layers = Counter(windows)  # by window

    def index_on(self, device: torch.device) -> Tensor:
        """The index on a device of some layers, copied there once a pass."""
        assert self.index is not None
        if self._moved[0] is not self.index:
            self._moved = self.index, {self.index.device: self.index}
        moved = self._moved[1]
        if device not in moved:
            moved[device] = self.index.to(device)
        return moved[device]

    def begin(self, width: int, scored: NDArray[np.int64] | None = None, *, is_plain: bool = False) -> None:
        """Begin a pass that writes `width` nodes per active row, after committed tokens and already scored nodes."""
        lengths = self.lengths[: self.active]
        starts = (lengths if scored is None else lengths + scored).tolist()
        self.start = starts[0]
        self.is_even = all(start == self.start for start in starts)
        self.is_plain = is_plain
        self.index = None
        self.width = width
        self.kv_length = max(starts) + width
        self.reached = max(self.reached, self.kv_length)
        if self.kv_length > self.capacity:
            self.capacity = max(self.kv_length, int(self.capacity * GROWTH))

    @contextmanager
    def rows_from(self, first: int, count: int) -> Iterator[None]:
        """Restrict passes in a block to `count` rows from `first` on, numbered from 0."""
        lengths, active = self.lengths, self.active
        self.first, self.lengths, self.active = first, lengths[first:], count
        try:
            yield
        finally:
            self.first, self.lengths, self.active = 0, lengths, active

    @contextmanager
    def fixed(self, rows: int, width: int, index: Tensor) -> Iterator[None]:
        """Run a fixed-shape pass, in which Python values never change; the slots of inactive rows are unused."""
        active, self.active = self.active, rows
        self.is_even, self.is_plain, self.is_fixed, self.index = False, False, True, index
        self.width, self.kv_length = width, self.capacity
        try:
            yield
        finally:
            self.active, self.is_fixed, self.index = active, False, None


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
