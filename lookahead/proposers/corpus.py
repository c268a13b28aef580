"""Drafts copied from a corpus of the user's, kept in a pool file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lookahead.ngram.chains import MAX_CONTEXT
from lookahead.ngram.hits import HitRates
from lookahead.ngram.pool import Pool
from lookahead.ngram.trie import Trie, grow_trie
from lookahead.proposers.base import IntArray, Outcome, Proposal


@dataclass(slots=True)
class _Row:
    """The newest tokens of one row, and what it proposed last."""

    tail: IntArray
    trie: Trie | None = None


class CorpusProposer:
    """Proposes what follows the last tokens in a pool.

    How far a match can be trusted is learned from every step of every row, and outlives the rows; the pool stays as
    it is.

    Args:
        pool: The corpus, of token ids that the target model knows.
        min_ngram: Shortest context looked up, in tokens, at least 1.
        max_ngram: Longest context compared, in tokens, from `min_ngram` to 64.
        rates: What is known of candidates already, and where more is learned; the first guesses when None.

    Raises:
        ValueError: An n-gram length is out of its range.

    Source: He et al. 2024, "REST: Retrieval-Based Speculative Decoding", §3 (drafts from a datastore, merged by
        prefix).
    """

    name = "corpus"
    needs_argmax = False

    def __init__(self, pool: Pool, min_ngram: int = 1, max_ngram: int = 16, rates: HitRates | None = None) -> None:
        if not 1 <= min_ngram <= max_ngram <= MAX_CONTEXT:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram <= {MAX_CONTEXT}, got {min_ngram!r} and {max_ngram!r}")
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self._pool = pool
        self._rates = rates if rates is not None else HitRates()
        self._rows: dict[int, _Row] = {}

    def start(self, row: int, prompt: IntArray) -> None:
        """Remember the end of a new row's prompt."""
        self._rows[row] = _Row(prompt[-self.max_ngram :])

    def propose(self, row: int, room: int) -> Proposal | None:
        """Offer what follows the row's last tokens in the pool, at most `room` nodes besides the root."""
        state = self._rows[row]
        trie = grow_trie(
            self._pool, self._rates, room, context=state.tail, min_ngram=self.min_ngram, max_ngram=self.max_ngram
        )
        state.trie = trie
        if trie is None:
            return None
        return Proposal(tokens=trie.tokens, parents=trie.parents, probabilities=trie.probabilities)

    def observe(self, row: int, outcome: Outcome, placed: IntArray) -> None:
        """Learn which candidates were right, and move on to the new end."""
        state = self._rows[row]
        if state.trie is not None:
            self._rates.learn(state.trie.parents, state.trie.tokens, state.trie.features, outcome.tokens)
            state.trie = None
        state.tail = np.concatenate((state.tail, outcome.tokens))[-self.max_ngram :]

    def finish(self, row: int) -> None:
        """Forget the row; what was learned stays."""
        del self._rows[row]
