"""The KV cache of trees: committed tokens in slots 0..length-1 of each row, tree nodes in the slots after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lookahead.drafting.tree import TokenTree
from lookahead.hf.state_layers import Levels, StateLayer, States
from lookahead.hf.tree_layers import GROWTH, TreeLayer, TreeSlots, layer_like
from lookahead.kernels import dispatch
from lookahead.kernels.dispatch import MAX_NODES

# The name of the cache among the inputs and outputs of a model. Transformers changed it in 5.24.
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
MARKS_CACHES = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 17)


RowStates = tuple[Tensor, Tensor]


class RowCopy(NamedTuple):
    """What a cache holds of a row, by the index of the layer."""

    kv: dict[int, RowStates]  # keys and values, `[heads, tokens, dim]`
    states: dict[int, States]


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among arguments of `model.generate`; None without one."""
    names = CACHE, "past_key_values", "cache_params"
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def may_be_callers(cache: Any, config: GenerationConfig) -> bool:
    """Whether the caller of `model.generate` may have passed a cache; of an implementation that is named, none did."""
    is_unmarked = not MARKS_CACHES and config.cache_implementation is None  # before transformers 5.17 none is marked
    return cache is not None and getattr(cache, "_is_user_defined", is_unmarked)


def is_callers(cache: Any) -> bool:
    """Whether the caller of `model.generate` is known to have passed a cache."""
    return bool(getattr(cache, "_is_user_defined", False))


def tokens_in(cache: Any) -> int:
    """Tokens that a cache holds; 0 without one, and for states that count none."""
    try:
        return 0 if cache is None else int(cache.get_seq_length())
    except ValueError:  # since transformers 5.24, from a cache without attention layers
        return 0


class TreeCache(Cache):
    """The KV cache of passes over token trees. Layers are made when the first pass reaches them, and grow.

    Of layers with states a row has those behind its committed tokens, and those of a pass over trees behind each node,
    of which `commit` takes one. Behind a prompt they are those of its last token too: `commit` comes before more trees.

    Args:
        rows: Rows of the batch.
        capacity: Slots per row to begin with.
        windows: Positions each layer of a `DynamicCache` keeps for a query; None for all.
        like: The layers of a cache of transformers, if some have states.
    """

    layers: Any  # of `TreeLayer`, `StateLayer` or `StateTreeLayer`, which the base class does not say

    def __init__(
        self, *, rows: int, capacity: int, windows: Sequence[int | None] = (), like: Sequence[Any] = ()
    ) -> None:
        self.slots = slots = TreeSlots(rows, capacity)
        self._compact: Callable[..., None] | None = None  # the kernel of `commit`, bound to the buffers
        self._bound_at = 0, 0  # allocations and tested kernels when it was bound
        self.tables: dict[int, Any] = {}  # of each kind a `PassTable` for the buffers as they are
        following = chain(windows, repeat(None))
        # The base class only calls it, so it need not be a class. It does not hold the cache, which is freed at once.
        self._next_layer: Callable[[], TreeLayer] = lambda: TreeLayer(slots, next(following))
        self.levels: Levels | None = None  # of the newest pass over trees, where there are states
        self._ahead = set[int]()  # rows with the states of their first root, which is not committed yet
        if like:
            super().__init__(layers=[layer_like(each, slots) for each in like])
        else:
            super().__init__(layer_class_to_replicate=cast(type[CacheLayerMixin], self._next_layer))
        self.states: list[StateLayer] = [layer for layer in self.layers if isinstance(layer, StateLayer)]

    def buffers(self) -> list[Tensor]:
        """Keys and values of all layers with KV of their own; a layer that shares another's is never written."""
        return [getattr(layer, name) for layer in self._written() for name in layer.names]

    def _written(self) -> list[TreeLayer]:
        """The layers that have slots."""
        return [layer for layer in self.layers if isinstance(layer, TreeLayer) and layer.is_initialized]

    def begin_trees(self, trees: Sequence[TokenTree], device: torch.device) -> None:
        """Let the next pass be one over trees; RuntimeError if a root was read already and is not committed."""
        if self._ahead:
            raise RuntimeError("the states of a row are those behind its root, which is not committed")
        self.levels = Levels(trees, self.slots.width, device)
        for layer in self.states:
            layer.drop()

    def begin_prompt(self, row: int) -> None:
        """Let the next pass go on with the text of a single row."""
        self.levels = None
        for layer in self.states:
            held = layer.committed.get(row, {})
            layer.load({key: each[None].clone() for key, each in held.items()})

    def end_prompt(self, row: int) -> None:
        """Keep the states that a pass over a single row left."""
        self._ahead.add(row)
        for layer in self.states:
            layer.read(row)

    def places(self, at: int) -> tuple[Tensor, Tensor] | None:
        """The slots of a layer that a pass over one row writes, `[1, width, heads, dim]`; None where `update` must."""
        slots, layer = self.slots, self.layers[at] if at < len(self.layers) else None
        if layer is None or not layer.is_initialized or slots.active > 1 or slots.first or slots.is_plain:
            return None
        if layer.keys.shape[1] < slots.capacity:
            layer.grow()
        keys, values = (each[:1].narrow(1, slots.start, slots.width) for each in (layer.keys, layer.values))
        return keys, values

    def reserve(self, capacity: int) -> None:
        """Allocate at least so many slots a row now, before a pass that must not allocate."""
        if capacity > self.slots.capacity:
            self.resize(rows=self.slots.rows, capacity=max(capacity, int(self.slots.capacity * GROWTH)))

    def resize(self, *, rows: int, capacity: int) -> None:
        """Reallocate for `rows`, at least the active ones, with `capacity` slots each, at least those in use."""
        slots = self.slots
        lengths = np.zeros(rows, np.int64)
        lengths[: slots.active] = slots.lengths[: slots.active]
        slots.lengths, slots.rows, slots.capacity = lengths, rows, capacity
        for layer in self._written():
            layer.grow()

    def wipe(self, row: int, start: int = 0) -> None:
        """Zero a row's KV after its first `start` tokens: a NaN in a masked slot would spread, as NaN · 0."""
        for buffer in self.buffers():
            buffer[row, start:] = 0
        self.slots.lengths[row] = start
        if not start:
            self._forget_states(row)

    def _forget_states(self, row: int) -> None:
        self._ahead.discard(row)
        for layer in self.states:
            layer.committed.pop(row, None)

    def _commit_states(self, row: int, path: NDArray[np.int32]) -> None:
        """Take the states of the last node of a path."""
        if row in self._ahead:
            self._ahead.remove(row)
        elif len(path):
            if self.levels is None:
                raise RuntimeError("no pass over trees has the states of a path")
            for layer in self.states:
                layer.commit(row, *self.levels.place_of(row, int(path[-1])))

    def commit(self, row: int, path: NDArray[np.int32], live: int = 0) -> None:
        """Keep the KV of the nodes of `path` (int32 `[a]`, ascending from 0) and drop the tree's other nodes.

        The last `live` of them stay nodes of a tree: their KV stays behind the committed tokens.
        """
        start = int(self.slots.lengths[row])
        self.slots.lengths[row] += len(path) - live
        if self.states:
            self._commit_states(row, path)
            if not self._written():
                return
        if self._bound_at != (self.slots.allocations, len(dispatch.verdicts)):
            self._compact = dispatch.compactor_for(self.buffers())
            self._bound_at = self.slots.allocations, len(dispatch.verdicts)
        if not len(path) or path[-1] < len(path):
            return  # every node is in its slot already
        if self._compact is None or len(path) > MAX_NODES:
            nodes = torch.from_numpy(path.astype(np.int64) + start)
            for buffer in self.buffers():
                nodes = nodes.to(buffer.device)  # a copy waits for the device, so one for all layers of it
                buffer[row, start : start + len(path)] = buffer[row].index_select(0, nodes)
            return
        packed = torch.from_numpy(np.array([row, start, len(path), *path], np.int32))
        packed = packed.to(self.buffers()[0].device, non_blocking=True)
        self._compact(rows=packed[:1], starts=packed[1:2], counts=packed[2:3], paths=packed[3:][None])

    def extract_row(self, row: int, path: Tensor | None = None) -> RowCopy:
        """Copy what is held of a row; of a path (int64 `[a]`) of its tree the KV too, `[heads, length + a, dim]`."""
        length, kv, states = int(self.slots.lengths[row]), dict[int, RowStates](), dict[int, States]()
        slots = slice(length) if path is None else torch.cat([torch.arange(length, device=path.device), length + path])
        for at, layer in enumerate(self.layers):
            if isinstance(layer, TreeLayer) and layer.is_initialized:
                keys, values = (each[row, slots].transpose(0, 1).clone() for each in (layer.keys, layer.values))
                kv[at] = keys, values
            if isinstance(layer, StateLayer):
                states[at] = dict(layer.committed[row])
        return RowCopy(kv, states)

    def copy_prefix_from(self, row: int, states: Iterable[RowStates | None], length: int) -> None:
        """Fill an empty row with the KV of its first `length` tokens: by layer keys and values, `[heads, n, dim]`.

        A sliding-window layer may hold only the last of them, and fills the slots before `length`. A layer without any,
        None, reads those of another layer.
        """
        for at, held in enumerate(states):
            if at == len(self.layers):
                self.layers.append(self._next_layer())
            if held is None:
                continue
            layer, (keys, values) = self.layers[at], held
            if not layer.is_initialized:
                layer.lazy_initialization(keys[None], values[None])
            for buffer, each in ((layer.keys, keys), (layer.values, values)):
                buffer[row, length - each.shape[1] : length] = each.transpose(0, 1)
        self.slots.lengths[row] = length

    def hold_root(self, row: int) -> None:
        """Let the newest committed token of a row be the root of its first tree."""
        self.slots.lengths[row] -= 1
        if self.states:
            self._ahead.add(row)

    def retire(self, row: int) -> int:
        """Remove an active row; the last active row takes its place. Returns the row that moved to `row`."""
        last = self.slots.active - 1
        if row != last:
            length = int(self.slots.lengths[last])
            for buffer in self.buffers():
                buffer[row, :length] = buffer[last, :length]
            self.slots.lengths[row] = length
            for layer in self.states:
                layer.committed[row] = layer.committed.pop(last, {})
            self._ahead = {row if each == last else each for each in self._ahead - {row}}
        self._forget_states(last)
        self.levels = None
        self.slots.lengths[last] = 0
        self.slots.active = last
        return last
