"""Draft trees of a draft model, one per row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.drafting.proposal import Draws, IntArray, Proposal
from lookahead.drafting.tree import TokenTree
from lookahead.ngram.acceptance import AcceptanceTable
from lookahead.ngram.prune import best_nodes
from lookahead.verification.rejection import draw_several

Float32Array = NDArray[np.float32]

_MIN_PATH_PROB = 0.02  # a candidate that is less likely to be reached is not scored
_DRAW_EDGES = np.array([0.01, 0.03, 0.07, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93, 0.98])
LEVELS = len(_DRAW_EDGES) + 1  # of the table of rates: a draw is counted by its draft probability
# Before any trial: the probability that the first, second, third or a later draw at a place is accepted.
_OF_DRAWS = np.array([0.6, 0.15, 0.06, 0.02], np.float32)


class DraftTree:
    """The candidates of one row, node 0 the root, which is scored; scored nodes have candidates of their own.

    `slots` holds the place of each node among the `scored` ones, -1 for one that is not. `kinds` and `draft_probs` are
    those of `AcceptanceTable`: the level of a draw is the range of its draft probability, any other level is 0; the
    rank is the place among the candidates after the parent. `probabilities` are calibrated, `path_probs` their product
    along the path.
    """

    def __init__(self, root: int) -> None:
        self.tokens = np.array([root], np.int32)
        self.parents, self.slots, self.scored, self._depths = np.zeros((4, 1), np.int32)
        self.kinds: IntArray = np.zeros((1, 2), np.int32)
        self.draft_probs, self.probabilities = np.ones((2, 1), np.float32)
        self.path_probs: NDArray[np.float64] = np.ones(1)

    def add(
        self,
        parents: IntArray,
        tokens: IntArray,
        kinds: IntArray,
        draft_probs: Float32Array,
        probabilities: Float32Array,
    ) -> None:
        """Add candidates after scored nodes, `[n]` each."""
        self.tokens = np.append(self.tokens, tokens)
        self.parents = np.append(self.parents, parents)
        self.kinds = np.append(self.kinds, kinds, axis=0)
        self.draft_probs = np.append(self.draft_probs, draft_probs)
        self.probabilities = np.append(self.probabilities, probabilities)
        self.path_probs = np.append(self.path_probs, self.path_probs[parents] * probabilities)
        self.slots = np.append(self.slots, np.full(len(tokens), -1, np.int32))
        self._depths = np.append(self._depths, self._depths[parents] + 1)

    def likeliest(self, width: int, least: float = 0.0) -> IntArray:
        """The likeliest candidates that are not scored, at most `width`, none below `least`; ties go to the earlier."""
        open_nodes = np.flatnonzero((self.slots < 0) & (self.path_probs >= least)).astype(np.int32)
        return open_nodes[np.argsort(-self.path_probs[open_nodes], kind="stable")[:width]]

    def choose(self, width: int) -> IntArray:
        """Choose the likeliest candidates to be scored next; they count as scored from now on."""
        chosen = self.likeliest(width, _MIN_PATH_PROB)
        self.slots[chosen] = np.arange(len(self.scored), len(self.scored) + len(chosen))
        self.scored = np.append(self.scored, chosen)
        return chosen

    def outlook(self, width: int) -> tuple[float, float]:
        """Tokens that the tree is expected to give, and how many more one further pass would."""
        expected = float(self.path_probs.sum()) - 1.0
        per_scored = expected / float(self.path_probs[self.scored].sum())
        return 1.0 + expected, per_scored * float(self.path_probs[self.likeliest(width)].sum())

    def scored_tree(self) -> TokenTree:
        """The scored nodes, in the order they were."""
        parents = self.slots[self.parents[self.scored]]
        return TokenTree(self.tokens[self.scored], parents, self._depths[self.scored], np.zeros_like(self.scored))

    def path_of(self, emitted: IntArray) -> IntArray:
        """The slots of the root and of the scored nodes that hold emitted tokens, int32 `[a]`."""
        path = [0]
        for token in emitted:
            follows = (self.parents == path[-1]) & (self.tokens == token) & (self.slots > 0)
            if not follows.any():
                break
            path.append(int(follows.argmax()))
        return self.slots[path]


class DraftTreeBatch:
    """Turns the logits of a draft model into candidates for all rows, and candidates into proposals."""

    def __init__(
        self,
        roots: Sequence[int],  # the last token of every row
        rates: AcceptanceTable,  # of `LEVELS` levels
        *,
        max_nodes: int,  # of a proposal besides its root
        width: int,  # candidates of a row that one pass scores
        children: int,  # candidates after every node
        vocabulary: int,  # token ids that may be proposed are those below
        warp: Callable[[Tensor], Tensor] | None,  # as in `lookahead.drafting.proposal.Call`
        by_rejection: bool,  # candidates are drawn, and all of them are proposed
    ) -> None:
        self.trees = [DraftTree(root) for root in roots]
        self._rates = rates
        self._max_nodes = max_nodes
        self._width = width
        self._children = min(children, max_nodes) if by_rejection else children
        self._vocabulary = vocabulary
        self._warp = warp
        self._by_rejection = by_rejection
        self._distributions: list[list[Tensor]] = [[] for _ in roots]
        self._chosen: list[IntArray] = [np.zeros(1, np.int32) for _ in roots]  # the roots

    def choose(self) -> NDArray[np.int64]:
        """Choose the candidates of every row to be scored next: int64 `[rows]`, how many were scored before."""
        before = np.array([len(tree.scored) for tree in self.trees])
        widths = [self._width] * len(before)
        if self._by_rejection:  # the number of draws must not depend on what they turn out to be
            left = [(self._max_nodes + 1 - len(tree.tokens)) // self._children for tree in self.trees]
            widths = [min(self._width, each) for each in left]
        self._chosen = [tree.choose(width) for tree, width in zip(self.trees, widths, strict=True)]
        return before

    @property
    def is_chosen(self) -> bool:
        """Whether there is anything to be scored."""
        return any(map(len, self._chosen))

    def add(self, logits: Tensor) -> None:
        """Take the candidates after the chosen nodes of every row from logits `[rows, most nodes chosen, vocab]`."""
        scores = logits[..., : self._vocabulary].flatten(0, 1).float()
        probabilities = torch.softmax(scores if self._warp is None else self._warp(scores), -1)
        if self._by_rejection:
            drawn = draw_several(probabilities, self._children)
            own = probabilities.gather(1, drawn.clamp(min=0)).masked_fill(drawn < 0, 0.0)
        else:
            own, drawn = probabilities.topk(min(self._children, probabilities.shape[-1]))
        # One copy from the device; float32 counts tokens exactly up to 16 million.
        tokens, own = torch.stack((drawn.float(), own)).unflatten(1, logits.shape[:2]).cpu().numpy()
        ranks = np.broadcast_to(np.arange(own.shape[-1], dtype=np.int32), own.shape)
        levels = np.searchsorted(_DRAW_EDGES, own).astype(np.int32) if self._by_rejection else np.zeros_like(ranks)
        kinds = np.stack((levels, ranks), -1)
        draft_probs = _OF_DRAWS[np.minimum(ranks, len(_OF_DRAWS) - 1)] if self._by_rejection else own
        new = tokens.astype(np.int32), kinds, draft_probs, self._rates.calibrate(kinds, draft_probs)
        for row, (tree, chosen) in enumerate(zip(self.trees, self._chosen, strict=True)):
            n = len(chosen)
            is_candidate = own[row, :n] != 0.0
            parents = np.broadcast_to(chosen[:, None], is_candidate.shape)[is_candidate]
            tree.add(parents, *(each[row, :n][is_candidate] for each in new))
            if self._by_rejection:
                self._distributions[row] += probabilities.unflatten(0, logits.shape[:2])[row, :n]

    def outlook(self) -> tuple[float, float]:
        """Tokens that a tree is expected to give on average, and how many more one further pass would."""
        tokens, gains = zip(*(tree.outlook(self._width) for tree in self.trees), strict=True)
        return sum(tokens) / len(tokens), sum(gains) / len(gains)

    def proposals(self) -> list[Proposal]:
        """The best nodes of every tree; all of it where it was drawn."""
        made = []
        for tree, distributions in zip(self.trees, self._distributions, strict=True):
            whole = Proposal(tree.tokens, tree.parents, tree.probabilities)
            if self._by_rejection:
                draws = Draws(torch.stack(distributions), tree.slots[tree.parents])
                made.append(whole._replace(required=len(tree.tokens), draws=draws))
            else:
                nodes, parents = best_nodes(tree.parents, tree.probabilities, self._max_nodes)
                made.append(Proposal(tree.tokens[nodes], parents, tree.probabilities[nodes]))
        return made
