"""The two-dimensional window of lookahead decoding, as a token tree.

Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", §3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lookahead.ngram.chains import SEPARATOR, IntArray
from lookahead.ngram.trie import Trie

UNKNOWN = -1  # stands for what the target would have said, where it was not asked
_WINDOW_CHANCE = 0.05  # of a window node once its parent was chosen


@dataclass(frozen=True, slots=True)
class PlantedWindow:
    """A window and the guesses beside it, merged into one tree.

    Attributes:
        tokens: int32 `[k]`; the root, node 0, is the newest token.
        parents: int32 `[k]`; a parent comes before its children, and no two of those hold the same token.
        probabilities: float32 `[k]`; the chance of a node once its parent was chosen; 1 for the root.
        cells: int32 `[levels, width]`; the node that each cell of the window became.
        required: Nodes 0 to `required - 1` are the window, the root included; the rest are guesses.
    """

    tokens: IntArray
    parents: IntArray
    probabilities: NDArray[np.float32]
    cells: IntArray
    required: int


class JacobiWindow:
    """W columns, N-1 levels deep, of what the target may say at the positions to come.

    Cell (l, i) holds a token for l + i positions after the newest. Level 0 is a chain, its column 0 the newest
    token itself; above each of its columns stands a tooth, every cell the child of the one below. What the
    target says after a tooth of N-1 tokens closes an N-gram, and becomes the top of the next window. It starts
    with level 0 only and gains one level a step.

    Args:
        width: Columns W, at least 1.
        ngram_size: N, at least 2.
        context: int32 `[n]`, tokens so far, at least one; what is unknown is drawn from them.

    Raises:
        ValueError: A size is too small, or the context is empty.

    Example:
        >>> window = JacobiWindow(width=2, ngram_size=3, context=np.array([7, 7, 7], np.int32))
        >>> window.cells.tolist()
        [[7, 7]]
        >>> window.slide(np.array([[3, 4]], np.int32), np.array([9], np.int32), np.array([7, 9], np.int32))
        >>> window.cells.tolist()  # 4 was said after the cell that is now column 0; column 1 is drawn
        [[9, 9], [4, 9]]
    """

    __slots__ = ("_cells", "_drawn", "_levels")

    def __init__(self, width: int, ngram_size: int, context: IntArray) -> None:
        if width < 1 or ngram_size < 2 or context.size == 0:
            raise ValueError(
                f"need width >= 1, ngram_size >= 2 and a context, got {width}, {ngram_size}, {context.size} tokens"
            )
        self._cells = np.zeros((ngram_size - 1, width), dtype=np.int32)
        self._levels = 1
        self._drawn = _fill(self._cells[:1], context, 0)
        self._cells[0, 0] = context[-1]

    @property
    def cells(self) -> IntArray:
        """The levels filled so far, int32 `[levels, width]`."""
        return self._cells[: self._levels]

    def plant(self, room: int, guesses: Trie | None = None) -> PlantedWindow:
        """Lay the window out as a tree, then the guesses; nodes that are the same are one.

        Where there is no room for the whole window, columns on the right stay away, at last the tops of teeth.

        Args:
            room: Most nodes of the window besides the root; guesses are not counted.
            guesses: What else to verify, grown from the same root.
        """
        cells = self.cells[: room + 1, : max(1, (room + 1) // self._levels)]
        if guesses is None:
            return PlantedWindow(*_plant(cells, cells[0, :1], _NO_PARENTS, _NO_CHANCES))
        return PlantedWindow(*_plant(cells, guesses.tokens, guesses.parents, guesses.probabilities))

    def slide(self, answers: IntArray | None, emitted: IntArray, context: IntArray) -> None:
        """Move on by the tokens emitted.

        Once all levels are filled, each takes the one above and the answers to the last enter on top; until
        then each stays and the answers become a new level. Columns left of the newest token fall out; those
        that open on the right are drawn from the context, always the same for the same tokens.

        Args:
            answers: int32 `[levels, width]`, what the target says after each cell, `UNKNOWN` where it was not
                asked; `None` where it was asked nothing at all.
            emitted: int32 `[n]`, the tokens the step emitted, at least one.
            context: int32 `[m]`, the newest tokens, `emitted` at their end.
        """
        grown = self._levels if answers is None else min(self._levels + 1, self._cells.shape[0])
        rise = 0 if answers is None or grown > self._levels else 1
        rows = self.cells if answers is None else np.concatenate((self.cells, answers[-1:]))
        shift = emitted.size - rise
        self._drawn = _slide(self._cells[:grown], rows, rise, shift, context, self._drawn)
        self._cells[0, 0] = emitted[-1]
        self._levels = grown


_NO_PARENTS = np.zeros(1, dtype=np.int32)
_NO_CHANCES = np.ones(1, dtype=np.float32)


def ngrams_of_step(
    window: JacobiWindow,
    planted: PlantedWindow,
    answers: IntArray,
    heard: IntArray,
    *,
    before: IntArray,
    emitted: IntArray,
    reach: int,
) -> IntArray:
    """Gather what a step teaches, as documents for a pool.

    First the n-grams the window closes, the longest first; then each guess with what the target says after it;
    last the tokens emitted. Guesses and output come with the tokens before them, so that a longer context
    than one token can be recognised.

    Args:
        window: The window as it was planted.
        planted: Its tree.
        answers: int32 `[levels, width]`, what the target says after each cell, `UNKNOWN` where it was not asked.
        heard: int32 `[k]`, the same for each node of the tree.
        before: int32 `[n]`, the tokens up to the root, the root included, that may be taught; at least one.
        emitted: int32 `[m]`, the tokens the step emitted.
        reach: Most tokens of a guess, and of what is taught before the tokens emitted.

    Returns:
        int32 `[tokens]`, documents apart by `SEPARATOR`, those most worth finding last.
    """
    documents: IntArray = _write_ngrams(
        window.cells, answers, planted.tokens, planted.parents, planted.required, heard, before, emitted, reach
    )
    return documents


@njit(cache=True)
def _draw(context, drawn):
    """A token of the context, picked by a hash of how many were drawn before."""
    code = ((drawn + 1) * 0x9E3779B1) & 0xFFFFFFFF
    code = ((code ^ (code >> 15)) * 0x45D9F3B) & 0xFFFFFFFF
    return context[(code ^ (code >> 13)) % context.size]


@njit(cache=True)
def _fill(cells, context, drawn):
    """Draw every cell; returns how many tokens were drawn so far."""
    for level in range(cells.shape[0]):
        for column in range(cells.shape[1]):
            cells[level, column] = _draw(context, drawn)
            drawn += 1
    return drawn


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


@njit(cache=True)
def _child(tokens, first_child, next_sibling, parent, token):
    """The child of `parent` that holds `token`, or 0."""
    node = first_child[parent]
    while node != 0 and tokens[node] != token:
        node = next_sibling[node]
    return node


@njit(cache=True)
def _plant(cells, guess_tokens, guess_parents, guess_chances):
    """The arrays of a `PlantedWindow`, in its order."""
    levels, width = cells.shape
    most = levels * width + guess_tokens.size
    tokens, parents = np.empty(most, np.int32), np.zeros(most, np.int32)
    chances = np.full(most, _WINDOW_CHANCE, np.float32)
    first_child, next_sibling = np.zeros(most, np.int32), np.zeros(most, np.int32)
    nodes = np.zeros((levels, width), np.int32)
    tokens[0], chances[0] = cells[0, 0], 1.0
    count = 1
    for place in range(1, levels * width):
        level, column = place // width, place % width
        parent = nodes[0, column - 1] if level == 0 else nodes[level - 1, column]
        node = _child(tokens, first_child, next_sibling, parent, cells[level, column])
        if node == 0:
            node = count
            count += 1
            tokens[node], parents[node] = cells[level, column], parent
            next_sibling[node], first_child[parent] = first_child[parent], node
        nodes[level, column] = node
    required = count
    where = np.zeros(guess_tokens.size, np.int32)
    for guess in range(1, guess_tokens.size):
        parent = where[guess_parents[guess]]
        node = _child(tokens, first_child, next_sibling, parent, guess_tokens[guess])
        if node == 0:
            node = count
            count += 1
            tokens[node], parents[node], chances[node] = guess_tokens[guess], parent, 0.0
            next_sibling[node], first_child[parent] = first_child[parent], node
        chances[node] = max(chances[node], guess_chances[guess])
        where[guess] = node
    return tokens[:count], parents[:count], chances[:count], nodes, required


@njit(cache=True)
def _write_window(out, size, cells, answers):
    """Write what each cell and its answer close: a tooth from the chain up; returns the new size."""
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


@njit(cache=True)
def _write_guess(out, size, tokens, parents, node, answer, before, reach):
    """Write the path to a guess and its answer, `reach` tokens at most, what came before the root included."""
    count = 1
    up = node
    while up != 0 and count < reach:
        count += 1
        up = parents[up]
    if up == 0:
        count = min(reach, count + before.size)
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
def _write_ngrams(cells, answers, tokens, parents, required, heard, before, emitted, reach):
    """The documents of `ngrams_of_step`."""
    levels, width = cells.shape
    most = levels * width * (levels + 2) + (tokens.size - required) * (reach + 1) + reach + emitted.size
    out = np.empty(most, np.int32)
    size = _write_window(out, 0, cells, answers)
    for node in range(required, tokens.size):
        if heard[node] >= 0:
            size = _write_guess(out, size, tokens, parents, node, heard[node], before, reach)
    for token in before[max(0, before.size - reach + 1) :]:
        out[size] = token
        size += 1
    for token in emitted:
        out[size] = token
        size += 1
    return out[:size]
