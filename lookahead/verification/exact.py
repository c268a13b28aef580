"""Walk a verified tree: the only place where output tokens are chosen and outputs end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import njit

from lookahead.drafting.tree import IntArray, TokenTree


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What the target chose along one row's tree.

    Attributes:
        path: int32 `[a]`; the accepted nodes from the root, `path[0] == 0`, whose KV is kept.
        tokens: int32 `[a]`; the token the target chose after each node of the path: the tokens of `path[1:]`, then the
            bonus token.
        finished: The output ends with the last of `tokens`.
    """

    path: IntArray
    tokens: IntArray
    finished: bool


def verify(tree: TokenTree, choose: Callable[[int], int], is_finished: Callable[[int], bool]) -> VerifyResult:
    """Walk from the root: choose a token, emit it, and descend if a child of the node holds it.

    `choose` and `is_finished` are called in turn, once per emitted token and in order. So random numbers, logits
    processors and stopping criteria get exactly what they get in a token-by-token loop.

    Args:
        tree: The draft.
        choose: Takes a node and returns the target's choice after it.
        is_finished: Takes the emitted token and returns whether the output ends there.

    Source: the sampling loop of transformers, replayed along the tree; lossless for any tree.
    """
    path, tokens = [0], []
    while True:
        node = path[-1]
        token = choose(node)
        tokens.append(token)
        finished = is_finished(token)
        child = 0 if finished else _child(tree.tokens, tree.parents, node, token)
        if child == 0:
            return VerifyResult(np.array(path, np.int32), np.array(tokens, np.int32), finished)
        path.append(child)


@njit(cache=True)
def _child(tokens, parents, node, token):
    """The child of `node` that holds `token`, or 0."""
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token:
            return child
    return 0


@njit(cache=True)
def walk_greedy(tree_tokens, parents, argmax, eos_tokens, limit):
    """`verify` for greedy decoding that ends at an end token or after `limit` tokens; the fields of a `VerifyResult`.

    Args:
        tree_tokens: int32 `[n]`, of the draft.
        parents: int32 `[n]`.
        argmax: int32 `[n]`; the target's choice after every node.
        eos_tokens: int32 `[k]`; tokens that end the output.
        limit: Tokens the row may still emit, at least 1.
    """
    path, tokens = np.empty(len(tree_tokens), np.int32), np.empty(len(tree_tokens), np.int32)
    node, count = 0, 0
    while True:
        token = argmax[node]
        path[count], tokens[count] = node, token
        count += 1
        finished = count >= limit
        for eos in eos_tokens:
            finished = finished or token == eos
        node = 0 if finished else _child(tree_tokens, parents, node, token)
        if node == 0:
            return path[:count], tokens[:count], finished
