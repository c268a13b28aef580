"""The KV cache of trees: committed tokens in slots 0..length-1 of each row, tree nodes in the slots after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

_GROWTH = 1.5

RowStates = tuple[Tensor, Tensor]


class TreeSlots:
    """The slots that the rows of a batch use, in every layer; one object is shared by all layers.

    Attributes:
        lengths: int64 `[rows]`; committed tokens of each row from `first` on, with KV in slots 0..length-1.
        first: The first row of a pass; 0 except within `since`.
        active: Rows of a pass: first..first+active-1.
        width: Nodes the running pass writes per row, in slots length..length+width-1.
        kv_length: Slots a row's queries may look at during the running pass.
        is_even: Whether all active rows have the same number of committed tokens.
        is_plain: Whether the model uses its own masks and attention in the running pass.
        begun_at: Committed tokens of the first active row when the running pass began.
        rows: Rows with slots.
        capacity: Slots of a row.
        allocations: Allocations of slots by layers so far; when it grows, old addresses are invalid.
        index: int64 `[active * width]`; the slots a fixed-shape pass writes, rows laid end to end; None in others.
        flat: `places` of the running pass, by device.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.lengths: NDArray[np.int64] = np.zeros(rows, np.int64)
        self.rows = rows
        self.first = 0
        self.active = rows
        self.width = 0
        self.kv_length = 0
        self.capacity = capacity
        self.allocations = 0
        self.is_even = True
        self.is_plain = False
        self.index: Tensor | None = None
        self.begun_at = 0
        self.flat: dict[torch.device, Tensor] = {}

    def begin(self, width: int, *, is_plain: bool = False) -> None:
        """Begin a pass that writes `width` nodes per active row; a plain one runs as in the model's own decoding."""
        lengths = self.lengths[: self.active].tolist()
        self.begun_at = lengths[0]
        self.is_even = all(length == self.begun_at for length in lengths)
        self.is_plain = is_plain
        self.flat = {}
        self.index = None
        self.width = width
        self.kv_length = max(lengths) + width
        self.hold(self.kv_length)

    def hold(self, slots: int) -> None:
        """Raise the capacity to at least so many slots a row, by a factor of 1.5 or more."""
        if slots > self.capacity:
            self.capacity = max(slots, int(self.capacity * _GROWTH))

    @contextmanager
    def since(self, first: int) -> Iterator[None]:
        """Leave the rows before `first` out of the passes in a block, and number the others from 0."""
        lengths, active = self.lengths, self.active
        self.first, self.lengths, self.active = first, lengths[first:], active - first
        try:
            yield
        finally:
            self.first, self.lengths, self.active = 0, lengths, active

    @contextmanager
    def fixed(self, rows: int, width: int, index: Tensor) -> Iterator[None]:
        """Run a fixed-shape pass: Python values are the same at every step, and slots come as a tensor.

        Args:
            rows: Rows of the pass, the active ones first; the slots of the others are unused.
            width: Nodes it writes per row.
            index: int64 `[rows * width]`; as the attribute.
        """
        active, self.active = self.active, rows
        self.is_even, self.is_plain, self.index = False, False, index
        self.width, self.kv_length = width, self.capacity
        try:
            yield
        finally:
            self.active, self.index = active, None

    def write(self, buffers: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Write keys and values `[active, heads, width, dim]` into their buffers `[rows, capacity, heads, dim]`."""
        rows = slice(self.first, self.first + self.active)
        for buffer, new in zip(buffers, states, strict=True):
            if self.is_even:
                buffer[rows, self.begun_at : self.begun_at + self.width] = new.transpose(1, 2)
            else:
                index = self._index(buffer.device) if self.index is None else self.index
                buffer.flatten(0, 1).index_copy_(0, index, new.transpose(1, 2).flatten(0, 1))

    def places(self) -> NDArray[np.int64]:
        """The slots of the pass's nodes, int64 `[active * width]`, numbered over all rows."""
        starts = self.lengths[: self.active] + (self.first + np.arange(self.active)) * self.capacity
        return (starts[:, None] + np.arange(self.width)).reshape(-1)

    def _index(self, device: torch.device) -> Tensor:
        """`places` on a device."""
        if device not in self.flat:
            self.flat[device] = torch.from_numpy(self.places()).to(device)
        return self.flat[device]


class TreeLayer(CacheLayerMixin):
    """KV of one layer, `[rows, capacity, heads, dim]`, allocated by the first pass.

    In a plain pass it returns what a layer of a `DynamicCache` returns, so that results are bit-identical.

    Args:
        slots: The slots of the rows.
        window: Positions that a `DynamicCache` layer keeps for a query, its own included; None for all.

    Attributes:
        buffers: Keys and values, `[rows, capacity, heads, dim]` each; empty before the first pass.
    """

    def __init__(self, slots: TreeSlots, window: int | None = None) -> None:
        base: Any = super()
        base.__init__()  # untyped in transformers
        self._slots = slots
        self._window = window
        self.buffers: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeroed slots: the value of a masked slot is still multiplied by 0."""
        shape = (self._slots.rows, self._slots.capacity)
        self.buffers = [new.new_zeros(*shape, new.shape[1], new.shape[3]) for new in (key_states, value_states)]
        self.keys, self.values = self.buffers
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True
        self._slots.allocations += 1

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the pass's nodes and return the keys and values its queries may see, `[active, heads, kv, dim]`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.buffers[0].shape[1] < self._slots.capacity:
            self.grow()
        keys, values = self.buffers
        self._slots.write(self.buffers, (key_states, value_states))
        first, kv_length = self._slots.first, self._slots.kv_length
        rows, seen = slice(first, first + self._slots.active), slice(self._offset, kv_length)
        return keys[rows, seen].transpose(1, 2), values[rows, seen].transpose(1, 2)

    @property
    def is_sliding(self) -> bool:
        """Whether the running pass reads a sliding window."""
        return self._slots.is_plain and self._window is not None

    @property
    def _offset(self) -> int:
        """The first slot that the running pass reads."""
        if self._window is None or not self._slots.is_plain:
            return 0
        return max(0, self._slots.begun_at - self._window + 1)

    def move(self, row: int, start: int, nodes: Tensor) -> None:
        """Move tree nodes to the slots from `start` on. Ranges may overlap: all reads come before all writes."""
        for buffer in self.buffers:
            kept = buffer[row].index_select(0, nodes.to(buffer.device))
            buffer[row, start : start + len(nodes)] = kept

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of one row over another's."""
        for buffer in self.buffers:
            buffer[target, :length] = buffer[source, :length]

    def take(self, row: int, length: int, path: Tensor | None = None) -> RowStates:
        """Copy the first `length` slots of a row, and those of the nodes of a path behind them.

        Returns:
            Keys and values, `[heads, length + nodes, dim]`.
        """
        slots = slice(length) if path is None else torch.cat([torch.arange(length), length + path])
        keys, values = (buffer[row, slots].transpose(0, 1).clone() for buffer in self.buffers)
        return keys, values

    def fill(self, row: int, length: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values `[heads, n, dim]` into the n slots before `length`."""
        if not self.is_initialized:
            self.lazy_initialization(keys[None], values[None])
        for buffer, states in zip(self.buffers, (keys, values), strict=True):
            buffer[row, length - states.shape[1] : length] = states.transpose(0, 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys the running pass reads, and their offset."""
        return self._slots.kv_length - self._offset, self._offset

    def get_seq_length(self) -> int:
        """Committed tokens of the longest active row; always 1 in a fixed-shape pass."""
        if self._slots.index is not None:
            return 1
        return self._slots.kv_length - self._slots.width

    def get_max_length(self) -> int:
        """No maximum: the slots grow."""
        return -1

    def wipe(self, row: int, start: int) -> None:
        """Write zeros into the slots of a row from `start` on."""
        for buffer in self.buffers:
            buffer[row, start:] = 0

    def grow(self) -> None:
        """Reallocate for the shared rows and capacity, and copy what fits."""
        for i, old in enumerate(self.buffers):
            new = old.new_zeros(self._slots.rows, self._slots.capacity, *old.shape[2:])
            rows, capacity = (min(sizes) for sizes in zip(old.shape[:2], new.shape[:2], strict=True))
            new[:rows, :capacity] = old[:rows, :capacity]
            self.buffers[i] = new
        self.keys, self.values = self.buffers
        self._slots.allocations += 1


class TreeCache(Cache):
    """The KV cache of passes over token trees.

    Layers are made when the first pass reaches them.

    Args:
        rows: Rows of the batch.
        capacity: Slots per row to begin with; it grows when a row needs more.
        windows: Positions each layer of a `DynamicCache` keeps for a query; None for all.
    """

    layers: Any  # of `TreeLayer`, which the base class does not say

    def __init__(self, *, rows: int, capacity: int, windows: Sequence[int | None] = ()) -> None:
        self.slots = TreeSlots(rows, capacity)
        self._windows = windows
        self._bound: Callable[..., None] | None = None
        self._bound_at = 0
        # The base class only calls it, so it need not be a class.
        super().__init__(layer_class_to_replicate=cast(type[CacheLayerMixin], self._next_layer))

    def _next_layer(self) -> TreeLayer:
        """Make the next layer."""
        at = len(self.layers)
        return TreeLayer(self.slots, self._windows[at] if at < len(self._windows) else None)

    def reserve(self, capacity: int) -> None:
        """Allocate so many slots a row now, before a pass that must not allocate."""
        self.slots.hold(capacity)
        for layer in self._written_layers():
            if layer.buffers[0].shape[1] < self.slots.capacity:
                layer.grow()

    def vacate(self) -> None:
        """Take all rows out of the passes until they join; their KV stays."""
        self.slots.active = 0

    def join(self, rows: int) -> int:
        """Add so many rows to the passes, after the active ones. Returns the first of them."""
        first = self.slots.active
        self.slots.active += rows
        return first

    def resize(self, *, rows: int, capacity: int) -> None:
        """Reallocate for `rows`, at least the active ones, with `capacity` slots each, at least those in use."""
        slots = self.slots
        lengths = np.zeros(rows, np.int64)
        lengths[: slots.active] = slots.lengths[: slots.active]
        slots.lengths, slots.rows, slots.capacity = lengths, rows, capacity
        for layer in self._written_layers():
            layer.grow()

    def wipe(self, row: int, start: int = 0) -> None:
        """Zero a row's KV after its first `start` tokens.

        The value of a masked slot is still multiplied by 0, so a NaN would spread.
        """
        for layer in self._written_layers():
            layer.wipe(row, start)
        self.slots.lengths[row] = start

    def commit(self, row: int, path: NDArray[np.int32], live: int = 0) -> None:
        """Keep the KV of the nodes of `path` (int32 `[a]`, ascending from 0) and drop the tree's other nodes.

        Args:
            row: The row.
            path: The nodes.
            live: How many of them, the last ones, stay nodes of a tree: their KV stays behind the committed tokens.
        """
        if len(path) and path[-1] >= len(path):  # else every node is in its slot already
            self._gather(row, int(self.slots.lengths[row]), path)
        self.slots.lengths[row] += len(path) - live

    def _gather(self, row: int, start: int, path: NDArray[np.int32]) -> None:
        """Move the KV of the nodes of `path`, in slots `start + path`, to the slots from `start` on."""
        layers = self._written_layers()
        compact = self._compactor(layers, len(path))
        if compact is None:
            in_place = int(np.argmax(path != np.arange(len(path))))
            nodes = torch.from_numpy(path[in_place:].astype(np.int64) + start)
            for layer in layers:
                layer.move(row, start + in_place, nodes)
            return
        packed = torch.from_numpy(np.array([row, start, len(path), *path], np.int32))
        packed = packed.to(layers[0].device, non_blocking=True)
        compact(rows=packed[:1], starts=packed[1:2], counts=packed[2:3], paths=packed[3:][None])

    def _compactor(self, layers: Sequence[TreeLayer], nodes: int) -> Callable[..., None] | None:
        """The kernel that moves so many nodes in all layers at once; None if layers move their own."""
        from lookahead.kernels.checks import MAX_NODES
        from lookahead.kernels.dispatch import compactor_for

        if self._bound_at != self.slots.allocations:
            self._bound = compactor_for([buffer for layer in layers for buffer in layer.buffers])
            self._bound_at = self.slots.allocations
        return self._bound if nodes <= MAX_NODES else None

    def take(self, row: int, path: Tensor | None = None) -> list[RowStates]:
        """Copy the committed KV of a row, and that of the nodes of a path (int64 `[a]`) of its tree.

        Returns:
            For every layer keys and values, `[heads, length + a, dim]`.
        """
        length = int(self.slots.lengths[row])
        return [layer.take(row, length, path) for layer in self._written_layers()]

    def adopt(self, row: int, states: Sequence[RowStates], length: int) -> None:
        """Fill an empty row with the KV of its first `length` tokens.

        A sliding-window layer may hold only the last of them, and fills the slots before `length`.
        """
        while len(self.layers) < len(states):
            self.layers.append(self._next_layer())
        for layer, (keys, values) in zip(self.layers, states, strict=True):
            layer.fill(row, length, keys, values)
        self.slots.lengths[row] = length

    def retire(self, row: int) -> int:
        """Remove an active row; the last active row takes its place. Returns the row that moved to `row`."""
        last = self.slots.active - 1
        if row != last:
            length = int(self.slots.lengths[last])
            for layer in self._written_layers():
                layer.copy_row(last, row, length)
            self.slots.lengths[row] = length
        self.slots.lengths[last] = 0
        self.slots.active = last
        return last

    def _written_layers(self) -> list[TreeLayer]:
        """The layers with KV of their own; a layer that shares another's is never written."""
        return [layer for layer in self.layers if layer.is_initialized]


def windows_of(model: PreTrainedModel) -> list[int | None]:
    """Positions that each layer of the cache of `model.generate` keeps for a query; None for all."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return [getattr(layer, "sliding_window", None) for layer in layers]
