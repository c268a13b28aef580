"""Softmax by blocks of keys, and weighted sums of values: parts of attention that Numba compiles.

In bfloat16 every sum has torch's order, as described in `row_attention`; in float32 the order is free.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lookahead.kernels.microkernel import LANES, ROWS, tile_of
from lookahead.kernels.scalars import exp_of_negative, fma, jit_part
from lookahead.utils.jit import njit

BLOCK = 512  # keys whose weights are computed before their values are added
COLUMNS = 2 * LANES
SIZES = sorted({4, ROWS})  # rows of a tile: the smaller one for few queries
TOGETHER = 4  # keys whose weighted values are added to each other before they are added to the sum

_F = np.float32
_LOWEST = _F(-87.33654475)  # the exponential of smaller numbers is 0
_LOG2E = _F(1.4426950408889634)
# 2 ** x for a fraction x is nearly 1 + x minus this polynomial, whose coefficients start with the cube.
_POLYNOMIAL = _F(-0.079204240219773236), _F(-0.22433836478672356), _F(0.30354260500649682), _F(0.00010703434948458272)
_EXPONENT, _BIAS = _F(1 << 23), _F(127 << 23)  # a number times the first plus the second: the bits of 2 ** number


_fours_of_one: Any = tile_of(1, "fours", rows=SIZES)
_fours_of_two: Any = tile_of(2, "fours", rows=SIZES)
_sums_of_one: Any = tile_of(1, "sums", rows=SIZES)
_sums_of_two: Any = tile_of(2, "sums", rows=SIZES)


@jit_part
def weigh_more(scores, size, row, begin, is_half, peaks, totals, sums):
    """Turn the scores of a query into weights, and scale its earlier sums down accordingly."""
    peak, total = _weigh(scores, size, peaks[row], is_half)
    fade = _F(math.exp(peaks[row] - peak))
    totals[row], peaks[row] = fma(fade, totals[row], total), peak
    if begin:
        for i in range(sums.shape[1]):
            sums[row, i] *= fade


@jit_part
def _weigh(scores, size, peak, is_half):
    """Replace scores by weights; returns the maximum of scores and `peak`, and the sum of the weights."""
    whole = size // LANES * LANES
    lanes = np.empty(LANES, np.float32)
    lanes[:] = peak
    for first in range(0, whole, LANES):
        line = scores[first : first + LANES]
        for lane in range(LANES):  # one instruction, unlike `max`
            lanes[lane] = line[lane] if line[lane] > lanes[lane] else lanes[lane]
    for lane in range(LANES):
        peak = max(peak, lanes[lane])
    for i in range(whole, size):
        peak = max(peak, scores[i])
    return peak, _weigh_halves(scores, size, peak) if is_half else _weigh_floats(scores, size, peak)


@njit(fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _weigh_floats(scores, size, peak):
    total = _F(0.0)
    for i in range(size):
        weight = exp_of_negative(scores[i] - peak)
        scores[i] = weight
        total += weight
    return total


@jit_part
def _weigh_halves(scores, size, peak):
    """Weights are rounded to bfloat16 after summation.

    Source of the exponential: Malossi et al. 2015, "Fast exponential computation on SIMD architectures".
    """
    whole = size // LANES * LANES
    lanes = np.zeros(2 * LANES, np.float32)
    for i in range(whole):
        shifted = scores[i] - peak
        power = shifted * _LOG2E
        fraction = power - np.floor(power)
        error = fma(fraction, _POLYNOMIAL[0], _POLYNOMIAL[1])
        error = fma(fraction, error, _POLYNOMIAL[2])
        error = fma(fraction, error, _POLYNOMIAL[3])
        weight = np.int32(fma(_EXPONENT, power - error, _BIAS)).view(np.float32)
        scores[i] = weight if shifted >= _LOWEST else _F(0.0)
    for first in range(0, whole, LANES):
        turn = first % (2 * LANES)
        line, sums = scores[first : first + LANES], lanes[turn : turn + LANES]
        for lane in range(LANES):
            sums[lane] += line[lane]
    half = LANES
    while half:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    total = lanes[0]
    for i in range(whole, size):
        scores[i] = _F(math.exp(scores[i] - peak))
        total += scores[i]
    bits = scores.view(np.int32)
    for i in range(size):  # to the nearest bfloat16, ties to even
        bits[i] = (bits[i] + np.int32(0x7FFF) + ((bits[i] >> np.int32(16)) & np.int32(1))) & np.int32(-65536)
    return total


@jit_part
def add_fours(weights, block, size, sums, first, count):
    """Add weighted values of a block, four keys at a time. The products are exact, so only the sums round."""
    dim = sums.shape[1]
    for column in range(0, dim if size else 0, COLUMNS):
        to = first * dim + column
        if dim - column > LANES:
            _fours_of_two((weights, 0, BLOCK, 1), (block, column, dim), (sums, to, dim), count, size)
        else:
            _fours_of_one((weights, 0, BLOCK, 1), (block, column, dim), (sums, to, dim), count, size)


@jit_part
def add_sums(weights, values, begin, size, head, kv_heads, sums, first, count):
    """Add weighted values, read directly from the cache."""
    dim = sums.shape[1]
    for column in range(0, dim if size else 0, COLUMNS):
        at, step, to = (begin * kv_heads + head) * dim + column, kv_heads * dim, first * dim + column
        if dim - column > LANES:
            _sums_of_two((weights, 0, BLOCK, 1), (values, at, step), (sums, to, dim), count, size)
        else:
            _sums_of_one((weights, 0, BLOCK, 1), (values, at, step), (sums, to, dim), count, size)


@jit_part
def add_rest(weights, values, begin, size, sums):
    """Add weighted values: four keys at a time, then the rest, from the last one backwards."""
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
