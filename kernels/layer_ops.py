"""The operators between the products of a decoder layer, one job each: RMSNorm, rotary embedding, gated SiLU, copies.

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

from lookahead.kernels.jobs import Job, claim_part
from lookahead.kernels.scalars import bits_of, exp, jit_part, narrow, widen
from lookahead.utils.addresses import array_at

_PARTIALS = 4  # partial sums, each of every fourth vector
_LEVELS = 4  # of sums; each takes the sums of the level below
_TURNS = 16  # additions to a level before its sums move to the next one
_LANES = 8  # float32 per vector, on all x86 CPUs: torch does not build its sums for wider vectors
_WIDTH = _PARTIALS * _LANES

_F = np.float32
_MAX_EXP_INPUT = _F(80.0)  # from here on SiLU returns its input
_NORM, _ROTATION, _GATING, _STORING = range(4)  # kinds of jobs


def norm(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    eps: float,
    *,
    delta: Tensor | None = None,
    total: Tensor | None = None,
    means: Tensor | None = None,
) -> Job:
    """A job that divides rows by the root of their mean square plus `eps`, and multiplies them by a weight.

    All tensors are contiguous, and of one dtype, bfloat16 or float32, except `means`.

    Args:
        x: `[..., size]`.
        weight: `[size]`.
        out: Like `x`, or `x` itself.
        eps: Added to the mean square.
        delta: Like `x`; added to it first.
        total: Like `x`; the sum `x + delta` is written to it.
        means: float32 `[rows]`; the mean squares are written to it.
    """
    tensors = x, delta, weight, total, out, means
    places = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    size = weight.numel()
    sizes = x.numel() // size, size, bits_of(eps)
    return _ENTRIES[x.dtype], 1, (_NORM, *places, *sizes), tensors


def rotation(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Job:
    """A job that applies a rotary embedding in place; pairs are formed of the two halves of a head.

    Queries and keys are tokens of heads of `dim` numbers; `cos` and `sin` are `[..., dim]` for as many tokens. All are
    contiguous, and of one dtype, bfloat16 or float32.
    """
    dim = cos.shape[-1]
    tokens = cos.numel() // dim
    sizes = tokens, query.numel() // tokens, key.numel() // tokens, dim
    places = query.data_ptr(), key.data_ptr(), cos.data_ptr(), sin.data_ptr()
    return _ENTRIES[cos.dtype], 1, (_ROTATION, *places, *sizes), (query, key, cos, sin)


def gating(gate: Tensor, up: Tensor) -> Job:
    """A job that writes `silu(gate) * up` over the gate; bfloat16 or float32 of one shape, contiguous."""
    return _ENTRIES[gate.dtype], 1, (_GATING, gate.data_ptr(), up.data_ptr(), gate.numel()), (gate, up)


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


def _numbers_at(address: Any, size: Any, kind: Any) -> Any:
    """The array at an address: bfloat16 if `kind` is an integer, else float32."""


@overload(_numbers_at, strict=False)
def _typed_numbers_at(address: Any, size: Any, kind: Any) -> Any:
    dtype = np.uint16 if isinstance(kind, types.Integer) else np.float32
    return lambda address, size, kind: array_at(address, (size,), dtype)


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
def _norm(address, kind):
    """Add the tensor at `delta_at`, unless it is 0, and norm the rows."""
    x_at, delta_at, weight_at, total_at, out_at, means_at, rows, size, bits = array_at(address, (9,), np.int64)
    count, eps = rows * size, np.int32(bits).view(np.float32)
    x, out = _numbers_at(x_at, count, kind), _numbers_at(out_at, count, kind)
    weight, means = _numbers_at(weight_at, size, kind), array_at(means_at, (rows,), np.float32)
    delta, total = _numbers_at(delta_at, count, kind), _numbers_at(total_at, count, kind)
    line, factors = np.empty(size, np.float32), np.empty(size, np.float32)
    sums = np.empty(_LEVELS * _WIDTH, np.float32)
    for i in range(size):
        factors[i] = widen(weight[i])
    for row in range(rows):
        begin = row * size
        own, normed = x[begin : begin + size], out[begin : begin + size]
        if delta_at:
            other, added = delta[begin : begin + size], total[begin : begin + size]
            for i in range(size):
                added[i] = narrow(widen(own[i]) + widen(other[i]), added[i])
                line[i] = widen(added[i])
        else:
            for i in range(size):
                line[i] = widen(own[i])
        mean = _mean_square(line, sums)
        if means_at:
            means[row] = mean
        scale = _F(1.0) / np.sqrt(mean + eps)
        for i in range(size):
            scaled = widen(narrow(line[i] * scale, normed[i]))
            normed[i] = narrow(factors[i] * scaled, normed[i])


@jit_part
def _rotate_heads(heads, cos, sin):
    """Rotate the heads of one token. Every product and every sum is rounded."""
    half = len(cos) // 2
    for begin in range(0, len(heads), 2 * half):
        first, second = heads[begin : begin + half], heads[begin + half : begin + 2 * half]
        for i in range(half):
            a, b = widen(first[i]), widen(second[i])
            kept, turned = narrow(a * cos[i], first[i]), narrow(-b * sin[i], first[i])
            kept_too, turned_too = narrow(b * cos[half + i], first[i]), narrow(a * sin[half + i], first[i])
            first[i] = narrow(widen(kept) + widen(turned), first[i])
            second[i] = narrow(widen(kept_too) + widen(turned_too), second[i])


@jit_part
def _rotate(address, kind):
    """Rotate the heads of queries and keys, which have `width` and `key_width` numbers per token."""
    query_at, key_at, cos_at, sin_at, tokens, width, key_width, dim = array_at(address, (8,), np.int64)
    query, key = _numbers_at(query_at, tokens * width, kind), _numbers_at(key_at, tokens * key_width, kind)
    cos, sin = _numbers_at(cos_at, tokens * dim, kind), _numbers_at(sin_at, tokens * dim, kind)
    cosines, sines = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for token in range(tokens):
        for i in range(dim):
            cosines[i], sines[i] = widen(cos[token * dim + i]), widen(sin[token * dim + i])
        _rotate_heads(query[token * width : (token + 1) * width], cosines, sines)
        _rotate_heads(key[token * key_width : (token + 1) * key_width], cosines, sines)


@jit_part
def _gate(address, kind):
    """Write the product over the gate."""
    gate_at, up_at, size = array_at(address, (3,), np.int64)
    gate, up = _numbers_at(gate_at, size, kind), _numbers_at(up_at, size, kind)
    for i in range(size):
        x = widen(gate[i])
        power = exp(-x if x < _MAX_EXP_INPUT else -_MAX_EXP_INPUT)
        activated = widen(narrow(x / (_F(1.0) + power), gate[i]))
        gate[i] = narrow(activated * widen(up[i]), gate[i])


@jit_part
def _store(address, kind):
    """Copy keys and values of tokens to their slots."""
    key_at, value_at, keys_at, values_at, places_at, tokens, width, size = array_at(address, (8,), np.int64)
    places, step = array_at(places_at, (tokens,), np.int64), width * size
    for token in range(tokens):
        for source, slots in ((key_at, keys_at), (value_at, values_at)):
            line, to = (
                _numbers_at(source + token * step, width, kind),
                _numbers_at(slots + places[token] * step, width, kind),
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
        _norm(numbers, kind)
    elif job == _ROTATION:
        _rotate(numbers, kind)
    elif job == _GATING:
        _gate(numbers, kind)
    else:
        _store(numbers, kind)


def _work_on_halves(address: Any) -> None:
    _work(address, 0)


def _work_on_floats(address: Any) -> None:
    _work(address, 0.0)


_ENTRIES = {torch.bfloat16: _work_on_halves, torch.float32: _work_on_floats}
