"""The source of tokens that a grammar forces."""

from __future__ import annotations

from lookahead.drafting.proposal import Feedback, IntArray, Proposal, Proposer


class ForcedTokens(Proposer):
    """Stands for forced tokens among the proposers of a call, as the last one.

    It proposes nothing itself: `lookahead.drafting.constrain` adds such tokens behind the nodes of all others.
    """

    sources = ("grammar",)

    def start(self, row: int, prompt: IntArray) -> None:
        pass

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        return None

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        pass

    def finish(self, row: int) -> None:
        pass
