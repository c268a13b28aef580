"""Drafts of the lookahead branch while it pays."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from lookahead.drafting.budget import LookaheadBranch
from lookahead.drafting.proposal import Feedback, IntArray, Proposal
from lookahead.drafting.sizes import BranchSize
from lookahead.ngram.acceptance import HitRates
from lookahead.proposers.jacobi import JacobiProposer

_ROOT = np.zeros(1, np.int32)
_NOTHING = np.zeros(0, np.int32)


@dataclass(slots=True)
class _AutoJacobiRow:
    """One row: what it emitted, how much of that is known to what serves it, and who does, at what size."""

    prompt: IntArray
    emitted: list[IntArray] = field(default_factory=list)
    told: int = 0
    size: BranchSize | None = None
    server: JacobiProposer | None = None


class AutoJacobiProposer:
    """A `JacobiProposer` of the size the branch has at the moment, and of none while it is off.

    While it is off it only remembers what its rows emitted: there is no window, no pool and nothing to read from the
    target. A row that was served before goes on with its window and its pool when the branch comes back; one that was
    served at another size begins anew.

    Args:
        branch: Whether it runs, and how large; is told how long this takes.
        pool_from_prompt: Whether the prompt enters the n-gram pool too.
        rates: What is known of guesses already, and where more is learned.
    """

    sources: tuple[str, ...] = ("jacobi",)
    needs_argmax = False  # but while the branch is on, as the engine knows
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
        """Meet a new row; nothing is made of it yet."""
        self._rows[row] = _AutoJacobiRow(prompt)

    def propose(self, row: int, room: int) -> Proposal | None:
        """Offer the window and guesses where the branch is on; it has room of its own."""
        size, state = self._branch.size, self._rows[row]
        if size is None:
            return None
        begin = time.perf_counter()
        if state.server is None or state.size != size:
            state.server = JacobiProposer(*size, pool_from_prompt=self._pool_from_prompt, rates=self._rates)
            state.server.start(row, state.prompt)
            state.size, state.told = size, 0
        if state.told < len(state.emitted):
            missed = np.concatenate(state.emitted[state.told :])
            state.server.observe(row, Feedback(missed, _ROOT, _NOTHING), _NOTHING)
        state.told = len(state.emitted) + 1  # it is told of the coming step itself
        proposal = state.server.propose(row, size.nodes)
        self._branch.host_s += time.perf_counter() - begin
        return proposal

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        """Learn as a `JacobiProposer` does where it proposed, else remember what was emitted."""
        begin, state = time.perf_counter(), self._rows[row]
        state.emitted.append(feedback.tokens)
        if state.server is not None and state.told == len(state.emitted):
            state.server.observe(row, feedback, placed)
        self._branch.host_s += time.perf_counter() - begin

    def finish(self, row: int) -> None:
        """Forget the row; what was learned stays."""
        del self._rows[row]
