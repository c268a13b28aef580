"""Parts of `lookahead.kernels.row_attention`: loading and scoring a block of keys, of a prompt or of a path."""

from __future__ import annotations

from typing import Any

import numpy as np

from lookahead.kernels.microkernel import LANES, ROWS, tile_of
from lookahead.kernels.scalars import jit_part, widen
from lookahead.kernels.shuffles import fetch_rows, pair_rows, transpose, transpose_fourths
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

    Values are widened, or come as pairs for the CPU's instruction: of every four the first with the third, the second
    with the fourth, in the rows of the first two. The last values, of fewer than four, are widened.
    """
    load_keys(keys, words, values, begin, size, head, transposed, is_half)
    if is_half:
        _load_values(values, begin, size, head, block)


@jit_part
def load_keys(keys, words, values, begin, size, head, transposed, is_half):
    """Copy some keys, transposed: widened, or with `transpose_fourths` as pairs for the CPU's instruction."""
    (_, heads, dim), count, whole = keys.shape, words.shape[2], size // LANES * LANES
    lines, step, together, is_paired = dim // count, heads * count, count // LANES * LANES, is_half and HAS_PAIRS
    pairs, of_values = transposed.view(np.int32), values.reshape(values.size)
    for slot in range(0, whole, LANES):
        at = (begin + slot) * step + head * count
        for word in range(0, together, LANES):
            fetch_rows((words, at + word + _AHEAD * step, step))
            fetch_rows((of_values, lines * (at + word), lines * step))
            if is_paired:
                to = 2 * word // _FOURTHS * STEP + slot
                transpose_fourths((words, at + word, step), (pairs, to, STEP, dim // _FOURTHS * STEP))
            else:
                transpose((words, at + word, step), (transposed, lines * word * STEP + slot, STEP))
    for slot in range(0 if lines * together < dim else whole, size):
        first = lines * together if slot < whole else 0
        if is_paired:
            pair_fourths(keys[begin + slot, head], first, pairs[:, slot])
        else:
            for i in range(first, dim):
                transposed[i, slot] = widen(keys[begin + slot, head, i])


@jit_part
def _load_values(values, begin, size, head, block):
    _, heads, dim = values.shape
    step, whole = heads * dim, size // TOGETHER * TOGETHER if HAS_PAIRS else 0
    flat, places = values.reshape(values.size), block.view(np.int32).reshape(block.size)
    for slot in range(0, whole, TOGETHER):
        for i in range(2):
            first, to = (begin + slot + i) * step + head * dim, (slot // 2 + i) * dim
            for at in range(0, dim, LANES):
                pair_rows((flat, first + at, 2 * step), (places, to + at))
    for slot in range(whole, size):
        line, to = values[begin + slot, head], block[slot]
        for i in range(dim):
            to[i] = widen(line[i])


@jit_part
def _fetch_share(ahead, column, size, is_half):
    """Prefetch keys of a later block, which are too far apart for the CPU to expect them, while scores are computed.

    `ahead` has the keys and values as words, the block's first slot, the head, and the first and the last line to
    prefetch; they are spread over the columns. Of values in float32, a block would leave too little of a cache.
    """
    words, values, begin, head, first, last = ahead
    _, heads, count = words.shape
    lines, step = count // LANES, heads * count
    for line in range(first + (last - first) * column // size, first + (last - first) * (column + COLUMNS) // size):
        at = (begin + line // lines * LANES) * step + head * count + line % lines * LANES
        fetch_rows((words, at, step))
        if is_half:
            fetch_rows((values, at, step))


@jit_part
def pair_fourths(numbers, first, out):
    """Pair bfloat16 from a multiple of 8 on with the fourth after them, as in `transpose_fourths`."""
    part = len(numbers) // _FOURTHS
    for begin in range(first, len(numbers), _FOURTHS):
        for i in range(_PARTS):
            pair = (np.int32(numbers[begin + i]) << np.int32(16)) | np.int32(numbers[begin + i + _PARTS])
            out[i * part + begin // _FOURTHS] = pair


@jit_part
def score_prompt(queries, pairs, first, count, transposed, size, scale, is_half, scores, ahead):
    """Score the prompt's keys of a block for a tile of queries: four partial sums of every fourth dimension.

    In float32 queries are already scaled, and there is one sum. `ahead` are the arguments of `_fetch_share`.
    """
    dim, of_keys = queries.shape[1], transposed.view(np.int32)
    step, parts = dim // 2, np.empty((_PARTS if is_half and not HAS_PAIRS else 0, ROWS * COLUMNS), np.float32)
    for column in range(0, size, COLUMNS):
        _fetch_share(ahead, column, size, is_half)
        if not is_half:
            scored = scores, column, LINE
            _score_tile((queries, first * dim, dim, 1), (transposed, column, STEP), scored, count, dim)
        elif HAS_PAIRS:
            for row in range(0, count, FEW):
                of_queries, to = (pairs, (first + row) * step, step, 1), (scores, row * LINE + column, LINE, scale)
                _score_pairs(of_queries, (of_keys, column, STEP), to, FEW, dim // _FOURTHS)
        else:
            _score_widened(queries, first, count, transposed, column, scale, scores, parts)


@jit_part
def _score_widened(queries, first, count, transposed, column, scale, scores, parts):
    """Score a tile of queries and keys that are widened."""
    dim = queries.shape[1]
    for i in range(_PARTS):
        at, line, step = first * dim + i, i * STEP + column, _PARTS * STEP
        _score_tile((queries, at, dim, _PARTS), (transposed, line, step), (parts[i], 0, COLUMNS), count, dim // _PARTS)
    for row in range(count):
        scored, at = scores[row, column : column + COLUMNS], row * COLUMNS
        a, b, c, d = (
            parts[0, at : at + COLUMNS], parts[1, at : at + COLUMNS],
            parts[2, at : at + COLUMNS], parts[3, at : at + COLUMNS],
        )  # fmt: skip
        for i in range(COLUMNS):
            scored[i] = ((a[i] + c[i]) + (b[i] + d[i])) * scale


@jit_part
def score_nodes(
    keys, words, values, flat, start, count, head, queries, pairs, transposed, scale, is_half, scores, of_nodes,
):  # fmt: skip
    """Score the nodes of a tree for some queries, whether or not they see them: `[queries, nodes]`."""
    for begin in range(0, count, BLOCK):
        size, first = min(BLOCK, count - begin), start + begin
        whole = min((size + LANES - 1) // LANES * LANES, len(keys) - first)  # any keys fill the last registers
        load_keys(keys, words, values, first, whole, head, transposed, is_half)
        for row in range(0, len(queries), ROWS):
            tile, none = min(ROWS, len(queries) - row), (words, flat.reshape(words.shape), 0, 0, 0, 0)
            score_prompt(queries, pairs, row, tile, transposed, size, scale, is_half, scores, none)
            for i in range(tile):
                line, to = scores[i], of_nodes[row + i, begin : begin + size]
                for at in range(size):  # Numba compiles an assignment of an array with its message for other shapes
                    to[at] = line[at]


@jit_part
def take_path(node, size, common, root, parents, depths, of_nodes, scores):
    """Copy the scores of the nodes of a path that are in a block, in which the tree's root has the index `root`."""
    at = root + depths[node]
    while at >= common:
        if at < size:
            scores[at] = of_nodes[node]
        if at == root:
            break
        node = parents[node]
        at -= 1


@jit_part
def load_path(node, size, common, root, values, start, head, parents, depths, owners, block):
    """Copy the values of a path's nodes to their slots in a block, unless they are already there."""
    at = root + depths[node]
    while at >= common:
        if at < size and owners[depths[node]] != node:
            owners[depths[node]] = node
            line, to = values[start + node, head], block[at]
            for i in range(len(to)):
                to[i] = widen(line[i])
        if at == root:
            break
        node = parents[node]
        at -= 1
