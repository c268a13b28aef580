"""The two-dimensional window of lookahead decoding, as a token tree.

Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", §3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.ngram.chains import SEPARATOR, IntArray
from lookahead.ngram.prune import union
from lookahead.ngram.raw_arrays import jit_inline
from lookahead.ngram.trie import Trie

UNKNOWN = -1  # in place of the target's answer where it was not asked
_WINDOW_PROB = 0.05  # of a window node once its parent was chosen


@dataclass(frozen=True, slots=True)
class WindowTree:
    """A window and the guesses beside it, merged into one tree.

    Attributes:
        tokens: int32 `[k]`; the root, node 0, is the last token.
        parents: int32 `[k]`; a parent comes before its children, whose tokens all differ.
        probabilities: float32 `[k]`; the probability of a node once its parent was chosen; 1 for the root.
        cells: int32 `[levels, width]`; the node that each cell of the window became.
        required: Nodes 0 to `required - 1` are the window, the root included; the rest are guesses.
    """

    tokens: IntArray
    parents: IntArray
    probabilities: NDArray[np.float32]
    cells: IntArray
    required: int


class JacobiWindow:
    """W columns, N-1 levels deep, of guesses at the tokens to come.

    Cell (l, i) holds a token for l + i positions after the last. Level 0 is a chain, whose column 0 is the last token
    itself. Above each of its columns every cell is the child of the one below. The target's answer after a column of
    N-1 tokens completes an n-gram, and becomes the top of the next window. A window starts with level 0 only and grows
    by a level a step.

    Args:
        width: Columns W, at least 1.
        ngram_size: N, at least 2.
        context: int32 `[n]`, tokens so far, at least one; unknown cells are drawn from them.

    Raises:
        ValueError: A size is too small, or the context is empty.

    Example:
        >>> window = JacobiWindow(width=2, ngram_size=3, context=np.array([7, 7, 7], np.int32))
        >>> window.cells.tolist()
        [[7, 7]]
        >>> window.slide(np.array([[3, 4]], np.int32), np.array([9], np.int32), np.array([7, 9], np.int32))
        >>> window.cells.tolist()  # 4 is the answer after the cell that is now column 0; column 1 is drawn
        [[9, 9], [4, 9]]
    """

    __slots__ = ("_cells", "_drawn", "_levels")

    def __init__(self, width: int, ngram_size: int, context: IntArray) -> None:
        if width < 1 or ngram_size < 2 or context.size == 0:
            raise ValueError(
                f"need width >= 1, ngram_size >= 2 and a context, got {width}, {ngram_size}, {context.size} tokens"
            )
        self._cells = np.full((ngram_size - 1, width), UNKNOWN, dtype=np.int32)
        self._levels = 1
        self._drawn = _slide(self._cells[:1], self._cells[:1].copy(), 0, 0, context, 0)
        self._cells[0, 0] = context[-1]

    @property
    def cells(self) -> IntArray:
        """The levels filled so far, int32 `[levels, width]`."""
        return self._cells[: self._levels]

    def tree(self, max_nodes: int, guesses: Trie | None = None) -> WindowTree:
        """Lay the window out as a tree, then the guesses; equal nodes are merged.

        If the window has more nodes than allowed, columns on the right are left out, then the upper levels.

        Args:
            max_nodes: Most nodes of the window besides the root; guesses are not counted.
            guesses: Guesses to verify beside it, a tree with the same root.
        """
        cells = self.cells[: max_nodes + 1, : max(1, (max_nodes + 1) // self._levels)]
        tokens, parents = cells.reshape(-1), _cell_parents(*cells.shape)
        probs, offers = np.full(cells.size, _WINDOW_PROB, np.float32), [(cells.size, 0, 0)]
        if guesses is not None:
            tokens, parents = np.append(tokens, guesses.tokens), np.append(parents, guesses.parents)
            probs = np.append(probs, guesses.probabilities)
            offers.append((guesses.tokens.size, 0, 0))
        tokens, parents, probs, placed = _union(tokens, parents, probs, np.array(offers))
        nodes = placed[: cells.size].reshape(cells.shape)
        return WindowTree(tokens, parents, probs, nodes, int(nodes.max()) + 1)

    def slide(self, answers: IntArray | None, emitted: IntArray, context: IntArray) -> None:
        """Move on by the tokens emitted.

        Once all levels are filled, each takes the one above, and the answers to the last become the top level; until
        then the levels stay and the answers become a new one. Columns left of the last token are dropped. New columns
        on the right are drawn from the context, always the same for the same tokens.

        Args:
            answers: int32 `[levels, width]`, the target's next token after each cell, `UNKNOWN` where it was not
                asked; `None` where nothing was asked.
            emitted: int32 `[n]`, the tokens the step emitted, at least one.
            context: int32 `[m]`, the last tokens, `emitted` at their end.
        """
        grown = self._levels if answers is None else min(self._levels + 1, self._cells.shape[0])
        rise = 0 if answers is None or grown > self._levels else 1
        rows = self.cells if answers is None else np.concatenate((self.cells, answers[-1:]))
        shift = emitted.size - rise
        self._drawn = _slide(self._cells[:grown], rows, rise, shift, context, self._drawn)
        self._cells[0, 0] = emitted[-1]
        self._levels = grown


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
    """Collect the n-grams of a step, as documents for a pool.

    First those that the window completes, the longest first; then each guess with the target's next token; last the
    tokens emitted. Guesses and output include the tokens before them, so that they are found by longer contexts too.

    Args:
        window: The window before it slides.
        tree: Its tree.
        answers: int32 `[levels, width]`, the target's next token after each cell, `UNKNOWN` where it was not asked.
        argmax: int32 `[k]`, the same for each node of the tree.
        before: int32 `[n]`, the tokens up to the root, the root included, that may enter the pool; at least one.
        emitted: int32 `[m]`, the tokens the step emitted.
        max_length: Most tokens of a guess, and one more than are taken of `before`.

    Returns:
        int32 `[tokens]`, `SEPARATOR` between documents, the most useful ones last.
    """
    documents: IntArray = _write_ngrams(
        window.cells, answers, tree.tokens, tree.parents, tree.required, argmax, before, emitted, max_length
    )
    return documents


def _cell_parents(levels: int, width: int) -> IntArray:
    """For every cell, level by level, the cell below it; on level 0 the one before it."""
    parents = np.arange(levels * width, dtype=np.int32) - width
    parents[:width] = np.arange(width) - 1
    parents[0] = 0
    return parents


@njit(cache=True)
def _union(tokens, parents, probabilities, offers):
    """Merge the window and the guesses: tokens, parents, probabilities, and the node of every token offered."""
    merged, probs, placed = union(tokens[0], (tokens, parents, probabilities, np.zeros_like(tokens)), offers)
    return merged[0].copy(), merged[1].copy(), probs.astype(np.float32), placed


@jit_inline
def _draw(context, drawn):
    """A token of the context, chosen by a hash of how many were drawn before."""
    code = ((drawn + 1) * 0x9E3779B1) & 0xFFFFFFFF
    code = ((code ^ (code >> 15)) * 0x45D9F3B) & 0xFFFFFFFF
    return context[(code ^ (code >> 13)) % context.size]


@njit(cache=True)
def _slide(cells, rows, rise, shift, context, drawn):
    """Fill `cells` from `rows`, `rise` levels up and `shift` columns right; returns the tokens drawn so far."""
    width = cells.shape[1]
    for level in range(cells.shape[0]):
        for column in range(width):
            token = UNKNOWN
            if column + shift < width:
                token = rows[level + rise, column + shift]
            if token < 0:
                token = _draw(context, drawn)
                drawn += 1
            cells[level, column] = token
    return drawn


@jit_inline
def _write_window(out, size, cells, answers):
    """Write every column up to each cell with its answer; returns the new size."""
    levels, width = cells.shape
    for level in range(levels - 1, -1, -1):
        for column in range(width - 1, -1, -1):
            if answers[level, column] < 0:
                continue
            for below in range(level + 1):
                out[size + below] = cells[below, column]
            out[size + level + 1] = answers[level, column]
            out[size + level + 2] = SEPARATOR
            size += level + 3
    return size


@jit_inline
def _write_guess(out, size, tokens, parents, node, answer, before, max_length):
    """Write the path to a guess and its answer, at most `max_length` tokens with those before the root."""
    count = 1
    up = node
    while up != 0 and count < max_length:
        count += 1
        up = parents[up]
    if up == 0:
        count = min(max_length, count + before.size)
    end = size + count
    out[end] = SEPARATOR
    out[end - 1] = answer
    place = end - 2
    up = node
    while up != 0 and place >= size:
        out[place] = tokens[up]
        up = parents[up]
        place -= 1
    back = before.size - 1
    while place >= size:
        out[place] = before[back]
        place -= 1
        back -= 1
    return end + 1


@njit(cache=True)
def _write_ngrams(cells, answers, tokens, parents, required, argmax, before, emitted, max_length):
    """The core of `ngrams_of_step`."""
    levels, width = cells.shape
    most = levels * width * (levels + 2) + (tokens.size - required) * (max_length + 1) + max_length + emitted.size
    out = np.empty(most, np.int32)
    size = _write_window(out, 0, cells, answers)
    for node in range(required, tokens.size):
        if argmax[node] >= 0:
            size = _write_guess(out, size, tokens, parents, node, argmax[node], before, max_length)
    for token in before[max(0, before.size - max_length + 1) :]:
        out[size] = token
        size += 1
    for token in emitted:
        out[size] = token
        size += 1
    return out[:size]
