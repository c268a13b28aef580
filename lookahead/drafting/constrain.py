"""Drafts under a constraint: nodes that it forbids are cut, and tokens that it forces are drafted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lookahead.drafting.proposal import Proposal

_LIKELY = 0.8  # probability of a likely token, as measured with SmolLM2 writing JSON by schemas


class Constraint(Protocol):
    """What the tokens of a row must follow, at a place that moves along a tree of continuations."""

    def push(self, token: int) -> bool:
        """Move past a token that does not end the output; False, and no move, where it is forbidden."""

    def pop(self, count: int) -> None:
        """Move back by so many tokens."""

    def forced(self) -> list[int]:
        """Tokens that must come next, each of them the only one allowed there; they do not end the output."""

    def likely(self) -> list[int]:
        """Where several tokens may come next that share their beginning, at most one token made of that beginning."""


def constrain(
    root: int, offers: Sequence[Proposal | None], constraint: Constraint, max_nodes: int, least: float = 0.0
) -> tuple[list[Proposal | None], Proposal | None]:
    """Cut from the proposals of a row what its constraint forbids, and propose what it forces behind their nodes.

    A node is cut by a probability of 0; one that is required stays. Nodes that are reached with a probability below
    `least` are not looked at.

    Args:
        root: The row's last token.
        offers: The proposals, None where there is nothing; they are not written to.
        constraint: Where the row is, behind `root`; it is there again at the end.
        max_nodes: Most nodes that are added, and most that are looked at besides.
        least: The probability to be reached from which on a node is looked at.

    Returns:
        The proposals without what was cut, and the proposal of forced and likely tokens, of source 0 and with the nodes
        before them, of no source; None if there are none.
    """
    tree, placed = _Tree(root), list[list[int]]()
    for offer in offers:
        placed.append([] if offer is None else tree.take_in(offer))
    is_cut, is_forced = _walk(tree, constraint, max_nodes, least)
    if is_cut:
        offers = [
            offer if offer is None else _without(offer, [node in is_cut for node in nodes])
            for offer, nodes in zip(offers, placed, strict=True)
        ]
    return list(offers), tree.leading_to(is_forced) if is_forced else None


class _Tree:
    """Proposals merged by prefix; node 0 is their root."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths = [root], [0], [0]
        self.chances = [1.0]  # to be chosen once the parent was
        self.children: list[dict[int, int]] = [{}]

    def child(self, parent: int, token: int, chance: float) -> int:
        """The node of a token behind a node, a new one where there is none."""
        node = self.children[parent].get(token)
        if node is None:
            node = self.children[parent][token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.chances.append(chance)
            self.children.append({})
        else:
            self.chances[node] = max(self.chances[node], chance)
        return node

    def take_in(self, offer: Proposal) -> list[int]:
        """Add a proposal; returns the node of each of its nodes."""
        nodes = [0]
        given = offer.tokens.tolist(), offer.parents.tolist(), offer.probabilities.tolist()
        for token, parent, chance in list(zip(*given, strict=True))[1:]:
            nodes.append(self.child(nodes[parent], token, chance))
        return nodes

    def leading_to(self, forced: set[int]) -> Proposal:
        """The proposal of some nodes and of those before them."""
        kept = set[int]()
        for node in forced:
            while node not in kept:
                kept.add(node)
                node = self.parents[node]
        nodes = sorted(kept | {0})
        places = {node: place for place, node in enumerate(nodes)}
        return Proposal(
            np.array([self.tokens[node] for node in nodes], np.int32),
            np.array([places[self.parents[node]] for node in nodes], np.int32),
            np.array([self.chances[node] for node in nodes], np.float32),
            np.array([node in forced for node in nodes], np.int32),
        )


def _walk(tree: _Tree, constraint: Constraint, max_nodes: int, least: float) -> tuple[set[int], set[int]]:
    """Walk a tree depth first, the likeliest child first, and add forced tokens; the nodes cut and those forced."""
    is_cut, is_forced = set[int](), set[int]()
    stack, depth, visits = [(0, 1.0)], 0, 0
    while stack and visits <= max_nodes and len(is_forced) < max_nodes:
        node, reached = stack.pop()
        visits += 1
        if node:
            constraint.pop(depth - tree.depths[node] + 1)
            depth = tree.depths[node] - 1
            if not constraint.push(tree.tokens[node]):
                is_cut.add(node)
                is_forced.discard(node)
                continue
            depth += 1
        for token in constraint.forced()[: max_nodes - len(is_forced)]:
            is_cut |= {other for drafted, other in tree.children[node].items() if drafted != token}
            node = tree.child(node, token, 1.0)
            is_forced.add(node)
            constraint.push(token)
            depth += 1
        for token in constraint.likely():
            is_forced.add(tree.child(node, token, _LIKELY))
        behind = [(each, reached * tree.chances[each]) for each in tree.children[node].values()]
        stack += sorted((each for each in behind if each[1] >= least), key=lambda each: each[1])
    constraint.pop(depth)
    return is_cut, is_forced


def _without(offer: Proposal, is_cut: list[bool]) -> Proposal:
    """A proposal whose cut nodes have the probability 0."""
    if not any(is_cut):
        return offer
    return offer._replace(probabilities=np.where(is_cut, np.float32(0.0), offer.probabilities))
