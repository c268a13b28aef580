"""The window of lookahead decoding, as a token tree.

Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", §3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lookahead.ngram.chains import SEPARATOR, IntArray
from lookahead.ngram.prune import union
from lookahead.ngram.search import Trie
from lookahead.utils.jit import njit

UNKNOWN = -1  # no answer of the target
_WINDOW_PROB = 0.05  # of a window node given its parent


@dataclass(frozen=True, slots=True)
class WindowTree:
    """A window and guesses, merged into one tree; arrays are `[k]`.

    Example:
        >>> window = JacobiWindow(width=2, ngram_size=3, context=np.array([7, 7, 9], np.int32))
        >>> tree = window.tree(max_nodes=8)
        >>> tree.parents.tolist(), tree.cells.tolist(), tree.required
        ([0, 0], [[0, 1]], 2)
    """

    tokens: IntArray  # the root, node 0, is the last token
    parents: IntArray  # a parent comes before its children, whose tokens all differ
    probabilities: NDArray[np.float32]  # of a node given its parent; 1 for the root
    cells: IntArray  # [levels, width]; the node of each cell of the window
    required: int  # nodes 0 to `required - 1` are the window, including the root; the others are guesses


class JacobiWindow:
    """W columns and N-1 levels of guesses at future tokens.

    Cell (l, i) holds a token for l + i positions after the last. Level 0 is a chain that starts at the last token.
    Each further cell is the child of the cell below it. The target's answer after a column of N-1 tokens completes an
    n-gram, and becomes the top of the next window. A window starts with level 0 and grows by one level per step.
    Unknown cells are drawn from the context, at least one token. `cells` are the filled levels, `[levels, width]`.

    Example:
        >>> window = JacobiWindow(width=2, ngram_size=3, context=np.array([7, 7, 7], np.int32))
        >>> window.tree(max_nodes=8).tokens.tolist()
        [7, 7]
        >>> window.slide(np.array([[3, 4]], np.int32), np.array([9], np.int32), np.array([7, 9], np.int32))
        >>> window.cells.tolist()  # 4 is the answer after the cell that is now column 0; column 1 is drawn
        [[9, 9], [4, 7]]
    """

    __slots__ = ("_most_levels", "_rng", "cells")

    def __init__(self, width: int, ngram_size: int, context: IntArray) -> None:
        if width < 1 or ngram_size < 2 or context.size == 0:
            raise ValueError(
                f"need width >= 1, ngram_size >= 2 and a context, got {width}, {ngram_size}, {context.size} tokens"
            )
        self._most_levels = ngram_size - 1
        self._rng = np.random.default_rng(0)
        self.cells: IntArray = np.full((1, width), UNKNOWN, np.int32)
        self._fill(context)

    def tree(self, max_nodes: int, guesses: Trie | None = None) -> WindowTree:
        """Lay out the window and the guesses as one tree.

        If the window has more than `max_nodes` nodes besides the root, columns on the right are dropped, then the upper
        levels. Guesses, a tree with the same root, do not count.
        """
        cells = self.cells[: max_nodes + 1, : max(1, (max_nodes + 1) // len(self.cells))]
        width = cells.shape[1]
        tokens: IntArray = cells.reshape(-1)
        offers = [(cells.size, 0, 0)]
        parents: IntArray = np.arange(cells.size, dtype=np.int32) - width  # the cell below
        parents[:width] = np.maximum(0, np.arange(width) - 1)  # on level 0 the one before
        probs: NDArray[np.float32] = np.full(cells.size, _WINDOW_PROB, np.float32)
        if guesses is not None:
            tokens, parents = np.append(tokens, guesses.tokens), np.append(parents, guesses.parents)
            probs = np.append(probs, guesses.probabilities)
            offers.append((guesses.tokens.size, 0, 0))
        tokens, parents, probs, placed = _union(tokens, parents, probs, np.array(offers))
        nodes = placed[: cells.size].reshape(cells.shape)
        return WindowTree(tokens, parents, probs, nodes, int(nodes.max()) + 1)

    def slide(self, answers: IntArray | None, emitted: IntArray, context: IntArray) -> None:
        """Move on by the emitted tokens, at least one, which end the context.

        The answers, int32 `[levels, width]`, are the target's next token after each cell, `UNKNOWN` where there is
        none, or None for no answers. The answers after the last level become a new level; once all levels are filled,
        level 0 is dropped in exchange. Columns left of the last token are dropped. New columns on the right are drawn
        from the context, deterministically.
        """
        rows = self.cells if answers is None else np.concatenate((self.cells, answers[-1:]))
        levels, width = min(len(rows), self._most_levels), rows.shape[1]
        rise = len(rows) - levels
        shift = min(emitted.size - rise, width)
        self.cells = np.full((levels, width), UNKNOWN, np.int32)
        self.cells[:, : width - shift] = rows[rise:, shift:]
        self._fill(context)

    def _fill(self, context: IntArray) -> None:
        """Draw unknown cells from the context; cell (0, 0) is the last token."""
        is_unknown = self.cells < 0
        self.cells[is_unknown] = self._rng.choice(context, np.count_nonzero(is_unknown))
        self.cells[0, 0] = context[-1]


def ngrams_of_step(
    window: JacobiWindow,
    tree: WindowTree,
    answers: IntArray,
    argmax: IntArray,
    *,
    before: IntArray,
    emitted: IntArray,
    max_length: int,
) -> IntArray:
    """Collect the n-grams of a step, as documents for a pool with `SEPARATOR` between, the most useful ones last.

    First come n-grams of the window, before it slides, completed by its answers, longest first; then each guess of the
    tree with the target's argmax; last the emitted tokens. Guesses and output start with the tokens before them that
    may enter the pool, so that longer contexts find them too.

    Args:
        window: The window of the step.
        tree: The tree that was proposed.
        answers: int32 `[levels, width]`, the target's next token after each cell, `UNKNOWN` where there is none.
        argmax: int32 `[nodes]`, the target's next token after each node of the tree.
        before: int32 `[n]`, the tokens up to and including the root that may enter the pool; at least one.
        emitted: int32 `[m]`, the tokens of the step.
        max_length: Maximum tokens of a guess with the tokens before it, at least 2.

    Example:
        >>> context = np.array([7, 7, 7], np.int32)
        >>> window = JacobiWindow(width=2, ngram_size=3, context=context)
        >>> tree, answers = window.tree(max_nodes=8), np.array([[3, 4]], np.int32)
        >>> argmax, emitted = answers[0], np.array([3], np.int32)
        >>> step = {"before": context, "emitted": emitted, "max_length": 3}
        >>> ngrams_of_step(window, tree, answers, argmax, **step).tolist()
        [7, 4, -1, 7, 3, -1, 7, 7, 3]
    """
    documents: list[int] = []
    columns, column_answers = window.cells.T.tolist(), answers.T.tolist()
    for level in reversed(range(len(window.cells))):
        for column, successors in zip(reversed(columns), reversed(column_answers), strict=True):
            if successors[level] >= 0:
                documents += [*column[: level + 1], successors[level], SEPARATOR]
    paths = [before[1 - max_length :].tolist()]
    nodes = zip(tree.tokens.tolist(), tree.parents.tolist(), argmax.tolist(), strict=True)
    for node, (token, parent, answer) in enumerate(nodes):
        if node > 0:
            paths.append([*paths[parent], token][1 - max_length :])
        if node >= tree.required and answer >= 0:
            documents += [*paths[node], answer, SEPARATOR]
    return np.array([*documents, *paths[0], *emitted.tolist()], np.int32)


@njit()
def _union(tokens, parents, probabilities, offers):
    """Tokens, parents and probabilities of the merged window and guesses, and the node of every offered token."""
    merged, probs, placed = union(tokens[0], (tokens, parents, probabilities, np.zeros_like(tokens)), offers)
    return merged[0].copy(), merged[1].copy(), probs.astype(np.float32), placed
