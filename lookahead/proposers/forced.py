"""The source of tokens forced by a grammar."""

from __future__ import annotations

from lookahead.drafting.proposal import Feedback, IntArray, Proposal, Proposer


class ForcedTokens(Proposer):
    """Represents the forced tokens, which `Row.constrain` adds, among the proposers of a call, as the last one."""

    sources = ("grammar",)

    def start(self, row: int, prompt: IntArray) -> None:
        pass

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        return None

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        pass

    def finish(self, row: int) -> None:
        pass
