"""States of recurrent layers in a cache: those behind the committed tokens of each row, and behind nodes of a pass.

A recurrent layer cannot cut back its state, so that every node of a tree has its own: the nodes of one depth are the
rows of a batch of single tokens, each with a copy of the state of its parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, cache_utils

from lookahead.drafting.tree import TokenTree

States = dict[tuple[str, int], Tensor]
"""The states of one layer by kind, "conv" or "recurrent", and number, `[nodes, ...]`, or `[...]` of one node."""

KEEPS_STATES = hasattr(cache_utils.Cache, "get_conv_state")  # earlier releases of transformers have no such calls
_Layer: Any = getattr(cache_utils, "LinearAttentionLayer", object)
_ATTENTION = {"DynamicLayer", "DynamicSlidingWindowLayer"}
_SERVED = {*_ATTENTION, "DummyLayer", "LinearAttentionLayer"} | {
    *("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
}


class Level(NamedTuple):
    """The nodes of one depth, of the trees of all rows."""

    nodes: Tensor  # int64 `[n]`, places among the columns of all rows
    parents: Tensor  # int64 `[n]`, places among the nodes of the level before; of the first level, its rows


class Levels:
    """The trees of a pass by depth.

    Args:
        trees: One tree per active row.
        width: Columns of a row in the pass.
        device: Of the hidden states.
    """

    def __init__(self, trees: Sequence[TokenTree], width: int, device: torch.device) -> None:
        self.width, self._trees = width, trees
        starts = np.arange(len(trees)) * width
        depths = np.concatenate([tree.depths for tree in trees])
        nodes = np.concatenate([start + np.arange(len(tree)) for start, tree in zip(starts, trees, strict=True)])
        parents = np.concatenate([start + tree.parents for start, tree in zip(starts, trees, strict=True)])
        self._places: NDArray[np.int64] = np.zeros(len(trees) * width, np.int64)  # of the nodes, each in its level
        self.all: list[Level] = []
        for depth in range(int(depths.max()) + 1):
            found = np.flatnonzero(depths == depth)
            own = nodes[found]
            self._places[own] = np.arange(len(own))
            before = self._places[parents[found]] if depth else np.arange(len(trees))
            self.all.append(Level(*(torch.from_numpy(each.astype(np.int64)).to(device) for each in (own, before))))

    def place_of(self, row: int, node: int) -> tuple[int, int]:
        """The level of a row's node, and its place there."""
        return int(self._trees[row].depths[node]), int(self._places[row * self.width + node])


class StateLayer(_Layer):  # type: ignore[misc]
    """The states of one layer for the rows of a batch. Within a level it is what the layer of a `DynamicCache` is."""

    is_initialized = False

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)
        self.committed: dict[int, States] = {}  # by row
        self._levels: list[list[States]] = []  # of the newest pass over trees, by level and call

    def load(self, states: States) -> None:
        """Continue from states `[rows, ...]`; without any from an empty text."""
        load_states(self, states)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Hold new states themselves, which the base class copies into memory of a fixed address."""
        held = self.recurrent_states.get(state_idx)
        if held is None or (held.shape, held.dtype) != (recurrent_states.shape, recurrent_states.dtype):
            made: Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
            return made
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    def taken(self) -> States:
        """The states as the newest call of the layer left them."""
        return states_in(self)

    def begin(self, depth: int, parents: Tensor) -> None:
        """Give every node of a call a copy of the state of its parent; those of depth 0 that of their row."""
        if not depth:
            rows = [self.committed[row] for row in parents.tolist()]
            self.load({key: torch.stack([states[key] for states in rows]) for key in rows[0]})
        else:
            before = self.level(depth - 1).items()
            self.load({key: each.index_select(0, parents.to(each.device)) for key, each in before})

    def end(self, depth: int) -> None:
        """Keep the states that a call left, of the next nodes of a level."""
        if depth == len(self._levels):
            self._levels.append([])
        self._levels[depth].append(self.taken())

    def level(self, depth: int) -> States:
        """The states of the nodes of a level, `[nodes, ...]`; none if the layer was not called."""
        if depth >= len(self._levels):
            return {}
        parts = self._levels[depth]
        if len(parts) > 1:
            parts[:] = [{key: torch.cat([part[key] for part in parts]) for key in parts[0]}]
        return parts[0]

    def commit(self, row: int, level: int, place: int) -> None:
        """Take the states of a node for those of a row."""
        # A view of one state would keep those of all nodes in memory.
        states = self.level(level).items()
        self.committed[row] = {key: each[place].clone() if len(each) > 1 else each[0] for key, each in states}

    def drop(self) -> None:
        """Forget the states of the nodes."""
        self._levels.clear()

    def read(self, row: int) -> None:
        """Take what the newest call of the layer, over a single row, left."""
        self.committed[row] = {key: each[0] for key, each in self.taken().items()}


def states_in(layer: Any) -> States:
    """The states that a layer of a cache of transformers holds."""
    kinds = (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
    return {(kind, at): each for kind, held in kinds for at, each in held.items() if each is not None}


def load_states(layer: Any, states: States) -> None:
    """Let a layer of a cache of transformers hold states `[rows, ...]`, or none, as behind an empty text."""
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
    """Whether a layer of a cache is one of states, with keys and values besides or without."""
    return KEEPS_STATES and isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin)


def is_filled(layer: Any) -> bool:
    """Whether a layer of a cache of transformers holds a text."""
    holds_states = not has_states(layer) or all(layer.has_previous_state.values())
    return holds_states and bool(getattr(layer, "is_initialized", True))


def takes_states(cache: Any) -> bool:
    """Whether a cache of transformers counts the tokens of its states, by attention, and lets others be set."""
    if not isinstance(cache, DynamicCache):
        return False
    return counts_tokens(cache) and not any(getattr(layer, "record_past", False) for layer in cache.layers)


def counts_tokens(cache: Any) -> bool:
    """Whether a cache of transformers tells how many tokens it holds: not if it has states alone."""
    return not cache.layers or any(isinstance(layer, cache_utils.CacheLayerMixin) for layer in cache.layers)


def cache_layers(config: Any) -> list[Any]:
    """The layers of a cache of transformers for a configuration, where some have states; else none."""
    layers: list[Any] = DynamicCache(config=config).layers if KEEPS_STATES else []
    return layers if any(map(has_states, layers)) else []


def unserved_layers(layers: Sequence[Any]) -> Iterator[str]:
    """The kinds of layers of a cache that a cache of trees cannot stand for."""
    return (type(each).__name__ for each in layers if type(each).__name__ not in _SERVED)
