"""Chain drafts for many requests of an engine that verifies chains: no model, no torch, shared memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.ngram.chains import LENGTH, SEPARATOR, ChainIndex, Chains, IntArray, add, as_tokens, chains_at
from lookahead.ngram.hit_rates import HitRates, count_hits, rates_at
from lookahead.ngram.search import FLOOR, RATES, SIZE, TEXT, Search, grow
from lookahead.utils.addresses import KeepsAddresses, addresses_of, array_at
from lookahead.utils.jit import njit

_MAX_DRAFT_TOKENS = 1024
_SHORTEST, _LONGEST, _MAX_LINKS = 1, 16, 32  # tokens of a match; links walked in each text
_CONTEXT = 16  # tokens before an output that are kept with it, so that its start is found too
_YES = np.bool_(True)  # Numba compiles a function again for `True`
# The record of a request, int64: addresses of its search, its chain and the chain's probabilities; the nodes that these
# have room for, and the nodes of the newest chain, including its root; and the tokens of the text that the shared
# memory has or does not need, initially those of the prompt.
_SEARCH, _CHAIN, _PROBS, _ROOM, _DRAFTED, _KEPT = range(6)
SAMPLES = 16  # tokens compared at the end of a known text, and at least as many spread over it
NEVER = 1 << 62


class ChainRequest(KeepsAddresses):
    """One request: its text, its search, and the newest chain.

    Example:
        >>> request = ChainProposer(max_draft=4).start(np.array([5, 6, 7], np.int32))
        >>> len(request), request.text.tokens.tolist()
        (3, [-1, 5, 6, 7])
    """

    __slots__ = ("_chain", "_record", "_search", "address", "text")

    def __init__(self, text: ChainIndex, search: Search, max_draft: int) -> None:
        self.text = text  # prompt and output, one open document
        self._search = search
        self._chain = np.zeros((4, max_draft + 1), np.int32), np.zeros(max_draft + 1, np.float32)
        self._record = np.array([*(0,) * _ROOM, max_draft + 1, 0, len(self)], np.int64)
        self._readdress()

    def _readdress(self) -> None:
        self._record[:_ROOM] = addresses_of([self._search.record, *self._chain])
        (self.address,) = addresses_of([self._record])  # for compiled functions

    def __len__(self) -> int:
        """Tokens of the prompt and the output so far."""
        return len(self.text) - 1


class ChainProposer:
    """Drafts chains from the text of a request, from earlier outputs, and from a pool.

    A chain follows the likeliest candidate after each token. Hit rates are learned from every request, so the
    probability that a chain is accepted up to each token is known before verification.

    Example:
        >>> proposer = ChainProposer(max_draft=4)
        >>> request = proposer.start(np.array([5, 6, 7, 8, 9, 5, 6], np.int32))
        >>> proposer.draft(request, 2)[0].tolist()
        [7, 8]
        >>> proposer.observe(request, np.array([7, 1], np.int32))
        >>> text = np.array([[5, 6, 7, 8, 9, 5, 6, 7, 1, 8]], np.int32)  # `observe` and `draft` in one
        >>> chains, _, sizes = proposer.step([request], text, np.array([10]), longest=12)
        >>> chains[0, : sizes[0]].tolist()
        [9, 5]
        >>> proposer.finish(request)
    """

    def __init__(
        self,
        max_draft: int,  # tokens of a chain, 1 to 1,024
        *,
        memory_tokens: int = 1 << 20,  # of earlier outputs; if full, the oldest half is dropped
        pool: Chains | None = None,  # a corpus, of token ids that the target knows
        min_probability: float = 0.02,  # a chain ends before a token that is less likely than this to be reached
    ) -> None:
        if not 1 <= max_draft <= _MAX_DRAFT_TOKENS:
            raise ValueError(f"max_draft must be from 1 to {_MAX_DRAFT_TOKENS}, got {max_draft}")
        self.max_draft = max_draft
        self.min_probability = min_probability
        self.rates = HitRates()
        self.outputs = ChainIndex(memory_tokens)
        self._most_kept = memory_tokens // 2  # of one output
        self._shared: list[Chains] = [self.outputs] if pool is None else [self.outputs, pool]

    def start(self, prompt: IntArray) -> ChainRequest:
        """Index the prompt of a new request, int32 `[n]`."""
        text = ChainIndex()
        text.append(prompt)
        search = Search([text, *self._shared], self.rates, None, (_SHORTEST, _LONGEST, _MAX_LINKS))
        return ChainRequest(text, search, self.max_draft)

    def draft(self, request: ChainRequest, most: int) -> tuple[IntArray, NDArray[np.float64]]:
        """Draft at most `most` tokens, int32 `[n]`, with the probability that each is reached, float64 `[n]`."""
        chains, path_probs, sizes = self._step_alone(request, [], most, NEVER)
        return chains[0, : sizes[0]], path_probs[0, : sizes[0]]

    def observe(self, request: ChainRequest, tokens: IntArray) -> None:
        """Add tokens chosen by the target, int32 `[n]`, and learn which of the last chain were right."""
        self._step_alone(request, tokens, 0, NEVER)

    def finish(self, request: ChainRequest) -> None:
        """Keep the output of a request for later requests. It may be continued and finished again."""
        self._step_alone(request, [], 0, 1)

    def _step_alone(
        self, request: ChainRequest, new: Sequence[int] | IntArray, most: int, shared: int
    ) -> tuple[IntArray, NDArray[np.float64], list[int]]:
        tokens = np.concatenate((request.text.tokens[1:], as_tokens(new)))
        return self.step([request], tokens[None], np.array([tokens.size]), tokens.size + most, shared)

    def step(
        self,
        requests: Sequence[ChainRequest | None],
        tokens: IntArray,
        counts: NDArray[np.int64],
        longest: int,
        shared: int = NEVER,
    ) -> tuple[IntArray, NDArray[np.float64], list[int]]:
        """`observe`, `finish` and `draft` for each row in order, in one compiled call.

        Args:
            requests: The request of each row; None to skip a row.
            tokens: int32 `[rows or more, columns]`.
            counts: int64 `[rows]`, the tokens of each row.
            longest: Maximum tokens of a row with its chain.
            shared: Tokens of an output from which it is kept before it ends.

        Returns:
            Chains, int32 `[rows, max_draft]`; the probability that each of their tokens is reached, 0 after their ends;
            and their lengths. A length of -1 marks a row with a negative token, which is left unchanged. If a row does
            not begin with the text of its request, no row is changed and the lengths are empty.
        """
        rows, row = len(requests), 0
        addresses = np.array([0 if request is None else request.address for request in requests], np.int64)
        path_probs, sizes = np.zeros((rows, self.max_draft)), np.zeros(rows, np.int64)
        chains = np.empty((rows, self.max_draft), np.int32)
        options = self.outputs.record, self._most_kept, shared, longest, max(self.min_probability, FLOOR)
        while row < rows:
            row, in_text, in_outputs = _step((addresses, tokens, counts), row, options, chains, path_probs, sizes)
            if row < 0:
                return chains, path_probs, []
            if in_text:
                requests[row].text.make_room(in_text)
            if in_outputs:
                self.outputs.make_room(in_outputs)
        return chains, path_probs, sizes.tolist()


@njit(error_model="numpy")
def _step(texts, begin, options, chains, path_probs, sizes):
    """The core of `ChainProposer.step`; returns the next row to process, or -1 if a row is not its request's.

    If it runs out of room, it also returns the entries missing in the text of that row, and in the outputs.
    """
    (addresses, tokens, counts), (outputs, most_kept, shared, longest, floor) = texts, options
    for row in range(addresses.size if begin == 0 else 0):
        if addresses[row] != 0 and not begins(addresses[row], tokens[row], counts[row], SAMPLES):
            return -1, 0, 0
    for row in range(begin, addresses.size):
        if addresses[row] == 0:
            continue
        request = array_at(addresses[row], (6,), np.int64)
        search = array_at(request[_SEARCH], (SIZE,), np.int64)
        text = array_at(search[TEXT], (6,), np.int64)
        nodes = array_at(request[_CHAIN], (4, request[_ROOM]), np.int32)
        probs = array_at(request[_PROBS], (request[_ROOM],), np.float32)
        new = tokens[row, text[LENGTH] - 1 : counts[row]]
        if new.size > 0 and new.min() < 0:
            sizes[row] = -1
            continue
        if not add(text, new):
            return row, new.size, 0
        drafted = request[_DRAFTED]
        trie = nodes[1][:drafted], nodes[0][:drafted], nodes[2][:drafted]
        count_hits(rates_at(search[RATES:]), trie, new, _YES)
        request[_DRAFTED] = 0
        arena, length = chains_at(text)[0], text[LENGTH]
        if length - 1 >= request[_KEPT] + shared:
            is_closed = chains_at(outputs)[0][outputs[LENGTH] - 1] == SEPARATOR
            if not is_closed and not add(outputs, arena[:1]):  # a separator
                return row, 0, 1
            kept = arena[max(1, 1 + request[_KEPT] - _CONTEXT, length - most_kept) : length]
            if not add(outputs, kept):
                return row, 0, kept.size
            request[_KEPT] = length - 1
        most = min(longest - counts[row], request[_ROOM] - 1)
        if most > 0:
            size = grow(search, arena[:0], (_YES, floor, _YES), most, nodes, probs)
            request[_DRAFTED], sizes[row] = size, size - 1
            path_prob = 1.0
            for at in range(1, size):
                path_prob *= probs[at]
                chains[row, at - 1], path_probs[row, at - 1] = nodes[0, at], path_prob
    return addresses.size, 0, 0


@njit(error_model="numpy")
def begins(address, tokens, count, samples):
    """Whether a row begins with a request's text, judging by `samples` spread tokens and as many of the last ones.

    Example:
        >>> request = ChainProposer(max_draft=4).start(np.array([5, 6, 7], np.int32))
        >>> begins(request.address, np.array([5, 6, 7, 8], np.int32), 4, SAMPLES)
        True
        >>> begins(request.address, np.array([5, 6, 8, 8], np.int32), 4, SAMPLES)
        False
    """
    search = array_at(array_at(address, (6,), np.int64)[_SEARCH], (SIZE,), np.int64)
    text = array_at(search[TEXT], (6,), np.int64)
    arena, size, at = chains_at(text)[0], text[LENGTH] - 1, 0
    if size > count:
        return False
    while at < size and tokens[at] == arena[1 + at]:
        at = min(at + max(1, size // samples), max(at + 1, size - samples))
    return at >= size
