"""What may follow a context, by matches and by the target's memory together: a small tree grown likeliest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.ngram.candidates import (
    COLUMNS,
    DEPTH,
    FEATURE,
    FIRST,
    MOST_OPTIONS,
    PARENT,
    SOURCES,
    STOP,
    TOKEN,
    part,
    score,
)
from lookahead.ngram.chains import MAX_CONTEXT, ChainIndex, Chains, IntArray, as_tokens, find_matches
from lookahead.ngram.hits import HitRates, follow_factor
from lookahead.ngram.recycled import ORDERS, RecycledTable, hash_context

_VARIETY = 16
_FLOOR = 0.0001
_MAX_ROOM = 1 << 10
_POSITION, _LENGTH, _TEXT = range(3)  # columns of an occurrence
_MOST_TEXTS = 3
_NO_TEXTS = [ChainIndex().state] * _MOST_TEXTS  # always as many, so that one compilation serves all
_NO_MEMORY = RecycledTable(contexts=4)


@dataclass(frozen=True, slots=True)
class Trie:
    """What may follow a context, as a tree.

    Attributes:
        tokens: int32 `[k]`; the root, node 0, holds the last token of the context.
        parents: int32 `[k]`; a parent comes before its children, and the likeliest path is 0, 1, 2, ….
        probabilities: float32 `[k]`; the chance of a node once its parent was chosen; 1 for the root.
        features: int32 `[k]`; what `HitRates.learn` needs to know of each node; 0 for the root.
        sources: int32 `[k]`; bit i is set where text i offered the node, the bit after those of the texts where
            the memory did; 0 for the root.
    """

    tokens: IntArray
    parents: IntArray
    probabilities: NDArray[np.float32]
    features: IntArray
    sources: IntArray


def grow_trie(
    texts: Sequence[Chains],
    rates: HitRates,
    room: int,
    *,
    memory: RecycledTable | None = None,
    context: Sequence[int] | IntArray | None = None,
    min_ngram: int = 1,
    max_ngram: int = 16,
    max_links: int = 32,
) -> Trie | None:
    """Merge what followed a context before and what the target thought of it into a tree, likeliest paths first.

    Occurrences of all texts are followed side by side while they agree, each as far as its document goes; one
    that runs into the end of the open document goes on with the path itself, so that a loop is continued as a
    loop. The memory is asked after every node. What offers the same token at the same place is one candidate, and
    its chance is the hit rate of all that is known of it.

    Args:
        texts: Where to look for the context, at most three.
        rates: The chance of each kind of candidate.
        room: Most nodes besides the root.
        memory: What the target thought likely after contexts.
        context: Tokens whose end is looked up; `None` means the open document of the first text.
        min_ngram: Shortest match that counts, in tokens, at least 1.
        max_ngram: Longest context compared, in tokens, from `min_ngram` to 64.
        max_links: Most chain links walked in each text, at least 1.

    Returns:
        The tree, or `None` where nothing was found or there is no room.

    Raises:
        TypeError: `context` does not hold whole numbers.
        ValueError: An argument is out of its range, or there are too many texts.

    Example:
        >>> text = ChainIndex()
        >>> text.append([5, 6, 7, 8, 5, 6])
        >>> grow_trie([text], HitRates(), room=3).tokens.tolist()
        [6, 7, 8, 5]
    """
    if not 1 <= min_ngram <= max_ngram <= MAX_CONTEXT:
        raise ValueError(f"need 1 <= min_ngram <= max_ngram <= {MAX_CONTEXT}, got {min_ngram} and {max_ngram}")
    if max_links < 1:
        raise ValueError(f"max_links must be positive, got {max_links}")
    if len(texts) > _MOST_TEXTS:
        raise ValueError(f"at most {_MOST_TEXTS} texts are searched, got {len(texts)}")
    own = context is None
    tail = texts[0].tokens if context is None else as_tokens(context)
    if room < 1 or tail.size == 0 or tail[-1] < 0:
        return None
    tokens, parents, probabilities, features, sources = _propose(
        tuple([text.state for text in texts] + _NO_TEXTS[len(texts) :]),
        (memory if memory is not None else _NO_MEMORY).state,
        tail,
        own,
        (min_ngram, max_ngram, max_links, min(room, _MAX_ROOM), len(texts)),
        rates.table,
        rates.follows,
        rates.frequent,
    )
    return Trie(tokens, parents, probabilities, features, sources) if tokens.size > 1 else None


@njit(cache=True)
def _propose(texts, memory, tail, own, limits, table, follows, frequent):
    """Find, grow, and put in order: the whole of `grow_trie`."""
    shortest, longest, walked, room, source = limits
    places = np.empty((len(texts) * walked, 3), dtype=np.int64)
    found = _find(texts, tail, shortest, longest, walked, places)
    ahead = np.full((found, room), -1, dtype=np.int32)
    for each in range(found):
        text = places[each, _TEXT]
        arena, _, _, length = texts[text]
        _read_ahead(arena, length, places[each, _POSITION], own and text == 0, ahead, each)
    nodes = np.zeros((room + 1, COLUMNS), dtype=np.int64)
    chances = np.ones(room + 1)
    nodes[0, TOKEN], nodes[0, STOP] = tail[-1], found
    occurrences = (np.arange(found), places[:found, _LENGTH], places[:found, _TEXT], ahead)
    count = _grow(occurrences, memory, tail, source, table, follows, frequent, nodes, chances)
    return _in_order(nodes, chances, count)


@njit(cache=True)
def _find(texts, tail, shortest, longest, walked, places):
    """Fill `places` with the occurrences of the end of the context in all texts, the longest first; how many."""
    positions = np.empty(walked, dtype=np.int32)
    lengths = np.empty(walked, dtype=np.int32)
    count = 0
    for text in range(len(texts)):
        arena, heads, links, length = texts[text]
        found = find_matches(
            arena, heads, links, length, tail, tail.size, shortest, longest, _VARIETY, positions, lengths
        )
        for each in range(found):
            at = count
            while text > 0 and at > 0 and places[at - 1, _LENGTH] < lengths[each]:
                for column in range(3):
                    places[at, column] = places[at - 1, column]
                at -= 1
            places[at, _POSITION], places[at, _LENGTH], places[at, _TEXT] = positions[each], lengths[each], text
            count += 1
    return count


@njit(cache=True)
def _read_ahead(arena, length, position, is_open, ahead, row):
    """Copy what followed an occurrence, as far as its document goes.

    The open document has not ended: what will follow it repeats what followed the occurrence.
    """
    at = position
    for depth in range(ahead.shape[1]):
        if at == length:
            if not is_open:
                return
            at = position
        if arena[at] < 0:
            return
        ahead[row, depth] = arena[at]
        at += 1


@njit(cache=True)
def _grow(occurrences, memory, tail, source, table, follows, frequent, nodes, chances):
    """Best-first: turn the likeliest tip into a node and see what may follow it; returns the nodes made.

    No more tips are kept than nodes can still be made, so a scan for the best is as fast as a heap.
    """
    which, lengths, texts, ahead = occurrences
    room = nodes.shape[0] - 1
    options, likely = np.empty((MOST_OPTIONS, COLUMNS), dtype=np.int64), np.empty(MOST_OPTIONS)
    tips, tip_chances, reach = np.empty((room, COLUMNS), dtype=np.int64), np.empty(room), np.empty(room)
    tokens, parents = np.empty(room + 1, dtype=np.int32), np.zeros(room + 1, dtype=np.int32)
    hashes = np.empty(ORDERS, np.uint64)
    orders = 0
    count, live, reached = 1, 0, 1.0
    while True:
        node = count - 1
        tokens[node], parents[node] = nodes[node, TOKEN], nodes[node, PARENT]
        depth = nodes[node, DEPTH]
        matches, longest = 0, 0
        if nodes[node, STOP] > nodes[node, FIRST] and depth < room:
            matches, longest = part(
                which, nodes[node, FIRST], nodes[node, STOP], depth, lengths, texts, ahead, options, likely
            )
        if memory[0].shape[0] > 1:
            orders = hash_context(tail, tail.size, tokens, parents, node, hashes)
        factor = follow_factor(follows, tokens[node])
        offered = score(options, likely, matches, longest, memory, hashes, orders, source, table, frequent, factor)
        for option in range(offered):
            value = likely[option] * reached
            at = live
            if live == room - node:
                at = _least(reach, live)
            if value < _FLOOR or (at < live and reach[at] >= value):
                continue
            live = max(live, at + 1)
            for column in range(COLUMNS):
                tips[at, column] = options[option, column]
            tips[at, PARENT], tips[at, DEPTH] = node, depth + 1
            reach[at], tip_chances[at] = value, likely[option]
        if live == 0 or node == room:
            return count
        best = 0
        for tip in range(1, live):
            if reach[tip] > reach[best]:
                best = tip
        live -= 1
        chances[count], reached = tip_chances[best], reach[best]
        reach[best], tip_chances[best] = reach[live], tip_chances[live]
        for column in range(COLUMNS):
            nodes[count, column], tips[best, column] = tips[best, column], tips[live, column]
        count += 1


@njit(cache=True)
def _least(reach, live):
    """The least likely of the tips, -1 where there are none."""
    least = live - 1
    for tip in range(live):
        if reach[tip] < reach[least]:
            least = tip
    return least


@njit(cache=True)
def _in_order(nodes, chances, count):
    """The tree's arrays, nodes as a walk from the root meets them; siblings as they were made, likeliest first."""
    first_child = np.zeros(count, dtype=np.int32)
    next_sibling = np.zeros(count, dtype=np.int32)
    for node in range(count - 1, 0, -1):
        next_sibling[node] = first_child[nodes[node, PARENT]]
        first_child[nodes[node, PARENT]] = node
    tokens = np.empty(count, dtype=np.int32)
    parents = np.zeros(count, dtype=np.int32)
    probabilities = np.ones(count, dtype=np.float32)
    features = np.zeros(count, dtype=np.int32)
    sources = np.zeros(count, dtype=np.int32)
    place = np.zeros(count, dtype=np.int32)
    tokens[0] = nodes[0, TOKEN]
    node = 0
    for new in range(1, count):
        if first_child[node] > 0:
            node = first_child[node]
        else:
            while next_sibling[node] == 0:
                node = nodes[node, PARENT]
            node = next_sibling[node]
        place[node] = new
        tokens[new], parents[new] = nodes[node, TOKEN], place[nodes[node, PARENT]]
        probabilities[new], features[new] = chances[node], nodes[node, FEATURE]
        sources[new] = nodes[node, SOURCES]
    return tokens, parents, probabilities, features, sources
