"""Norms of rows, with the sums of torch's `mean` and of its `layer_norm`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from lookahead.kernels.scalars import fma, jit_part, narrow, numbers_at, widen
from lookahead.utils.addresses import array_at

_PARTIALS = 4  # partial sums, each of every fourth vector
_LEVELS = 4  # of sums; each takes the sums of the level below
_TURNS = 16  # additions to a level before its sums move to the next one
_LANES = 8  # float32 per vector, on all x86 CPUs: torch does not build its sums for wider vectors
_WIDTH = _PARTIALS * _LANES
_CHUNK = 16  # steps of a chunk of moments
LAYER_STEP = 2 * _LANES  # layer norms are of a multiple of as many numbers
_MOMENT_LEVELS = 16  # of chunks, each of twice as many as the level below

_F = np.float32
ROUNDED, WIDE, PLUS_ONE, LAYER = range(4)
"""Norms: of rows that are rounded before they meet the weight, as in Llama, or after, as in OLMo 2; the latter with 1
added to the weight, as in Gemma; and torch's layer norm."""


def width_of_steps(kind: Any) -> Any:
    """Numbers per step of torch's moments: a vector, of which bfloat16 has twice as many numbers."""


@overload(width_of_steps, strict=False)
def _width_of_steps(kind: Any) -> Any:
    width = 2 * _LANES if isinstance(kind, types.Integer) else _LANES
    return lambda kind: width


def _move(line: Any, mean: Any, scale: Any, kind: Any) -> None:
    """Subtract the mean of a row and multiply it, as torch does for its type."""


@overload(_move, strict=False)
def _move_as(line: Any, mean: Any, scale: Any, kind: Any) -> Any:
    def of_halves(line: Any, mean: Any, scale: Any, kind: Any) -> None:
        shift = -(scale * mean)
        for i in range(len(line)):
            line[i] = fma(line[i], scale, shift)

    def of_floats(line: Any, mean: Any, scale: Any, kind: Any) -> None:
        for i in range(len(line)):
            line[i] = (line[i] - mean) * scale

    return of_halves if isinstance(kind, types.Integer) else of_floats


@jit_part
def _merge(count, means, squares, own_count, own_means, own_squares):
    """Add the moments of `count` numbers a lane to others; returns how many there are then."""
    total = own_count + count
    share = _F(count) / _F(total) if total else _F(0.0)
    for i in range(_LANES):
        delta = means[i] - own_means[i]
        shared = share * delta
        own_squares[i] = fma(delta * _F(own_count), shared, own_squares[i] + squares[i])
        own_means[i] += shared
    return total


@jit_part
def _moments(line, width):
    """The mean and the variance of a row of whole steps, in the order of torch's `layer_norm`.

    Steps of 8 or 16 lanes make chunks, and chunks a cascade of levels. Source: Chan et al. 1983, "Algorithms for
    Computing the Sample Variance".
    """
    steps, depth = len(line) // width, 1
    chunks = (steps + _CHUNK - 1) // _CHUNK
    while (1 << depth) < chunks:
        depth += 1
    counts = np.zeros(_MOMENT_LEVELS, np.int64)
    means, squares = np.zeros((_MOMENT_LEVELS, _LANES), np.float32), np.zeros((_MOMENT_LEVELS, _LANES), np.float32)
    of_chunk, of_squares = np.empty(width, np.float32), np.empty(width, np.float32)
    for chunk in range(chunks):
        count = min(_CHUNK, steps - chunk * _CHUNK)
        of_chunk[:], of_squares[:] = _F(0.0), _F(0.0)
        for step in range(count):
            begin, share = (chunk * _CHUNK + step) * width, _F(1.0) / _F(step + 1)
            for i in range(width):
                delta = line[begin + i] - of_chunk[i]
                of_chunk[i] = fma(delta, share, of_chunk[i])
                of_squares[i] = fma(delta, line[begin + i] - of_chunk[i], of_squares[i])
        for lane in range(0, width, _LANES):
            end = lane + _LANES
            counts[0] = _merge(count, of_chunk[lane:end], of_squares[lane:end], counts[0], means[0], squares[0])
        level, rest = 1, chunk + 1
        while level < depth and rest % 2 == 0:
            counts[level] = _merge(
                counts[level - 1], means[level - 1], squares[level - 1], counts[level], means[level], squares[level]
            )
            counts[level - 1], means[level - 1], squares[level - 1] = 0, _F(0.0), _F(0.0)
            level, rest = level + 1, rest // 2
    for level in range(1, depth):
        counts[0] = _merge(counts[level], means[level], squares[level], counts[0], means[0], squares[0])
    count, lanes, mean, square = 0, steps * width // _LANES, _F(0.0), _F(0.0)
    for i in range(_LANES):
        share, delta = _F(lanes) / _F(count + lanes), means[0, i] - mean
        mean = fma(share, delta, mean)
        square += fma(delta * delta * share, _F(count), squares[0, i])
        count += lanes
    return mean, square / _F(len(line))


@jit_part
def _mean_square(line, sums):
    """The mean square of a row, in the order of torch's `mean`.

    Every fourth vector goes to the same partial sum. After 16 vectors the sums move to the next level. At the end come
    the levels, the remaining vectors, the partial sums, the remaining numbers, and the lanes.
    """
    size = len(line)
    steps = size // _WIDTH
    sums[:] = _F(0.0)
    for step in range(steps):
        begin = step * _WIDTH
        for i in range(_WIDTH):
            value = line[begin + i]
            sums[i] += value * value
        level, turns = _WIDTH, _TURNS
        while level < len(sums) and (step + 1) % turns == 0:
            for i in range(level, level + _WIDTH):
                sums[i] += sums[i - _WIDTH]
                sums[i - _WIDTH] = _F(0.0)
            level += _WIDTH
            turns *= _TURNS
    for level in range(_WIDTH, len(sums), _WIDTH):
        for i in range(_WIDTH):
            sums[i] += sums[level + i]
    whole = size // _LANES * _LANES
    for begin in range(steps * _WIDTH, whole, _LANES):
        for i in range(_LANES):
            value = line[begin + i]
            sums[i] += value * value
    for partial in range(_LANES, _WIDTH, _LANES):
        for i in range(_LANES):
            sums[i] += sums[partial + i]
    final = _F(0.0)
    for i in range(whole, size):
        final += line[i] * line[i]
    for i in range(_LANES):
        final += sums[i]
    return final / _F(size)


@jit_part
def norm_rows(address, kind):
    """Add the tensor at `delta_at`, unless it is 0, and norm the rows, unless `out_at` is 0."""
    numbers = array_at(address, (13,), np.int64)
    x_at, delta_at, weight_at, total_at, out_at, means_at, bias_at, rows, size, bits, rounding = numbers[:11]
    count, eps, factor = rows * size, np.int32(bits).view(np.float32), np.int32(numbers[11]).view(np.float32)
    of_sum = np.int32(numbers[12]).view(np.float32)
    x, out = numbers_at(x_at, count, kind), numbers_at(out_at, count, kind)
    weight, means = numbers_at(weight_at, size, kind), array_at(means_at, (2 * rows,), np.float32)
    delta, total = numbers_at(delta_at, count, kind), numbers_at(total_at, count, kind)
    bias = numbers_at(bias_at, size, kind)
    line, factors = np.empty(size, np.float32), np.empty(size, np.float32)
    sums = np.empty(_LEVELS * _WIDTH, np.float32)
    for i in range(size if out_at else 0):
        factors[i] = widen(weight[i]) + _F(1.0) if rounding == PLUS_ONE else widen(weight[i])
    for row in range(rows):
        begin = row * size
        own = x[begin : begin + size]
        if delta_at:
            other, added = delta[begin : begin + size], total[begin : begin + size]
            if factor == _F(1.0) and of_sum == _F(1.0):
                for i in range(size):
                    added[i] = narrow(widen(own[i]) + widen(other[i]), added[i])
                    line[i] = widen(added[i])
            else:
                for i in range(size):
                    scaled = narrow(widen(other[i]) * factor, added[i])
                    both = narrow(widen(own[i]) + widen(scaled), added[i])
                    added[i] = narrow(widen(both) * of_sum, added[i])
                    line[i] = widen(added[i])
        else:
            for i in range(size):
                line[i] = widen(own[i])
        if out_at == 0:
            continue
        normed = out[begin : begin + size]
        if rounding == LAYER:
            mean, variance = _moments(line, width_of_steps(kind))
            scale = _F(1.0) / np.sqrt(variance + eps)
            if means_at:
                means[row], means[rows + row] = mean, scale
            _move(line, mean, scale, kind)
            for i in range(size):
                shift = widen(bias[i]) if bias_at else _F(0.0)
                normed[i] = narrow(fma(line[i], factors[i], shift), normed[i])
            continue
        mean = _mean_square(line, sums)
        if means_at:
            means[row] = mean
        scale = _F(1.0) / np.sqrt(mean + eps)
        if rounding == ROUNDED:
            for i in range(size):
                rounded = widen(narrow(line[i] * scale, normed[i]))
                normed[i] = narrow(factors[i] * rounded, normed[i])
        else:
            for i in range(size):
                normed[i] = narrow(factors[i] * (line[i] * scale), normed[i])
