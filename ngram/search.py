"""Where a context is looked up at every step."""

from __future__ import annotations

from collections.abc import Sequence
from threading import local

import numpy as np
from numpy.typing import NDArray

from lookahead.ngram.acceptance import HitRates
from lookahead.ngram.chains import MAX_CONTEXT, ChainIndex, Chains, IntArray, as_tokens
from lookahead.ngram.prune import FREE, NOTHING, Limits
from lookahead.ngram.raw_arrays import Placed
from lookahead.ngram.recycled import RecycledTable
from lookahead.ngram.trie import MOST_TEXTS, SEARCH_PLACES, Grown, Trie, propose, space_needed

MAX_ROOM = 1 << 10
_FLOOR = 0.0001
_MAX_LINKS = 1 << 12
_NO_TEXT = ChainIndex()
_NO_TAIL = np.zeros(0, np.int32)
_NO_MEMORY = RecycledTable(contexts=4)


class _Space(local):
    """Memory a tree is grown in, one for each thread: making it anew would take as long as finding matches."""

    size = 0

    def __init__(self) -> None:
        self.at_least(1 << 15)

    def at_least(self, size: int) -> int:
        """Where as many int64 lie, or more."""
        if self.size < size:
            self.size, self.numbers = size, np.zeros(size, np.int64)
            self.address = int(self.numbers.ctypes.data)
        return self.address


_space = _Space()


class Search(Placed):
    """What contexts are looked up in, and how: made once, so that a step need tell nothing but what is new.

    Args:
        texts: As `grow_trie` takes them, and not checked here.
        rates: As there.
        memory: As there.
        bounds: `min_ngram`, `max_ngram` and `max_links`.
    """

    __slots__ = ("_links", "_room", "_searched", "_space")

    def __init__(
        self, texts: Sequence[Chains], rates: HitRates, memory: RecycledTable | None, bounds: tuple[int, int, int]
    ) -> None:
        super().__init__(SEARCH_PLACES)
        memory = memory if memory is not None else _NO_MEMORY
        self._searched = (*texts, rates, memory)  # they must live as long as their addresses are told
        addresses = [text.address for text in texts] + [_NO_TEXT.address] * (MOST_TEXTS - len(texts))
        self._places[:] = (*addresses, memory.address, rates.address, *bounds, len(texts))
        self._links = bounds[2]
        self._room = self._space = 0

    def grow(
        self,
        room: int,
        min_probability: float,
        limits: Limits = NOTHING,
        costs: NDArray[np.float64] = FREE,
        context: IntArray | None = None,
    ) -> Grown:
        """`grow_trie` for those who call it at every step: arguments are not checked, and a part is cut from the tree.

        Args:
            room: As there, at most `MAX_ROOM`.
            min_probability: As there.
            limits: What part of the tree is cut: of all that may be kept the likeliest nodes, as many as give the
                most expected tokens per cost.
            costs: float64 `[budget + 2]` or longer, what a step with that many nodes costs, the root counted; empty
                where nodes are free.
            context: As there, int32; at least one text where it is None.
        """
        if room != self._room:
            self._room, self._space = room, space_needed(self._links, room)
        space = _space.address if self._space <= _space.size else _space.at_least(self._space)
        tail = _NO_TAIL if context is None else context
        floor = min_probability if min_probability > _FLOOR else _FLOOR
        return Grown(*propose(self.address, space, room, tail, context is None, floor, *limits, costs))


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
    min_probability: float = 0.0,
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
        min_probability: Nodes less likely to be reached than this are left out.

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
    if not 1 <= max_links <= _MAX_LINKS:
        raise ValueError(f"max_links must be from 1 to {_MAX_LINKS}, got {max_links}")
    if len(texts) > MOST_TEXTS:
        raise ValueError(f"at most {MOST_TEXTS} texts are searched, got {len(texts)}")
    if room < 1 or (context is None and not texts):
        return None
    search = Search(texts, rates, memory, (min_ngram, max_ngram, max_links))
    grown = search.grow(min(room, MAX_ROOM), min_probability, context=None if context is None else as_tokens(context))
    return grown.trie if grown.written.shape[1] > 1 else None
