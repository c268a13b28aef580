"""The slots of token trees in a cache, and its layers: keys and values of attention, of an indexer, and states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from lookahead.hf.state_layers import StateLayer, has_states

GROWTH = 1.5  # of the slots of a row, when they are too few


class TreeSlots:
    """The slots that the rows of a batch use, in every layer; one object is shared by all layers."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.lengths: NDArray[np.int64] = np.zeros(rows, np.int64)  # committed tokens, with KV in slots 0..length-1
        self.rows, self.capacity = rows, capacity  # slots of a row
        self.first, self.active = 0, rows  # the rows of a pass: first..first+active-1, numbered from 0 by `lengths`
        self.width = self.kv_length = 0  # nodes the running pass writes per row, and slots its queries may look at
        self.is_even, self.start = True, 0  # whether all active rows write from one slot on; that of the first row
        self.is_plain = False  # whether the model uses its own masks and attention in the running pass
        self.is_fixed = False  # whether it is a fixed-shape pass
        self.index: Tensor | None = None  # int64 `[active * width]`, the slots of uneven rows, numbered over all rows
        self.allocations = 0  # by layers so far; when it grows, old addresses are invalid

    def begin(self, width: int, scored: NDArray[np.int64] | None = None, *, is_plain: bool = False) -> None:
        """Begin a pass that writes `width` nodes per active row, behind committed tokens and nodes scored before."""
        lengths = self.lengths[: self.active]
        starts = (lengths if scored is None else lengths + scored).tolist()
        self.start = starts[0]
        self.is_even = all(start == self.start for start in starts)
        self.is_plain = is_plain
        self.index = None
        self.width = width
        self.kv_length = max(starts) + width
        if self.kv_length > self.capacity:
            self.capacity = max(self.kv_length, int(self.capacity * GROWTH))

    @contextmanager
    def rows_from(self, first: int, count: int) -> Iterator[None]:
        """Leave all rows but `count` from `first` on out of the passes in a block, and number these from 0."""
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


class TreeLayer(CacheLayerMixin):
    """KV of one layer, `[rows, capacity, heads, dim]`, allocated by the first pass.

    In a plain pass it returns what a layer of a `DynamicCache` does, of which a query sees `window` positions.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, slots: TreeSlots, window: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = slots
        self._window = window
        self.names = ["keys", "values"]  # of the buffers, `index_keys` too where an indexer picks the keys of queries

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeroed slots: the value of a masked slot is still multiplied by 0."""
        shape = (self._slots.rows, self._slots.capacity)
        self.keys, self.values = (
            new.new_zeros(*shape, new.shape[1], new.shape[3]) for new in (key_states, value_states)
        )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True
        self._slots.allocations += 1

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the pass's nodes and return the keys and values its queries may see, `[active, heads, kv, dim]`."""
        slots = self._slots
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[1] < slots.capacity:
            self.grow()
        keys = self._write(self.keys, key_states.transpose(1, 2))
        values = self._write(self.values, value_states.transpose(1, 2))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _write(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Write `[active, width, ...]` into the slots of the pass; what its queries may see."""
        slots = self._slots
        rows = slice(slots.first, slots.first + slots.active)
        if slots.index is None:
            buffer[rows, slots.start : slots.start + slots.width] = new
        else:
            buffer.flatten(0, 1).index_copy_(0, slots.index.to(buffer.device), new.flatten(0, 1))
        return buffer[rows, self.get_mask_sizes(slots.width)[1] : slots.kv_length]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write what the indexer of the pass's nodes compares, and return that of all slots, `[active, kv, dim]`."""
        new, slots = indexer_key_states, self._slots
        if "index_keys" not in self.names:
            self.names.append("index_keys")
            self.index_keys = new.new_zeros(slots.rows, slots.capacity, 1, new.shape[-1])
            slots.allocations += 1
        elif self.index_keys.shape[1] < slots.capacity:
            self.index_keys = self._grown(self.index_keys)
        return self._write(self.index_keys, new[:, :, None]).squeeze(2)

    @property
    def is_sliding(self) -> bool:
        """Whether the running pass reads a sliding window."""
        return self._slots.is_plain and self._window is not None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys the running pass reads, and their offset."""
        window = self._window if self._slots.is_plain else None
        offset = 0 if window is None else max(0, self._slots.start - window + 1)
        return self._slots.kv_length - offset, offset

    def get_seq_length(self) -> int:
        """Committed tokens of the longest active row; always 1 in a fixed-shape pass."""
        return 1 if self._slots.is_fixed else self._slots.kv_length - self._slots.width

    def get_max_length(self) -> int:
        """No maximum: the slots grow."""
        return -1

    get_max_cache_shape = get_max_length  # as older releases of transformers call it

    def grow(self) -> None:
        """Reallocate for the shared rows and capacity, and copy what fits."""
        for name in self.names:
            setattr(self, name, self._grown(getattr(self, name)))
        self._slots.allocations += 1

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self._slots.rows, self._slots.capacity, *old.shape[2:])
        rows, capacity = (min(sizes) for sizes in zip(old.shape[:2], new.shape[:2], strict=True))
        new[:rows, :capacity] = old[:rows, :capacity]
        return new


class StateTreeLayer(StateLayer, TreeLayer):
    """The states of one layer, and the KV of attention beside them."""

    def __init__(self, slots: TreeSlots, window: int | None, number_of_states: int) -> None:
        StateLayer.__init__(self, number_of_states)
        TreeLayer.__init__(self, slots, window)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate slots for keys and values, which come without names, or states."""
        (TreeLayer if args else StateLayer).lazy_initialization(self, *args, **kwargs)


def layer_like(layer: Any, slots: TreeSlots) -> Any:
    """The layer of a cache of trees that stands for one of a `DynamicCache`."""
    window: int | None = getattr(layer, "sliding_window", None)
    if not has_states(layer):
        return TreeLayer(slots, window) if isinstance(layer, CacheLayerMixin) else layer
    count: int = layer.number_of_states
    return StateTreeLayer(slots, window, count) if isinstance(layer, CacheLayerMixin) else StateLayer(count)
