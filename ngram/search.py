"""Trees of continuations for a context, grown best first from matches and recycled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.ngram.acceptance import HitRates, rates_at
from lookahead.ngram.candidates import (
    COLUMNS,
    DEPTH,
    FEATURE,
    FIRST,
    LENGTH,
    MOST_OPTIONS,
    PARENT,
    POSITION,
    SOURCES,
    STOP,
    TEXT,
    TOKEN,
    score,
    split,
)
from lookahead.ngram.chains import ChainIndex, Chains, IntArray, chains_at, find_matches
from lookahead.ngram.prune import FREE, NOTHING, Limits, node_at, select
from lookahead.ngram.raw_arrays import RawArrays, jit_inline, pointers_at
from lookahead.ngram.recycled import ORDERS, RecycledTable, hash_context, table_at

MAX_NODES = 1 << 10
# Rows of what `_write` returns: five of the whole tree, where its nodes went, and five of the selected part.
PLACED, PART, _ROWS = 5, 6, 11
_MOST_TEXTS = 3
_POINTERS = _MOST_TEXTS + 7  # texts, memory, rates, min_ngram, max_ngram, max_links, bit and time of the memory
_FLOOR = 0.0001  # least probability of a node to be reached
_VARIETY = 16  # different next tokens looked for in a text
_SHORTEST_FOREIGN = 3  # tokens of a match in another text than the row's own, beside recycled tokens

_NO_TEXT = ChainIndex()
_NO_TAIL = np.zeros(0, np.int32)
_NO_MEMORY = RecycledTable(contexts=4)


class Trie(NamedTuple):
    """Candidates for the tokens after a context, as a tree by falling path probability; arrays are `[k]`.

    Bit i of a node's sources is set if text i offered it, the bit after those of the texts if the recycled table did.
    """

    tokens: IntArray  # node 0, the root, holds the last token of the context
    parents: IntArray  # a parent comes before its children
    probabilities: NDArray[np.float32]  # of a node once its parent was chosen; 1 for the root
    features: IntArray  # for `HitRates.learn`; 0 for the root
    sources: IntArray  # 0 for the root


class Grown(NamedTuple):
    """A tree, and the part of it that is worth verifying.

    `written` is int32 `[11, k]`: tokens, parents, features, sources and the bits of float32 probabilities of the whole
    tree; the node of the part that each became; then tokens, parents, depths and sources of the part, and zeros.
    """

    written: IntArray
    path_probs: NDArray[np.float64]  # [m], the probability that a node of the part is reached; 1 for the root

    @property
    def trie(self) -> Trie:
        """The whole tree."""
        tokens, parents, features, sources, bits = self.written[:PLACED]
        return Trie(tokens, parents, bits.view(np.float32), features, sources)


class Search(RawArrays):
    """Merges earlier continuations of a context and the target's recycled tokens into a tree, likeliest paths first.

    Each occurrence is followed to the end of its document; at the end of the open document it continues with the path
    itself, so that a loop is continued as a loop. The recycled table is looked up at every node. The same token from
    several sources is one candidate; its probability is the hit rate of its features.

    Args:
        texts: At most three.
        rates: The hit rates.
        memory: The recycled table, if any.
        bounds: Tokens of the shortest match and of the longest, at most `MAX_CONTEXT`, and links walked in each text;
            they are not checked.

    Example:
        >>> text = ChainIndex()
        >>> text.append([5, 6, 7, 8, 5, 6])
        >>> Search([text], HitRates(), None, (1, 16, 32)).grow(3).trie.tokens.tolist()
        [6, 7, 8, 5]
    """

    __slots__ = ("_searched",)

    def __init__(
        self, texts: Sequence[Chains], rates: HitRates, memory: RecycledTable | None, bounds: tuple[int, int, int]
    ) -> None:
        super().__init__(_POINTERS)
        memory = memory if memory is not None else _NO_MEMORY
        self._searched = (*texts, rates, memory)  # keeps alive what the addresses point to
        addresses = [text.address for text in texts] + [_NO_TEXT.address] * (_MOST_TEXTS - len(texts))
        since = memory.clock[1][0]  # what the memory learned before is foreign
        self._pointers[:] = (*addresses, memory.address, rates.address, *bounds, len(texts), since)

    def grow(
        self,
        max_nodes: int,  # besides the root, 1 to `MAX_NODES`
        min_probability: float = 0.0,  # nodes less likely to be reached are left out
        limits: Limits = NOTHING,  # of the part that is worth verifying
        costs: NDArray[np.float64] = FREE,  # of a step, as for `select`
        context: IntArray | None = None,  # int32; its end is looked up. None: the open document of the first text
    ) -> Grown:
        """A tree of continuations, its root alone if nothing was found, and the part of it worth verifying."""
        tail = _NO_TAIL if context is None else context
        floor = min_probability if min_probability > _FLOOR else _FLOOR
        return Grown(*_propose(self.address, max_nodes, tail, context is None, floor, *limits, costs))


# The whole search is compiled as one function: between functions the compiler counts references to arrays, which took
# longer than the search. For the same reason nothing in it may fail, so no tuple is indexed by a variable.


@njit(cache=True, error_model="numpy")
def _propose(search_at, max_nodes, context, own, floor, budget, max_depth, min_probability, is_chain, worth, costs):
    """Find, grow and select, by addresses. With `own` the context is the first text's open document."""
    given = pointers_at(search_at, _POINTERS)
    first, second, third = chains_at(given[0]), chains_at(given[1]), chains_at(given[2])
    memory, (table, frequent) = table_at(given[3]), rates_at(given[4])
    shortest, longest, walked, source = given[5], given[6], given[7], given[8]
    limits = (budget, max_depth, min_probability, is_chain, worth)
    tail = first[0][: first[3]] if own else context
    most = _MOST_TEXTS * walked + 1
    occurrences, orders = np.empty((most, 3), np.int64), np.empty((3, most), np.int64)
    nodes, tips = np.empty((max_nodes + 1, COLUMNS), np.int64), np.empty((max_nodes, COLUMNS), np.int64)
    options, likely = np.empty((MOST_OPTIONS, COLUMNS), np.int64), np.empty(MOST_OPTIONS)
    probs, hashes = np.empty((4, max_nodes + 1)), np.empty(ORDERS, np.uint64)
    for column in range(COLUMNS):
        nodes[0, column] = 0
    count = 1
    if tail.size > 0 and tail[-1] >= 0:
        matches = (occurrences, orders)
        bounds = (shortest, longest, walked)
        found = _find(first, 0, tail, bounds, matches, 0)
        if own and memory[0].shape[0] > 1:  # the target's own successors say more than short matches in other texts
            bounds = (max(shortest, min(_SHORTEST_FOREIGN, longest)), longest, walked)
        found = _find(second, 1, tail, bounds, matches, found)
        found = _find(third, 2, tail, bounds, matches, found)
        nodes[0, TOKEN], nodes[0, STOP] = tail[-1], found
        known = (memory, given[9], hashes, table, frequent, source)
        begin = (tail, floor, is_chain)
        count = _grow((first, second, third), own, matches, known, begin, nodes, tips, probs, (options, likely))
    return _write(nodes, probs[0], probs[3], count, limits, costs)


@jit_inline
def _write(nodes, probs, path_probs, count, limits, costs):
    """Select the part worth verifying; returns the fields of a `Grown`."""
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
def _find(chains, text, tail, bounds, matches, count):
    """Find the end of the context in one more text; returns how many occurrences there are then.

    `orders[0]` lists them, those of the longest matches first.
    """
    arena, heads, links, length = chains
    if length == 1:
        return count
    shortest, longest, walked = bounds
    occurrences, orders = matches
    positions, lengths = orders[1, :walked], orders[2, :walked]
    found = find_matches(arena, heads, links, length, tail, tail.size, shortest, longest, _VARIETY, positions, lengths)
    for each in range(found):
        matched = lengths[each]
        occurrences[count, POSITION], occurrences[count, LENGTH] = positions[each], matched
        occurrences[count, TEXT] = text
        at = count
        while text > 0 and at > 0 and occurrences[orders[0, at - 1], LENGTH] < matched:
            orders[0, at] = orders[0, at - 1]
            at -= 1
        orders[0, at] = count
        count += 1
    return count


@jit_inline
def _grow(texts, own, found, known, begin, nodes, tips, numbers, space_of_options):
    """Best first: turn the likeliest tip into a node and add the candidates after it; returns the number of nodes.

    No more tips are kept than nodes can still be made, so a scan for the best is as fast as a heap. Of a chain only the
    likeliest candidate after each node is kept.
    """
    options, likely = space_of_options
    tail, floor, is_chain = begin
    memory, since, hashes, table, frequent, source = known
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
        least = floor / path_prob
        offered = score(
            least, options, likely, matches, longest, memory, since, hashes, orders, source, table, frequent
        )
        first_option = _greatest(likely, offered) if is_chain else 0
        for option in range(first_option, min(first_option + 1, offered) if is_chain else offered):
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
        best = _greatest(tip_path_probs, live)
        live -= 1
        probs[count], path_prob = tip_probs[best], tip_path_probs[best]
        path_probs[count] = path_prob
        tip_path_probs[best], tip_probs[best] = tip_path_probs[live], tip_probs[live]
        for column in range(COLUMNS):
            nodes[count, column], tips[best, column] = tips[best, column], tips[live, column]
        count += 1


@jit_inline
def _greatest(probs, count):
    """The index of the greatest of the first `count` numbers; 0 if there are none."""
    best = 0
    for at in range(1, count):
        if probs[at] > probs[best]:
            best = at
    return best


@jit_inline
def _least(path_probs, live):
    """The least likely of the tips, -1 if there are none."""
    least = live - 1
    for tip in range(live):
        if path_probs[tip] < path_probs[least]:
            least = tip
    return least
