"""Trees of candidates for a context: the public functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.ngram.acceptance import HitRates
from lookahead.ngram.chains import MAX_CONTEXT, ChainIndex, Chains, IntArray, as_tokens
from lookahead.ngram.prune import FREE, NOTHING, Limits
from lookahead.ngram.raw_arrays import RawArrays
from lookahead.ngram.recycled import RecycledTable
from lookahead.ngram.trie import MOST_TEXTS, SEARCH_POINTERS, Grown, Trie, propose

MAX_NODES = 1 << 10
_FLOOR = 0.0001
_MAX_LINKS = 1 << 12
_NO_TEXT = ChainIndex()
_NO_TAIL = np.zeros(0, np.int32)
_NO_MEMORY = RecycledTable(contexts=4)


class Search(RawArrays):
    """The texts, tables and bounds of a search, set up once, so that a step passes only what is new.

    Args:
        texts: As for `grow_trie`, not checked here.
        rates: As for `grow_trie`.
        memory: As for `grow_trie`.
        bounds: `min_ngram`, `max_ngram` and `max_links`.
    """

    __slots__ = ("_searched",)

    def __init__(
        self, texts: Sequence[Chains], rates: HitRates, memory: RecycledTable | None, bounds: tuple[int, int, int]
    ) -> None:
        super().__init__(SEARCH_POINTERS)
        memory = memory if memory is not None else _NO_MEMORY
        self._searched = (*texts, rates, memory)  # keeps alive what the addresses point to
        addresses = [text.address for text in texts] + [_NO_TEXT.address] * (MOST_TEXTS - len(texts))
        self._pointers[:] = (*addresses, memory.address, rates.address, *bounds, len(texts))

    def grow(
        self,
        max_nodes: int,
        min_probability: float,
        limits: Limits = NOTHING,
        costs: NDArray[np.float64] = FREE,
        context: IntArray | None = None,
    ) -> Grown:
        """`grow_trie` for every step: arguments are not checked, and the part worth verifying is selected.

        Args:
            max_nodes: At most `MAX_NODES`.
            min_probability: As for `grow_trie`.
            limits: Limits of the selected part.
            costs: float64 `[limits.max_nodes + 2]` or longer, the cost of a step with so many nodes, the root counted;
                empty where nodes are free.
            context: As for `grow_trie`, int32. There is at least one text if it is None.
        """
        tail = _NO_TAIL if context is None else context
        floor = min_probability if min_probability > _FLOOR else _FLOOR
        return Grown(*propose(self.address, max_nodes, tail, context is None, floor, *limits, costs))


def grow_trie(
    texts: Sequence[Chains],
    rates: HitRates,
    max_nodes: int,
    *,
    memory: RecycledTable | None = None,
    context: Sequence[int] | IntArray | None = None,
    min_ngram: int = 1,
    max_ngram: int = 16,
    max_links: int = 32,
    min_probability: float = 0.0,
) -> Trie | None:
    """Merge earlier continuations of a context and the target's recycled tokens into a tree, likeliest paths first.

    Occurrences of all texts are followed side by side while they agree, each up to the end of its document. One that
    reaches the end of the open document goes on with the path itself, so that a loop goes on as a loop. The recycled
    table is looked up at every node. Offers of the same token after the same node are one candidate; its probability is
    the hit rate of its features.

    Args:
        texts: Texts to search, at most three.
        rates: Hit rates of features.
        max_nodes: Most nodes besides the root.
        memory: Recycled tokens of the target.
        context: Tokens whose end is looked up; `None` means the open document of the first text.
        min_ngram: Shortest match, in tokens, at least 1.
        max_ngram: Longest context compared, in tokens, from `min_ngram` to 64.
        max_links: Most chain links walked in each text, at least 1.
        min_probability: Nodes less likely to be reached than this are left out.

    Returns:
        The tree, or `None` if nothing was found or `max_nodes` is below 1.

    Raises:
        TypeError: `context` does not hold whole numbers.
        ValueError: An argument is out of its range, or there are too many texts.

    Example:
        >>> text = ChainIndex()
        >>> text.append([5, 6, 7, 8, 5, 6])
        >>> grow_trie([text], HitRates(), max_nodes=3).tokens.tolist()
        [6, 7, 8, 5]
    """
    if not 1 <= min_ngram <= max_ngram <= MAX_CONTEXT:
        raise ValueError(f"need 1 <= min_ngram <= max_ngram <= {MAX_CONTEXT}, got {min_ngram} and {max_ngram}")
    if not 1 <= max_links <= _MAX_LINKS:
        raise ValueError(f"max_links must be from 1 to {_MAX_LINKS}, got {max_links}")
    if len(texts) > MOST_TEXTS:
        raise ValueError(f"at most {MOST_TEXTS} texts are searched, got {len(texts)}")
    if max_nodes < 1 or (context is None and not texts):
        return None
    search = Search(texts, rates, memory, (min_ngram, max_ngram, max_links))
    grown = search.grow(
        min(max_nodes, MAX_NODES), min_probability, context=None if context is None else as_tokens(context)
    )
    return grown.trie if grown.written.shape[1] > 1 else None
