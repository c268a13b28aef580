"""Drafts of the target's own making: the lookahead branch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lookahead.drafting.proposal import Feedback, IntArray, Proposal
from lookahead.ngram.acceptance import HitRates
from lookahead.ngram.chains import ChainIndex
from lookahead.ngram.search import grow_trie
from lookahead.ngram.trie import Trie
from lookahead.ngram.window import UNKNOWN, JacobiWindow, PlantedWindow, ngrams_of_step

_TAIL = 256  # newest tokens kept of a row: what is looked up, and what new cells are drawn from
_POOL_TOKENS = 1 << 17  # of a row's pool; the oldest half is forgotten when it is full
_LONGEST_KEY = 16
_LINKS = 64  # the same n-gram comes back often, so more are walked than in a text


@dataclass(slots=True)
class _JacobiRow:
    """One row's window and pool, and what it proposed last."""

    window: JacobiWindow
    pool: ChainIndex
    tail: IntArray
    taught: int  # how many tokens at the end of `tail` may enter the pool
    planted: PlantedWindow | None = None
    guesses: Trie | None = None


class JacobiProposer:
    """Guesses the future at many positions at once, keeps the n-grams that come out, and proposes those that fit.

    The window (`lookahead.ngram.window.JacobiWindow`) must stand in every draft, since only what the target says
    after its cells moves it on. Each step closes n-grams: every cell with the tokens below it and the target's
    answer, from the first step on. They enter a pool, as does what the target says after every guess, and the
    output itself. Guesses are looked up by the longest context the pool knows, and merged by prefix.

    Args:
        window: Columns W of the window, at least 1.
        ngram_size: N, the length of the n-grams that a full window closes, at least 2.
        guesses: G; guesses take at most the nodes of G n-grams, `G * (N - 1)`. 0 only moves the window.
        pool_from_prompt: Whether the prompt enters the pool too.
        rates: What is known of guesses already, and where more is learned; the first guesses when None.

    Raises:
        ValueError: A size is out of its range.

    Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", §3.1
        (lookahead branch) and §3.2 (verification branch). Unlike there, the window slides by all the tokens a
        step emits, guesses share prefixes, and n-grams shorter than N enter the pool.
    """

    sources: tuple[str, ...] = ("jacobi",)
    needs_argmax = True
    needs_top = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        window: int = 7,
        ngram_size: int = 5,
        guesses: int = 7,
        *,
        pool_from_prompt: bool = True,
        rates: HitRates | None = None,
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
        taught = tail.size if self.pool_from_prompt else 1
        self._rows[row] = _JacobiRow(JacobiWindow(self.window, self.ngram_size, tail), pool, tail, taught)

    def propose(self, row: int, room: int) -> Proposal | None:
        """Offer the window, and beside it guesses from the pool, at most `room` nodes besides the root."""
        state = self._rows[row]
        for_guesses = min(self.guesses * (self.ngram_size - 1), room - (state.window.cells.size - 1))
        state.guesses = grow_trie(
            [state.pool],
            self._rates,
            for_guesses,
            context=state.tail[-_LONGEST_KEY:],
            max_ngram=_LONGEST_KEY,
            max_links=_LINKS,
        )
        planted = state.window.plant(room, state.guesses)
        state.planted = planted
        return Proposal(planted.tokens, planted.parents, planted.probabilities, required=planted.required)

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        """Learn which guesses were right, pool what the target said, and slide the window."""
        state = self._rows[row]
        emitted = feedback.tokens
        before = state.tail[-state.taught :]
        state.tail = np.concatenate((state.tail, emitted))[-_TAIL:]
        state.taught = min(state.taught + emitted.size, state.tail.size)
        planted = state.planted if state.planted is not None else state.window.plant(room=0)
        heard = _heard(feedback.argmax, placed, planted.tokens.size)
        answers = np.full(state.window.cells.shape, UNKNOWN, dtype=np.int32)
        levels, width = planted.cells.shape
        answers[:levels, :width] = heard[planted.cells]
        if self.guesses > 0:
            if state.guesses is not None:
                self._rates.learn(state.guesses.parents, state.guesses.tokens, state.guesses.features, emitted)
            lessons = ngrams_of_step(
                state.window, planted, answers, heard, before=before, emitted=emitted, reach=2 * self.ngram_size
            )
            state.pool.append_documents(lessons)
        is_answered = 2 * np.count_nonzero(answers[-1] != UNKNOWN) > self.window
        state.window.slide(answers if is_answered else None, emitted, state.tail)
        state.planted = state.guesses = None

    def finish(self, row: int) -> None:
        """Forget the row; what was learned stays."""
        del self._rows[row]


def _heard(argmax: IntArray, placed: IntArray, nodes: int) -> IntArray:
    """What the target says after each node of a proposal, `UNKNOWN` where it was left out of the draft."""
    heard = np.full(nodes, UNKNOWN, dtype=np.int32)
    if argmax.size > 0:
        heard[: placed.size] = np.where(placed > 0, argmax[placed], UNKNOWN)
        heard[0] = argmax[0]
    return heard
