"""Trees of continuations for a context, grown best first from matches and recycled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.ngram.alignment import CURSOR_SIZE, MOST_ALIGNED, find_aligned, follow
from lookahead.ngram.candidates import MAX_OPTIONS, NODE, OCCURRENCE, PREDICTED, score, split
from lookahead.ngram.chains import ChainIndex, Chains, IntArray, add, chains_at, find_matches
from lookahead.ngram.hit_rates import HitRates, copied, count_hits, rates_at
from lookahead.ngram.inlining import jit_inline
from lookahead.ngram.successors import ENTRY, ORDERS, TOP, WAYS, SuccessorTable, hash_context, store_tree
from lookahead.utils.addresses import KeepsAddresses, addresses_of, array_at
from lookahead.utils.jit import njit

_NAMED_TEXTS = 3
_LIVE = _NAMED_TEXTS  # the text of the other rows
_MAX_TEXTS = _NAMED_TEXTS + 2  # the last one is the text of predictions
_RECYCLED_BIT = _MAX_TEXTS
_NEVER = 2.0  # a probability that no candidate has
FLOOR = 0.0001  # minimum probability of a node to be reached
# The record of a search, int64: addresses of the records of its texts, its hit rates, its memory with the number of
# writes, and its cursor; the sets of the memory, its writes at the start, and the bounds; the bits of the memory, the
# live text and the predictions in a node's sources; and the row's own positions in the live text.
TEXT, RATES, _ENTRIES, _NOW, _CURSOR, _GROUPS, _SINCE, _SHORTEST, _LONGEST = 0, 5, 8, 9, 10, 11, 12, 13, 14
_WALKED, _SOURCE, _LIVE_SOURCE, _OWN_BEGIN, _OWN_END, _PREDICTED_SOURCE, SIZE = 15, 16, 17, 18, 19, 20, 21
_SHORTEST_FOREIGN = 3  # tokens of a match in another than the row's own text, if there are recycled tokens

_NO_TEXT = ChainIndex()
_NO_MEMORY = SuccessorTable(contexts=4)


class Trie(NamedTuple):
    """Candidates for the tokens after a context, as a tree by descending path probability; arrays are `[k]`.

    Bit i of a node's sources is set if text i offered it; the bit after the texts is set if the recycled table did.

    Example:
        >>> text = ChainIndex()
        >>> text.append([5, 6, 7, 5])
        >>> trie = Search([text], HitRates(), None, (1, 16, 32)).grow(2)
        >>> trie.tokens.tolist(), trie.parents.tolist(), trie.sources.tolist()
        ([5, 6, 7], [0, 0, 1], [0, 1, 1])
    """

    tokens: IntArray  # node 0, the root, holds the last token of the context
    parents: IntArray  # a parent comes before its children
    probabilities: NDArray[np.float32]  # of a node given its parent; 1 for the root
    features: IntArray  # for `HitRates.learn`; 0 for the root
    sources: IntArray  # 0 for the root


Verified = tuple[IntArray, IntArray, IntArray, NDArray[np.float32]]
"""Parents and tokens of a tree, `[k]`, and the 8 likeliest tokens after each node with probabilities, `[k, 8]`."""

_NONE: IntArray = np.zeros(0, np.int32)
NOT_VERIFIED: Verified = _NONE, _NONE, np.zeros((0, TOP), np.int32), np.zeros((0, TOP), np.float32)
NO_CANDIDATES = Trie(_NONE, _NONE, np.zeros(0, np.float32), _NONE, _NONE)


class Search(KeepsAddresses):
    """Merges earlier continuations of a context and the target's recycled tokens into a tree, likeliest paths first.

    Each occurrence is followed to the end of its document. At the end of the open document it continues with the path
    itself, so that a loop is continued as a loop. The recycled table is looked up at every node. A token from several
    sources is one candidate; its probability is the hit rate of its features.

    Args:
        texts: At most three texts.
        rates: The hit rates.
        memory: The recycled table, if any.
        bounds: Tokens of the shortest and the longest match, at most `MAX_CONTEXT`, and links walked in each text; not
            validated.
        live: Another text with the output of the other rows, and the number of the text whose bit its nodes get.

    Example:
        >>> text = ChainIndex()
        >>> text.append([5, 6, 7, 8, 5, 6])
        >>> search = Search([text], HitRates(), None, (1, 16, 32))
        >>> trie = search.grow(3)
        >>> trie.tokens.tolist()
        [6, 7, 8, 5]
        >>> search.learn(text, trie, np.array([7], np.int32), NOT_VERIFIED, np.zeros(0, np.int32))
        >>> text.tokens.tolist()
        [-1, 5, 6, 7, 8, 5, 6, 7]
        >>> search = Search([], HitRates(), None, (1, 16, 32))
        >>> search.expect([np.array([1, 2, 3], np.int32)], source=0)
        >>> search.grow(2, context=np.array([9], np.int32)).tokens.tolist()
        [9, 1, 2]
    """

    __slots__ = ("_cursor", "_learned", "_texts", "record")

    def __init__(
        self,
        texts: Sequence[Chains],
        rates: HitRates,
        memory: SuccessorTable | None,
        bounds: tuple[int, int, int],
        live: tuple[Chains, int] = (_NO_TEXT, 0),
    ) -> None:
        self._texts = *texts, *(_NO_TEXT,) * (_NAMED_TEXTS - len(texts)), live[0], _NO_TEXT
        self._cursor = np.zeros(CURSOR_SIZE, np.int64)
        memory = memory if memory is not None else _NO_MEMORY
        self._learned = rates.table, rates.prior, rates.frequent, memory.entries, memory.now
        # Earlier entries of the memory are foreign.
        counts, bits = (len(memory.entries), memory.now[0]), (len(texts), live[1])
        # For compiled functions.
        self.record = np.array([*(0,) * _GROUPS, *counts, *bounds, *bits, 0, 0, 0], np.int64)
        self._readdress()

    def _readdress(self) -> None:
        self.record[:_GROUPS] = addresses_of([*(text.record for text in self._texts), *self._learned, self._cursor])

    def expect(self, predictions: Sequence[IntArray], source: int) -> None:
        """Set predictions of the output, int32 `[n]` each, before its first token, and the bit of their source."""
        text = ChainIndex()
        for prediction in predictions:
            text.append_documents(prediction)
        self._texts = *self._texts[:PREDICTED], text
        self._cursor[:], self.record[_PREDICTED_SOURCE] = 0, source
        self._cursor[0] = int(len(text) > 1)
        self._readdress()

    def leave_out(self, begin: int, end: int) -> None:
        """Exclude the row's own positions in the live text from the search."""
        self.record[_OWN_BEGIN], self.record[_OWN_END] = begin, end

    def grow(
        self,
        max_nodes: int,  # without the root, at least 1
        min_probability: float = 0.0,  # nodes less likely to be reached are left out
        context: IntArray | None = None,  # int32; its end is looked up. None: the open document of the first text
    ) -> Trie:
        """A tree of continuations; only its root if nothing was found."""
        options = context is None, max(min_probability, FLOOR), False
        nodes, probs = np.empty((4, max_nodes + 1), np.int32), np.empty(max_nodes + 1, np.float32)
        size = grow(self.record, _NONE if context is None else context, options, max_nodes, nodes, probs)
        nodes = nodes[:, :size]
        return Trie(nodes[0], nodes[1], probs[:size], nodes[2], nodes[3])

    def learn(self, text: ChainIndex, trie: Trie, emitted: IntArray, verified: Verified, placed: IntArray) -> None:
        """Learn from a step: count hits, store the target's likeliest tokens, and add the emitted tokens to the text.

        Args:
            text: Prompt and output of the row, which need not be a searched text.
            trie: The offered candidates.
            emitted: int32 `[n]`, the tokens of the step.
            verified: The verified tree and the target's likeliest tokens; `NOT_VERIFIED` to store nothing.
            placed: The node of that tree for each candidate, 0 if it was left out; empty if none was offered.
        """
        offered = trie.parents, trie.tokens, trie.features
        if not _learn(text.record, self.record, offered, emitted, verified, placed):
            text.append(emitted)
        if self._cursor[0]:
            follow(self._cursor, self._texts[PREDICTED].record, text.record, len(emitted))


@njit(error_model="numpy")
def _learn(text, record, trie, emitted, verified, placed):
    """The core of `Search.learn`; returns whether the text had room. Nothing is stored after copies of the text."""
    count_hits(rates_at(record[RATES:]), trie, emitted, True)
    _, tokens, top, _ = verified
    if tokens.size > 0:
        skipped = np.zeros(tokens.size, np.bool_)
        if placed.size > 0:  # copies are found in this text anyway, and would mislead in another
            skipped = copied(trie, placed, top[:, 0])
        arena, _, _, length = chains_at(text)
        memory = array_at(record[_ENTRIES], (record[_GROUPS], WAYS), ENTRY), array_at(record[_NOW], 1, np.int64)
        store_tree(memory, arena[:length], verified, skipped)
    return add(text, emitted)


@njit(error_model="numpy")
def grow(record, context, options, max_nodes, trie, probs):
    """Find matches and grow a tree of nodes by descending probability to be reached.

    The whole search is one compiled function, because across functions the compiler counts references to arrays.

    Args:
        record: int64 `[SIZE]`, `Search.record`.
        context: int32 `[n]`, whose end is looked up; unused if the end of the first text is looked up.
        options: Whether to look up the end of the first text, the minimum probability of a node to be reached, and
            whether to keep only the likeliest candidate after each node.
        max_nodes: Nodes without the root, at least 1.
        trie: int32 `[4, max_nodes + 1]`, filled with the token, parent, feature and sources of each node.
        probs: float32 `[max_nodes + 1]`, filled with the probability of each node given its parent.

    Returns:
        The number of nodes, including the root.

    Example:
        >>> text = ChainIndex()
        >>> text.append([5, 6, 7, 8, 5, 6])
        >>> search = Search([text], HitRates(), None, (1, 16, 32))
        >>> trie, probs = np.empty((4, 4), np.int32), np.empty(4, np.float32)
        >>> size = grow(search.record, np.zeros(0, np.int32), (True, FLOOR, False), 3, trie, probs)
        >>> trie[0, :size].tolist()
        [6, 7, 8, 5]
    """
    predicted = _chains_of(record, PREDICTED)
    texts = _chains_of(record, 0), _chains_of(record, 1), _chains_of(record, 2), _chains_of(record, _LIVE), predicted
    entries = array_at(record[_ENTRIES], (record[_GROUPS], WAYS), ENTRY)
    memory, own, walked = (entries, _RECYCLED_BIT, record[_SINCE]), options[0], record[_WALKED]
    shortest, longest = record[_SHORTEST], record[_LONGEST]
    bounds = shortest, longest, walked
    table, _, frequent = rates_at(record[RATES:])
    rates = table, frequent
    tail = texts[0][0][: texts[0][3]] if own else context
    most = _MAX_TEXTS * walked + MOST_ALIGNED + 1
    matches = np.empty(most, OCCURRENCE), np.empty((3, most), np.int64)
    nodes, size = np.zeros(max_nodes + 1, NODE), 1
    nodes[0]["prob"] = nodes[0]["path_prob"] = 1.0
    if tail.size > 0 and tail[-1] >= 0:
        count = 0
        for text in range(PREDICTED):
            left_out = (record[_OWN_BEGIN], record[_OWN_END]) if text == _LIVE else (0, 0)
            count = _find(texts[text], text, tail, bounds, left_out, matches, count)
            if own and memory[0].shape[0] > 1:  # recycled tokens are better evidence than short matches elsewhere
                bounds = (max(shortest, min(_SHORTEST_FOREIGN, longest)), longest, walked)
        count = _find_aligned(predicted, array_at(record[_CURSOR], (CURSOR_SIZE,), np.int64), tail, matches, count)
        nodes[0]["token"], nodes[0]["stop"] = tail[-1], count
        others = record[_SOURCE] > 0 or memory[0].shape[0] > 1  # else predictions are the only source
        size = _add_nodes(texts, memory, rates, tail, (*options, others), matches, nodes)
    for at in range(size):
        node = nodes[at]
        trie[0, at], trie[1, at], probs[at] = node["token"], node["parent"], node["prob"]
        trie[2, at], bits = node["feature"], node["sources"]
        trie[3, at] = bits & (1 << _LIVE) - 1 | (bits >> _LIVE & 1) << record[_LIVE_SOURCE]
        trie[3, at] |= (bits >> PREDICTED & 1) << record[_PREDICTED_SOURCE]
        trie[3, at] |= bits >> _RECYCLED_BIT << record[_SOURCE]
    return size


@jit_inline
def _chains_of(record, text):
    return chains_at(array_at(record[TEXT + text], (6,), np.int64))


@jit_inline
def _find(chains, text, tail, bounds, left_out, matches, count):
    """Find the end of the context in another text; returns the new number of occurrences.

    `orders[0]` lists them, longest matches first. Positions in `left_out` are skipped.
    """
    if chains[3] == 1:  # no tokens
        return count
    shortest, longest, walked = bounds
    occurrences, orders = matches
    positions, lengths = orders[1, :walked], orders[2, :walked]
    for match in range(find_matches(chains, tail, tail.size, shortest, longest, positions, lengths)):
        if left_out[0] <= positions[match] < left_out[1]:
            continue
        new = occurrences[count]
        new["text"], new["position"], new["length"] = text, positions[match], lengths[match]
        at = count
        while text > 0 and at > 0 and occurrences[orders[0, at - 1]]["length"] < new["length"]:
            orders[0, at] = orders[0, at - 1]
            at -= 1
        orders[0, at] = count
        count += 1
    return count


@jit_inline
def _find_aligned(chains, cursor, tail, matches, count):
    """Put continuations of predictions before the other occurrences; returns the new number of occurrences."""
    if cursor[0] == 0:
        return count
    occurrences, orders = matches
    aligned = occurrences[count:]
    size = find_aligned(chains, PREDICTED, cursor, tail, tail.size, aligned, orders[1:])
    for at in range(count - 1, -1, -1):
        orders[0, at + size] = orders[0, at]
    for at in range(size):
        orders[0, at] = count + at
    return count + size


@jit_inline
def _add_nodes(texts, memory, rates, tail, begin, matches, nodes):
    """Best first: turn the likeliest tip into a node and add the candidates after it; returns the number of nodes.

    At most as many tips are kept as nodes can still be made, so a scan for the best is as fast as a heap. Most
    candidates are no likelier than the least likely tip of a full list, so that tip is cached. For a chain only the
    likeliest candidate after each node is kept.
    """
    own, floor, is_chain, others = begin
    max_nodes = len(nodes) - 1
    recalls, orders, hashes = memory[0].shape[0] > 1, 0, np.empty(ORDERS, np.uint64)
    tips, tip_probs, options = np.empty(max_nodes, NODE), np.empty(max_nodes), np.empty(MAX_OPTIONS, NODE)
    live = 0
    for at_node in range(max_nodes):
        node = nodes[at_node]
        matched, longest, guessed = 0, 0, 0
        if node["stop"] > node["first"]:
            matched, longest, guessed = split(texts, own, matches, node, options)
        if recalls:
            orders = hash_context(tail, tail.size, nodes["token"], nodes["parent"], at_node, hashes)
        least, depth = floor / node["path_prob"] if others else _NEVER, node["depth"] + 1
        offered = score(least, depth, options, matched, longest, guessed, memory, hashes, orders, rates)
        if is_chain and offered > 0:
            best = 0
            for at_option in range(1, offered):
                if options[at_option]["prob"] > options[best]["prob"]:
                    best = at_option
            options[0], offered = options[best], 1
        room, worst = max_nodes - at_node, -1
        for at_option in range(offered):
            option = options[at_option]
            path_prob = option["prob"] * node["path_prob"]
            if path_prob < floor:
                continue
            at = live
            if live == room:
                worst = _least(tip_probs, live) if worst < 0 else worst
                if tip_probs[worst] >= path_prob:
                    continue
                at, worst = worst, -1
            live = max(live, at + 1)
            option["parent"], option["depth"], option["path_prob"] = at_node, node["depth"] + 1, path_prob
            tips[at], tip_probs[at] = option, path_prob
        if live == 0:
            return at_node + 1
        best = 0
        for at in range(1, live):
            if tip_probs[at] > tip_probs[best]:
                best = at
        live -= 1
        nodes[at_node + 1], tips[best], tip_probs[best] = tips[best], tips[live], tip_probs[live]
    return max_nodes + 1


@jit_inline
def _least(values, count):
    """The index of the first minimum."""
    least = 0
    for at in range(1, count):
        if values[at] < values[least]:
            least = at
    return least
