"""Typical acceptance: lossy. What the target finds likely enough is accepted, whether it would have chosen it or not.

Source: Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", §2.3.1,
    with the thresholds of its published code.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lookahead.drafting.tree import TokenTree

EPSILON = 0.09
"""A token of at least this probability is typical, however certain the target is."""

DELTA = 0.3
"""Share of exp(-entropy) above which a token is typical where the target is uncertain."""

Walk = dict[int, tuple[int, float]]
"""By the node before it the token accepted, and the probability the target gave it."""


def threshold(chances: Tensor) -> float:
    """What the probability of a typical token exceeds, given the target's probabilities `[vocab]`."""
    entropy = float(torch.special.entr(chances.double()).sum())
    return min(EPSILON, DELTA * float(np.exp(-entropy)))


def longest_typical(tree: TokenTree, chances_after: Callable[[list[int]], Tensor]) -> Walk:
    """The longest path of typical tokens from the root; of several as long the likeliest.

    Args:
        tree: The draft.
        chances_after: The target's probabilities `[vocab]` after a path of nodes, the root first.
    """
    best: tuple[int, float, Walk] = (0, 1.0, {})
    open_paths: list[tuple[list[int], float, Walk]] = [([0], 1.0, {})]
    while open_paths:
        path, reach, walk = open_paths.pop()
        if (len(walk), reach) > best[:2]:
            best = (len(walk), reach, walk)
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
                open_paths.append(([*path, child], reach * chance, {**walk, path[-1]: (token, chance)}))
    return best[2]
