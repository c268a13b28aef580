"""Drafts copied from the prompt and the output so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from lookahead.ngram.chains import MAX_CONTEXT, ChainIndex
from lookahead.ngram.hits import HitRates
from lookahead.ngram.trie import Trie, grow_trie
from lookahead.proposers.base import IntArray, Outcome, Proposal


@dataclass(slots=True)
class _Row:
    """One row's index, and what it proposed last."""

    index: ChainIndex = field(default_factory=ChainIndex)
    trie: Trie | None = None


class PromptProposer:
    """Proposes what followed earlier occurrences of the last tokens, in the prompt or in the output.

    Several occurrences are merged by prefix into one tree. How far a match of a given length, rank and agreement
    can be trusted is learned from every step of every row, and outlives the rows.

    Args:
        min_ngram: Shortest context looked up, in tokens, at least 1.
        max_ngram: Longest context compared, in tokens, from `min_ngram` to 64.
        rates: What is known of candidates already, and where more is learned; the first guesses when None.

    Raises:
        ValueError: An n-gram length is out of its range.

    Source: Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, "Inference with Reference: Lossless
        Acceleration of Large Language Models", §3 (copying from a reference, verified by the target).
    """

    name = "prompt"
    needs_argmax = False

    def __init__(self, min_ngram: int = 1, max_ngram: int = 16, rates: HitRates | None = None) -> None:
        if not 1 <= min_ngram <= max_ngram <= MAX_CONTEXT:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram <= {MAX_CONTEXT}, got {min_ngram!r} and {max_ngram!r}")
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self._rates = rates if rates is not None else HitRates()
        self._rows: dict[int, _Row] = {}

    def start(self, row: int, prompt: IntArray) -> None:
        """Index the prompt of a new row."""
        self._rows[row] = _Row()
        self._rows[row].index.append(prompt)

    def propose(self, row: int, room: int) -> Proposal | None:
        """Offer what followed the row's last tokens before, at most `room` nodes besides the root."""
        state = self._rows[row]
        trie = grow_trie(state.index, self._rates, room, min_ngram=self.min_ngram, max_ngram=self.max_ngram)
        state.trie = trie
        if trie is None:
            return None
        return Proposal(tokens=trie.tokens, parents=trie.parents, probabilities=trie.probabilities)

    def observe(self, row: int, outcome: Outcome, placed: IntArray) -> None:
        """Index the emitted tokens, and learn from them which candidates were right."""
        state = self._rows[row]
        if state.trie is not None:
            self._rates.learn(state.trie.parents, state.trie.tokens, state.trie.features, outcome.tokens)
            state.trie = None
        state.index.append(outcome.tokens)

    def finish(self, row: int) -> None:
        """Forget the row; what was learned stays."""
        del self._rows[row]
