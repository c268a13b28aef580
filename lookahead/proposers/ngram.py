"""Drafts without a model: from the text of the row, earlier outputs, a corpus, and the target's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lookahead.drafting.proposal import Feedback, IntArray, Proposal, Proposer
from lookahead.errors import warn
from lookahead.ngram.chains import ChainIndex, Chains, LiveOutputs
from lookahead.ngram.hit_rates import HitRates
from lookahead.ngram.pool_file import Pool
from lookahead.ngram.search import NO_CANDIDATES, NOT_VERIFIED, Search, Trie
from lookahead.ngram.successors import SuccessorTable

SOURCES = ("prompt", "outputs", "corpus", "recycled")
PREDICTION = "prediction"
_LONGEST_KEY = 16  # tokens of the longest context compared
_MAX_LINKS = 32  # links walked in each text
OUTPUT_TOKENS = 1 << 20  # of earlier outputs; the oldest half is dropped when they are full


@dataclass(slots=True)
class Memory:
    """Texts of finished requests, and the target's most likely tokens after 262,144 contexts (16 MiB) by default."""

    recycled: SuccessorTable = field(default_factory=SuccessorTable)
    outputs: ChainIndex = field(default_factory=lambda: ChainIndex(OUTPUT_TOKENS))


@dataclass(slots=True)
class _NgramRow:
    text: ChainIndex
    search: Search
    shared: int  # entries of the text already available to other rows, or not needed by them
    offered: Trie = NO_CANDIDATES  # in the coming step


class NgramProposer(Proposer):
    """Proposes earlier continuations of the last tokens, and the target's most likely tokens after them.

    Its sources share one tree (`lookahead.ngram.search.Search`): `"prompt"` finds earlier occurrences in the row's
    prompt and output, `"outputs"` in earlier requests and in the outputs so far of the other rows of the call,
    `"corpus"` in a pool; `"recycled"` has the target's most likely tokens after the last four, three, two or one
    tokens, at every node of the tree; `"prediction"` follows the texts passed to `expect`. Hit rates of candidates are
    learned from every step of every row and kept for later rows, as is the memory.

    Source: Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, "Inference with Reference: Lossless
        Acceleration of Large Language Models", §3 (copying from a reference, verified by the target); Luo et al.
        2024, "Token Recycling", §3; He et al. 2024, "REST: Retrieval-Based Speculative Decoding", §3 (a corpus).

    Args:
        sources: Names of `SOURCES`, and `PREDICTION` if rows may have predictions.
        memory: Texts of earlier requests and recycled tokens; empty when None.
        rates: Hit rates of candidates; the priors when None.
        pool: The corpus, in token ids of the target.
        min_probability: Minimum probability of reaching an offered candidate.
    """

    def __init__(
        self,
        sources: Sequence[str] = ("prompt", "outputs", "recycled"),
        memory: Memory | None = None,
        rates: HitRates | None = None,
        pool: Pool | None = None,
        *,
        min_probability: float = 0.0,
    ) -> None:
        self.sources = tuple(name for name in (*SOURCES, PREDICTION) if name in sources)
        self.needs_top = "recycled" in sources
        self._from_prompt = "prompt" in sources
        self.min_probability = min_probability
        self._pool = pool if "corpus" in sources else None
        self._memory = memory if memory is not None else Memory()
        self._recycled = self._memory.recycled if self.needs_top else None
        self._rates = rates if rates is not None else HitRates()
        self._rows: dict[int, _NgramRow] = {}
        self._live, self._is_shared = LiveOutputs(), False  # whether rows ran together since one was alone

    def start(self, row: int, prompt: IntArray) -> None:
        """Index the prompt of a new row."""
        text = ChainIndex()
        text.append(prompt)
        texts: list[Chains] = [text] if self._from_prompt else []
        live = self._live.chains, len(texts)
        if "outputs" in self.sources:
            texts.append(self._memory.outputs)
        if self._pool is not None:
            texts.append(self._pool)
        bounds = (1, _LONGEST_KEY, _MAX_LINKS)
        shared = max(1, 1 + prompt.size - _LONGEST_KEY)  # finds continuations of the end of the prompt
        self._is_shared |= bool(self._rows)
        self._rows[row] = _NgramRow(text, Search(texts, self._rates, self._recycled, bounds, live), shared)

    def expect(self, row: int, predictions: Sequence[IntArray]) -> None:
        """Receive the expected outputs of a row, if predictions are a source."""
        if PREDICTION in self.sources:
            self._rows[row].search.expect(predictions, self.sources.index(PREDICTION))

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        """Propose continuations of the row's last tokens, at most `max_nodes` nodes without the root."""
        if max_nodes < 1:
            return None
        if self._pool is not None and not self._pool.is_intact:
            warn(f"{self._pool.path}: changed while it was in use; no more is drafted from it")
            self._pool = None
        state = self._rows[row]
        context = None if self._from_prompt else state.text.tokens[1:][-_LONGEST_KEY:]
        if self._is_shared:
            state.search.leave_out(*self._live.span_of(row))
        state.offered = trie = state.search.grow(max_nodes, self.min_probability, context)
        return Proposal(trie.tokens, trie.parents, trie.probabilities, trie.sources) if len(trie.tokens) > 1 else None

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        """Count the hits of candidates, store the target's most likely tokens, and index the emitted tokens."""
        state = self._rows[row]
        trie, state.offered = state.offered, NO_CANDIDATES
        verified, top = NOT_VERIFIED, feedback.top
        if self._recycled is not None and top is not None:
            verified = top.tree.parents, top.tree.tokens, top.tokens, top.probabilities
        state.search.learn(state.text, trie, feedback.tokens, verified, placed)
        if len(self._rows) > 1 and "outputs" in self.sources:
            self._live.extend(row, state.text.tokens[state.shared :])
            state.shared = len(state.text)

    def finish(self, row: int) -> None:
        """Forget the row; hit rates stay, and its text stays if earlier outputs are a source."""
        text = self._rows.pop(row).text
        self._live.end(row)
        self._is_shared &= bool(self._rows)
        if "outputs" in self.sources:
            self._memory.outputs.end_document()
            self._memory.outputs.append(text.tokens[1:])
