"""The source of tokens forced by a grammar."""

from __future__ import annotations

from lookahead.drafting.proposal import Feedback, IntArray, Proposal, Proposer


class ForcedTokens(Proposer):
    """Represents forced tokens among the proposers of a call, as the last one.

    It proposes nothing itself: `Row.constrain` adds forced tokens after the nodes of the others.
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
