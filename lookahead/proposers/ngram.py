"""Drafts from all that can be had without a draft model: the row's text, earlier outputs, the target's own logits."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.proposal import Feedback, IntArray, Proposal
from lookahead.drafting.select import Draft
from lookahead.drafting.tree import TokenTree
from lookahead.ngram.acceptance import HitRates, copied
from lookahead.ngram.chains import MAX_CONTEXT, ChainIndex, Chains
from lookahead.ngram.pool_file import Pool
from lookahead.ngram.prune import FREE, NOTHING, Limits
from lookahead.ngram.recycled import ORDERS, RecycledTable
from lookahead.ngram.search import MAX_NODES, Search
from lookahead.ngram.trie import PART, PLACED, Grown

SOURCES = ("prompt", "outputs", "corpus", "recycled")
_MAX_LINKS = 32  # walked in each text
_OUTPUT_TOKENS = 1 << 20  # of earlier outputs; the oldest half is forgotten when they are full


class Memory:
    """What requests leave behind for those that come later, in bounded space.

    Attributes:
        outputs: The texts of finished requests: at most 1,048,576 tokens.
        recycled: What the target thought likely after contexts: 262,144 of them, 16 MiB.
    """

    __slots__ = ("outputs", "recycled")

    def __init__(self) -> None:
        self.outputs = ChainIndex(max_tokens=_OUTPUT_TOKENS)
        self.recycled = RecycledTable()


@dataclass(slots=True)
class _NgramRow:
    """One row's text, all that it is looked up in, and what it proposed last."""

    text: ChainIndex
    search: Search
    grown: Grown | None = None


class MixtureProposer:
    """Proposes what followed the last tokens before, and what the target thought likely after them.

    Four sources serve one tree (`lookahead.ngram.search.grow_trie`): `"prompt"` finds earlier occurrences in the
    row's prompt and output, `"outputs"` in what earlier requests left, `"corpus"` in a pool, `"recycled"` the
    target's likeliest tokens after the last four, three, two or one tokens, at every node of the tree. How far
    each combination of evidence can be trusted is learned from every step of every row, and outlives the rows.

    Args:
        sources: Which of the four.
        memory: What earlier requests left, and where this one leaves its own; an empty one when None.
        rates: What is known of candidates already, and where more is learned; the first guesses when None.
        pool: The corpus, of token ids that the target model knows; it stays as it is.
        min_ngram: Shortest context looked up, in tokens, at least 1.
        max_ngram: Longest context compared, in tokens, from `min_ngram` to 64.
        min_probability: Candidates less likely to be reached than this are not offered.

    Raises:
        ValueError: An n-gram length is out of its range, a source is unknown, or there is a corpus but no pool.

    Source: Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, "Inference with Reference: Lossless
        Acceleration of Large Language Models", §3 (copying from a reference, verified by the target); Luo et al.
        2024, "Token Recycling", §3; He et al. 2024, "REST: Retrieval-Based Speculative Decoding", §3 (a corpus).
    """

    needs_argmax = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        sources: Sequence[str] = ("prompt", "outputs", "recycled"),
        memory: Memory | None = None,
        rates: HitRates | None = None,
        pool: Pool | None = None,
        *,
        min_ngram: int = 1,
        max_ngram: int = 16,
        min_probability: float = 0.0,
    ) -> None:
        if not 1 <= min_ngram <= max_ngram <= MAX_CONTEXT:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram <= {MAX_CONTEXT}, got {min_ngram!r} and {max_ngram!r}")
        self.sources = tuple(name for name in SOURCES if name in sources)
        if len(self.sources) != len(sources) or not sources:
            raise ValueError(f"sources must be some of {', '.join(SOURCES)}, got {', '.join(sources)}")
        if "corpus" in sources and pool is None:
            raise ValueError("the source corpus needs a pool")
        self.needs_top = "recycled" in sources
        self._from_prompt = "prompt" in sources
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self.min_probability = min_probability
        self._pool = pool if "corpus" in sources else None
        self._memory = memory if memory is not None else Memory()
        self._recycled = self._memory.recycled if self.needs_top else None
        self._rates = rates if rates is not None else HitRates()
        self._rows: dict[int, _NgramRow] = {}

    def start(self, row: int, prompt: IntArray) -> None:
        """Index the prompt of a new row."""
        text = ChainIndex()
        text.append(prompt)
        texts: list[Chains] = [text] if self._from_prompt else []
        if "outputs" in self.sources:
            texts.append(self._memory.outputs)
        if self._pool is not None:
            texts.append(self._pool)
        bounds = (self.min_ngram, self.max_ngram, _MAX_LINKS)
        self._rows[row] = _NgramRow(text, Search(texts, self._rates, self._recycled, bounds))

    def propose(self, row: int, room: int) -> Proposal | None:
        """Offer what may follow the row's last tokens, at most `room` nodes besides the root."""
        if room < 1:
            return None
        trie = self._grow(self._rows[row], room).trie
        return Proposal(trie.tokens, trie.parents, trie.probabilities, trie.sources) if len(trie.tokens) > 1 else None

    def draft(self, row: int, room: int, limits: Limits, costs: NDArray[np.float64]) -> Draft:
        """Propose, with room for a node at least, and cut the proposal to a draft."""
        written, reach = self._grow(self._rows[row], room, limits, costs)
        tokens, parents, depths, sources, required = written[PART:, : reach.size]
        return Draft(TokenTree(tokens, parents, depths, sources), (written[PLACED],), reach, required)

    def _grow(self, state: _NgramRow, room: int, limits: Limits = NOTHING, costs: NDArray[np.float64] = FREE) -> Grown:
        """What may follow, remembered until it is known what did."""
        if self._pool is not None and not self._pool.is_intact:
            warnings.warn(f"{self._pool.path}: changed while it was in use; no more is drafted from it", stacklevel=2)
            self._pool = None
        context = None if self._from_prompt else state.text.tokens[1:][-self.max_ngram :]
        room = room if room < MAX_NODES else MAX_NODES
        state.grown = state.search.grow(room, self.min_probability, limits, costs, context)
        return state.grown

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        """Learn which candidates were right and what the target thinks now, and index the emitted tokens."""
        state = self._rows[row]
        trie = state.grown.trie if state.grown is not None else None
        if trie is not None:
            self._rates.learn(trie.parents, trie.tokens, trie.features, feedback.tokens)
        if self._recycled is not None and feedback.top is not None:
            tree, top, skipped = feedback.top.tree, feedback.top, None
            if trie is not None and placed.size:
                # What is copied from this text is found in it, and in another text it would mislead.
                skipped = copied(trie.parents, trie.tokens, trie.features, placed, top.tokens[:, 0])
            before = state.text.tokens[-ORDERS:]
            self._recycled.store(before, tree.parents, tree.tokens, top.tokens, top.probabilities, skipped)
        state.grown = None
        self._rates.count(feedback.tokens)
        state.text.append(feedback.tokens)

    def finish(self, row: int) -> None:
        """Forget the row; what was learned stays, and so does its text where earlier outputs are a source."""
        text = self._rows.pop(row).text
        if "outputs" in self.sources:
            self._memory.outputs.end_document()
            self._memory.outputs.append(text.tokens[1:])
