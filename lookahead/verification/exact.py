"""Walk a verified tree: the only place where output tokens are chosen and outputs end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

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
        children = (tree.parents == node) & (tree.tokens == token)
        children[0] = False  # the root, which counts as its own parent
        child = int(children.argmax())
        if finished or not children[child]:
            return VerifyResult(np.array(path, np.int32), np.array(tokens, np.int32), finished)
        path.append(child)
