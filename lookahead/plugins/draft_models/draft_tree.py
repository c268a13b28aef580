"""Draft trees of a draft model, one per row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.drafting.budget import Ema
from lookahead.drafting.proposal import Draws, IntArray, Proposal
from lookahead.drafting.tree import TokenTree
from lookahead.kernels.topk import read_scores
from lookahead.ngram.hit_rates import AcceptanceTable, children_along
from lookahead.ngram.prune import best_nodes
from lookahead.verification.acceptance import draw_several

_MIN_PATH_PROB = 0.02  # candidates less likely to be reached are not scored
_DRAW_EDGES = np.array([0.01, 0.03, 0.07, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93, 0.98])
LEVELS = len(_DRAW_EDGES) + 1  # of the rates table: draws are counted by their draft probability
NO_TOKENS = np.zeros(0, np.int32)
# Priors: the probability that the first, second, third or a later draw after a node is accepted.
_OF_DRAWS = np.array([0.6, 0.15, 0.06, 0.02], np.float32)


# `kind` and `draft_prob` are as in `AcceptanceTable`: the level of a draw is the range of its draft probability, any
# other level is 0; the rank is the index among the candidates after the parent. `probability` is calibrated, and
# `path_prob` the product along the path. `slot` is the index among the scored nodes, -1 if not scored.
NODE = np.dtype(
    {
        "names": ["token", "parent", "depth", "slot", "kind", "draft_prob", "probability", "path_prob"],
        "formats": ["i4", "i4", "i4", "i4", "2i4", "f4", "f4", "f8"],
    }
)


class DraftTree:
    """The candidates of one row, after the tokens that the model has not read: a chain, int32 `[n]`, up to the root.

    A guess, int32 `[m]`, is the most likely chain of other sources after the root. It is scored with the root: where
    the model agrees, one pass gives the candidates after all of its nodes. A node of the guess that is none of the
    model's candidates has the probability 0.
    """

    def __init__(self, unread: IntArray, guess: IntArray = NO_TOKENS) -> None:
        size, self.root = len(unread) + len(guess), len(unread) - 1
        self.scored: IntArray = np.arange(size, dtype=np.int32)
        self.nodes = nodes = np.zeros(size, NODE)
        nodes["token"], nodes["parent"] = np.append(unread, guess), np.maximum(self.scored - 1, 0)
        nodes["depth"] = nodes["slot"] = self.scored
        for name in ("draft_prob", "probability", "path_prob"):
            nodes[name][: len(unread)] = 1.0
        self.chosen = self.scored[self.root :]  # the latest scored nodes, whose candidates come next

    @property
    def draft(self) -> NDArray[np.void]:
        """The root and the nodes after it, `NODE` `[n]`, with parents among these."""
        nodes = self.nodes[self.root :].copy()
        nodes["parent"] = np.maximum(nodes["parent"] - self.root, 0)
        return nodes

    def add(self, new: NDArray[np.void]) -> None:
        """Add candidates after the chosen nodes, `NODE` `[n]`, in their order."""
        if len(self.chosen) > 1 and self.chosen[0] == self.root:
            new = self._beside_guess(new)
        parents = self.nodes[new["parent"]]
        new["depth"], new["slot"] = parents["depth"] + 1, -1
        new["path_prob"] = parents["path_prob"] * new["probability"]
        self.nodes = np.append(self.nodes, new)

    def _beside_guess(self, new: NDArray[np.void]) -> NDArray[np.void]:
        """Give the guess the model's probabilities; returns the other candidates after the nodes it may reach."""
        nodes, others = self.nodes, []
        for node in self.chosen:
            after = new[new["parent"] == node]
            if node + 1 < len(nodes):
                is_next = after["token"] == nodes["token"][node + 1]
                for name in ("kind", "draft_prob", "probability"):
                    nodes[name][node + 1] = after[name][is_next][0] if is_next.any() else 0
                nodes["path_prob"][node + 1] = nodes["path_prob"][node] * nodes["probability"][node + 1]
                after = after[~is_next]
            others.append(after)
            if node + 1 < len(nodes) and not nodes["path_prob"][node + 1]:
                break
        return np.concatenate(others)

    def likeliest(self, width: int, least: float = 0.0) -> IntArray:
        """The most likely unscored candidates, at most `width`, none below `least`; ties go to the earlier."""
        path_probs = self.nodes["path_prob"]
        open_nodes = np.flatnonzero((self.nodes["slot"] < 0) & (path_probs >= least)).astype(np.int32)
        return open_nodes[np.argsort(-path_probs[open_nodes], kind="stable")[:width]]

    def choose(self, width: int) -> None:
        """Choose the most likely candidates to score next; they count as scored from now on."""
        self.chosen = self.likeliest(width, _MIN_PATH_PROB)
        self.nodes["slot"][self.chosen] = len(self.scored) + np.arange(len(self.chosen))
        self.scored = np.append(self.scored, self.chosen)

    def outlook(self, width: int) -> tuple[float, float]:
        """Expected tokens of the tree, and expected further tokens of one more pass."""
        path_probs = self.nodes["path_prob"]
        expected = float(path_probs[self.root :].sum()) - 1.0
        per_scored = expected / float(path_probs[self.scored[self.root :]].sum())
        return 1.0 + expected, per_scored * float(path_probs[self.likeliest(width)].sum())

    def scored_tree(self) -> TokenTree:
        """The scored nodes, in scoring order."""
        scored = self.nodes[self.scored]
        parents = self.nodes["slot"][scored["parent"]]
        return TokenTree(scored["token"].copy(), parents, scored["depth"].copy(), np.zeros_like(self.scored))

    def learn(self, rates: AcceptanceTable, agreement: Ema, emitted: IntArray) -> IntArray:
        """Count the hits of candidates; returns the slots of the tokens now read and of the right nodes."""
        draft = self.draft
        likely = _reachable(draft)
        parents, tokens = likely["parent"].copy(), likely["token"].copy()
        rates.learn(parents, tokens, likely["kind"], likely["draft_prob"], emitted)
        nodes, hits = children_along(parents, tokens, emitted)
        for hit in hits[likely["kind"][nodes, 1] == 0]:
            agreement.add(float(hit))
        # The last token is read again, to score its successors.
        nodes, hits = children_along(draft["parent"].copy(), draft["token"].copy(), emitted[:-1])
        slots = draft["slot"][nodes[hits]]
        return np.append(self.scored[: self.root + 1], slots[slots > self.root])


def _reachable(nodes: NDArray[np.void]) -> NDArray[np.void]:
    """The nodes with a probability above 0, `NODE` `[n]`, with parents among these."""
    keep = nodes["path_prob"] > 0.0
    kept = nodes[keep]
    kept["parent"] = (np.cumsum(keep) - 1)[kept["parent"]]
    return kept


@dataclass(eq=False)
class DraftTreeBatch:
    """Turns the logits of a draft model into candidates for all rows, and candidates into proposals."""

    trees: Sequence[DraftTree]
    rates: AcceptanceTable  # of `LEVELS` levels
    _: KW_ONLY
    max_nodes: int  # of a proposal, without its root
    width: int  # candidates of a row scored per pass
    children: int  # candidates after every node
    vocabulary: int  # proposed token ids must be below this
    warp: Callable[[Tensor], Tensor] | None  # as in `lookahead.drafting.proposal.Call`
    by_rejection: bool  # candidates are drawn, and all are proposed
    sharpness: int = 1  # power of the probabilities: how much surer the target's choice is than a draw

    def __post_init__(self) -> None:
        if self.by_rejection:
            self.children = min(self.children, self.max_nodes)
        self._distributions: list[list[Tensor]] = [[] for _ in self.trees]

    def choose(self) -> NDArray[np.int64]:
        """Choose the candidates of every row to score next; returns the numbers scored before, int64 `[rows]`."""
        before = np.array([len(tree.scored) for tree in self.trees])
        for tree in self.trees:
            # The number of draws must not depend on the drawn tokens.
            left = self.max_nodes + 1 - (len(tree.nodes) - tree.root)
            left = left // self.children if self.by_rejection else self.width
            tree.choose(min(self.width, left))
        return before

    def add(self, logits: Tensor) -> None:
        """Add the candidates after the chosen nodes of every row, from logits `[rows, most nodes chosen, vocab]`."""
        logits = logits[..., : self.vocabulary]
        if self.warp is None and not self.by_rejection:
            scores = read_scores(logits, min(self.children, self.vocabulary))
            assert scores.top is not None and scores.probabilities is not None
            tokens, own = scores.top, scores.probabilities**self.sharpness
            own /= own.sum(-1, keepdims=True).clip(1.0 if self.sharpness == 1 else 1e-30)
        else:
            tokens, own = self._warped(logits)
        ranks = np.broadcast_to(np.arange(own.shape[-1], dtype=np.int32), own.shape)
        levels = np.searchsorted(_DRAW_EDGES, own).astype(np.int32) if self.by_rejection else np.zeros_like(ranks)
        new = np.zeros(own.shape, NODE)
        new["token"], new["kind"] = tokens, np.stack((levels, ranks), -1)
        new["draft_prob"] = _OF_DRAWS[np.minimum(ranks, len(_OF_DRAWS) - 1)] if self.by_rejection else own
        new["probability"] = self.rates.calibrate(new["kind"], new["draft_prob"])
        for row, tree in enumerate(self.trees):
            n = len(tree.chosen)
            new["parent"][row, :n] = tree.chosen[:, None]
            tree.add(new[row, :n][own[row, :n] != 0.0])

    def _warped(self, logits: Tensor) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The candidates of the sampling distribution, or draws from it, and their probabilities."""
        scores = logits.flatten(0, 1).float()
        probabilities = torch.softmax(scores if self.warp is None else self.warp(scores), -1)
        if self.by_rejection:
            drawn = draw_several(probabilities, self.children)
            own = probabilities.gather(1, drawn.clamp(min=0)).masked_fill(drawn < 0, 0.0)
            for row, tree in enumerate(self.trees):
                self._distributions[row] += probabilities.unflatten(0, logits.shape[:2])[row, : len(tree.chosen)]
        else:
            own, drawn = probabilities.topk(min(self.children, probabilities.shape[-1]))
        # One copy from the device; float32 represents token ids exactly up to 16 million.
        tokens, own_probs = torch.stack((drawn.float(), own)).unflatten(1, logits.shape[:2]).cpu().numpy()
        return tokens, own_probs

    def outlook(self) -> tuple[float, float]:
        """Expected tokens of a tree and expected further tokens of one more pass, averaged over rows."""
        tokens, gains = zip(*(tree.outlook(self.width) for tree in self.trees), strict=True)
        return sum(tokens) / len(tokens), sum(gains) / len(gains)

    def proposals(self) -> list[Proposal]:
        """The best nodes of every tree; all nodes if they were drawn."""
        made = []
        for tree, distributions in zip(self.trees, self._distributions, strict=True):
            draft = tree.draft if self.by_rejection else _reachable(tree.draft)
            tokens, parents, probabilities = (draft[name].copy() for name in ("token", "parent", "probability"))
            if self.by_rejection:
                draws = Draws(torch.stack(distributions), draft["slot"][parents] - tree.root)
                made.append(Proposal(tokens, parents, probabilities, required=len(tokens), draws=draws))
            else:
                nodes, kept_parents = best_nodes(parents, probabilities, self.max_nodes)
                made.append(Proposal(tokens[nodes], kept_parents, probabilities[nodes]))
        return made
