"""Merge what the proposers offer into one tree, best first, under a node budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.drafting.batch_value import Batch, steps_saved
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.ngram.prune import FREE, Limits
from lookahead.ngram.raw_arrays import jit_inline

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
    if not offers or limits.budget <= 0 or limits.max_depth <= 0:
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


def fit(drafts: Sequence[Draft], costs: FloatArray, batch: Batch) -> list[Draft]:
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
    kept, places = _fit(reaches, required, ends, costs, batch.left, batch.plain)
    fitted = []
    for draft, end in zip(drafts, ends, strict=True):
        begin = end - len(draft.tree)
        keep = kept[begin:end]
        if keep.all():
            fitted.append(draft)
        elif not keep[1:].any():
            fitted.append(draft.bare())
        else:
            place, tree = places[begin:end], draft.tree
            cut = TokenTree(tree.tokens[keep], place[tree.parents[keep]], tree.depths[keep], tree.sources[keep])
            placed = tuple(place[where] for where in draft.placed)
            fitted.append(Draft(cut, placed, draft.reach[keep], draft.required[keep]))
    return fitted


def _sources_of(offer: Proposal) -> IntArray:
    """The sources of every node of a proposal."""
    return offer.sources if offer.sources is not None else np.ones(len(offer.tokens), np.int32)


@njit(cache=True, error_model="numpy")
def _merge(root, offered, offers, limits, costs):
    """Union trie, selection, then depth-first layout.

    Returns tokens, parents, depths, sources and what is required, int32 `[5, nodes]`; the reach; where nodes went.
    """
    budget, max_depth, min_probability, is_chain = limits
    tokens, parents, depths, reach, must, sources, where = _union(root, offered, offers)
    if is_chain:
        _leave_likeliest_chain(parents, reach, must)
    kept = _select(depths, reach, must, budget, max_depth, min_probability, costs)
    order = _layout(parents, reach, kept)
    n = len(order)
    position = np.zeros(len(tokens), np.int32)
    whole, kept_reach = np.empty((5, n), np.int32), np.empty(n)
    for new in range(n):
        node = order[new]
        position[node] = new
        whole[0, new], whole[1, new] = tokens[node], position[parents[node]]
        whole[2, new], whole[3, new] = depths[node], sources[node] if node > 0 else 0
        whole[4, new] = node > 0 and must[node]
        kept_reach[new] = reach[node]
    for i in range(len(where)):
        where[i] = position[where[i]]
    return whole, kept_reach, where


@njit(cache=True, error_model="numpy")
def _fit(reaches, required, ends, costs, left, plain):
    """Which nodes of all rows to keep, and the place of each among those its row keeps, 0 where it goes."""
    ranks = np.zeros(len(reaches), np.int64)
    gains = np.zeros((len(costs), len(ends)))
    least, most, begin = 1, 1, 0
    for row, end in enumerate(ends):
        order = _likeliest_first(np.where(required[begin:end] > 0, 2.0, reaches[begin:end]))
        # The root is certain but not required: it comes first all the same.
        rank = 1
        for node in order:
            if node != 0:
                ranks[begin + node] = rank
                gains[rank + 1, row] = reaches[begin + node]
                rank += 1
        least, most = max(least, 1 + required[begin:end].sum()), max(most, rank)
        begin = end
    expected, best, best_rate = np.ones(len(ends)), least, 0.0
    for size in range(1, most + 1):
        expected += gains[size]
        if size >= least:
            rate = steps_saved(expected, left, plain) / costs[size]
            if rate > best_rate:
                best, best_rate = size, rate
    kept, places = ranks < best, np.zeros(len(reaches), np.int32)
    begin = 0
    for end in ends:
        count = 0
        for node in range(begin, end):
            if kept[node]:
                places[node] = count
                count += 1
        begin = end
    return kept, places


@jit_inline
def _union(root, offered, offers):
    """Insert every proposal into one trie; a node's probability is the highest of those offered.

    `offers` holds (nodes, required nodes, first source) of each proposal.
    """
    tokens, parents, probabilities, origins = offered
    most = len(tokens) + 1
    trie_tokens, trie_parents = np.empty(most, np.int32), np.zeros(most, np.int32)
    depths, sources = np.zeros(most, np.int32), np.zeros(most, np.int32)
    chance, must = np.zeros(most, np.float64), np.zeros(most, np.bool_)
    first_child, next_sibling = np.zeros(most, np.int32), np.zeros(most, np.int32)
    where = np.zeros(len(tokens), np.int32)
    trie_tokens[0], chance[0], must[0] = root, 1.0, True
    count, start = 1, 0
    for size, required, first_source in offers:
        for i in range(1, size):
            parent = where[start + parents[start + i]]
            token = tokens[start + i]
            node = first_child[parent]
            while node != 0 and trie_tokens[node] != token:
                node = next_sibling[node]
            if node == 0:
                node = count
                count += 1
                trie_tokens[node], trie_parents[node], depths[node] = token, parent, depths[parent] + 1
                next_sibling[node], first_child[parent] = first_child[parent], node
            chance[node] = max(chance[node], min(1.0, probabilities[start + i]))
            sources[node] |= origins[start + i] << first_source
            must[node] = must[node] or i < required
            where[start + i] = node
        start += size
    reach = np.empty(count, np.float64)
    reach[0] = 1.0
    for node in range(1, count):
        reach[node] = reach[trie_parents[node]] * chance[node]
    return (
        trie_tokens[:count],
        trie_parents[:count],
        depths[:count],
        reach,
        must[:count],
        sources[:count],
        where,
    )


@jit_inline
def _leave_likeliest_chain(parents, reach, must):
    """Let nothing be reached but the likeliest child of the root, the likeliest of that one, and so on."""
    must[1:] = False
    end = 0
    for node in range(1, len(reach)):
        if parents[node] != end:
            continue
        best = node
        for other in range(node + 1, len(reach)):
            if parents[other] == end and reach[other] > reach[best]:
                best = other
        reach[end + 1 : best] = 0.0
        end = best
    reach[end + 1 :] = 0.0


@jit_inline
def _select(depths, reach, must, budget, max_depth, min_probability, costs):
    """Keep the root, the required nodes, then the likeliest; a parent never ranks below its child.

    Expected tokens of a tree are the sum of its nodes' reach, the root's bonus token included; the number of
    nodes is where expected tokens over cost are highest.
    """
    kept = np.zeros(len(reach), np.bool_)
    kept[0] = True
    nodes, expected = 1, 1.0
    for node in range(1, len(reach)):
        if must[node] and depths[node] <= max_depth and nodes <= budget:
            kept[node] = True
            nodes += 1
            expected += reach[node]
    likeliest = np.empty(len(reach), np.int64)
    count, best, best_rate = 0, 0, 0.0
    if len(costs) > 0:
        best_rate = expected / costs[nodes]
    for node in _likeliest_first(reach):
        if nodes > budget or reach[node] < min_probability or reach[node] == 0.0:
            break
        if not kept[node] and depths[node] <= max_depth:
            likeliest[count] = node
            count += 1
            nodes += 1
            expected += reach[node]
            if len(costs) == 0:
                best = count
            elif expected / costs[nodes] > best_rate:
                best, best_rate = count, expected / costs[nodes]
    for i in range(best):
        kept[likeliest[i]] = True
    return kept


@jit_inline
def _likeliest_first(reach):
    """Nodes by falling reach, ties in order; insertion, because proposals come nearly sorted."""
    order = np.arange(len(reach))
    for i in range(1, len(reach)):
        node = order[i]
        at = i
        while at > 0 and reach[order[at - 1]] < reach[node]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = node
    return order


@jit_inline
def _layout(parents, reach, kept):
    """Depth-first order of the kept nodes, the likelier child first."""
    n = len(parents)
    first_child, next_sibling = np.zeros(n, np.int32), np.zeros(n, np.int32)
    # Inserting the least likely first, each at the head, leaves the likeliest child at the head of its list.
    for node in _likeliest_first(reach)[::-1]:
        if node != 0 and kept[node]:
            next_sibling[node] = first_child[parents[node]]
            first_child[parents[node]] = node
    order = np.empty(n, np.int32)
    node, count = 0, 0
    while True:
        order[count] = node
        count += 1
        if first_child[node] > 0:
            node = first_child[node]
            continue
        while node > 0 and next_sibling[node] == 0:
            node = parents[node]
        if node == 0:
            return order[:count]
        node = next_sibling[node]
