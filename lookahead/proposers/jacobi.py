"""Proposers of the lookahead branch: one of a fixed size, one of the size that the controller chooses."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from lookahead.drafting.budget import LookaheadBranch
from lookahead.drafting.proposal import Feedback, IntArray, Proposal
from lookahead.drafting.sizes import BranchSize
from lookahead.ngram.acceptance import HitRates
from lookahead.ngram.chains import ChainIndex
from lookahead.ngram.search import Trie, grow_trie
from lookahead.ngram.window import UNKNOWN, JacobiWindow, WindowTree, ngrams_of_step

_TAIL = 256  # last tokens kept of a row: they are looked up, and new cells are drawn from them
_POOL_TOKENS = 1 << 17  # of a row's pool; the oldest half is forgotten when it is full
_LONGEST_KEY = 16
_LINKS = 64  # more than in a text: the same n-gram is stored often
_ROOT = np.zeros(1, np.int32)
_NOTHING = np.zeros(0, np.int32)


@dataclass(slots=True)
class _JacobiRow:
    """One row's window and pool, and its last proposal."""

    window: JacobiWindow
    pool: ChainIndex
    tail: IntArray
    poolable: int  # how many tokens at the end of `tail` may enter the pool
    tree: WindowTree | None = None
    guesses: Trie | None = None


class JacobiProposer:
    """Proposes the lookahead branch: the Jacobi window, and n-grams collected from its earlier steps.

    The window (`lookahead.ngram.window.JacobiWindow`) must be in every draft, since it advances by the target's answers
    after its cells. Each step completes n-grams: every cell with the tokens below it and the target's answer, from the
    first step on. They enter a pool, as do the target's answers after guesses, and the output. Guesses are looked up in
    the pool by the longest known context, and merged by prefix.

    Raises:
        ValueError: A size is out of its range.

    Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", §3.1
        (lookahead branch) and §3.2 (verification branch). Unlike there, the window slides by all tokens of a step,
        guesses share prefixes, and n-grams shorter than N enter the pool.
    """

    sources: tuple[str, ...] = ("jacobi",)
    needs_argmax = True
    needs_top = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        window: int = 7,  # columns W, at least 1
        ngram_size: int = 5,  # N, the length of the n-grams that a full window completes, at least 2
        guesses: int = 7,  # G; guesses take at most the nodes of G n-grams, G * (N - 1)
        *,
        pool_from_prompt: bool = True,  # the prompt enters the pool too
        rates: HitRates | None = None,  # hit rates of guesses; the priors when None
    ) -> None:
        if window < 1 or ngram_size < 2 or guesses < 0:
            raise ValueError(
                f"need window >= 1, ngram_size >= 2 and guesses >= 0, got {window}, {ngram_size} and {guesses}"
            )
        self.window = window
        self.ngram_size = ngram_size
        self.guesses = guesses
        self.pool_from_prompt = pool_from_prompt
        self._rates = rates if rates is not None else HitRates()
        self._rows: dict[int, _JacobiRow] = {}

    def start(self, row: int, prompt: IntArray) -> None:
        """Draw a first window from the prompt of a new row."""
        tail = prompt[-_TAIL:]
        pool = ChainIndex(max_tokens=_POOL_TOKENS)
        if self.pool_from_prompt:
            pool.append(prompt)
        poolable = tail.size if self.pool_from_prompt else 1
        self._rows[row] = _JacobiRow(JacobiWindow(self.window, self.ngram_size, tail), pool, tail, poolable)

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        """Propose the window and guesses from the pool, at most `max_nodes` nodes besides the root."""
        state = self._rows[row]
        state.guesses = grow_trie(
            [state.pool],
            self._rates,
            min(self.guesses * (self.ngram_size - 1), max_nodes - (state.window.cells.size - 1)),
            context=state.tail[-_LONGEST_KEY:],
            max_ngram=_LONGEST_KEY,
            max_links=_LINKS,
        )
        state.tree = tree = state.window.tree(max_nodes, state.guesses)
        return Proposal(tree.tokens, tree.parents, tree.probabilities, required=tree.required)

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        """Count the hits of guesses, add the n-grams of the step to the pool, and slide the window."""
        state, emitted = self._rows[row], feedback.tokens
        before = state.tail[-state.poolable :]
        state.tail = np.concatenate((state.tail, emitted))[-_TAIL:]
        state.poolable = min(state.poolable + emitted.size, state.tail.size)
        tree = state.tree if state.tree is not None else state.window.tree(0)
        argmax = np.full(tree.tokens.size, UNKNOWN, dtype=np.int32)
        if feedback.argmax.size > 0:
            argmax[: placed.size] = np.where(placed > 0, feedback.argmax[placed], UNKNOWN)
            argmax[0] = feedback.argmax[0]
        answers = np.full(state.window.cells.shape, UNKNOWN, dtype=np.int32)
        levels, width = tree.cells.shape
        answers[:levels, :width] = argmax[tree.cells]
        if self.guesses > 0:
            if state.guesses is not None:
                self._rates.learn(state.guesses.parents, state.guesses.tokens, state.guesses.features, emitted)
            length = 2 * self.ngram_size
            state.pool.append_documents(
                ngrams_of_step(state.window, tree, answers, argmax, before=before, emitted=emitted, max_length=length)
            )
        is_answered = 2 * np.count_nonzero(answers[-1] != UNKNOWN) > self.window
        state.window.slide(answers if is_answered else None, emitted, state.tail)
        state.tree = state.guesses = None

    def finish(self, row: int) -> None:
        """Forget the row; hit rates stay."""
        del self._rows[row]


@dataclass(slots=True)
class _AutoJacobiRow:
    """One row: its emitted tokens, the `JacobiProposer` that drafts for it, and how many emissions that knows."""

    prompt: IntArray
    emitted: list[IntArray] = field(default_factory=list)
    known: int = 0
    size: BranchSize | None = None
    proposer: JacobiProposer | None = None


class AutoJacobiProposer:
    """A `JacobiProposer` of the current size of the branch; proposes nothing while the branch is off.

    While the branch is off, only emitted tokens are remembered: there is no window and no pool, and nothing is read
    from the target. When the branch returns at the same size, a row goes on with its window and its pool; at another
    size it starts anew. The time taken is added to the branch.
    """

    sources: tuple[str, ...] = ("jacobi",)
    needs_argmax = False  # the engine reads it while the branch is on
    needs_top = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self, branch: LookaheadBranch, *, pool_from_prompt: bool = True, rates: HitRates | None = None
    ) -> None:
        self._branch = branch
        self._pool_from_prompt = pool_from_prompt
        self._rates = rates if rates is not None else HitRates()
        self._rows: dict[int, _AutoJacobiRow] = {}

    def start(self, row: int, prompt: IntArray) -> None:
        """Remember the prompt of a new row."""
        self._rows[row] = _AutoJacobiRow(prompt)

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        """Propose the window and guesses while the branch is on; its size replaces `max_nodes`."""
        size, state = self._branch.size, self._rows[row]
        if size is None:
            return None
        begin = time.perf_counter()
        if state.proposer is None or state.size != size:
            state.proposer = JacobiProposer(*size, pool_from_prompt=self._pool_from_prompt, rates=self._rates)
            state.proposer.start(row, state.prompt)
            state.size, state.known = size, 0
        if state.known < len(state.emitted):
            missed = np.concatenate(state.emitted[state.known :])
            state.proposer.observe(row, Feedback(missed, _ROOT, _NOTHING), _NOTHING)
        state.known = len(state.emitted) + 1  # the coming step is observed
        proposal = state.proposer.propose(row, size.nodes)
        self._branch.host_s += time.perf_counter() - begin
        return proposal

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        """Pass the feedback on if the row was drafted for, and remember the emitted tokens."""
        begin, state = time.perf_counter(), self._rows[row]
        state.emitted.append(feedback.tokens)
        if state.proposer is not None and state.known == len(state.emitted):
            state.proposer.observe(row, feedback, placed)
        self._branch.host_s += time.perf_counter() - begin

    def finish(self, row: int) -> None:
        """Forget the row; hit rates stay."""
        del self._rows[row]
