"""Token trees as arrays: merge several, select the nodes worth verifying, and lay them out depth first."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.ngram.chains import IntArray
from lookahead.ngram.inlining import jit_inline
from lookahead.utils.jit import njit

FREE: NDArray[np.float64] = np.zeros(0)  # costs if nodes are free


class Limits(NamedTuple):
    """Limits of the verified part of a tree.

    Example:
        >>> Limits(max_nodes=8, max_depth=4, min_probability=0.1)[:3]
        (8, 4, 0.1)
    """

    max_nodes: int  # without the root
    max_depth: int
    min_probability: float = 0.0  # nodes less likely to be reached are left out
    is_chain: bool = False  # only the likeliest child of a node is kept
    node_bonus_tokens: float = (
        0.0  # value in tokens of a verified node, accepted or not, because a source learns from its logits
    )


# Rows of the scratch memory of `select`: one array is one allocation, and avoids reference counting.
_RANKED, _KEPT, _FIRST_CHILD, _NEXT_SIBLING, _ORDER = range(5)


def best_nodes(parents: IntArray, probabilities: NDArray[np.floating], max_nodes: int) -> tuple[IntArray, IntArray]:
    """The nodes of a tree likeliest to be reached, int32 `[n]`, depth first, and their parents among these.

    `probabilities` are of each node given its parent, 1 for the root, which does not count.

    Source: Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", §4.2 (reranking).

    Example:
        >>> parents, probabilities = np.array([0, 0, 0, 2], np.int32), np.array([1.0, 0.2, 0.6, 0.5])
        >>> nodes, kept_parents = best_nodes(parents, probabilities, 2)
        >>> nodes.tolist(), kept_parents.tolist()
        ([0, 2, 3], [0, 0, 1])
    """
    nodes = _best_nodes(parents, probabilities.astype(np.float64), max_nodes).astype(np.int32)
    places: IntArray = np.zeros(len(parents), np.int32)
    places[nodes] = np.arange(len(nodes))
    return nodes, places[parents[nodes]]


@njit(error_model="numpy")
def _best_nodes(parents, path_probs, max_nodes):
    zeros = np.zeros(len(parents), np.int32)
    for node in range(1, len(parents)):
        path_probs[node] *= path_probs[parents[node]]
    return select(parents, zeros, path_probs, zeros, (max_nodes, 0, 0.0, False, 0.0), path_probs[:0])


@jit_inline
def select(parents, depths, path_probs, required, limits, costs):
    """Select the nodes that give the most expected tokens per cost, and lay them out depth first.

    The root and the required nodes are always selected, then the nodes with the highest path probability. The expected
    number of tokens is the sum of the path probabilities and the bonuses of the nodes. The likelier child comes first,
    so the likeliest path is 0, 1, 2, ….

    Args:
        parents: Integers `[k]`; a parent comes before its children.
        depths: Integers `[k]`.
        path_probs: float64 `[k]`; the probability to be reached, never above the parent's.
        required: Numbers `[k]`; nonzero if a node, and so its parent, must be in the tree; all 0 for a chain.
        limits: A `Limits`, as a tuple.
        costs: float64 `[max_nodes + 2]` or longer, of a step by its nodes, including the root; empty if nodes are free.

    Returns the selected nodes in layout order, int64 `[n]`.

    Example:
        >>> parents, depths = np.array([[0, 0, 0, 2], [0, 1, 1, 2]])
        >>> path_probs, costs = np.array([1.0, 0.1, 0.6, 0.3]), np.array([0.0, 1.0, 1.2, 1.3, 1.9, 2.0])
        >>> select(parents, depths, path_probs, np.zeros(4), Limits(max_nodes=4, max_depth=2), costs).tolist()
        [0, 2, 3]
    """
    max_nodes, max_depth, min_probability, is_chain, node_bonus_tokens = limits
    count = len(path_probs)
    scratch = np.empty((5, count), np.int64)
    rank(path_probs, scratch[_RANKED])
    size, expected, end = 1, 1.0, 0
    for node in range(count):
        scratch[_FIRST_CHILD, node] = scratch[_KEPT, node] = 0
        if required[node] and depths[node] <= max_depth and size <= max_nodes:
            scratch[_KEPT, node] = 1
            size += 1
            expected += path_probs[node] + node_bonus_tokens
    best_size, last, best_rate = size, 0, 0.0
    if costs.size > 0:
        best_rate = expected / costs[size]
    for at in range(1, count):
        node = scratch[_RANKED, at]
        if size > max_nodes or path_probs[node] < min_probability or path_probs[node] == 0.0:
            break
        if scratch[_KEPT, node] or depths[node] > max_depth or (is_chain and parents[node] != end):
            continue
        scratch[_KEPT, node] = 1
        size, end = size + 1, node
        expected += path_probs[node] + node_bonus_tokens
        if costs.size == 0 or expected / costs[size] > best_rate:
            best_size, last = size, at
            best_rate = expected / costs[size] if costs.size > 0 else 0.0
    _lay_out(parents, required, scratch, last, best_size)
    return scratch[_ORDER, :best_size]


@jit_inline
def rank(values, ranked):
    """Fill `ranked` with indices by descending value, ties in order. Insertion sort: values are nearly sorted.

    Example:
        >>> ranked = np.zeros(3, np.int64)
        >>> rank(np.array([0.2, 0.5, 0.2]), ranked)
        >>> ranked.tolist()
        [1, 0, 2]
    """
    for i in range(len(values)):
        at = i
        while at > 0 and values[ranked[at - 1]] < values[i]:
            ranked[at] = ranked[at - 1]
            at -= 1
        ranked[at] = i


@jit_inline
def _lay_out(parents, required, scratch, last, size):
    """Write the kept nodes depth first: the required ones, and those ranked up to `last`."""
    # Nodes are prepended to their siblings from the least likely on, so the likeliest ends up first.
    for at in range(scratch.shape[1] - 1, 0, -1):
        node = scratch[_RANKED, at]
        if scratch[_KEPT, node] and (at <= last or required[node]):
            scratch[_NEXT_SIBLING, node] = scratch[_FIRST_CHILD, parents[node]]
            scratch[_FIRST_CHILD, parents[node]] = node
    node = 0
    for place in range(size):
        scratch[_ORDER, place] = node
        if scratch[_FIRST_CHILD, node] > 0:
            node = scratch[_FIRST_CHILD, node]
            continue
        while node > 0 and scratch[_NEXT_SIBLING, node] == 0:
            node = parents[node]
        node = scratch[_NEXT_SIBLING, node]


@jit_inline
def union(root, offered, offers):
    """Merge trees with one root by prefix: a node offered by several trees is one node.

    `offered` are tokens, parents, probabilities and sources of the nodes of all trees, concatenated. `offers`,
    `[trees, 3]`, are the number of nodes of each tree, how many first nodes are required, and the bit of its first
    source.

    Returns tokens, parents, depths, sources, and 1 if required, int32 `[5, nodes]`; the highest probability offered
    for each node, float64; and the merged node of every offered node, int32.

    Example:
        >>> tokens, parents = np.array([5, 6, 5, 6, 7]), np.array([0, 0, 0, 0, 1])  # two trees: 5 6, and 5 6 7
        >>> offered = tokens, parents, np.ones(5), np.ones(5, np.int32)
        >>> merged, probs, placed = union(5, offered, np.array([[2, 0, 0], [3, 0, 1]]))
        >>> merged[0].tolist(), merged[3].tolist(), placed.tolist()  # tokens and sources
        ([5, 6, 7], [0, 3, 2], [0, 1, 0, 1, 2])
    """
    tokens, parents, probabilities, sources = offered
    most = len(tokens) + 1
    merged, probs = np.zeros((5, most), np.int32), np.zeros(most)
    first_child, next_sibling = np.zeros(most, np.int32), np.zeros(most, np.int32)
    placed = np.zeros(len(tokens), np.int32)
    merged[0, 0], probs[0] = root, 1.0
    count, start = 1, 0
    for size, required, first_source in offers:
        for i in range(1, size):
            parent, token = placed[start + parents[start + i]], tokens[start + i]
            node = first_child[parent]
            while node != 0 and merged[0, node] != token:
                node = next_sibling[node]
            if node == 0:
                node = count
                count += 1
                merged[0, node], merged[1, node], merged[2, node] = token, parent, merged[2, parent] + 1
                next_sibling[node], first_child[parent] = first_child[parent], node
            probs[node] = max(probs[node], min(1.0, probabilities[start + i]))
            merged[3, node] |= sources[start + i] << first_source
            merged[4, node] |= i < required
            placed[start + i] = node
        start += size
    return merged[:, :count], probs[:count], placed
