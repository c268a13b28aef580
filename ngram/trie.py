"""Continuations of a context merged by prefix into a small tree, likeliest first, in one compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.ngram.chains import MAX_CONTEXT, ChainIndex, IntArray, as_tokens, find_matches
from lookahead.ngram.hits import RANKS, HitRates, feature_of, support_of

_MAX_LINKS = 64
_VARIETY = 8  # different next tokens after which the walk stops
_FLOOR = 0.005  # a path less likely than this is not worth its node
_CEILING = 0.99  # the children of a node never claim all of the chance
_MAX_ROOM = 1 << 16


@dataclass(frozen=True, slots=True)
class Trie:
    """What may follow a context, as a tree.

    Attributes:
        tokens: int32 `[k]`; the root, node 0, holds the last token of the context.
        parents: int32 `[k]`; a parent comes before its children, and the likeliest path is 0, 1, 2, ….
        probabilities: float32 `[k]`; the chance of a node once its parent was chosen; 1 for the root.
        features: int32 `[k]`; what `HitRates.learn` needs to know of each node; 0 for the root.
    """

    tokens: IntArray
    parents: IntArray
    probabilities: NDArray[np.float32]
    features: IntArray


def grow_trie(
    index: ChainIndex,
    rates: HitRates,
    room: int,
    *,
    context: Sequence[int] | IntArray | None = None,
    min_ngram: int = 1,
    max_ngram: int = 16,
) -> Trie | None:
    """Merge what followed the earlier occurrences of a context into a tree, likeliest paths first.

    Occurrences are followed side by side while they agree, each as far as its document goes; one that runs
    into the end of the open document goes on with the path itself, so that a loop is continued as a loop.

    Args:
        index: Where to look.
        rates: The chance of each kind of candidate.
        room: Most nodes besides the root.
        context: Tokens whose end is looked up; `None` means the open document of the index.
        min_ngram: Shortest match that counts, in tokens, at least 1.
        max_ngram: Longest context compared, in tokens, from `min_ngram` to 64.

    Returns:
        The tree, or `None` where nothing was found or there is no room.

    Raises:
        TypeError: `context` does not hold whole numbers.
        ValueError: An argument is out of its range.

    Example:
        >>> index = ChainIndex()
        >>> index.append([5, 6, 7, 8, 5, 6])
        >>> grow_trie(index, HitRates(), room=3).tokens.tolist()
        [6, 7, 8, 5]
    """
    if not 1 <= min_ngram <= max_ngram <= MAX_CONTEXT:
        raise ValueError(f"need 1 <= min_ngram <= max_ngram <= {MAX_CONTEXT}, got {min_ngram} and {max_ngram}")
    own = context is None
    tail = index.tokens if context is None else as_tokens(context)
    if room < 1 or tail.size == 0 or tail[-1] < 0:
        return None
    arena, heads, links, length = index.state
    tokens, parents, probabilities, features = _propose(
        arena, heads, links, length, tail, own, min_ngram, max_ngram, min(room, _MAX_ROOM), rates.table
    )
    return Trie(tokens, parents, probabilities, features) if tokens.size > 1 else None


@njit(cache=True)
def _propose(arena, heads, links, length, tail, own, shortest, longest, room, table):
    """Find, grow, and put in order: the whole of `grow_trie`."""
    positions = np.empty(_MAX_LINKS, dtype=np.int32)
    lengths = np.empty(_MAX_LINKS, dtype=np.int32)
    found = find_matches(arena, heads, links, length, tail, tail.size, shortest, longest, _VARIETY, positions, lengths)
    tokens = np.empty(room + 1, dtype=np.int32)
    parents = np.zeros(room + 1, dtype=np.int32)
    probabilities = np.ones(room + 1, dtype=np.float32)
    features = np.zeros(room + 1, dtype=np.int32)
    tokens[0] = tail[-1]
    count = 1
    if found > 0:
        count = _grow(arena, length, own, positions, lengths, found, table, tokens, parents, probabilities, features)
    order = _depth_first(parents, count)
    return _reordered(order, tokens, parents, probabilities, features)


@njit(cache=True)
def _next_token(arena, length, own, position, tokens, parents, node, depth):
    """The token at `position`, or of the path to `node` where the open document has ended; negative: none."""
    if position < length:
        return arena[position]
    if not own:
        return -1
    for _ in range(depth - 1 - (position - length)):
        node = parents[node]
    return tokens[node]


@njit(cache=True)
def _grow(arena, length, own, positions, lengths, found, table, tokens, parents, probabilities, features):
    """Best-first: turn the likeliest branch into a node and split its occurrences; returns the nodes made.

    A branch is a run of occurrences that agree so far. Runs are disjoint, so there are never more branches
    than occurrences, and a scan for the best is as fast as a heap.
    """
    # a branch: first and last occurrence, parent node, depth, token, feature; its chance, that of its path
    shape = np.empty((found + 1, 6), dtype=np.int64)
    chance = np.empty((found + 1, 2))
    ahead = np.empty(found, dtype=np.int64)
    branches = _split(
        arena, length, own, positions, lengths, 0, found, 0, 0, 1.0,
        tokens, parents, table, ahead, shape, chance, 0,
    )  # fmt: skip
    count = 1
    while branches > 0 and count < tokens.size:
        best = 0
        for other in range(1, branches):
            if chance[other, 1] > chance[best, 1]:
                best = other
        path = chance[best, 1]
        if path < _FLOOR:
            break
        first, stop, parent, depth = shape[best, 0], shape[best, 1], shape[best, 2], shape[best, 3]
        tokens[count], parents[count], features[count] = shape[best, 4], parent, shape[best, 5]
        probabilities[count] = chance[best, 0]
        branches -= 1
        shape[best] = shape[branches]
        chance[best] = chance[branches]
        branches = _split(
            arena, length, own, positions, lengths, first, stop, count, depth, path,
            tokens, parents, table, ahead, shape, chance, branches,
        )  # fmt: skip
        count += 1
    return count


@njit(cache=True)
def _split(
    arena, length, own, positions, lengths, first, stop, node, depth, path,
    tokens, parents, table, ahead, shape, chance, branches,
):  # fmt: skip
    """Part the occurrences of a node by their next token, each part a new branch; returns the branches now."""
    total = 0
    for each in range(first, stop):
        token = _next_token(arena, length, own, positions[each] + depth, tokens, parents, node, depth)
        if token >= 0:
            positions[first + total], lengths[first + total] = positions[each], lengths[each]
            ahead[first + total] = token
            total += 1
    opened = branches
    begin = first
    end = first + total
    while begin < end and branches - opened < RANKS and branches < chance.shape[0]:
        after = _gather(positions, lengths, ahead, begin, end)
        longest = 0
        for each in range(begin, after):
            longest = max(longest, lengths[each])
        shape[branches, 0], shape[branches, 1] = begin, after
        shape[branches, 2], shape[branches, 3] = node, depth + 1
        shape[branches, 4], shape[branches, 5] = ahead[begin], longest + depth
        branches += 1
        begin = after
    _score(table, shape, chance, opened, branches, total, path)
    return branches


@njit(cache=True)
def _gather(positions, lengths, ahead, begin, end):
    """Bring the occurrences that agree with the first of [begin, end) to the front, order kept; returns their end."""
    token = ahead[begin]
    after = begin + 1
    for each in range(begin + 1, end):
        if ahead[each] != token:
            continue
        position, length = positions[each], lengths[each]
        for back in range(each, after, -1):
            positions[back], lengths[back], ahead[back] = positions[back - 1], lengths[back - 1], ahead[back - 1]
        positions[after], lengths[after], ahead[after] = position, length, token
        after += 1
    return after


@njit(cache=True)
def _score(table, shape, chance, opened, branches, total, path):
    """Rank sibling branches by what supports them, and give each the chance of its feature."""
    for rank in range(branches - opened):
        best = opened + rank
        best_weight = -1.0
        for other in range(opened + rank, branches):
            agreeing = shape[other, 1] - shape[other, 0]
            weight = shape[other, 5] * 1.0 + 0.5 * agreeing
            if weight > best_weight:
                best, best_weight = other, weight
        at = opened + rank
        for column in range(shape.shape[1]):
            shape[at, column], shape[best, column] = shape[best, column], shape[at, column]
        support = support_of(shape[at, 1] - shape[at, 0], total)
        shape[at, 5] = feature_of(shape[at, 5], rank, support)
        chance[at, 0] = table[shape[at, 5], 0]
    mass = 0.0
    for each in range(opened, branches):
        mass += chance[each, 0]
    scale = _CEILING / mass if mass > _CEILING else 1.0
    for each in range(opened, branches):
        chance[each, 0] *= scale
        chance[each, 1] = chance[each, 0] * path


@njit(cache=True)
def _depth_first(parents, count):
    """Nodes as a walk from the root meets them; siblings in the order they were made, the likeliest first."""
    first_child = np.zeros(count, dtype=np.int32)
    next_sibling = np.zeros(count, dtype=np.int32)
    for node in range(count - 1, 0, -1):
        next_sibling[node] = first_child[parents[node]]
        first_child[parents[node]] = node
    order = np.zeros(count, dtype=np.int32)
    node = 0
    for place in range(1, count):
        if first_child[node] > 0:
            node = first_child[node]
        else:
            while next_sibling[node] == 0:
                node = parents[node]
            node = next_sibling[node]
        order[place] = node
    return order


@njit(cache=True)
def _reordered(order, tokens, parents, probabilities, features):
    """The tree with node `order[i]` as its node i."""
    count = order.size
    place = np.empty(count, dtype=np.int32)
    for new in range(count):
        place[order[new]] = new
    new_tokens = np.empty(count, dtype=np.int32)
    new_parents = np.empty(count, dtype=np.int32)
    new_probabilities = np.empty(count, dtype=np.float32)
    new_features = np.empty(count, dtype=np.int32)
    for new in range(count):
        old = order[new]
        new_tokens[new], new_parents[new] = tokens[old], place[parents[old]]
        new_probabilities[new], new_features[new] = probabilities[old], features[old]
    return new_tokens, new_parents, new_probabilities, new_features
