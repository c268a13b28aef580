"""Softmax by blocks of keys, and weighted sums of values: parts of attention that Numba compiles.

In bfloat16 every sum has torch's order, as described in `row_attention`; in float32 the order is free.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lookahead.kernels.microkernel import HAS_DOT_OF_PAIRS, LANES, ROWS, tile_of
from lookahead.kernels.scalars import exp_of_negative, fma, jit_part, narrow, widen
from lookahead.kernels.shuffles import pair_weights
from lookahead.kernels.softmax_lines import peak_of, weigh_in_order, weigh_line
from lookahead.utils.jit import njit

BLOCK = 512  # keys whose weights are computed before their values are added
LINE = BLOCK + BLOCK // 2  # elements of the scores of a query: those of a block, and room for their weights as pairs
COLUMNS = 2 * LANES
FEW = 4  # rows of the smaller tile, for few queries
SIZES = sorted({FEW, ROWS})
TOGETHER = 4  # keys whose weighted values are added to each other before they are added to the sum

# Whether an instruction adds both products of a pair to a sum, one after the other, each sum rounded.
HAS_PAIRS = HAS_DOT_OF_PAIRS

_F = np.float32


_fours_of_one: Any = tile_of(1, "fours", rows=SIZES)
_fours_of_two: Any = tile_of(2, "fours", rows=SIZES)
_pairs_of_one: Any = tile_of(1, "pairs", rows=[FEW]) if HAS_PAIRS else None
_pairs_of_two: Any = tile_of(2, "pairs", rows=[FEW]) if HAS_PAIRS else None
_pairs_of_four: Any = tile_of(4, "pairs", rows=[FEW]) if HAS_PAIRS else None
_sums_of_one: Any = tile_of(1, "sums", rows=SIZES)
_sums_of_two: Any = tile_of(2, "sums", rows=SIZES)


@jit_part
def peak_of_line(scores, size, peak):
    """The maximum of `peak` and the scores of a query; found for all queries of a tile before any is weighed."""
    registers = size // LANES
    peak = peak_of((scores, 0, registers), peak)
    for i in range(registers * LANES, size):
        peak = max(peak, scores[i])
    return peak


@jit_part
def weigh_more(scores, size, row, begin, peak, is_half, peaks, totals, sums, in_order=False):
    """Turn the scores of a query into weights relative to a peak, and scale its earlier sums down accordingly.

    `in_order` pairs neighbouring weights, not every fourth with the second next.
    """
    total = _weigh_halves(scores, size, peak, in_order) if is_half else _weigh_floats(scores, size, peak)
    if peak == peaks[row]:
        totals[row] += total
        return
    fade = _F(math.exp(peaks[row] - peak))
    totals[row], peaks[row] = fma(fade, totals[row], total), peak
    if begin:
        for i in range(sums.shape[1]):
            sums[row, i] *= fade


@njit(fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _weigh_floats(scores, size, peak):
    total = _F(0.0)
    for i in range(size):
        weight = exp_of_negative(scores[i] - peak)
        scores[i] = weight
        total += weight
    return total


@jit_part
def _weigh_halves(scores, size, peak, in_order):
    """Weights are also stored as pairs of bfloat16 from index `BLOCK` on; see `softmax_lines` for which are rounded."""
    registers, bits = size // LANES, scores.view(np.int32)
    if in_order:
        total = weigh_in_order((scores, 0, registers), (bits, BLOCK), peak)
    else:
        total = weigh_line((scores, 0, registers), (bits, BLOCK), peak)
    for i in range(registers * LANES, size):
        weight = _F(math.exp(np.float64(scores[i] - peak)))  # rounded once, as torch's weights of single keys are
        total += weight
        scores[i] = widen(narrow(weight, np.uint16(0)))
    last = size // COLUMNS * COLUMNS
    if last < size and not in_order:
        pair_weights((bits, last), (bits, BLOCK + last // 2))
    return total


@jit_part
def add_fours(weights, block, size, sums, first, count):
    """Add weighted values of a block, four keys at a time. The products are exact, so only the sums round."""
    dim = sums.shape[1]
    if HAS_PAIRS:
        _add_pairs(weights.view(np.int32), block.view(np.int32), size // TOGETHER * TOGETHER, sums, first, count)
        return
    for column in range(0, dim if size else 0, COLUMNS):
        to = first * dim + column
        if dim - column > LANES:
            _fours_of_two((weights, 0, LINE, 1), (block, column, dim), (sums, to, dim), count, size)
        else:
            _fours_of_one((weights, 0, LINE, 1), (block, column, dim), (sums, to, dim), count, size)


@jit_part
def _add_pairs(weights, block, size, sums, first, count):
    """`add_fours` by the CPU's instruction, of paired values and weights."""
    dim = sums.shape[1]
    for row in range(0, count, FEW):
        of_row = (weights, row * LINE + BLOCK, LINE, 1)
        for column in range(0, dim // (2 * COLUMNS) * 2 * COLUMNS, 2 * COLUMNS):
            to = (sums, (first + row) * dim + column, dim)
            _pairs_of_four(of_row, (block, column, dim), to, FEW, size // 2)
        for column in range(dim // (2 * COLUMNS) * 2 * COLUMNS, dim, COLUMNS):
            to = (sums, (first + row) * dim + column, dim)
            if dim - column > LANES:
                _pairs_of_two(of_row, (block, column, dim), to, FEW, size // 2)
            else:
                _pairs_of_one(of_row, (block, column, dim), to, FEW, size // 2)


@jit_part
def add_sums(weights, values, begin, size, head, kv_heads, sums, first, count):
    """Add weighted values, read directly from the cache."""
    dim = sums.shape[1]
    for column in range(0, dim if size else 0, COLUMNS):
        at, step, to = (begin * kv_heads + head) * dim + column, kv_heads * dim, first * dim + column
        if dim - column > LANES:
            _sums_of_two((weights, 0, LINE, 1), (values, at, step), (sums, to, dim), count, size)
        else:
            _sums_of_one((weights, 0, LINE, 1), (values, at, step), (sums, to, dim), count, size)


@jit_part
def add_rest(weights, values, begin, size, sums, like):
    """Add weighted values: four keys at a time, then the rest, from the last one backwards.

    Weights are rounded to the type of `like`.
    """
    for i in range(begin, size):
        weights[i] = widen(narrow(weights[i], like))
    whole = begin + (size - begin) // TOGETHER * TOGETHER
    for i in range(begin, whole, TOGETHER):
        a, b, c, d = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        for at in range(len(sums)):
            even = a * values[i, at] + c * values[i + 2, at]
            odd = b * values[i + 1, at] + d * values[i + 3, at]
            sums[at] += even + odd
    for i in range(size - 1, whole - 1, -1):
        for at in range(len(sums)):
            sums[at] += weights[i] * values[i, at]
