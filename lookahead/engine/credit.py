"""Who answers for what a step took: all sources together, or a costly one on its own account."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.drafting.controller import Pacing
from lookahead.drafting.proposal import IntArray, Proposer
from lookahead.drafting.tree import TokenTree, count_within, without_sources
from lookahead.proposers.validated import paid_by_bits


class Accounts:
    """Tells the pacing what a step was worth, and every proposer that has to earn its time what that gave.

    A proposer that has not earned what it takes (or reads the prompt, once a call) is on its own account alone: the
    pacing is told what the step would have been without it. So one that is too dear is given up without a word
    against the other sources, and one that earns its time is counted in even where the others earn nothing.

    Args:
        pacing: What sizes drafts, and turns drafting off.
        proposers: In the order of their sources.
    """

    def __init__(self, pacing: Pacing, proposers: Sequence[Proposer]) -> None:
        self._pacing = pacing
        self._paid = paid_by_bits(proposers)
        sources = [name for proposer in proposers for name in proposer.sources]
        self._branch = 1 << sources.index("jacobi") if "jacobi" in sources else 0

    def settle(
        self,
        verified: Sequence[tuple[TokenTree, IntArray]],
        tokens: Sequence[int],
        *,
        nodes: int,
        host_s: float,
        step_s: float,
        is_cold: bool,
    ) -> None:
        """Count a step.

        Args:
            verified: Of every row the tree, and int32 `[a]` the nodes that were accepted, the root first.
            tokens: Tokens that each row emitted.
            nodes: Of its largest tree, its root counted.
            host_s: What drafting took, and letting the proposers learn.
            step_s: What all of it took.
            is_cold: Its pass did work that later ones need not do.
        """
        rows, bits, apart_s = len(tokens), 0, 0.0
        for own, paid in self._paid.items():
            alone = sum(count_within(tree, path, own) for tree, path in verified) / rows
            took = paid.settle(alone=alone, tokens=sum(tokens) / rows, step_s=step_s)
            if took is not None:
                bits, apart_s = bits | own, apart_s + took
        branch, without, apart = self._pacing.branch, None, None
        if branch.size is not None:
            without = without_sources(verified, tokens, self._branch)
        if bits:
            on_trial = self._branch if branch.size is not None and not branch.is_proven else 0
            apart = (*without_sources(verified, tokens, bits | on_trial), apart_s)
        self._pacing.learn(nodes, tokens, host_s, step_s - host_s, without, apart, is_cold=is_cold)
