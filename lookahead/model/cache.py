"""The KV cache for trees: committed tokens in slots 0..length-1 of each row, tree nodes in the slots after them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from lookahead.drafting.tree import TokenTree
from lookahead.kernels import dispatch
from lookahead.kernels.dispatch import MAX_NODES
from lookahead.model.slots import MOST_PARTS, Origin, RowCopy, RowStates, SlotBlock, SlotForm, new_origin, zeros
from lookahead.model.state_layers import Levels, StateLayer, States, has_states

_GROWTH = 1.5  # of the slots per row, if they are too few


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
            self.capacity = max(self.kv_length, int(self.capacity * _GROWTH))

    @contextmanager
    def rows_from(self, first: int, count: int) -> Iterator[None]:
        """Restrict passes in a block to `count` rows from `first` on, numbered from 0."""
        lengths, active = self.lengths, self.active
        self.first, self.lengths, self.active = first, lengths[first:], count
        try:
            yield
        finally:
            self.first, self.lengths, self.active = 0, lengths, active


class TreeLayer(CacheLayerMixin):
    """KV of one layer, `[rows, capacity, heads, dim]`, allocated by the first pass.

    In a plain pass it acts like a layer of a `DynamicCache`, in which a query sees `window` positions.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, slots: TreeSlots, window: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = slots
        self._window = window
        self._places: list[tuple[SlotBlock, int]] = []  # of keys and values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take a part of a block for the keys and one for the values; a block has room for later layers like this."""
        slots = self._slots
        for new in (key_states, value_states):
            form = SlotForm(new.device, new.dtype, new.shape[1], new.shape[3], self._window)
            alike = [block for block in slots.blocks if block.form == form]
            if all(block.used == len(block.whole) for block in alike):
                kinds = 1 + (key_states.shape == value_states.shape)
                left = kinds * slots.layers[self._window] - sum(len(block.whole) for block in alike)
                shape = min(max(left, 1), MOST_PARTS), slots.rows, slots.capacity, form.heads, form.dim
                alike.append(SlotBlock(form, zeros(new, shape)))
                slots.blocks.append(alike[-1])
            self._places.append((alike[-1], alike[-1].used))
            alike[-1].used += 1
        self.keys, self.values = [block.whole[part] for block, part in self._places]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True
        slots.allocations += 1

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the pass's nodes; returns the keys and values its queries may see, `[active, heads, kv, dim]`."""
        slots = self._slots
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[1] < slots.capacity:
            self.grow()
        rows = slice(slots.first, slots.first + slots.active)
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            if slots.index is None:
                buffer[rows, slots.start : slots.start + slots.width] = new.transpose(1, 2)
            else:
                index = slots.index_on(buffer.device)
                buffer.flatten(0, 1).index_copy_(0, index, new.transpose(1, 2).flatten(0, 1))
        seen = slice(0 if self._window is None else self.get_mask_sizes(slots.width)[1], slots.kv_length)
        return self.keys[rows, seen].transpose(1, 2), self.values[rows, seen].transpose(1, 2)

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

    get_max_cache_shape = get_max_length  # its name in older releases of transformers

    def grow(self) -> None:
        """Reallocate for the shared number of rows and capacity, and copy the rows in use as far as they fit."""
        slots = self._slots
        for block, _ in self._places:
            block.fit(slots.rows, slots.capacity, slots.first + slots.active, slots.reached)
        self.keys, self.values = [block.whole[part] for block, part in self._places]
        slots.allocations += 1


class StateTreeLayer(StateLayer, TreeLayer):
    """A layer with recurrent states and the KV of attention."""

    def __init__(self, slots: TreeSlots, window: int | None, number_of_states: int) -> None:
        StateLayer.__init__(self, number_of_states)
        TreeLayer.__init__(self, slots, window)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate slots for keys and values, which are positional arguments, or states."""
        (TreeLayer if args else StateLayer).lazy_initialization(self, *args, **kwargs)


KINDS: dict[str, Callable[[Any, TreeSlots], Any]] = {
    "DynamicLayer": lambda layer, slots: TreeLayer(slots),
    "DynamicSlidingWindowLayer": lambda layer, slots: TreeLayer(slots, layer.sliding_window),
    "LinearAttentionLayer": lambda layer, slots: StateLayer(layer.number_of_states),
    "LinearAttentionAndFullAttentionLayer": lambda layer, slots: StateTreeLayer(slots, None, layer.number_of_states),
    "LinearAttentionAndSlidingWindowAttentionLayer": lambda layer, slots: StateTreeLayer(
        slots, layer.sliding_window, layer.number_of_states
    ),
    "DummyLayer": lambda layer, slots: layer,  # it holds nothing
}
"""The layer that stands in a `TreeCache` for each kind of layer of a transformers cache with states."""


class TreeCache(Cache):
    """The KV cache of passes over token trees. Layers are made when the first pass reaches them, and grow.

    For layers with recurrent states, a row holds the states after its committed tokens, and a pass over trees adds the
    states after each node, of which `commit` keeps one. After a prompt the states include its last token, the root, so
    `commit` must come before more trees.

    Args:
        rows: Rows of the batch.
        capacity: Initial slots per row.
        windows: Positions that each layer of a `DynamicCache` keeps for a query; None for all.
        like: The layers of a transformers cache, if some have states; each of one of `KINDS`.
    """

    layers: Any  # `TreeLayer`, `StateLayer` or `StateTreeLayer`

    def __init__(
        self, *, rows: int, capacity: int, windows: Sequence[int | None] = (), like: Sequence[Any] = ()
    ) -> None:
        attending = [getattr(layer, "sliding_window", None) for layer in like if isinstance(layer, CacheLayerMixin)]
        self.slots = slots = TreeSlots(rows, capacity, attending if like else windows)
        self._compact: Callable[..., None] | None = None  # the kernel of `commit`, bound to the buffers
        self._bound_at = 0, 0  # allocation count and tested kernels at binding
        self.tables: dict[Any, Any] = {}  # by kind, a `PassTable` for the current buffers
        self.heads: dict[Any, Any] = {}  # by module and type, `HeadSlots` beside latents
        following = chain(windows, repeat(None))
        # The base class only calls it, so it need not be a class. It must not hold the cache, which is freed at once.
        self._next_layer: Callable[[], TreeLayer] = lambda: TreeLayer(slots, next(following))
        self.levels: Levels | None = None  # of the newest pass over trees, if there are states
        self._ahead = set[int]()  # rows whose states include an uncommitted root
        if like:
            super().__init__(layers=[KINDS[type(layer).__name__](layer, slots) for layer in like])
        else:
            super().__init__(layer_class_to_replicate=cast(type[CacheLayerMixin], self._next_layer))
        self.states: list[StateLayer] = [layer for layer in self.layers if isinstance(layer, StateLayer)]

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer holds states only, as transformers asks to find the layer that masks are made for."""
        return [not isinstance(layer, CacheLayerMixin) and has_states(layer) for layer in self.layers]

    def buffers(self) -> list[Tensor]:
        """Keys and values of all layers with their own KV. A layer that shares another's is never written."""
        return [states for layer in self._written() for states in (layer.keys, layer.values)]

    def _written(self) -> list[TreeLayer]:
        """The layers that have slots."""
        return [layer for layer in self.layers if isinstance(layer, TreeLayer) and layer.is_initialized]

    def begin_trees(self, trees: Sequence[TokenTree], device: torch.device) -> None:
        """Prepare for a pass over trees; RuntimeError if a row's states include an uncommitted root."""
        if self._ahead:
            raise RuntimeError("the states of a row are those behind its root, which is not committed")
        self.levels = Levels(trees, self.slots.width, device)
        for layer in self.states:
            layer.drop()

    def begin_prompt(self, row: int) -> None:
        """Prepare for a pass that continues the text of a single row."""
        self.levels = None
        for layer in self.states:
            states = layer.committed.get(row, {})
            layer.load({key: state[None].clone() for key, state in states.items()})

    def end_prompt(self, row: int) -> None:
        """Keep the states after a pass over a single row."""
        self._ahead.add(row)
        for layer in self.states:
            layer.read(row)

    def is_ready(self, at: int) -> bool:
        """Whether a layer's slots are allocated for the running pass, and may be written without `update`."""
        slots, layer = self.slots, self.layers[at] if at < len(self.layers) else None
        if layer is None or not layer.is_initialized or slots.first or slots.is_plain:
            return False
        if layer.keys.shape[1] < slots.capacity:
            layer.grow()
        return True

    def reserve(self, capacity: int) -> None:
        """Allocate at least `capacity` slots per row now, before a pass that must not allocate."""
        if capacity > self.slots.capacity:
            self.resize(rows=self.slots.rows, capacity=max(capacity, int(self.slots.capacity * _GROWTH)))

    def resize(self, *, rows: int, capacity: int) -> None:
        """Reallocate for `rows` rows, at least the active ones, of `capacity` slots, at least the used ones."""
        slots = self.slots
        lengths = np.zeros(rows, np.int64)
        lengths[: slots.active] = slots.lengths[: slots.active]
        slots.origins = slots.origins[:rows] + [new_origin() for _ in range(rows - slots.rows)]
        slots.lengths, slots.rows, slots.capacity = lengths, rows, capacity
        for layer in self._written():
            layer.grow()

    def wipe(self, row: int, start: int = 0) -> None:
        """Zero a row's KV after its first `start` tokens, since a NaN in a masked slot would spread as NaN · 0."""
        for block in self.slots.blocks:
            block.whole[:, row, start : self.slots.reached] = 0
        self.slots.lengths[row] = start
        self.slots.origins[row] = new_origin(self.slots.origins[row], start)
        if not start:
            self._forget_states(row)

    def _forget_states(self, row: int) -> None:
        self._ahead.discard(row)
        for layer in self.states:
            layer.committed.pop(row, None)

    def _commit_states(self, row: int, path: NDArray[np.int32]) -> None:
        """Keep the states after the last node of a path."""
        if row in self._ahead:
            self._ahead.remove(row)
        elif len(path):
            if self.levels is None:
                raise RuntimeError("no pass over trees has the states of a path")
            for layer in self.states:
                layer.committed[row] = layer.states_after(row, self.levels, path)

    def commit(self, row: int, path: NDArray[np.int32], live: int = 0) -> None:
        """Keep the KV of the nodes of `path` (int32 `[a]`, ascending from 0) and drop the tree's other nodes.

        The last `live` of them stay tree nodes: their KV stays after the committed tokens.
        """
        start = int(self.slots.lengths[row])
        self.slots.lengths[row] += len(path) - live
        if self.states:
            self._commit_states(row, path)
            if not self._written():
                return
        if not len(path) or path[-1] < len(path):
            return  # every node is already in its slot
        if self._bound_at != (self.slots.allocations, len(dispatch.verdicts)):
            self._compact = dispatch.compactor_for(self.buffers())
            self._bound_at = self.slots.allocations, len(dispatch.verdicts)
        if self._compact is None or len(path) > MAX_NODES:
            nodes = torch.from_numpy(path.astype(np.int64) + start)
            for block in self.slots.blocks:
                # Once per device; CUDA has read the host's memory when the call returns.
                nodes = nodes.to(block.form.device, non_blocking=block.form.device.type == "cuda")
                parts = block.whole[:, row]
                parts[:, start : start + len(path)] = parts.index_select(1, nodes)
            return
        packed = torch.from_numpy(np.array([row, start, len(path), *path], np.int32))
        packed = packed.to(self.buffers()[0].device, non_blocking=True)  # on CUDA only, which reads it at once
        self._compact(rows=packed[:1], starts=packed[1:2], counts=packed[2:3], paths=packed[3:][None])

    def extract_row(self, row: int, path: Tensor | None = None) -> RowCopy:
        """Copy a row, and the KV of a path (int64 `[a]`) of its tree; KV `[heads, length + a, dim]`."""
        length, kv, states = int(self.slots.lengths[row]), dict[int, RowStates](), dict[int, States]()
        slots = slice(length) if path is None else torch.cat([torch.arange(length, device=path.device), length + path])
        for at, layer in enumerate(self.layers):
            if isinstance(layer, TreeLayer) and layer.is_initialized:
                keys, values = (states[row, slots].transpose(0, 1).clone() for states in (layer.keys, layer.values))
                kv[at] = keys, values
            if isinstance(layer, StateLayer):
                states[at] = {key: state.clone() for key, state in layer.committed[row].items()}
        return RowCopy(kv, states, length, self.slots.origins[row])

    def copy_prefix_from(self, row: int, states: Iterable[RowStates | None], length: int, origin: Origin = ()) -> None:
        """Fill an empty row with the KV of `length` tokens: keys and values by layer, `[heads, n, dim]`.

        A sliding-window layer may hold only the last n tokens, which fill the slots before `length`. None stands for a
        layer that reads the KV of another layer.
        """
        for at, pair in enumerate(states):
            if at == len(self.layers):
                self.layers.append(self._next_layer())
            if pair is None:
                continue
            layer, (keys, values) = self.layers[at], pair
            if not layer.is_initialized:
                layer.lazy_initialization(keys[None], values[None])
            for buffer, new in ((layer.keys, keys), (layer.values, values)):
                buffer[row, length - new.shape[1] : length] = new.transpose(0, 1)
        slots = self.slots
        slots.lengths[row], slots.origins[row] = length, new_origin(origin, length)
        slots.reached = max(slots.reached, length)

    def hold_root(self, row: int) -> None:
        """Turn the newest committed token of a row into the root of its first tree."""
        slots = self.slots
        slots.lengths[row] -= 1
        slots.origins[row] = new_origin(slots.origins[row], int(slots.lengths[row]))
        if self.states:
            self._ahead.add(row)

    def retire(self, row: int) -> int:
        """Remove an active row; the last active row takes its place. Returns the old index of that row."""
        last = self.slots.active - 1
        if row != last:
            length = int(self.slots.lengths[last])
            for block in self.slots.blocks:
                block.whole[:, row, :length] = block.whole[:, last, :length]
            self.slots.lengths[row], self.slots.origins[row] = length, self.slots.origins[last]
            for layer in self.states:
                layer.committed[row] = layer.committed.pop(last, {})
            self._ahead = {row if other == last else other for other in self._ahead - {row}}
        self._forget_states(last)
        self.levels = None
        self.slots.lengths[last], self.slots.origins[last] = 0, new_origin()
        self.slots.active = last
        return last
