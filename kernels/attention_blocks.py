"""Parts of `lookahead.kernels.row_attention`: loading and scoring a block of keys, of a prompt or of a path."""

from __future__ import annotations

from typing import Any

import numpy as np

from lookahead.kernels.microkernel import LANES, ROWS, tile_of
from lookahead.kernels.scalars import jit_part, widen
from lookahead.kernels.shuffles import pair_rows, transpose, transpose_fourths
from lookahead.kernels.weighted_sums import BLOCK, COLUMNS, FEW, HAS_PAIRS, LINE, SIZES, TOGETHER

STEP = BLOCK + LANES
"""Elements from one dimension of the transposed keys to the next."""
_AHEAD = 96  # keys from one that is read to the one prefetched: those of a head are too far apart for the CPU to expect
_PARTS = 4  # partial sums of a score
_FOURTHS = 2 * _PARTS  # numbers that hold one pair of each part
_F = np.float32

_score_tile: Any = tile_of(2, rows=SIZES)
_score_pairs: Any = tile_of(2, "quarters", rows=[FEW]) if HAS_PAIRS else None


@jit_part
def load_block(keys, words, values, begin, size, head, transposed, block, is_half):
    """Copy the prompt's keys of a block, transposed, and its values if they are bfloat16.

    Keys and values are widened, or come as pairs for the CPU's instruction: keys with `transpose_fourths`; of every
    four values the first with the third, the second with the fourth, in the rows of the first two. The last values, of
    fewer than four, are widened.
    """
    if is_half and HAS_PAIRS:
        _load_pairs(keys, words, values, begin, size, head, transposed.view(np.int32), block.view(np.int32))
    dim, whole = keys.shape[2], size // LANES * LANES
    for slot in range(size // TOGETHER * TOGETHER if HAS_PAIRS else 0, size if is_half else 0):
        line, to = values[begin + slot, head], block[slot]
        for i in range(dim):
            to[i] = widen(line[i])
    if is_half and HAS_PAIRS:
        return
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
def _load_pairs(keys, words, values, begin, size, head, transposed, block):
    slots, heads, dim = values.shape
    step, count, part, whole = heads * dim, dim // 2, dim // _FOURTHS, size // LANES * LANES
    ahead, together = _AHEAD * step, count // LANES * LANES
    flat, places = values.reshape(slots * step), block.reshape(block.size)
    for slot in range(0, size // TOGETHER * TOGETHER, TOGETHER):
        for i in range(2):
            first, to = (begin + slot + i) * step + head * dim, (slot // 2 + i) * dim
            for at in range(0, dim, LANES):
                pair_rows((flat, first + at, 2 * step, ahead), (places, to + at))
    for slot in range(0, whole, LANES):
        at = (begin + slot) * heads * count + head * count
        for word in range(0, together, LANES):
            to = 2 * word // _FOURTHS * STEP + slot
            transpose_fourths((words, at + word, heads * count, ahead // 2), (transposed, to, STEP, part * STEP))
    for slot in range(0 if 2 * together < keys.shape[2] else whole, size):
        first = 2 * together if slot < whole else 0
        pair_fourths(keys[begin + slot, head], first, transposed[:, slot])


@jit_part
def pair_fourths(numbers, first, out):
    """Pair bfloat16 from a multiple of 8 on with the fourth after them, as in `transpose_fourths`."""
    part = len(numbers) // _FOURTHS
    for begin in range(first, len(numbers), _FOURTHS):
        for i in range(_PARTS):
            pair = (np.int32(numbers[begin + i]) << np.int32(16)) | np.int32(numbers[begin + i + _PARTS])
            out[i * part + begin // _FOURTHS] = pair


@jit_part
def score_prompt(queries, pairs, first, count, transposed, size, scale, is_half, scores):
    """Score the prompt's keys of a block for a tile of queries: four partial sums of every fourth dimension.

    In float32 queries are already scaled, and there is one sum.
    """
    dim = queries.shape[1]
    if not is_half:
        for column in range(0, size, COLUMNS):
            _score_tile((queries, first * dim, dim, 1), (transposed, column, STEP), (scores, column, LINE), count, dim)
        return
    if HAS_PAIRS:
        of_keys, step = transposed.view(np.int32), dim // 2
        for column in range(0, size, COLUMNS):
            for row in range(0, count, FEW):
                of_queries, to = (pairs, (first + row) * step, step, 1), (scores, row * LINE + column, LINE, scale)
                _score_pairs(of_queries, (of_keys, column, STEP), to, FEW, dim // _FOURTHS)
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
