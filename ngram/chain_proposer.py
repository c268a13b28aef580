"""Chains for many requests of an engine that verifies chains: no model, no torch, and memory that requests share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lookahead.ngram.acceptance import HitRates
from lookahead.ngram.chains import ChainIndex, Chains, IntArray
from lookahead.ngram.search import NO_CANDIDATES, Search, Trie

_MOST_DRAFTED = 1024
_SHORTEST, _LONGEST, _MAX_LINKS = 1, 16, 32  # tokens of a match; links walked in each text
_CONTEXT = 16  # tokens before an output that are kept with it, so that its beginning is found too


@dataclass(slots=True, eq=False)
class ChainRequest:
    """One request: its text, its search, and the chain drafted last."""

    text: ChainIndex  # prompt and output, one open document
    search: Search
    kept: int  # tokens of the text that the shared memory has or does not need; at first those of the prompt
    drafted: Trie = NO_CANDIDATES

    def __len__(self) -> int:
        """Tokens of the prompt and the output so far."""
        return len(self.text) - 1


class ChainProposer:
    """Drafts chains from the text of a request, from outputs of earlier ones, and from a pool.

    A chain follows the likeliest candidate after each token. Hit rates of candidates are learned from every request, so
    the probability of a chain to be accepted up to each of its tokens is known before it is verified.

    Example:
        >>> proposer = ChainProposer(max_draft=4)
        >>> request = proposer.start(np.array([5, 6, 7, 8, 9, 5, 6], np.int32))
        >>> proposer.draft(request, 2)[0].tolist()
        [7, 8]
        >>> proposer.observe(request, np.array([7, 1], np.int32))
        >>> proposer.finish(request)
    """

    def __init__(
        self,
        max_draft: int,  # tokens of a chain, 1 to 1,024
        *,
        memory_tokens: int = 1 << 20,  # of earlier outputs; the oldest half is forgotten when they are full
        pool: Chains | None = None,  # a corpus, of token ids that the target knows
        min_probability: float = 0.02,  # a chain ends before a token that is less likely than this to be reached
    ) -> None:
        if not 1 <= max_draft <= _MOST_DRAFTED:
            raise ValueError(f"max_draft must be from 1 to {_MOST_DRAFTED}, got {max_draft}")
        self.max_draft = max_draft
        self.min_probability = min_probability
        self.rates = HitRates()
        self.outputs = ChainIndex(memory_tokens)
        self._shared: list[Chains] = [self.outputs] if pool is None else [self.outputs, pool]

    def start(self, prompt: IntArray) -> ChainRequest:
        """Index the prompt of a new request, int32 `[n]`."""
        text = ChainIndex()
        text.append(prompt)
        search = Search([text, *self._shared], self.rates, None, (_SHORTEST, _LONGEST, _MAX_LINKS))
        return ChainRequest(text, search, len(prompt))

    def draft(self, request: ChainRequest, most: int) -> tuple[IntArray, NDArray[np.float64]]:
        """Draft at most `most` tokens, int32 `[n]`, with the probability that each is reached, float64 `[n]`."""
        most = min(most, self.max_draft)
        request.drafted = chain = (
            request.search.grow(most, self.min_probability, is_chain=True) if most > 0 else NO_CANDIDATES
        )
        return chain.tokens[1:], np.cumprod(chain.probabilities[1:], dtype=np.float64)

    def observe(self, request: ChainRequest, tokens: IntArray) -> None:
        """Add tokens that the target chose, int32 `[n]`, and learn how far the last chain foretold them."""
        request.text.append(tokens)
        chain = request.drafted
        self.rates.learn(chain.parents, chain.tokens, chain.features, tokens, counts=True)
        request.drafted = NO_CANDIDATES

    def finish(self, request: ChainRequest) -> None:
        """Keep the output of a request for later ones. The request may go on afterwards, and finish again."""
        if len(request) > request.kept:
            self.outputs.end_document()
            self.outputs.append(request.text.tokens[1 + max(0, request.kept - _CONTEXT) :])
            request.kept = len(request)
        request.drafted = NO_CANDIDATES
