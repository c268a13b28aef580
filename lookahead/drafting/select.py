"""Merge what the proposers offer into one tree, best first, under a node budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.drafting.cost_model import BatchValue, steps_saved
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.ngram.prune import FREE, Limits, node_at, rank, select, union

if TYPE_CHECKING:
    from lookahead.drafting.proposal import Proposal

FloatArray = NDArray[np.float64]

_CERTAIN = np.ones(1)
_NONE_REQUIRED = np.zeros(1, np.int32)


class Draft(NamedTuple):
    """One row's tree and where each proposal went.

    Attributes:
        tree: What the step verifies.
        placed: For each proposer int32 `[k]`, the tree node each node of its proposal became, 0 where it was
            left out; empty where the proposer offered nothing.
        reach: float64 `[nodes]`, the chance that a node is reached, that is, accepted; 1 for the root. Their sum is
            the number of tokens the step is expected to emit.
        required: int32 `[nodes]`, 1 where a node must stand in the draft.
    """

    tree: TokenTree
    placed: tuple[IntArray, ...]
    reach: FloatArray = _CERTAIN
    required: IntArray = _NONE_REQUIRED

    def bare(self) -> Draft:
        """The draft without its nodes but the root."""
        root = TokenTree.root(int(self.tree.tokens[0]))
        return Draft(root, tuple(np.zeros(len(where), np.int32) for where in self.placed))


@runtime_checkable
class Drafter(Protocol):
    """A proposer that can make a draft of its own proposal, in less time than `merge` takes."""

    def draft(self, row: int, room: int, limits: Limits, costs: FloatArray) -> Draft:
        """What `merge` makes of `propose(row, room)`, in the limits; free where there are no costs."""


def drafter_of(proposers: Sequence[object]) -> Drafter | None:
    """The one of these proposers that drafts by itself; None where several offers have to be merged."""
    return proposers[0] if len(proposers) == 1 and isinstance(proposers[0], Drafter) else None


def merge(
    root: int,
    proposals: Sequence[Proposal | None],
    limits: Limits,
    *,
    sources: Sequence[int] | None = None,
    costs: FloatArray = FREE,
) -> Draft:
    """Merge proposals by prefix and keep the likeliest nodes.

    A node several proposers offer is one node; its probability is the highest of theirs. Required nodes come
    first, then those with the highest probability of being reached (the product along the path), while that is at
    least the lowest allowed and the budget lasts; of these as many as give the most expected tokens per cost. Nodes
    are laid out depth first, the likelier child first, so that the likeliest path is 0, 1, 2, … and committing it
    moves no KV.

    Args:
        root: The newest committed token.
        proposals: One proposal, or None, per proposer. Each has `root` as its root.
        limits: What the tree may hold; no deeper than one less than the tokens the row may still emit.
        sources: How many sources each proposer has, 31 in all at most: their bits stand side by side in the
            tree's. None where each has one.
        costs: float64 `[budget + 2]` or longer, what a step with that many nodes costs, the root counted; empty
            where nodes are free.
    """
    offers = [(i, offer) for i, offer in enumerate(proposals) if offer is not None]
    if not offers or limits.max_nodes <= 0 or limits.max_depth <= 0:
        sizes = [0 if offer is None else len(offer.tokens) for offer in proposals]
        return Draft(TokenTree.root(root), tuple(np.zeros(size, np.int32) for size in sizes))
    arrays = [(each.tokens, each.parents, each.probabilities, _sources_of(each)) for _, each in offers]
    firsts = np.cumsum([0, *(sources if sources is not None else (1,) * len(proposals))])
    table = np.array([(len(each.tokens), each.required, firsts[i]) for i, each in offers])
    joined = tuple(map(np.concatenate, zip(*arrays, strict=True)))
    whole, reach, where = _merge(root, joined, table, limits, costs)
    ends = np.cumsum([0 if offer is None else len(offer.tokens) for offer in proposals]).tolist()
    placed = tuple(where[begin:end] for begin, end in zip([0, *ends], ends, strict=False))
    return Draft(TokenTree(whole[0], whole[1], whole[2], whole[3]), placed, reach, whole[4])


def fit(drafts: Sequence[Draft], costs: FloatArray, batch: BatchValue) -> list[Draft]:
    """Cut the drafts of rows that take a step together to one size, that which saves most per cost.

    A pass computes as many nodes for every row as the largest tree has, so their trees are sized together: each keeps
    its required nodes and its likeliest ones, as far as that size goes.

    Args:
        drafts: One per row, merged without costs.
        costs: float64, what a step costs whose largest tree has so many nodes, the root counted.
        batch: What a token of each row is worth.
    """
    reaches = np.concatenate([draft.reach for draft in drafts])
    required = np.concatenate([draft.required for draft in drafts])
    ends = np.cumsum([len(draft.tree) for draft in drafts])
    size, ranks = _fit(reaches, required, ends, costs, batch.left, batch.plain)
    fitted = []
    for draft, end in zip(drafts, ends, strict=True):
        keep = ranks[end - len(draft.tree) : end] < size
        if keep.all():
            fitted.append(draft)
        elif not keep[1:].any():
            fitted.append(draft.bare())
        else:
            place, tree = np.where(keep, np.cumsum(keep, dtype=np.int32) - 1, 0), draft.tree
            cut = TokenTree(tree.tokens[keep], place[tree.parents[keep]], tree.depths[keep], tree.sources[keep])
            placed = tuple(place[where] for where in draft.placed)
            fitted.append(Draft(cut, placed, draft.reach[keep], draft.required[keep]))
    return fitted


def _sources_of(offer: Proposal) -> IntArray:
    """The sources of every node of a proposal."""
    return offer.sources if offer.sources is not None else np.ones(len(offer.tokens), np.int32)


@njit(cache=True, error_model="numpy")
def _merge(root, offered, offers, limits, costs):
    """The core of `merge`.

    Returns tokens, parents, depths, sources and what is required, int32 `[5, nodes]`; path probabilities; where nodes
    went.
    """
    merged, path_probs, placed = union(root, offered, offers)
    parents = merged[1]
    for node in range(1, len(path_probs)):
        path_probs[node] *= path_probs[parents[node]]
    if limits[3]:
        merged[4] = 0
    scratch, size = select(parents, merged[2], path_probs, merged[4], limits, costs)
    places = np.zeros(len(path_probs), np.int32)
    whole, kept_probs = np.empty((5, size), np.int32), np.empty(size)
    for place in range(size):
        node = node_at(scratch, place)
        places[node] = place
        whole[:, place] = merged[:, node]
        whole[1, place] = places[parents[node]]
        kept_probs[place] = path_probs[node]
    for i in range(len(placed)):
        placed[i] = places[placed[i]]
    return whole, kept_probs, placed


@njit(cache=True, error_model="numpy")
def _fit(path_probs, required, ends, costs, left, plain):
    """The size to which trees are cut, and the rank of every node in its own tree, int64 `[nodes]`."""
    ranks = np.zeros(len(path_probs), np.int64)
    gains = np.zeros((len(costs), len(ends)))
    least, most, begin = 1, 1, 0
    for row, end in enumerate(ends):
        values = np.where(required[begin:end] > 0, 2.0, path_probs[begin:end])
        values[0] = 3.0
        ranked = np.empty(len(values), np.int64)
        rank(values, ranked)
        for at in range(1, len(ranked)):
            ranks[begin + ranked[at]] = at
            gains[at + 1, row] = path_probs[begin + ranked[at]]
        least, most = max(least, 1 + required[begin:end].sum()), max(most, len(ranked))
        begin = end
    expected, best, best_rate = np.ones(len(ends)), least, 0.0
    for size in range(1, most + 1):
        expected += gains[size]
        if size >= least:
            rate = steps_saved(expected, left, plain) / costs[size]
            if rate > best_rate:
                best, best_rate = size, rate
    return best, ranks
