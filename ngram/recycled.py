"""What the target thought likely after a context, kept for when the context comes back: a k-gram model of the target.

Source: Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
    Recycling", §3. There the candidates are kept by the last token; here by the last 4, 3, 2 and 1 tokens, together
    with the target's own probabilities.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.ngram.chains import IntArray
from lookahead.ngram.raw_arrays import Placed, array_at, jit_inline, places_at

FloatArray = NDArray[np.float32]
RecycledState = tuple[NDArray[np.uint64], IntArray, NDArray[np.uint16]]

TOP = 8  # successors kept of a context
ORDERS = 4  # contexts of 1 to 4 tokens
WAYS = 4  # places where a context may stand: its set
_GROUPS = 3  # behind the places of keys, tokens and chances: how many sets there are
_UNIT = 65535.0  # a probability of 1 as it is stored


class RecycledTable(Placed):
    """The likeliest successors of contexts, as the target saw them last, in memory that never grows.

    Every context of 1 to 4 tokens has one set of four places, found by its hash; the place written longest ago
    gives way to a new context. The hash of 64 bits is kept and compared, so that contexts do not mix.

    Args:
        contexts: Places, a power of two of at least 4; 64 bytes each.

    Raises:
        ValueError: `contexts` is no such number.

    Example:
        >>> table = RecycledTable(contexts=64)
        >>> successors = np.array([[3, 9, 1, 0, 2, 4, 5, 6]], np.int32)
        >>> table.store(
        ...     np.array([7, 8], np.int32), np.zeros(1, np.int32), np.array([8], np.int32),
        ...     successors, np.array([[0.5, 0.25, 0.1, 0.05, 0.0, 0.0, 0.0, 0.0]], np.float32),
        ... )
        >>> order, tokens, chances = table.find(np.array([1, 7, 8], np.int32))
        >>> order, tokens[:2].tolist(), chances[:2].round(3).tolist()
        (2, [3, 9], [0.5, 0.25])
    """

    __slots__ = ("_chances", "_keys", "_now", "_times", "_tokens")

    def __init__(self, contexts: int = 1 << 18) -> None:
        if contexts < WAYS or contexts & (contexts - 1):
            raise ValueError(f"contexts must be a power of two of at least {WAYS}, got {contexts}")
        self._keys = np.zeros((contexts // WAYS, WAYS), dtype=np.uint64)
        self._tokens = np.zeros((contexts // WAYS, WAYS, TOP), dtype=np.int32)
        self._chances = np.zeros((contexts // WAYS, WAYS, TOP), dtype=np.uint16)
        self._times = np.zeros((contexts // WAYS, WAYS), dtype=np.int64)  # when written, counted in writes
        self._now = np.zeros(1, dtype=np.int64)
        super().__init__(_GROUPS + 1)
        self._place(*self.state)
        self._places[_GROUPS] = contexts // WAYS

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes, whatever was stored."""
        return self._times.nbytes + sum(array.nbytes for array in self.state)

    @property
    def state(self) -> RecycledState:
        """Keys, tokens and chances, as the compiled cores take them."""
        return self._keys, self._tokens, self._chances

    def store(
        self,
        before: IntArray,
        parents: IntArray,
        tokens: IntArray,
        top: IntArray,
        chances: FloatArray,
        skipped: NDArray[np.bool_] | None = None,
    ) -> None:
        """Keep what the target thinks likely after every node of a tree, under the last tokens up to the node.

        Args:
            before: int32 `[n]`, the tokens up to the root, the root included.
            parents: int32 `[k]`, a tree whose root is node 0 and whose parents come before their children.
            tokens: int32 `[k]`, the token of each node; that of the root is the last of `before`.
            top: int32 `[k, 8]`, the target's likeliest tokens after each node.
            chances: float32 `[k, 8]`, their probabilities, highest first.
            skipped: bool `[k]`, nodes after which nothing is kept.

        Raises:
            ValueError: The shapes do not fit.
        """
        nodes = tokens.size
        if before.size == 0 or parents.size != nodes or top.shape != (nodes, TOP) or chances.shape != (nodes, TOP):
            raise ValueError(
                f"{nodes} tokens after {before.size} need as many parents and {TOP} successors each, got "
                f"{parents.size} parents, successors of {top.shape} and chances of {chances.shape}"
            )
        if skipped is None:
            skipped = np.zeros(nodes, np.bool_)
        _store_tree(*self.state, self._times, self._now, before, parents, tokens, top, chances, skipped)

    def find(self, context: IntArray) -> tuple[int, IntArray, FloatArray]:
        """Look up the longest known end of a context.

        Args:
            context: int32 `[n]`.

        Returns:
            How many tokens of the context were known, 0 to 4; the successors, int32 `[8]`; and their
            probabilities, float32 `[8]`, rounded to 1/65535; both empty where nothing was known.
        """
        hashes = np.empty(ORDERS, np.uint64)
        order, group, way = _look_up(self._keys, context, hashes)
        found = slice(0, TOP if order else 0)
        return order, self._tokens[group, way][found], (self._chances[group, way][found] / _UNIT).astype(np.float32)


@jit_inline
def table_at(address):
    """Keys, tokens and chances of the `RecycledTable` at an address."""
    places = places_at(address, _GROUPS + 1)
    groups = places[_GROUPS]
    keys = array_at(places[0], (groups, WAYS), np.uint64)
    tokens = array_at(places[1], (groups, WAYS, TOP), np.int32)
    return keys, tokens, array_at(places[2], (groups, WAYS, TOP), np.uint16)


@jit_inline
def _mix(code, token):
    """Fold one more token into a 64-bit hash (the finalizer of splitmix64)."""
    code = (code ^ np.uint64(token)) + np.uint64(0x9E3779B97F4A7C15)
    code = (code ^ (code >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    code = (code ^ (code >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return code ^ (code >> np.uint64(31))


@jit_inline
def hash_context(before, end, tokens, parents, node, hashes):
    """Fill `hashes[k - 1]` with the key of the last k tokens up to a node; returns how many there are, 4 at most.

    The tokens are those of the path from the root's children to the node, and before them `before[:end]`.
    """
    code = np.uint64(0)
    for order in range(ORDERS):
        if node > 0:
            token = tokens[node]
            node = parents[node]
        else:
            end -= 1
            if end < 0 or before[end] < 0:
                return order
            token = before[end]
        code = _mix(code, token)
        hashes[order] = code | np.uint64(1)  # 0 marks a free place
    return ORDERS


@jit_inline
def find_context(keys, hashes, orders):
    """The longest of the contexts that is in the table: its length in tokens (0: none), its set and its place."""
    mask = np.uint64(keys.shape[0] - 1)
    for order in range(orders - 1, -1, -1):
        code = hashes[order]
        group = np.int64((code >> np.uint64(1)) & mask)
        for way in range(WAYS):
            if keys[group, way] == code:
                return order + 1, group, way
    return 0, 0, 0


@njit(cache=True, error_model="numpy")
def _look_up(keys, context, hashes):
    """The core of `RecycledTable.find`."""
    return find_context(keys, hashes, hash_context(context, context.size, context, context, 0, hashes))


@jit_inline
def chance_of(stored):
    """A stored probability as a number."""
    return stored / _UNIT


@jit_inline
def _place(keys, times, code):
    """The set and the place of a context: where it stands, or else the one written longest ago."""
    group = np.int64((code >> np.uint64(1)) & np.uint64(keys.shape[0] - 1))
    oldest = 0
    for way in range(WAYS):
        if keys[group, way] == code:
            return group, way
        if times[group, way] < times[group, oldest]:
            oldest = way
    return group, oldest


@njit(cache=True, error_model="numpy")
def _store_tree(keys, kept_tokens, kept_chances, times, now, before, parents, tokens, top, chances, skipped):
    """The core of `RecycledTable.store`."""
    hashes = np.empty(ORDERS, np.uint64)
    for node in range(tokens.size):
        if skipped[node]:
            continue
        orders = hash_context(before, before.size, tokens, parents, node, hashes)
        for order in range(orders):
            group, way = _place(keys, times, hashes[order])
            now[0] += 1
            times[group, way] = now[0]
            keys[group, way] = hashes[order]
            for rank in range(TOP):
                kept_tokens[group, way, rank] = top[node, rank]
                kept_chances[group, way, rank] = np.uint16(chances[node, rank] * _UNIT + 0.5)
