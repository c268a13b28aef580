"""The operators between the products of a decoder layer, one job each: RMSNorm, rotary embedding, gates, copies.

For few tokens on a CPU, torch's operators for each of these cost more to call than to compute. In bfloat16 the results
have the bits of those operators: each rounds, and the mean sums in the order of torch's `mean`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from lookahead.kernels.jobs import Job, by_parts, claim_part
from lookahead.kernels.norm_rows import ROUNDED, norm_rows
from lookahead.kernels.scalars import bits_of, exp, jit_part, narrow, numbers_at, widen
from lookahead.utils.addresses import array_at

_F = np.float32
_MAX_EXP_INPUT = _F(80.0)  # from here on SiLU returns its input
_NORM, _ROTATION, _STORING, _COPYING = range(4)  # kinds of jobs
SILU, GELU_TANH, TABLE, SIGMOID, GELU, RELU, RELU_SQUARED = range(7)
"""Activations: formulas, and a table of the results of all bfloat16 numbers."""
_AT_ONCE = 1024  # numbers that are activated at a time, and the least for a part
_HALF_ROOT, _ERF_SHARE = _F(0.7071067811865476), _F(0.3275911)
_ERF_SERIES = tuple(map(_F, (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)))
_GELU_FACTOR, _GELU_CUBE = _F(1.5957691216057308), _F(0.044715)  # 2 * sqrt(2 / pi)


def norm(
    x: Tensor,
    weight: Tensor | None,
    out: Tensor | None,
    eps: float,
    *,
    kind: int = ROUNDED,
    delta: Tensor | None = None,
    factor: float = 1.0,
    scale: float = 1.0,
    total: Tensor | None = None,
    means: Tensor | None = None,
    bias: Tensor | None = None,
) -> Job:
    """A job that divides rows by the root of their mean square plus `eps`, and multiplies them by a weight.

    With the kind `LAYER` it subtracts the mean first, divides by the root of the variance plus `eps`, and adds a bias.

    All tensors are contiguous, and of one dtype, bfloat16 or float32, except `means`.

    Args:
        x: `[..., size]`.
        weight: `[size]`; may be None without `out`.
        out: Like `x`, or `x` itself; None only adds.
        eps: Added to the mean square.
        kind: `ROUNDED`, `WIDE`, `PLUS_ONE` or `LAYER`, whose rows are multiples of 16 numbers.
        delta: Like `x`; added to it first.
        factor: Of `delta`; the product is rounded.
        scale: Of the rounded sum; the product is rounded, and normed.
        total: Like `x`; the sum `x + delta` is written to it.
        means: float32 `[rows]`, the mean squares are written to it; of the kind `LAYER` `[2, rows]`, the means, and the
            reciprocals of the roots.
        bias: `[size]`, or None.
    """
    tensors = x, delta, weight, total, out, means, bias
    places = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    size = x.shape[-1] if weight is None else weight.numel()
    sizes = x.numel() // size, size, bits_of(eps), kind, bits_of(factor), bits_of(scale)
    return _ENTRIES[x.dtype], 1, (_NORM, *places, *sizes), tensors


def rotation(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    dim: int | None = None,
    turned: int | None = None,
    *,
    are_neighbours: bool = False,
) -> Job:
    """A job that applies a rotary embedding in place; pairs are formed of the two halves of the rotated numbers.

    Args:
        query: Tokens of heads, contiguous; bfloat16 or float32.
        key: Likewise, of the dtype of `query`.
        cos: `[..., size]` for as many tokens, contiguous. If it is float32 beside bfloat16 heads, only results are
            rounded.
        sin: Like `cos`.
        dim: Numbers of a head; the size of `cos` if None.
        turned: The first numbers of a head, which are rotated; the size of `cos` if None. If it is twice the size, both
            numbers of a pair share a cosine.
        are_neighbours: Whether the numbers of a pair are side by side instead, and share the first cosines.
    """
    size = cos.shape[-1]
    tokens = cos.numel() // size
    widths = query.numel() // tokens, key.numel() // tokens
    sizes = tokens, *widths, dim or size, turned or size, size, int(cos.dtype != query.dtype), int(are_neighbours)
    places = query.data_ptr(), key.data_ptr(), cos.data_ptr(), sin.data_ptr()
    return _ENTRIES[query.dtype], 1, (_ROTATION, *places, *sizes), (query, key, cos, sin)


def gating(
    gate: Tensor,
    up: Tensor | None,
    kind: int = SILU,
    table: Tensor | None = None,
    out: Tensor | None = None,
    *,
    limit: float = 0.0,
    factor: float = 1.0,
) -> Job:
    """A job that computes `activation(gate) * up`; without `up`, the activation.

    Args:
        gate: bfloat16 or float32; contiguous, or rows `[rows, size]` of any strides.
        up: Like `gate`, with strides of its own if there is `out`, or None.
        kind: `SILU`, `GELU_TANH`, `GELU`, `SIGMOID`, `RELU`, `RELU_SQUARED` or `TABLE`.
        table: bfloat16 `[65536]`: the activation of the number with these bits, for a gate in bfloat16.
        out: Contiguous, of the shape of `gate`; if None, results replace the gate, which is contiguous.
        limit: Largest gate, and largest absolute value of `up`, to which 1 is added then; 0 for none.
        factor: Of the gate within the sigmoid of `SILU`.
    """
    tensors = gate, up, table, gate if out is None else out
    places = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    strides = gate.stride() if up is None else up.stride()
    sizes = (1, gate.numel(), 0, 1, 0, 1) if out is None else (*gate.shape, *gate.stride(), *strides)
    of_job = *places, *sizes, kind, bits_of(limit), bits_of(factor), (parts := torch.get_num_threads())
    return _GATES[gate.dtype], parts, of_job, tensors


def storing(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> Job:
    """A job that copies keys and values of tokens into the slots of a cache.

    Args:
        key: `[..., width]`, contiguous; bfloat16 or float32, like all tensors except `places`.
        value: `[..., width]`, contiguous.
        keys: Slots of `width` numbers, contiguous.
        values: Slots of `width` numbers, contiguous.
        places: int64 `[tokens]`, contiguous: the slot of each token.
    """
    tensors, width = (key, value, keys, values, places), key.shape[-1]
    sizes = key.numel() // width, width, key.element_size()
    return _ENTRIES[key.dtype], 1, (_STORING, *(tensor.data_ptr() for tensor in tensors), *sizes), tensors


def copying(x: Tensor, out: Tensor) -> Job:
    """A job that copies rows `[rows, width]`, whose numbers are side by side, to contiguous ones of their dtype."""
    sizes = *x.shape, x.stride(0)
    return _ENTRIES[x.dtype], 1, (_COPYING, x.data_ptr(), out.data_ptr(), *sizes), (x, out)


@jit_part
def _rotate_pairs(first, second, cos, sin, second_at, is_wide):
    """Rotate the pairs of a head. Every product and every sum is rounded, or with `is_wide` the result alone."""
    if is_wide:
        for i in range(len(first)):
            a, b = widen(first[i]), widen(second[i])
            first[i] = narrow(a * cos[i] + -b * sin[i], first[i])
            second[i] = narrow(b * cos[second_at + i] + a * sin[second_at + i], first[i])
        return
    for i in range(len(first)):
        a, b = widen(first[i]), widen(second[i])
        kept, moved = narrow(a * cos[i], first[i]), narrow(-b * sin[i], first[i])
        kept_too = narrow(b * cos[second_at + i], first[i])
        moved_too = narrow(a * sin[second_at + i], first[i])
        first[i] = narrow(widen(kept) + widen(moved), first[i])
        second[i] = narrow(widen(kept_too) + widen(moved_too), second[i])


@jit_part
def _rotate_heads(heads, dim, turned, cos, sin, is_wide, are_neighbours):
    """Rotate the heads of one token."""
    half = turned // 2
    for begin in range(0, len(heads), dim):
        if are_neighbours:
            pairs = heads[begin : begin + turned]
            _rotate_pairs(pairs[::2], pairs[1::2], cos, sin, 0, is_wide)
        else:
            first, second = heads[begin : begin + half], heads[begin + half : begin + turned]
            _rotate_pairs(first, second, cos, sin, len(cos) - half, is_wide)


@jit_part
def _rotate(address, kind):
    """Rotate the heads of queries and keys, which have `width` and `key_width` numbers per token."""
    numbers = array_at(address, (12,), np.int64)
    query_at, key_at, cos_at, sin_at, tokens, width, key_width, dim, turned, size, is_wide, neighbours = numbers
    query, key = numbers_at(query_at, tokens * width, kind), numbers_at(key_at, tokens * key_width, kind)
    cos, sin = numbers_at(cos_at, tokens * size, kind), numbers_at(sin_at, tokens * size, kind)
    wide_cos, wide_sin = array_at(cos_at, (tokens * size,), np.float32), array_at(sin_at, (tokens * size,), np.float32)
    cosines, sines = np.empty(size, np.float32), np.empty(size, np.float32)
    for token in range(tokens):
        for i in range(size):
            at = token * size + i
            if is_wide:
                cosines[i], sines[i] = wide_cos[at], wide_sin[at]
            else:
                cosines[i], sines[i] = widen(cos[at]), widen(sin[at])
        queries, keys = query[token * width : (token + 1) * width], key[token * key_width : (token + 1) * key_width]
        _rotate_heads(queries, dim, turned, cosines, sines, is_wide, neighbours)
        _rotate_heads(keys, dim, turned, cosines, sines, is_wide, neighbours)


@jit_part
def _gelu(x):
    """x times the normal distribution function; its error function is formula 7.1.26 of Abramowitz and Stegun 1964."""
    size = np.abs(x) * _HALF_ROOT
    share = _F(1.0) / (_F(1.0) + _ERF_SHARE * size)
    series = _ERF_SERIES[0]
    for i in range(1, 5):
        series = series * share + _ERF_SERIES[i]
    square = size * size
    tail = _F(0.5) * series * share * exp(-square if square < _MAX_EXP_INPUT else -_MAX_EXP_INPUT)
    return x * (tail if x < _F(0.0) else _F(1.0) - tail)


@jit_part
def _gate(address, part, kind):
    """Write a part of the products of rows, which are `step` numbers apart, and their numbers `apart`."""
    numbers = array_at(address, (14,), np.int64)
    gate_at, up_at, table_at, out_at, rows, size, step, apart, up_step, up_apart = numbers[:10]
    formula, limit_bits, factor_bits, parts = numbers[10:]
    limit, factor = np.int32(limit_bits).view(np.float32), np.int32(factor_bits).view(np.float32)
    table, outs = array_at(table_at, (1 << 16,), np.uint16), numbers_at(out_at, rows * size, kind)
    gates = numbers_at(gate_at, (rows - 1) * step + (size - 1) * apart + 1, kind)
    ups = numbers_at(up_at, (rows - 1) * up_step + (size - 1) * up_apart + 1, kind)
    # Results may replace gates, and a loop over numbers that it replaces is not vectorized.
    line, other, share = np.empty(_AT_ONCE, np.float32), np.empty(_AT_ONCE, np.float32), _AT_ONCE
    share = max(share, (rows * size + parts - 1) // parts)
    at, end = part * share, min(rows * size, (part + 1) * share)
    while at < end:
        row, column = at // size, at % size
        count, first = min(_AT_ONCE, size - column, end - at), row * step + column * apart
        out = outs[at : at + count]
        if formula == TABLE:
            for i in range(count):
                line[i] = widen(_looked_up(gates[first + i * apart], table))
        else:
            _load(gates, first, apart, count, line)
            _activate(line, count, formula, limit, factor)
        if up_at:
            _load(ups, row * up_step + column * up_apart, up_apart, count, other)
            for i in range(count if limit else 0):
                y = other[i]
                y = limit if y > limit else -limit if y < -limit else y
                other[i] = widen(narrow(y + _F(1.0), out[0]))
            for i in range(count):
                line[i] = widen(narrow(line[i], out[0])) * other[i]
        for i in range(count):
            out[i] = narrow(line[i], out[0])
        at += count


@jit_part
def _load(numbers, first, apart, count, line):
    """Copy numbers that are `apart` to a line, as float32."""
    if apart == 1:
        near = numbers[first : first + count]
        for i in range(count):
            line[i] = widen(near[i])
    else:
        for i in range(count):
            line[i] = widen(numbers[first + i * apart])


@jit_part
def _activate(line, count, formula, limit, factor):
    """Replace numbers by their activations."""
    for i in range(count if limit else 0):
        line[i] = limit if line[i] > limit else line[i]
    if formula == GELU:
        for i in range(count):
            line[i] = _gelu(line[i])
    elif formula == RELU:
        for i in range(count):
            line[i] = _F(0.0) if line[i] < _F(0.0) else line[i]
    elif formula == RELU_SQUARED:
        for i in range(count):
            line[i] = _F(0.0) if line[i] < _F(0.0) else line[i] * line[i]
    elif formula == GELU_TANH:
        for i in range(count):
            x = line[i]
            line[i] = x / _share_of(_GELU_FACTOR * (x + _GELU_CUBE * x * x * x))
    elif formula == SIGMOID:
        for i in range(count):
            line[i] = _F(1.0) / _share_of(factor * line[i])
    else:
        for i in range(count):
            line[i] = line[i] / _share_of(factor * line[i])


@jit_part
def _share_of(power):
    """What a number is divided by, to multiply it by the sigmoid of `power`."""
    return _F(1.0) + exp(-power if power < _MAX_EXP_INPUT else -_MAX_EXP_INPUT)


def _looked_up(number: Any, table: Any) -> Any:
    """The entry of a bfloat16; a float32, which has no table, unchanged."""


@overload(_looked_up, strict=False)
def _look_up(number: Any, table: Any) -> Any:
    if number == types.uint16:
        return lambda number, table: table[number]
    return lambda number, table: number


@jit_part
def _copy(address, kind):
    """Copy rows that are `step` numbers apart."""
    x_at, out_at, rows, width, step = array_at(address, (5,), np.int64)
    source, out = numbers_at(x_at, (rows - 1) * step + width, kind), numbers_at(out_at, rows * width, kind)
    for row in range(rows):
        own, to = source[row * step : row * step + width], out[row * width : (row + 1) * width]
        for i in range(width):
            to[i] = own[i]


@jit_part
def _store(address, kind):
    """Copy keys and values of tokens to their slots."""
    key_at, value_at, keys_at, values_at, places_at, tokens, width, size = array_at(address, (8,), np.int64)
    places, step = array_at(places_at, (tokens,), np.int64), width * size
    for token in range(tokens):
        for source, slots in ((key_at, keys_at), (value_at, values_at)):
            line, to = (
                numbers_at(source + token * step, width, kind),
                numbers_at(slots + places[token] * step, width, kind),
            )
            for i in range(width):
                to[i] = line[i]


@jit_part
def _work(address, kind):
    """Do a whole job on one thread, which takes less time than waking the others."""
    if claim_part(address) > 0:
        return
    job, numbers = array_at(address, (3,), np.int64)[2], address + 24
    if job == _NORM:
        norm_rows(numbers, kind)
    elif job == _ROTATION:
        _rotate(numbers, kind)
    elif job == _COPYING:
        _copy(numbers, kind)
    else:
        _store(numbers, kind)


def _work_on_halves(address: Any) -> None:
    _work(address, 0)


def _work_on_floats(address: Any) -> None:
    _work(address, 0.0)


_ENTRIES = {torch.bfloat16: _work_on_halves, torch.float32: _work_on_floats}
_GATES = by_parts(_gate)
