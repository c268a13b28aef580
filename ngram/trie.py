"""Trees of candidates for a context, from matches and recycled tokens, grown best first in compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.ngram.acceptance import rates_at
from lookahead.ngram.candidates import (
    COLUMNS,
    DEPTH,
    FEATURE,
    FIRST,
    LENGTH,
    MOST_OPTIONS,
    PARENT,
    POSITION,
    PROXIMITY,
    READ,
    SOURCES,
    STOP,
    TEXT,
    TOKEN,
    read_ahead,
    score,
    split,
)
from lookahead.ngram.chains import IntArray, chains_at
from lookahead.ngram.features import RESUMED, proximity_of
from lookahead.ngram.prune import node_at, select
from lookahead.ngram.raw_arrays import jit_inline, pointers_at
from lookahead.ngram.recycled import ORDERS, hash_context, table_at
from lookahead.ngram.suffix_match import find_matches, last_copy

MOST_TEXTS = 3
SEARCH_POINTERS = MOST_TEXTS + 6  # texts, memory, rates, bounds of the length of matches, links, bit of the memory
# Rows of what is written: five of the whole tree as it grew, where its nodes went, and five of the part.
PLACED, PART, _ROWS = 5, 6, 11
_VARIETY = 16
_MOST_CHANGED = 3  # tokens that may replace as many of a copy's source before the copy goes on


class Trie(NamedTuple):
    """Candidates for the tokens after a context, as a tree.

    Attributes:
        tokens: int32 `[k]`; the root, node 0, holds the last token of the context.
        parents: int32 `[k]`; nodes by falling path probability, a parent before its children.
        probabilities: float32 `[k]`; the probability of a node once its parent was chosen; 1 for the root.
        features: int32 `[k]`; the feature of each node, for `HitRates.learn`; 0 for the root.
        sources: int32 `[k]`; bit i is set if text i offered the node, the bit after those of the texts if the
            recycled table did; 0 for the root.
    """

    tokens: IntArray
    parents: IntArray
    probabilities: NDArray[np.float32]
    features: IntArray
    sources: IntArray


class Grown(NamedTuple):
    """A tree, and the part of it that is worth verifying.

    Attributes:
        written: int32 `[11, k]`, as `_write` leaves it: from row `PLACED` on, the part.
        path_probs: float64 `[m]`, the probability that a node of the part is reached; 1 for the root.
    """

    written: IntArray
    path_probs: NDArray[np.float64]

    @property
    def trie(self) -> Trie:
        """The whole tree."""
        tokens, parents, features, sources, bits = self.written[:PLACED]
        return Trie(tokens, parents, bits.view(np.float32), features, sources)


# The whole search is compiled as one function: between functions the compiler counts references to arrays, which took
# longer than the search. For the same reason nothing in it may fail, so no tuple is indexed by a variable.


@jit_inline
def _carve(space, used, rows, columns):
    """A table `[rows, columns]` behind the used part of the scratch memory, and the size used then."""
    end = used + rows * columns
    return space[used:end].reshape(rows, columns), end


@njit(cache=True, error_model="numpy")
def propose(search_at, max_nodes, context, own, floor, budget, max_depth, min_probability, is_chain, costs):
    """Find, grow, and select: the whole of `Search.grow`, by addresses."""
    given = pointers_at(search_at, SEARCH_POINTERS)
    first, second, third = chains_at(given[0]), chains_at(given[1]), chains_at(given[2])
    memory, (table, frequent) = table_at(given[3]), rates_at(given[4])
    shortest, longest, walked, source = given[5], given[6], given[7], given[8]
    limits = (budget, max_depth, min_probability, is_chain)
    tail = first[0][: first[3]] if own else context
    most = MOST_TEXTS * walked + 1
    rest = MOST_OPTIONS * (COLUMNS + 1) + ORDERS
    space = np.empty(most * (8 + max_nodes) + (2 * max_nodes + 1) * COLUMNS + 4 * (max_nodes + 1) + rest, np.int64)
    occurrences, used = _carve(space, 0, most, 5)
    ahead, used = _carve(space, used, most, max_nodes)
    orders, used = _carve(space, used, 3, most)
    nodes, used = _carve(space, used, max_nodes + 1, COLUMNS)
    tips, used = _carve(space, used, max_nodes, COLUMNS)
    options, used = _carve(space, used, MOST_OPTIONS, COLUMNS)
    numbers, used = _carve(space, used, 4, max_nodes + 1)
    likely, used = _carve(space, used, 1, MOST_OPTIONS)
    hashes, used = _carve(space, used, 1, ORDERS)
    probs = numbers.view(np.float64)
    for column in range(COLUMNS):
        nodes[0, column] = 0
    count = 1
    if tail.size > 0 and tail[-1] >= 0:
        matches = (occurrences, ahead, orders)
        bounds = (shortest, longest, walked)
        found = _find(first, 0, own, tail, bounds, matches, 0)
        found = _find(second, 1, own, tail, bounds, matches, found)
        found = _find(third, 2, own, tail, bounds, matches, found)
        nodes[0, TOKEN], nodes[0, STOP] = tail[-1], found
        known = (memory, hashes[0].view(np.uint64), table, frequent, source)
        space_of_options = (options, likely[0].view(np.float64))
        count = _grow((first, second, third), own, matches, known, tail, floor, nodes, tips, probs, space_of_options)
    return _write(nodes, probs[0], probs[3], count, limits, costs)


@jit_inline
def _write(nodes, probs, path_probs, count, limits, costs):
    """Write down the whole tree and the part of it that is worth verifying.

    Returns int32 `[11, count]`: tokens, parents, features, sources and probabilities (the bits of float32) of the
    whole, the node of the part that each became, then tokens, parents, depths and sources of the part, as far as it
    goes, and zeros; and the path probabilities of the part's nodes, float64.
    """
    written = np.zeros((_ROWS, count), np.int32)
    bits = written[4].view(np.float32)
    for node in range(count):
        written[0, node], written[1, node] = nodes[node, TOKEN], nodes[node, PARENT]
        written[2, node], written[3, node] = nodes[node, FEATURE], nodes[node, SOURCES]
        bits[node] = probs[node]
    required, parents = written[10], nodes[:, PARENT]  # none is required
    scratch, size = select(parents, nodes[:, DEPTH], path_probs[:count], required, limits, costs)
    kept_probs = np.empty(size)
    for place in range(size):
        node = node_at(scratch, place)
        written[5, node] = place
        written[6, place], written[7, place] = nodes[node, TOKEN], written[5, nodes[node, PARENT]]
        written[8, place], written[9, place] = nodes[node, DEPTH], nodes[node, SOURCES]
        kept_probs[place] = path_probs[node]
    return written, kept_probs


@jit_inline
def _find(chains, text, own, tail, bounds, matches, count):
    """Find the end of the context in one more text; returns how many occurrences there are then.

    `orders[0]` lists them, those of the longest matches first.
    """
    arena, heads, links, length = chains
    if length == 1:
        return count
    shortest, longest, walked = bounds
    occurrences, ahead, orders = matches
    positions, lengths = orders[1, :walked], orders[2, :walked]
    source, changed = last_copy(arena, links, length) if own and text == 0 else (0, 0)
    near = source if source > 0 else 1  # before the first copy, the beginning: summaries start there
    found = find_matches(arena, heads, links, length, tail, tail.size, shortest, longest, _VARIETY, positions, lengths)
    for each in range(found):
        matched = lengths[each]
        occurrences[count, POSITION], occurrences[count, LENGTH] = positions[each], matched
        occurrences[count, TEXT], occurrences[count, READ] = text, 0
        occurrences[count, PROXIMITY] = proximity_of(positions[each] - near) if text == 0 and own else 0
        read_ahead(arena, length, own and text == 0, occurrences, ahead, count)
        at = count
        while text > 0 and at > 0 and occurrences[orders[0, at - 1], LENGTH] < matched:
            orders[0, at] = orders[0, at - 1]
            at -= 1
        orders[0, at] = count
        count += 1
    if shortest == 1 and 0 < changed <= _MOST_CHANGED and source + changed < length:
        occurrences[count, POSITION], occurrences[count, LENGTH] = source + changed, 0
        occurrences[count, TEXT], occurrences[count, READ] = text, 0
        occurrences[count, PROXIMITY] = RESUMED
        read_ahead(arena, length, True, occurrences, ahead, count)
        orders[0, count] = count
        count += 1
    return count


@jit_inline
def _grow(texts, own, found, known, tail, floor, nodes, tips, numbers, space_of_options):
    """Best first: turn the likeliest tip into a node and add the candidates after it; returns the number of nodes.

    No more tips are kept than nodes can still be made, so a scan for the best is as fast as a heap.
    """
    options, likely = space_of_options
    memory, hashes, table, frequent, source = known
    probs, tip_probs, tip_path_probs, path_probs = numbers[0], numbers[1], numbers[2], numbers[3]
    recalls, max_nodes, orders = memory[0].shape[0] > 1, tips.shape[0], 0
    count, live, path_prob = 1, 0, 1.0
    probs[0] = path_probs[0] = 1.0
    while True:
        node = count - 1
        depth, first, stop = nodes[node, DEPTH], nodes[node, FIRST], nodes[node, STOP]
        matches, longest = 0, 0
        if stop > first and depth < max_nodes:
            matches, longest = split(texts, own, found, first, stop, depth, options, likely)
        if recalls:
            orders = hash_context(tail, tail.size, nodes[:, TOKEN], nodes[:, PARENT], node, hashes)
        after = (nodes[node, TOKEN], floor / path_prob)
        offered = score(after, options, likely, matches, longest, memory, hashes, orders, source, table, frequent)
        for option in range(offered):
            value = likely[option] * path_prob
            if value < floor:
                continue
            at = live
            if live == max_nodes - node:
                at = _least(tip_path_probs, live)
                if at < 0 or tip_path_probs[at] >= value:
                    continue
            live = max(live, at + 1)
            for column in range(COLUMNS):
                tips[at, column] = options[option, column]
            tips[at, PARENT], tips[at, DEPTH] = node, depth + 1
            tip_path_probs[at], tip_probs[at] = value, likely[option]
        if live == 0 or node == max_nodes:
            return count
        best = 0
        for tip in range(1, live):
            if tip_path_probs[tip] > tip_path_probs[best]:
                best = tip
        live -= 1
        probs[count], path_prob = tip_probs[best], tip_path_probs[best]
        path_probs[count] = path_prob
        tip_path_probs[best], tip_probs[best] = tip_path_probs[live], tip_probs[live]
        for column in range(COLUMNS):
            nodes[count, column], tips[best, column] = tips[best, column], tips[live, column]
        count += 1


@jit_inline
def _least(path_probs, live):
    """The least likely of the tips, -1 where there are none."""
    least = live - 1
    for tip in range(live):
        if path_probs[tip] < path_probs[least]:
            least = tip
    return least
