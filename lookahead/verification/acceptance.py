"""Acceptance: which nodes of a scored tree an output takes. The only place where output tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lookahead.drafting.select import Draft
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.utils.jit import njit


class Target(NamedTuple):
    """What the target says after the nodes of a scored tree, and where the tokens of a walk go.

    `choose` or `chances` is called once for every token, and `emit` after it, in order. So random numbers, logits
    processors and stopping criteria behave exactly as in a token-by-token loop.

    Attributes:
        choose: Takes a node, all of whose path is emitted; returns the token that `model.generate` would choose next.
        chances: Takes such a node; returns the probabilities that this token is drawn from, `[vocab]`.
        chances_after: Takes a path of nodes, the root first, of which nothing is emitted yet; returns the same.
        emit: Takes the next token; returns whether the walk ends with it.
    """

    choose: Callable[[int], int]
    chances: Callable[[int], Tensor]
    chances_after: Callable[[list[int]], Tensor]
    emit: Callable[[int], bool]


class Walk(NamedTuple):
    """The accepted nodes from the root, and the emitted token after each of them; both int32 `[a]`."""

    path: IntArray
    tokens: IntArray
    total_variation: float = 0.0  # between what the tokens were taken from and the target's distributions, summed


class Acceptance:
    """Takes the tokens that the target chooses: lossless for any tree.

    A subclass is another way to accept, and `KINDS` names it. A row calls `accept` once for every scored tree.

    Source: the sampling loop of transformers, replayed along the tree.

    Attributes:
        name: Its name among the options.
        draws: Whether proposals must be drawn, and say how: `Call.by_rejection`.
        looks_ahead: Whether it asks for `Target.chances_after`, so that processors see tokens that are not emitted.
    """

    name = "exact"
    draws = False
    looks_ahead = False

    def accept(self, draft: Draft, target: Target) -> Walk:
        """Walk from the root: choose a token, emit it, and descend if a child of the node holds it.

        Example:
            >>> from lookahead.drafting.tree import TokenTree
            >>> draft = Draft(TokenTree.from_parents([5, 6, 7], [0, 0, 1]), ())
            >>> choices = [6, 9, 9]
            >>> walk = Acceptance().accept(draft, Target(choices.__getitem__, None, None, lambda token: False))
            >>> walk.path.tolist(), walk.tokens.tolist()
            ([0, 1], [6, 9])
        """
        tree, path, tokens = draft.tree, [0], []
        while True:
            token = target.choose(path[-1])
            tokens.append(token)
            is_last = target.emit(token)
            is_last = is_last or path[-1] == len(tree.tokens) - 1  # the last node has no child
            child = 0 if is_last else _child(tree.parents, tree.tokens, path[-1], token)
            if not child:
                return Walk(np.array(path, np.int32), np.array(tokens, np.int32))
            path.append(child)


class Rejection(Acceptance):
    """Speculative sampling: accepts draws from a draft's distribution so that outputs follow the target's.

    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", §2.3 (one draw: accept
        with min(1, p/q), else draw from norm(max(0, p - q))); Chen et al. 2023, "Accelerating Large Language Model
        Decoding with Speculative Sampling"; Miao et al. 2024, "SpecInfer", §4.3 (several draws, in rounds); Jeon et
        al. 2024, "Recursive Speculative Decoding", §3.2 (draws without replacement).
    """

    name = "rejection"
    draws = True

    def accept(self, draft: Draft, target: Target) -> Walk:
        """Try the draws at each node in order; after the last one draw from what is left of the target's."""
        rounds = _rounds_of(draft)

        def choose(node: int) -> int:
            return _accepted_draw(rounds.get(node, ()), target.chances(node))

        return super().accept(draft, target._replace(choose=choose))


class Typical(Acceptance):
    """Typical acceptance, which is lossy: likely enough tokens are accepted, even if the target would not choose them.

    Source: Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
        §2.3.1, with the thresholds of its published code.
    """

    name = "typical"
    looks_ahead = True

    def accept(self, draft: Draft, target: Target) -> Walk:
        """Take the longest path of typical tokens; after it the target chooses."""
        typical = longest_typical(draft.tree, target.chances_after) if len(draft.tree.tokens) > 1 else {}
        variations = [0.0]

        def choose(node: int) -> int:
            if node not in typical:
                return target.choose(node)
            token, chance = typical[node]
            target.chances(node)  # processors are called for every token
            variations.append(1.0 - chance)
            return token

        walk = super().accept(draft, target._replace(choose=choose))
        return walk._replace(total_variation=sum(variations))


@njit()
def _child(parents, tokens, node, token):
    """The child of a node that holds a token; 0, the root, if there is none."""
    for child in range(node + 1, len(parents)):
        if parents[child] == node and tokens[child] == token:
            return child
    return 0


EXACT = Acceptance()
KINDS = {kind.name: kind for kind in (EXACT, Rejection(), Typical())}
"""Every acceptance by its name in `lookahead.config.ACCEPTANCES`."""


def acceptance_of(name: str, *, is_sampled: bool) -> Acceptance:
    """The acceptance of an option; exact if nothing is sampled, for then the target has one choice."""
    return KINDS[name] if is_sampled else EXACT


def coin(chance: float) -> bool:
    """True with a probability from 0 to 1."""
    return float(torch.rand((), dtype=torch.float32, device="cpu")) < chance


def draw(weights: Tensor) -> int:
    """Draw one index by float64 `[vocab]` weights, of which one is above 0."""
    ends = weights.cumsum(0)  # one random number is a twentieth of the time of `torch.multinomial`, which draws `vocab`
    at = torch.rand((), dtype=torch.float64, device="cpu") * ends[-1]
    return int(torch.searchsorted(ends, at, right=True))  # right, so that no weight of 0 is drawn


def draw_several(weights: Tensor, count: int) -> Tensor:
    """Draw from every row of `[n, vocab]` weights without replacement: int64 `[n, count]`, -1 if no weight is left."""
    # Exponential clocks arrive in the order of successive draws.
    times = weights / torch.empty_like(weights).exponential_()
    arrived, order = times.topk(min(count, weights.shape[-1]), sorted=True)
    order = torch.where(arrived > 0, order, -1)
    return torch.nn.functional.pad(order, (0, count - order.shape[-1]), value=-1)


_Round = tuple[Tensor, list[int]]
"""A distribution, `[vocab]` or shorter, and the tokens drawn from it without replacement, in order."""


def _rounds_of(draft: Draft) -> dict[int, list[_Round]]:
    """The draws of the proposals at every node of a draft, in the order of the proposers."""
    rounds: dict[int, list[_Round]] = {}
    for proposal, where in zip(draft.proposals, draft.placed, strict=False):  # a root alone has no proposals
        if proposal is None or proposal.draws is None:
            continue
        families: dict[int, _Round] = {}
        parents, origins = proposal.parents.tolist(), proposal.draws.origins.tolist()
        for node, (parent, token) in enumerate(zip(parents, proposal.tokens.tolist(), strict=True)):
            if node == 0 or where[node] == 0:  # the node and its siblings lie beyond the end of the output
                continue
            if parent not in families:
                families[parent] = (proposal.draws.distributions[origins[node]], [])
                rounds.setdefault(int(where[parent]), []).append(families[parent])
            families[parent][1].append(token)
    return rounds


def _accepted_draw(rounds: Sequence[_Round], chances: Tensor) -> int:
    """The first accepted draw, else a draw from the residual distribution: together distributed as `chances`."""
    p = chances.cpu().double()  # on a device every iteration would synchronize
    for distribution, tokens in rounds:
        q = torch.zeros_like(p)
        q[: len(distribution)] = distribution.cpu()
        q /= q.sum()
        for token in tokens:
            if coin(min(1.0, float(p[token] / q[token]))):
                return token
            p = _normalized((p - q).clamp_(min=0.0), p)
            q[token] = 0.0
            q = _normalized(q, q)
    return draw(p)


def _normalized(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Weights divided by their sum; `otherwise` if rounding left a sum of 0."""
    total = weights.sum()
    return weights / total if float(total) > 0.0 else otherwise


EPSILON = 0.09
"""A token of more than this probability is always typical."""

DELTA = 0.3
"""A token is typical above this share of exp(-entropy)."""

TypicalPath = dict[int, tuple[int, float]]
"""The accepted token and its target probability, by the node before it."""


def threshold(chances: Tensor) -> float:
    """The probability above which a token is typical, given the target's probabilities `[vocab]`."""
    entropy = float(torch.special.entr(chances.double()).sum())
    return min(EPSILON, DELTA * float(np.exp(-entropy)))


def longest_typical(tree: TokenTree, chances_after: Callable[[list[int]], Tensor]) -> TypicalPath:
    """The longest path of typical tokens from the root; the most likely of equally long ones.

    `chances_after` is that of `Target`.
    """
    best: tuple[int, float, TypicalPath] = (0, 1.0, {})
    open_paths: list[tuple[list[int], float, TypicalPath]] = [([0], 1.0, {})]
    while open_paths:
        path, path_prob, walk = open_paths.pop()
        if (len(walk), path_prob) > best[:2]:
            best = (len(walk), path_prob, walk)
        children = np.flatnonzero(tree.parents == path[-1])
        children = children[children > path[-1]]
        if not len(children):
            continue
        chances = chances_after(path)
        least = threshold(chances)
        for child in children.tolist():
            token = int(tree.tokens[child])
            chance = float(chances[token])
            if chance > least:
                open_paths.append(([*path, child], path_prob * chance, {**walk, path[-1]: (token, chance)}))
    return best[2]
