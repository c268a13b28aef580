"""The trees of all rows that a draft model grows together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.drafting.proposal import Draws, IntArray, Proposal
from lookahead.drafting.tree import TokenTree
from lookahead.proposers.draft_rates import DraftRates, FloatArray
from lookahead.proposers.draft_tree import Growth
from lookahead.verification.rejection import draw_several

_LEAST_REACH = 0.02  # a candidate that is less likely to be reached is not asked about


class Grove:
    """Turns what a draft model says after nodes into their candidates, and candidates into proposals.

    Args:
        roots: The newest token of every row.
        rates: How far the model can be trusted.
        room: Most nodes a proposal may hold, its root not counted.
        passes: How often trees are added to at most.
        width: Candidates of a row that one pass scores.
        children: Candidates after every node.
        vocabulary: Token ids that may be proposed are those below.
        warp: As in `lookahead.drafting.proposal.Call`.
        by_rejection: Candidates are drawn, and all of them are proposed.

    Attributes:
        growths: One per row.
    """

    def __init__(
        self,
        roots: Sequence[int],
        rates: DraftRates,
        *,
        room: int,
        passes: int,
        width: int,
        children: int,
        vocabulary: int,
        warp: Callable[[Tensor], Tensor] | None,
        by_rejection: bool,
    ) -> None:
        capacity = 1 + children * (1 + (passes - 1) * width)
        self.growths = [Growth(root, capacity) for root in roots]
        self._rates = rates
        self._room = room
        self._width = width
        self._children = min(children, room) if by_rejection else children
        self._vocabulary = vocabulary
        self._warp = warp
        self._by_rejection = by_rejection
        self._distributions: list[list[Tensor]] = [[] for _ in roots]
        self._chosen: list[IntArray] = [np.zeros(1, np.int32) for _ in roots]  # the roots

    def choose(self) -> NDArray[np.int64]:
        """Choose the candidates of every row to be scored next: int64 `[rows]`, how many were scored before."""
        before = np.array([growth.scored for growth in self.growths])
        self._chosen = [growth.choose(self._width_for(growth), _LEAST_REACH) for growth in self.growths]
        return before

    @property
    def is_chosen(self) -> bool:
        """Whether there is anything to be scored."""
        return any(map(len, self._chosen))

    def _width_for(self, growth: Growth) -> int:
        """How many candidates of a row to score: the number of draws must not depend on what they turn out to be."""
        return min(self._width, (self._room + 1 - len(growth)) // self._children) if self._by_rejection else self._width

    def trees(self) -> list[TokenTree]:
        """What is scored of every row, or chosen to be."""
        return [growth.scored_tree() for growth in self.growths]

    def add(self, logits: Tensor) -> None:
        """Take the candidates after the chosen nodes of every row from what the model says there.

        Args:
            logits: `[rows, most nodes chosen, vocab]`.
        """
        width = logits.shape[1]
        scores = logits[..., : self._vocabulary].flatten(0, 1).float()
        chances = torch.softmax(scores if self._warp is None else self._warp(scores), -1)
        if self._by_rejection:
            top = draw_several(chances, self._children)
            found = chances.gather(1, top.clamp(min=0))
        else:
            found, top = chances.topk(min(self._children, chances.shape[-1]))
        # One read from the device; float32 counts tokens exactly up to 16 million.
        read = torch.stack((top.float(), found)).cpu().numpy().astype(np.float64)
        tokens, own = read[0].astype(np.int32), np.where(read[0] < 0, 0.0, read[1])
        worth, features = self._rates.chances(own)
        for row, (growth, chosen) in enumerate(zip(self.growths, self._chosen, strict=True)):
            for place, node in enumerate(chosen.tolist(), row * width):
                some = own[place] != 0.0
                growth.add(node, tokens[place][some], worth[place][some], features[place][some])
            if self._by_rejection:
                self._distributions[row] += chances[row * width : row * width + len(chosen)]

    def outlook(self) -> tuple[float, float]:
        """Tokens the trees are expected to give a row, and how many more one further pass would."""
        tokens = gain = 0.0
        for growth in self.growths:
            foretold = float(growth.reach.sum()) - 1.0
            tokens += 1.0 + foretold
            gain += foretold / growth.spread * growth.promise(self._width)
        return tokens / len(self.growths), gain / len(self.growths)

    def proposals(self) -> list[Proposal]:
        """The best of every tree; all of it where it was drawn."""
        return [self._propose(row, growth) for row, growth in enumerate(self.growths)]

    def _propose(self, row: int, growth: Growth) -> Proposal:
        """One row's."""
        best = growth.best(self._room)
        parents = np.searchsorted(best, growth.parents[best]).astype(np.int32)
        chances: FloatArray = growth.chances[best]
        offer = Proposal(growth.tokens[best], parents, chances.astype(np.float32))
        if not self._by_rejection:
            return offer
        draws = Draws(torch.stack(self._distributions[row]), growth.places[growth.parents])
        return Proposal(offer.tokens, offer.parents, offer.probabilities, required=len(best), draws=draws)
