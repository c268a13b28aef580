"""Trees of continuations for a context, grown best first from matches and recycled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.ngram.acceptance import HitRates
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
from lookahead.ngram.chains import ChainIndex, Chains, IntArray, find_matches
from lookahead.ngram.inlining import jit_inline
from lookahead.ngram.recycled import ORDERS, RecycledTable, hash_context

_MOST_TEXTS = 3
_FLOOR = 0.0001  # least probability of a node to be reached
_VARIETY = 16  # different next tokens looked for in a text
_SHORTEST_FOREIGN = 3  # tokens of a match in another text than the row's own, beside recycled tokens

_NO_TEXT = ChainIndex()
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


_NONE: IntArray = np.zeros(0, np.int32)
NO_CANDIDATES = Trie(_NONE, _NONE, np.zeros(0, np.float32), _NONE, _NONE)


class Search:
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
        >>> Search([text], HitRates(), None, (1, 16, 32)).grow(3).tokens.tolist()
        [6, 7, 8, 5]
    """

    __slots__ = ("_bounds", "_memory", "_rates", "_source", "_texts")

    def __init__(
        self, texts: Sequence[Chains], rates: HitRates, memory: RecycledTable | None, bounds: tuple[int, int, int]
    ) -> None:
        self._texts = *texts, *(_NO_TEXT,) * (_MOST_TEXTS - len(texts))
        self._rates, self._bounds = rates, bounds
        self._memory = memory if memory is not None else _NO_MEMORY
        # The bit of the memory, and its time: what it learned before is foreign.
        self._source = len(texts), int(self._memory.now[0])

    def grow(
        self,
        max_nodes: int,  # besides the root, at least 1
        min_probability: float = 0.0,  # nodes less likely to be reached are left out
        context: IntArray | None = None,  # int32; its end is looked up. None: the open document of the first text
        *,
        is_chain: bool = False,  # only the likeliest candidate after each node is kept
    ) -> Trie:
        """A tree of continuations; its root alone if nothing was found."""
        first, second, third = self._texts
        rates, memory = (self._rates.table, self._rates.frequent), (*self._memory.state, *self._source)
        tail = first.tokens if context is None else context
        options = (context is None, max(min_probability, _FLOOR), is_chain)
        texts = first.state, second.state, third.state
        whole, probs = _grow(texts, memory, rates, self._bounds, tail, max_nodes, options)
        tokens, parents, features, sources = whole
        return Trie(tokens, parents, probs, features, sources)


@njit(cache=True, error_model="numpy")
def _grow(texts, memory, rates, bounds, tail, max_nodes, options):
    """Find matches and grow a tree; returns tokens, parents, features and sources, int32 `[4, k]`, and probabilities.

    The whole search is compiled as one function: between functions the compiler counts references to arrays, which took
    longer than the search. For the same reason nothing in it may fail, so no tuple is indexed by a variable.
    """
    (first, second, third), own, (shortest, longest, walked) = texts, options[0], bounds
    most = _MOST_TEXTS * walked + 1
    occurrences, orders = np.empty((most, 3), np.int64), np.empty((3, most), np.int64)
    nodes, probs = np.zeros((max_nodes + 1, COLUMNS), np.int64), np.ones(max_nodes + 1, np.float32)
    count = 1
    if tail.size > 0 and tail[-1] >= 0:
        matches = (occurrences, orders)
        found = _find(first, 0, tail, bounds, matches, 0)
        if own and memory[0].shape[0] > 1:  # the target's own successors say more than short matches in other texts
            bounds = (max(shortest, min(_SHORTEST_FOREIGN, longest)), longest, walked)
        found = _find(second, 1, tail, bounds, matches, found)
        found = _find(third, 2, tail, bounds, matches, found)
        nodes[0, TOKEN], nodes[0, STOP] = tail[-1], found
        count = _add_nodes(texts, memory, rates, tail, options, matches, nodes, probs)
    whole = np.empty((4, count), np.int32)
    for node in range(count):
        whole[0, node], whole[1, node] = nodes[node, TOKEN], nodes[node, PARENT]
        whole[2, node], whole[3, node] = nodes[node, FEATURE], nodes[node, SOURCES]
    return whole, probs[:count]


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
def _add_nodes(texts, memory, rates, tail, begin, matches, nodes, probs):
    """Best first: turn the likeliest tip into a node and add the candidates after it; returns the number of nodes.

    No more tips are kept than nodes can still be made, so a scan for the best is as fast as a heap. Of a chain only the
    likeliest candidate after each node is kept.
    """
    own, floor, is_chain = begin
    max_nodes = nodes.shape[0] - 1
    recalls, orders, hashes = memory[0].shape[0] > 1, 0, np.empty(ORDERS, np.uint64)
    tips, tip_probs, tip_path_probs = np.empty((max_nodes, COLUMNS), np.int64), np.empty(max_nodes), np.empty(max_nodes)
    options, likely = np.empty((MOST_OPTIONS, COLUMNS), np.int64), np.empty(MOST_OPTIONS)
    count, live, path_prob = 1, 0, 1.0
    while True:
        node = count - 1
        depth, first, stop = nodes[node, DEPTH], nodes[node, FIRST], nodes[node, STOP]
        matched, longest = 0, 0
        if stop > first and depth < max_nodes:
            matched, longest = split(texts, own, matches, first, stop, depth, options, likely)
        if recalls:
            orders = hash_context(tail, tail.size, nodes[:, TOKEN], nodes[:, PARENT], node, hashes)
        offered = score(floor / path_prob, options, likely, matched, longest, memory, hashes, orders, rates)
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
            tips[at] = options[option]
            tips[at, PARENT], tips[at, DEPTH] = node, depth + 1
            tip_path_probs[at], tip_probs[at] = value, likely[option]
        if live == 0 or node == max_nodes:
            return count
        best = _greatest(tip_path_probs, live)
        live -= 1
        probs[count], path_prob = tip_probs[best], tip_path_probs[best]
        nodes[count], tips[best] = tips[best], tips[live]
        tip_path_probs[best], tip_probs[best] = tip_path_probs[live], tip_probs[live]
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
