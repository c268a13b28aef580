"""A tree that a model grows: its candidates, and which of them are worth asking the model about next."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.drafting.proposal import IntArray
from lookahead.drafting.tree import TokenTree

FloatArray = NDArray[np.float64]


class Growth:
    """The candidates of one row, node 0 the root; some are scored, so that they have candidates of their own.

    Args:
        root: The row's newest token, scored already.
        capacity: Most candidates, the root counted.

    Attributes:
        scored: How many nodes are scored.
        spread: Sum of the reach of the scored nodes: how many tokens their children were to foretell.
    """

    __slots__ = (
        *("_chances", "_count", "_depths", "_features", "_order", "_parents", "_places", "_reach", "_tokens"),
        *("scored", "spread"),
    )

    def __init__(self, root: int, capacity: int) -> None:
        self._tokens = np.full(capacity, root, np.int32)
        self._parents = np.zeros(capacity, np.int32)
        self._depths = np.zeros(capacity, np.int32)
        self._features = np.zeros(capacity, np.int32)
        self._chances = np.ones(capacity)
        self._reach = np.ones(capacity)
        self._places = np.full(capacity, -1, np.int32)  # among the scored nodes
        self._places[0] = 0
        self._order = np.zeros(capacity, np.int32)  # the scored nodes, as they were scored
        self._count = self.scored = 1
        self.spread = 1.0

    def __len__(self) -> int:
        return self._count

    @property
    def tokens(self) -> IntArray:
        """int32 `[nodes]`."""
        return self._tokens[: self._count]

    @property
    def parents(self) -> IntArray:
        """int32 `[nodes]`; a parent comes before its children."""
        return self._parents[: self._count]

    @property
    def places(self) -> IntArray:
        """int32 `[nodes]`, the place of each among the scored nodes, -1 for one that is not."""
        return self._places[: self._count]

    @property
    def features(self) -> IntArray:
        """int32 `[nodes]`, as they were given."""
        return self._features[: self._count]

    @property
    def chances(self) -> FloatArray:
        """float64 `[nodes]`, the chance of each once its parent is chosen."""
        return self._chances[: self._count]

    @property
    def reach(self) -> FloatArray:
        """float64 `[nodes]`, the chance of each to be reached."""
        return self._reach[: self._count]

    def add(self, parent: int, tokens: IntArray, chances: FloatArray, features: IntArray) -> None:
        """Give a scored node its candidates."""
        begin, end = self._count, self._count + len(tokens)
        self._tokens[begin:end] = tokens
        self._parents[begin:end] = parent
        self._depths[begin:end] = self._depths[parent] + 1
        self._features[begin:end] = features
        self._chances[begin:end] = chances
        self._reach[begin:end] = self._reach[parent] * chances
        self._count = end

    def promise(self, width: int) -> float:
        """How likely the output passes through one of the nodes that would be chosen next."""
        return float(self._reach[_likeliest(self.reach, self._places, width, 0.0)].sum())

    def choose(self, width: int, least: float) -> IntArray:
        """The likeliest candidates that are not scored yet, at most `width`, reached with a chance of at least `least`.

        Ties go to the earlier one. They count as scored from now on.
        """
        chosen: IntArray = _likeliest(self.reach, self._places, width, least)
        self._places[chosen] = np.arange(self.scored, self.scored + len(chosen))
        self._order[self.scored : self.scored + len(chosen)] = chosen
        self.scored += len(chosen)
        self.spread += float(self._reach[chosen].sum())
        return chosen

    def scored_tree(self) -> TokenTree:
        """The scored nodes, in the order they were."""
        order = self._order[: self.scored]
        parents = self._places[self._parents[order]]
        return TokenTree(self._tokens[order], parents, self._depths[order], np.zeros(len(order), np.int32))

    def path_of(self, emitted: IntArray) -> IntArray:
        """The scored nodes that hold emitted tokens: places among the scored, int32 `[a]`, the root's first."""
        path: IntArray = _follow(self.tokens, self.parents, self._places, emitted)
        return path

    def best(self, room: int) -> IntArray:
        """The root and the candidates likeliest to be reached, at most `room`, in their order."""
        if self._count <= room + 1:
            return np.arange(self._count, dtype=np.int32)
        others = 1 + np.argsort(-self._reach[1 : self._count], kind="stable")[:room]
        return np.sort(np.append(others, 0)).astype(np.int32)


@njit(cache=True)
def _likeliest(reach, places, width, least):
    """Nodes without a place by falling reach."""
    chosen = np.empty(width, np.int32)
    count = 0
    for node in range(len(reach)):
        if places[node] >= 0 or reach[node] < least:
            continue
        at = count
        while at > 0 and reach[chosen[at - 1]] < reach[node]:
            at -= 1
        if at == width:
            continue
        count = min(count + 1, width)
        for i in range(count - 1, at, -1):
            chosen[i] = chosen[i - 1]
        chosen[at] = node
    return chosen[:count].copy()


@njit(cache=True)
def _follow(tokens, parents, places, emitted):
    """Places of the nodes that hold the emitted tokens, as far as nodes have one."""
    path = np.zeros(len(emitted) + 1, np.int32)
    node, count = 0, 1
    for token in emitted:
        following = 0
        for child in range(node + 1, len(tokens)):
            if parents[child] == node and tokens[child] == token and places[child] >= 0:
                following = child
        if following == 0:
            break
        node = following
        path[count] = places[node]
        count += 1
    return path[:count]
