"""Typical acceptance, which is lossy: likely enough tokens are accepted, even if the target would not choose them.

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
"""A token of more than this probability is always typical."""

DELTA = 0.3
"""A token is typical above this share of exp(-entropy)."""

Walk = dict[int, tuple[int, float]]
"""The accepted token and its target probability, by the node before it."""


def threshold(chances: Tensor) -> float:
    """The probability above which a token is typical, given the target's probabilities `[vocab]`."""
    entropy = float(torch.special.entr(chances.double()).sum())
    return min(EPSILON, DELTA * float(np.exp(-entropy)))


def longest_typical(tree: TokenTree, chances_after: Callable[[list[int]], Tensor]) -> Walk:
    """The longest path of typical tokens from the root; the most likely of equally long ones.

    `chances_after` gives the target's probabilities `[vocab]` after a path of nodes, the root first.
    """
    best: tuple[int, float, Walk] = (0, 1.0, {})
    open_paths: list[tuple[list[int], float, Walk]] = [([0], 1.0, {})]
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
