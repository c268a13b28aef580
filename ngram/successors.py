"""The target's likeliest tokens after each context, kept for when the context returns: a k-gram model of the target.

Source: Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
    Recycling", §3. There candidates are stored by the last token; here by the last 4, 3, 2 and 1 tokens, with
    probabilities.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lookahead.ngram.chains import IntArray
from lookahead.ngram.inlining import jit_inline
from lookahead.utils.jit import njit

FloatArray = NDArray[np.float32]

TOP = 8  # successors kept per context
ORDERS = 4  # contexts of 1 to 4 tokens
WAYS = 4  # entries of a set
UNIT = 65535.0  # a probability of 1 as it is stored
# A context: the key is its hash, 0 for a free entry; the time is the count of writes at its last write.
ENTRY = np.dtype([("key", np.uint64), ("time", np.int64), ("tokens", np.int32, TOP), ("probs", np.uint16, TOP)])
_HASH_BITS = np.uint64(0xFFFFFFFFFFFFFF00)  # a file keeps the age of a context in the others


class SuccessorTable:
    """The likeliest successors of contexts, from the target's latest pass over them, in memory of fixed size.

    A set-associative cache: the hash of a context of 1 to 4 tokens selects a set of four entries, and a new context
    replaces the oldest entry. 56 bits of the hash are stored and compared, so that contexts are not confused. A context
    takes 64 bytes.

    Example:
        >>> table, token = SuccessorTable(contexts=8), np.array([5], np.int32)
        >>> top, probs = np.arange(TOP, dtype=np.int32)[None], np.full((1, TOP), 0.1, np.float32)
        >>> table.store(token, np.zeros(1, np.int32), token, top, probs)
        >>> table.entries[table.entries["key"] > 0]["tokens"].tolist()
        [[0, 1, 2, 3, 4, 5, 6, 7]]
    """

    __slots__ = ("entries", "now")

    def __init__(self, contexts: int = 1 << 18) -> None:
        if contexts < WAYS or contexts % WAYS:
            raise ValueError(f"contexts must be a multiple of {WAYS} and at least {WAYS}, got {contexts}")
        self.entries = np.zeros((contexts // WAYS, WAYS), ENTRY)
        self.now = np.zeros(1, np.int64)  # writes so far

    def store(
        self,
        before: IntArray,
        parents: IntArray,
        tokens: IntArray,
        top: IntArray,
        probs: FloatArray,
    ) -> None:
        """Store the target's likeliest tokens after every node of a tree, keyed by the last tokens up to the node.

        Args:
            before: int32 `[n]`, the tokens up to and including the root; at least one.
            parents: int32 `[k]`, of the tree; a parent comes before its children.
            tokens: int32 `[k]`; the root's is the last of `before`.
            top: int32 `[k, 8]`, the target's likeliest tokens after each node.
            probs: float32 `[k, 8]`, their probabilities, highest first.

        Raises:
            ValueError: The shapes do not match.
        """
        nodes = tokens.size
        if before.size == 0 or parents.size != nodes or top.shape != (nodes, TOP) or probs.shape != (nodes, TOP):
            raise ValueError(
                f"{nodes} tokens after {before.size} need as many parents and {TOP} successors each, got "
                f"{parents.size} parents, successors of {top.shape} and probs of {probs.shape}"
            )
        store_tree((self.entries, self.now), before, (parents, tokens, top, probs), np.zeros(nodes, np.bool_))


@jit_inline
def _mix(code, token):
    """Fold a token into a 64-bit hash (the finalizer of splitmix64)."""
    code = (code ^ np.uint64(token)) + np.uint64(0x9E3779B97F4A7C15)
    code = (code ^ (code >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    code = (code ^ (code >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return code ^ (code >> np.uint64(31))


@jit_inline
def hash_context(before, end, tokens, parents, node, hashes):
    """Fill `hashes[k - 1]` with the key of the last k tokens up to a node; returns the number of keys, at most 4.

    The tokens are those on the path from the root's children to the node, preceded by `before[:end]`.

    Args:
        before: int32 `[end or more]`, the tokens up to and including the root.
        end: How many of them to use.
        tokens: Integers `[k]`, of the tree.
        parents: Integers `[k]`.
        node: The node, below k.
        hashes: uint64 `[ORDERS]`, filled.

    Example:
        >>> hashes, tokens = np.zeros(ORDERS, np.uint64), np.array([5, 6])
        >>> with np.errstate(over="ignore"):  # compiled functions do not report overflow
        ...     hash_context(tokens, 2, tokens[1:], np.zeros(1, np.int64), 0, hashes)
        2
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
        hashes[order] = (code & _HASH_BITS) | np.uint64(1)  # 0 marks a free entry
    return ORDERS


@jit_inline
def group_of(entries, code):
    """The set of a context. It is monotonic in the hash, so that sorted contexts fill a table from front to back.

    Example:
        >>> int(group_of(np.zeros((8, WAYS), ENTRY), np.uint64(1 << 63)))
        4
    """
    return np.int64(((code >> np.uint64(32)) * np.uint64(entries.shape[0])) >> np.uint64(32))


@jit_inline
def find_context(entries, since, hashes, orders):
    """The longest context in the table: its length in tokens (0: none), its set and entry, and 1 if it is foreign.

    Entries stored up to the time `since` are foreign. A newer context takes precedence over a foreign one that is one
    token longer.

    Example:
        >>> table, key = SuccessorTable(contexts=8), np.array([257], np.uint64)
        >>> table.entries[0, 2]["key"], table.entries[0, 2]["time"] = 257, 1
        >>> [[*map(int, find_context(table.entries, since, key, 1))] for since in (0, 1)]
        [[1, 0, 2, 0], [1, 0, 2, 1]]
    """
    longest, found_group, found_way = 0, 0, 0
    for order in range(orders, 0, -1):
        if longest > order + 1:
            break
        group = group_of(entries, hashes[order - 1])
        for way in range(WAYS):
            if entries[group, way]["key"] == hashes[order - 1]:
                if entries[group, way]["time"] > since:
                    return order, group, way, 0
                if longest == 0:
                    longest, found_group, found_way = order, group, way
    return longest, found_group, found_way, 1


@njit(error_model="numpy")
def store_tree(memory, before, verified, skipped):
    """The core of `SuccessorTable.store`. Nothing is stored for the nodes `skipped`, bool `[k]`.

    `memory` are the entries of the table and the writes so far; `verified` are the last four arguments of `store`.

    Example:
        >>> table, token, skipped = SuccessorTable(contexts=8), np.array([5], np.int32), np.array([False])
        >>> top, probs = np.zeros((1, TOP), np.int32), np.zeros((1, TOP), np.float32)
        >>> store_tree((table.entries, table.now), token, (np.zeros(1, np.int32), token, top, probs), skipped)
        >>> table.now.item()  # writes
        1
    """
    (entries, now), (parents, tokens, top, probs) = memory, verified
    hashes = np.empty(ORDERS, np.uint64)
    for node in range(tokens.size):
        if skipped[node]:
            continue
        orders = hash_context(before, before.size, tokens, parents, node, hashes)
        for order in range(orders):
            ways = entries[group_of(entries, hashes[order])]
            entry = ways[0]  # its own entry, or else the oldest
            for way in range(WAYS):
                if ways[way]["key"] == hashes[order]:
                    entry = ways[way]
                    break
                if ways[way]["time"] < entry["time"]:
                    entry = ways[way]
            now[0] += 1
            entry["key"], entry["time"] = hashes[order], now[0]
            for rank in range(TOP):
                entry["tokens"][rank] = top[node, rank]
                entry["probs"][rank] = np.uint16(probs[node, rank] * UNIT + 0.5)
