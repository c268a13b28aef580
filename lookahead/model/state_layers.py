"""Recurrent states in a cache: after the committed tokens of each row, and after the nodes of a pass.

A recurrent layer cannot roll back its state, so every node of a tree has its own: the nodes of one depth are the rows
of a batch of single tokens, each with a copy of its parent's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, cache_utils

from lookahead.drafting.tree import IntArray, TokenTree

States = dict[tuple[str, int], Tensor]
"""The states of one layer by kind, "conv" or "recurrent", and number: `[nodes, ...]`, or `[...]` for one node."""

KEEPS_STATES = hasattr(cache_utils.Cache, "get_conv_state")  # earlier releases of transformers lack it
_Layer: Any = getattr(cache_utils, "LinearAttentionLayer", object)


class Level(NamedTuple):
    """The nodes of one depth in the trees of all rows."""

    nodes: Tensor  # int64 `[n]`, indices among the columns of all rows
    parents: Tensor  # int64 `[n]`, indices among the nodes of the previous level; in the first level, rows


class Levels:
    """The trees of a pass by depth.

    Args:
        trees: One tree per active row.
        width: Columns of a row in the pass.
        device: Device of the hidden states.
    """

    def __init__(self, trees: Sequence[TokenTree], width: int, device: torch.device) -> None:
        self.width, self._trees = width, trees
        starts = np.arange(len(trees)) * width
        depths = np.concatenate([tree.depths for tree in trees])
        nodes = np.concatenate([start + np.arange(len(tree)) for start, tree in zip(starts, trees, strict=True)])
        parents = np.concatenate([start + tree.parents for start, tree in zip(starts, trees, strict=True)])
        self._places: NDArray[np.int64] = np.zeros(len(trees) * width, np.int64)  # index of each node in its level
        self.all: list[Level] = []
        for depth in range(int(depths.max()) + 1):
            places = np.flatnonzero(depths == depth)
            own = nodes[places]
            self._places[own] = np.arange(len(own))
            before = self._places[parents[places]] if depth else np.arange(len(trees))
            self.all.append(Level(*(torch.from_numpy(array.astype(np.int64)).to(device) for array in (own, before))))

    @cached_property
    def parents(self) -> list[Tensor]:
        """The parents of every row's nodes in its tree, int64 `[nodes]` on the CPU."""
        return [torch.from_numpy(tree.parents.astype(np.int64)) for tree in self._trees]

    def place_of(self, row: int, node: int) -> tuple[int, int]:
        """The level of a row's node, and its index there."""
        return int(self._trees[row].depths[node]), int(self._places[row * self.width + node])


class StateLayer(_Layer):  # type: ignore[misc]
    """The states of one layer for the rows of a batch. Within a level it acts as a `DynamicCache` layer."""

    is_initialized = False

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)
        self.committed: dict[int, States] = {}  # by row
        self._levels: list[list[States]] = []  # of the newest pass over trees, by level and call
        self.after: Callable[[int, IntArray], States] | None = None  # of a row and a path, if kernels ran that pass
        self._memory: list[Tensor] = []  # for states that kernels write; at most one per row is not in use

    def load(self, states: States) -> None:
        """Continue from states `[rows, ...]`, or from an empty text without states."""
        load_states(self, states)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Hold new states directly; the base class copies them into memory of a fixed address."""
        former = self.recurrent_states.get(state_idx)
        if former is None or (former.shape, former.dtype) != (recurrent_states.shape, recurrent_states.dtype):
            made: Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
            return made
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    def taken(self) -> States:
        """The states after the newest call of the layer."""
        return states_in(self)

    def begin(self, depth: int, parents: Tensor) -> None:
        """Give every node of a call a copy of its parent's state, at depth 0 its row's state."""
        if not depth:
            rows = [self.committed[row] for row in parents.tolist()]
            self.load({key: torch.stack([states[key] for states in rows]) for key in rows[0]})
        else:
            before = self.level(depth - 1).items()
            self.load({key: state.index_select(0, parents.to(state.device)) for key, state in before})

    def end(self, depth: int) -> None:
        """Keep the states after a call, for the next nodes of a level."""
        if depth == len(self._levels):
            self._levels.append([])
        self._levels[depth].append(self.taken())

    def level(self, depth: int) -> States:
        """The states of the nodes of a level, `[nodes, ...]`; empty if the layer was not called."""
        if depth >= len(self._levels):
            return {}
        parts = self._levels[depth]
        if len(parts) > 1:
            parts[:] = [{key: torch.cat([part[key] for part in parts]) for key in parts[0]}]
        return parts[0]

    def states_after(self, row: int, levels: Levels, path: IntArray) -> States:
        """The states after the nodes of a path in a row's tree."""
        if self.after is not None:
            return self.after(row, path)
        level, place = levels.place_of(row, int(path[-1]))
        # A view of one state would keep the states of all nodes in memory.
        states = self.level(level).items()
        return {key: state[place].clone() if len(state) > 1 else state[0] for key, state in states}

    def memory_like(self, key: tuple[str, int], state: Tensor) -> Tensor:
        """Memory for a state of a kind, which no row uses: new memory of this size costs as much as a kernel.

        It is free again at the next call unless its state becomes that of a row.
        """
        used = {id(states.get(key)) for states in self.committed.values()}
        free = [one for one in self._memory if id(one) not in used and one.shape == state.shape]
        if not free:
            free = [torch.empty_like(state)]
            self._memory = [state for state in self._memory if id(state) in used] + free
        return free[0]

    def drop(self) -> None:
        """Drop the states of the nodes."""
        self._levels.clear()
        self.after = None

    def read(self, row: int) -> None:
        """Commit the states after the newest call of the layer, which was over a single row."""
        self.committed[row] = {key: state[0] for key, state in self.taken().items()}


def states_in(layer: Any) -> States:
    """The states in a layer of a transformers cache."""
    kinds = (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
    return {(kind, at): state for kind, states in kinds for at, state in states.items() if state is not None}


def load_states(layer: Any, states: States) -> None:
    """Set the states `[rows, ...]` of a layer of a transformers cache, or reset it to an empty text."""
    for at in range(layer.number_of_states):
        conv, recurrent = states.get(("conv", at)), states.get(("recurrent", at))
        layer.conv_states[at], layer.recurrent_states[at] = conv, recurrent
        layer.is_conv_states_initialized[at] = conv is not None
        layer.is_recurrent_states_initialized[at] = recurrent is not None
        layer.has_previous_state[at] = bool(states)
        if conv is not None:
            layer.conv_kernel_size[at] = conv.shape[-1]
            layer.device, layer.dtype = conv.device, conv.dtype


def has_states(layer: Any) -> bool:
    """Whether a cache layer holds recurrent states, with or without keys and values."""
    return KEEPS_STATES and isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin)


def is_filled(layer: Any) -> bool:
    """Whether a layer of a transformers cache holds a text."""
    holds_states = not has_states(layer) or all(layer.has_previous_state.values())
    return holds_states and bool(getattr(layer, "is_initialized", True))


def takes_states(cache: Any) -> bool:
    """Whether a transformers cache counts tokens, by attention layers, and accepts new states."""
    if not isinstance(cache, DynamicCache):
        return False
    return counts_tokens(cache) and not any(getattr(layer, "record_past", False) for layer in cache.layers)


def counts_tokens(cache: Any) -> bool:
    """Whether a transformers cache knows its number of tokens, which it does not with only recurrent states."""
    return not cache.layers or any(isinstance(layer, cache_utils.CacheLayerMixin) for layer in cache.layers)


def cache_layers(config: Any) -> list[Any]:
    """The layers of a transformers cache for a configuration if some have states; otherwise none."""
    layers: list[Any] = DynamicCache(config=config).layers if KEEPS_STATES else []
    return layers if any(map(has_states, layers)) else []
