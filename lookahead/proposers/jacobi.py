"""The proposer of the lookahead branch: the Jacobi window, and n-grams collected from its earlier steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from lookahead.drafting.branch import LookaheadBranch
from lookahead.drafting.proposal import Feedback, IntArray, Proposal, Proposer
from lookahead.drafting.sizes import BranchSize
from lookahead.ngram.chains import ChainIndex
from lookahead.ngram.hit_rates import HitRates
from lookahead.ngram.search import Search, Trie
from lookahead.ngram.window import UNKNOWN, JacobiWindow, WindowTree, ngrams_of_step

_TAIL = 256  # last tokens kept of a row, for lookups and for new cells
_POOL_TOKENS = 1 << 17  # of a row's pool; the oldest half is dropped when it is full
_LONGEST_KEY = 16
_LINKS = 64  # more than for a text: the same n-gram is stored often
_ROOT = np.zeros(1, np.int32)
_NOTHING = np.zeros(0, np.int32)


@dataclass(slots=True)
class _JacobiRow:
    """One row's window and pool, its last proposal, and its emitted tokens."""

    prompt: IntArray
    emitted: list[IntArray] = field(default_factory=list)
    observed: int = 0  # number of observed entries of `emitted`, including the coming step once it is drafted
    has_window: bool = False
    window: JacobiWindow = field(init=False)
    pool: ChainIndex = field(init=False)
    search: Search = field(init=False)
    tail: IntArray = field(init=False)
    tree: WindowTree | None = None
    guesses: Trie | None = None


class JacobiProposer(Proposer):
    """Proposes the lookahead branch: the Jacobi window, and n-grams collected from its earlier steps.

    The window (`lookahead.ngram.window.JacobiWindow`) must be in every draft, since it advances by the target's answers
    after its cells. Each step completes n-grams: every cell with the tokens below it and the target's answer. They
    enter a pool, as do the target's answers after guesses, and the output. Guesses are looked up in the pool by the
    longest known context, and merged by prefix.

    A `LookaheadBranch` turns it on and off. While it is off, only emitted tokens are stored; when it returns, a row
    continues with its window and pool.

    Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", §3.1
        (lookahead branch) and §3.2 (verification branch). Unlike there, the window slides by all tokens of a step,
        guesses share prefixes, and n-grams shorter than N enter the pool.
    """

    sources = ("jacobi",)

    def __init__(
        self,
        size: BranchSize,
        branch: LookaheadBranch | None = None,  # always on when None
        *,
        rates: HitRates | None = None,  # hit rates of guesses; the priors when None
    ) -> None:
        self._size, self._branch = size, branch
        self.needs_argmax = self._branch is None  # else the engine reads it while the branch is on
        self._rates = rates if rates is not None else HitRates()
        self._rows: dict[int, _JacobiRow] = {}

    def start(self, row: int, prompt: IntArray) -> None:
        self._rows[row] = _JacobiRow(prompt)

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        """Propose the window and guesses from the pool; with a branch, its size replaces `max_nodes`."""
        begin, state, size = time.perf_counter(), self._rows[row], self._size
        if self._branch is not None and not self._branch.is_on:
            return None
        if not state.has_window:
            self._begin(state)
        if state.observed < len(state.emitted):
            missed = np.concatenate(state.emitted[state.observed :])
            self._learn(state, Feedback(missed, _ROOT, _NOTHING), _NOTHING)
        state.observed = len(state.emitted) + 1  # the coming step is observed
        max_nodes = max_nodes if self._branch is None else size.nodes
        room = min(size.guesses * (size.ngram_size - 1), max_nodes - (state.window.cells.size - 1))
        state.guesses = state.search.grow(room, context=state.tail[-_LONGEST_KEY:]) if room > 0 else None
        state.tree = tree = state.window.tree(max_nodes, state.guesses)
        if self._branch is not None:
            self._branch.host_s += time.perf_counter() - begin
        return Proposal(tree.tokens, tree.parents, tree.probabilities, required=tree.required)

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        begin, state = time.perf_counter(), self._rows[row]
        state.emitted.append(feedback.tokens)
        if state.has_window and state.observed == len(state.emitted):
            self._learn(state, feedback, placed)
        if self._branch is not None:
            self._branch.host_s += time.perf_counter() - begin

    def finish(self, row: int) -> None:
        del self._rows[row]

    def _begin(self, state: _JacobiRow) -> None:
        """Draw the first window from the prompt of a row."""
        state.has_window, state.observed, state.tail = True, 0, state.prompt[-_TAIL:]
        state.window = JacobiWindow(self._size.window, self._size.ngram_size, state.tail)
        state.pool = ChainIndex(max_tokens=_POOL_TOKENS)
        state.pool.append(state.prompt)
        state.search = Search([state.pool], self._rates, None, (1, _LONGEST_KEY, _LINKS))

    def _learn(self, state: _JacobiRow, feedback: Feedback, placed: IntArray) -> None:
        """Count the hits of guesses, add the n-grams of the step to the pool, and slide the window."""
        emitted, before, size = feedback.tokens, state.tail, self._size
        state.tail = np.concatenate((state.tail, emitted))[-_TAIL:]
        tree = state.tree if state.tree is not None else state.window.tree(0)
        argmax = np.full(tree.tokens.size, UNKNOWN, dtype=np.int32)
        if feedback.argmax.size > 0:
            argmax[: placed.size] = np.where(placed > 0, feedback.argmax[placed], UNKNOWN)
            argmax[0] = feedback.argmax[0]
        answers = np.full(state.window.cells.shape, UNKNOWN, dtype=np.int32)
        levels, width = tree.cells.shape
        answers[:levels, :width] = argmax[tree.cells]
        if size.guesses > 0:
            if state.guesses is not None:
                self._rates.learn(state.guesses.parents, state.guesses.tokens, state.guesses.features, emitted)
            length = 2 * size.ngram_size
            state.pool.append_documents(
                ngrams_of_step(state.window, tree, answers, argmax, before=before, emitted=emitted, max_length=length)
            )
        is_answered = 2 * np.count_nonzero(answers[-1] != UNKNOWN) > size.window
        state.window.slide(answers if is_answered else None, emitted, state.tail)
        state.tree = state.guesses = None
