"""Continuations of a context merged by prefix into a small tree, likeliest first, in one compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.ngram.chains import MAX_CONTEXT, Chains, IntArray, as_tokens, find_matches
from lookahead.ngram.hits import CEILING, RANKS, HitRates, feature_of, follow_factor, support_of

_VARIETY = 8  # different next tokens after which the walk stops
_FLOOR = 0.005  # a path less likely than this is not worth its node
_MAX_ROOM = 1 << 16
_FOLLOWED = 6  # occurrences in the open document that agree on a token and are followed on: none of them ends

# Columns of an occurrence, of a branch (until it is scored, the match behind it stands for its feature), and of
# its chances: once its parent was chosen, and of being reached at all.
_POSITION, _MATCHED, _AHEAD = range(3)
_FIRST, _STOP, _PARENT, _DEPTH, _TOKEN, _FEATURE = range(6)
_CHANCE, _REACH = range(2)


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
    index: Chains,
    rates: HitRates,
    room: int,
    *,
    context: Sequence[int] | IntArray | None = None,
    min_ngram: int = 1,
    max_ngram: int = 16,
    max_links: int = 32,
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
        max_links: Most chain links walked, at least 1.

    Returns:
        The tree, or `None` where nothing was found or there is no room.

    Raises:
        TypeError: `context` does not hold whole numbers.
        ValueError: An argument is out of its range.

    Example:
        >>> from lookahead.ngram.chains import ChainIndex
        >>> index = ChainIndex()
        >>> index.append([5, 6, 7, 8, 5, 6])
        >>> grow_trie(index, HitRates(), room=3).tokens.tolist()
        [6, 7, 8, 5]
    """
    if not 1 <= min_ngram <= max_ngram <= MAX_CONTEXT:
        raise ValueError(f"need 1 <= min_ngram <= max_ngram <= {MAX_CONTEXT}, got {min_ngram} and {max_ngram}")
    if max_links < 1:
        raise ValueError(f"max_links must be positive, got {max_links}")
    own = context is None
    tail = index.tokens if context is None else as_tokens(context)
    if room < 1 or tail.size == 0 or tail[-1] < 0:
        return None
    most = min(room, _MAX_ROOM)
    tokens, parents, probabilities, features = _propose(
        *index.state, tail, own, min_ngram, max_ngram, max_links, most, rates.table, rates.follows
    )
    return Trie(tokens, parents, probabilities, features) if tokens.size > 1 else None


@njit(cache=True)
def _propose(arena, heads, links, length, tail, own, shortest, longest, walked, room, table, follows):
    """Find, grow, and put in order: the whole of `grow_trie`."""
    positions = np.empty(walked, dtype=np.int32)
    lengths = np.empty(walked, dtype=np.int32)
    found = find_matches(arena, heads, links, length, tail, tail.size, shortest, longest, _VARIETY, positions, lengths)
    occurrences = np.empty((found, 3), dtype=np.int64)
    for each in range(found):
        occurrences[each, _POSITION], occurrences[each, _MATCHED] = positions[each], lengths[each]
    tokens = np.empty(room + 1, dtype=np.int32)
    parents = np.zeros(room + 1, dtype=np.int32)
    probabilities = np.ones(room + 1, dtype=np.float32)
    features = np.zeros(room + 1, dtype=np.int32)
    tokens[0] = tail[-1]
    count = _grow(arena, length, own, occurrences, table, follows, tokens, parents, probabilities, features)
    order = _depth_first(parents, count)
    return _reordered(order, tokens, parents, probabilities, features)


@njit(cache=True)
def _grow(arena, length, own, occurrences, table, follows, tokens, parents, probabilities, features):
    """Best-first: turn the likeliest branch into a node and split its occurrences; returns the nodes made.

    A branch is a run of occurrences that agree so far. Runs are disjoint, so there are never more branches
    than occurrences, and a scan for the best is as fast as a heap.
    """
    found = occurrences.shape[0]
    branches = np.empty((found + 1, 6), dtype=np.int64)
    chances = np.empty((found + 1, 2))
    factor = follow_factor(follows, tokens[0])
    tips = _split(arena, length, own, occurrences, 0, found, 0, 0, table, factor, 1.0, branches, chances, 0)
    count = 1
    while tips > 0 and count < tokens.size:
        best = 0
        for other in range(1, tips):
            if chances[other, _REACH] > chances[best, _REACH]:
                best = other
        reach = chances[best, _REACH]
        if reach < _FLOOR:
            break
        tokens[count], parents[count] = branches[best, _TOKEN], branches[best, _PARENT]
        probabilities[count], features[count] = chances[best, _CHANCE], branches[best, _FEATURE]
        first, depth = branches[best, _FIRST], branches[best, _DEPTH]
        stop = min(branches[best, _STOP], first + _FOLLOWED) if own else branches[best, _STOP]
        tips -= 1
        for column in range(branches.shape[1]):
            branches[best, column] = branches[tips, column]
        chances[best, _CHANCE], chances[best, _REACH] = chances[tips, _CHANCE], chances[tips, _REACH]
        factor = follow_factor(follows, tokens[count])
        tips = _split(
            arena, length, own, occurrences, first, stop, count, depth, table, factor, reach, branches, chances, tips
        )
        count += 1
    return count


@njit(cache=True)
def _split(arena, length, own, occurrences, first, stop, node, depth, table, factor, reach, branches, chances, tips):
    """Part the occurrences [first, stop) of a node by their next token, each part a new tip; returns the tips."""
    end = first
    for each in range(first, stop):
        token = _next_token(arena, length, own, occurrences[each, _POSITION], depth)
        if token >= 0:
            occurrences[end, _POSITION] = occurrences[each, _POSITION]
            occurrences[end, _MATCHED] = occurrences[each, _MATCHED]
            occurrences[end, _AHEAD] = token
            end += 1
    opened = tips
    begin = first
    while begin < end and tips - opened < RANKS:
        after = _gather(occurrences, begin, end)
        matched = 0
        for each in range(begin, after):
            matched = max(matched, occurrences[each, _MATCHED])
        branches[tips, _FIRST], branches[tips, _STOP] = begin, after
        branches[tips, _PARENT], branches[tips, _DEPTH] = node, depth + 1
        branches[tips, _TOKEN], branches[tips, _FEATURE] = occurrences[begin, _AHEAD], matched + depth
        tips += 1
        begin = after
    _score(branches, chances, opened, tips, end - first, table, factor, reach)
    return tips


@njit(cache=True)
def _next_token(arena, length, own, position, depth):
    """The token `depth` places into what followed an occurrence; negative: its document ended before.

    The open document has not ended: what will follow it repeats what followed the occurrence.
    """
    if own:
        depth %= length - position
    elif position + depth >= length:
        return -1
    return int(arena[position + depth])


@njit(cache=True)
def _gather(occurrences, begin, end):
    """Bring those of [begin, end) that agree with the first to the front, order kept; returns where they end."""
    token = occurrences[begin, _AHEAD]
    after = begin + 1
    for each in range(begin + 1, end):
        if occurrences[each, _AHEAD] != token:
            continue
        position, matched = occurrences[each, _POSITION], occurrences[each, _MATCHED]
        for back in range(each, after, -1):
            occurrences[back] = occurrences[back - 1]
        occurrences[after, _POSITION], occurrences[after, _MATCHED], occurrences[after, _AHEAD] = (
            position,
            matched,
            token,
        )
        after += 1
    return after


@njit(cache=True)
def _score(branches, chances, opened, tips, total, table, factor, reach):
    """Rank sibling branches by the match and the agreement behind them; give each the chance of its feature."""
    mass = 0.0
    for at in range(opened, tips):
        best, best_weight = at, -1.0
        for other in range(at, tips):
            weight = branches[other, _FEATURE] + 0.5 * (branches[other, _STOP] - branches[other, _FIRST])
            if weight > best_weight:
                best, best_weight = other, weight
        for column in range(branches.shape[1]):
            branches[at, column], branches[best, column] = branches[best, column], branches[at, column]
        support = support_of(branches[at, _STOP] - branches[at, _FIRST], total)
        branches[at, _FEATURE] = feature_of(branches[at, _FEATURE], at - opened, support)
        chances[at, _CHANCE] = table[branches[at, _FEATURE], 0]
        mass += chances[at, _CHANCE]
    scale = min(factor, CEILING / mass) if mass > 0.0 else 1.0
    for at in range(opened, tips):
        chances[at, _CHANCE] *= scale
        chances[at, _REACH] = chances[at, _CHANCE] * reach


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
