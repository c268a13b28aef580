"""Parts of `lookahead.kernels.row_attention`: loading and scoring a block of keys, of a prompt or of a path."""

from __future__ import annotations

from typing import Any

import numpy as np

from lookahead.kernels.microkernel import LANES, ROWS, tile_of, transpose
from lookahead.kernels.scalars import jit_part, widen
from lookahead.kernels.weighted_sums import BLOCK, COLUMNS, SIZES

STEP = BLOCK + LANES
"""Elements from one dimension of the transposed keys to the next."""
_PARTS = 4  # partial sums of a score
_F = np.float32

_score_tile: Any = tile_of(2, rows=SIZES)


@jit_part
def load_block(keys, words, values, begin, size, head, transposed, block, is_half):
    """Copy the prompt's keys of a block, transposed, and its values as float32 if they are bfloat16."""
    dim = keys.shape[2]
    for slot in range(size if is_half else 0):
        line, to = values[begin + slot, head], block[slot]
        for i in range(dim):
            to[i] = widen(line[i])
    whole = size // LANES * LANES
    heads, count = words.shape[1:]
    each, step, together = dim // count, heads * count, count // LANES * LANES
    for slot in range(0, whole, LANES):
        at = (begin + slot) * step + head * count
        for word in range(0, together, LANES):
            transpose((words, at + word, step), (transposed, each * word * STEP + slot, STEP))
        for i in range(each * together, dim):
            for lane in range(LANES):
                transposed[i, slot + lane] = widen(keys[begin + slot + lane, head, i])
    for slot in range(whole, size):
        for i in range(dim):
            transposed[i, slot] = widen(keys[begin + slot, head, i])


@jit_part
def score_prompt(queries, first, count, transposed, size, scale, is_half, scores):
    """Score the prompt's keys of a block for a tile of queries: four partial sums of every fourth dimension.

    In float32 queries are already scaled, and there is one sum.
    """
    dim = queries.shape[1]
    if not is_half:
        for column in range(0, size, COLUMNS):
            _score_tile((queries, first * dim, dim, 1), (transposed, column, STEP), (scores, column, BLOCK), count, dim)
        return
    parts = np.empty((_PARTS, ROWS * COLUMNS), np.float32)
    for column in range(0, size, COLUMNS):
        for i in range(_PARTS):
            at, line, step = first * dim + i, i * STEP + column, _PARTS * STEP
            _score_tile(
                (queries, at, dim, _PARTS), (transposed, line, step), (parts[i], 0, COLUMNS), count, dim // _PARTS
            )
        for row in range(count):
            scored, at = scores[row, column : column + COLUMNS], row * COLUMNS
            a, b, c, d = (
                parts[0, at : at + COLUMNS], parts[1, at : at + COLUMNS],
                parts[2, at : at + COLUMNS], parts[3, at : at + COLUMNS],
            )  # fmt: skip
            for i in range(COLUMNS):
                scored[i] = ((a[i] + c[i]) + (b[i] + d[i])) * scale


@jit_part
def score_path(node, size, common, root, keys, start, head, parents, depths, query, scale, scores):
    """Score the nodes of a path that are in a block, in which the tree's root has the index `root`."""
    at = root + depths[node]
    while at >= common:
        if at < size:
            key = keys[start + node, head]
            a = b = c = d = _F(0.0)
            for i in range(0, len(key), _PARTS):
                a += widen(key[i]) * query[i]
                b += widen(key[i + 1]) * query[i + 1]
                c += widen(key[i + 2]) * query[i + 2]
                d += widen(key[i + 3]) * query[i + 3]
            scores[at] = ((a + c) + (b + d)) * scale
        if at == root:
            break
        node = parents[node]
        at -= 1


@jit_part
def load_path(node, size, common, root, values, start, head, parents, depths, held, block):
    """Copy the values of a path's nodes to their slots in a block, unless they are already there."""
    at = root + depths[node]
    while at >= common:
        if at < size and held[depths[node]] != node:
            held[depths[node]] = node
            line, to = values[start + node, head], block[at]
            for i in range(len(to)):
                to[i] = widen(line[i])
        if at == root:
            break
        node = parents[node]
        at -= 1
