"""Constrained drafts: forbidden nodes are cut, and forced tokens are drafted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lookahead.drafting.proposal import Proposal

_LIKELY = 0.8  # probability of a likely token, measured with SmolLM2 and JSON schemas


class Constraint(Protocol):
    """A constraint on the tokens of a row, with a state that moves along a tree of continuations."""

    def push(self, token: int) -> bool:
        """Move past a token that does not end the output; False, without a move, if it is forbidden."""

    def pop(self, count: int) -> None:
        """Move back by `count` tokens."""

    def forced(self) -> list[int]:
        """The next tokens while only one is allowed at a time; they do not end the output."""

    def likely(self) -> list[int]:
        """At most one token: the common beginning of several allowed next tokens."""


def constrain(
    root: int, offers: Sequence[Proposal | None], constraint: Constraint, max_nodes: int, least: float = 0.0
) -> tuple[list[Proposal | None], Proposal | None]:
    """Cut forbidden nodes from the proposals of a row, and propose the tokens forced after their nodes.

    A cut node gets the probability 0; a required one stays. Nodes reached with a probability below `least` are not
    checked.

    Args:
        root: The row's last token.
        offers: The proposals, None for an empty one; they are not modified.
        constraint: The constraint with its state after `root`, which is restored at the end.
        max_nodes: Maximum nodes added, and maximum nodes checked.
        least: Minimum probability of reaching a node to check it.

    Returns:
        The proposals without the cut nodes, and a proposal of the forced and likely tokens (source 0) with the nodes
        before them (no source), or None if there are none.
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
        self.chances = [1.0]  # probability given the parent
        self.children: list[dict[int, int]] = [{}]

    def child(self, parent: int, token: int, chance: float) -> int:
        """The child of a node with a token, created if missing."""
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
        """The proposal of `forced` nodes and their ancestors."""
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
    """Walk a tree depth first, most likely child first, and add forced tokens; returns the cut and forced nodes."""
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
        behind = [(child, reached * tree.chances[child]) for child in tree.children[node].values()]
        stack += sorted((each for each in behind if each[1] >= least), key=lambda each: each[1])
    constraint.pop(depth)
    return is_cut, is_forced


def _without(offer: Proposal, is_cut: list[bool]) -> Proposal:
    """The proposal with cut nodes set to probability 0."""
    if not any(is_cut):
        return offer
    return offer._replace(probabilities=np.where(is_cut, np.float32(0.0), offer.probabilities))
