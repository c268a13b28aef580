"""Rows of a product with quantized weights: every block is whole numbers from -127 to 127 times a scale.

Equal blocks of all rows are next to each other, so that a tile reads several rows from one place. What follows the
numbers of a block is described by `ROW_STEPS` of `kernels.block_tiles`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from lookahead.kernels.block_tiles import BYTES_OF, ROW_STEPS
from lookahead.kernels.jobs import claim_part
from lookahead.kernels.microkernel import LANES, PAIRS, VECTOR, WHOLE, call, matrices_of, spread, vector_at
from lookahead.kernels.scalars import jit_part, to_intrinsic
from lookahead.utils.addresses import array_at

_LARGEST = 127.0  # largest number of a rounded row
_SMALLEST = float(np.float32(1e-30))  # blocks with no larger number are rounded to zeros
_FLOAT, _I32 = ir.FloatType(), ir.IntType(32)
_WIDE = 64  # numbers of the larger blocks


def round_floats(address: Any) -> None:
    """A job function that rounds rows of float32."""
    _round(address, np.float32)


def round_halves(address: Any) -> None:
    """A job function that rounds rows of bfloat16."""
    _round(address, np.uint16)


@jit_part
def _round(address, number):
    """Round rows. Numbers beyond the last input are zeros."""
    _, rows, x_at, out_at, inputs, length, size, zero, parts = array_at(address, (9,), np.int64)
    words = size // BYTES_OF + ROW_STEPS
    x, out = array_at(x_at, (rows * inputs,), number), array_at(out_at, (rows * length,), np.int32)
    last = np.zeros(size, number)
    row = claim_part(address)
    while row < rows:
        for block in range(length // words):
            of_row, at, count = x, row * inputs + block * size, inputs - block * size
            if count < size:
                last[max(0, count) :] = 0
                for i in range(count):
                    last[i] = x[at + i]
                of_row, at = last, 0
            to = (block * rows + row) * words
            if size == _WIDE:
                _round_wide((of_row, at), (out, to), zero, parts)
            else:
                _round_block((of_row, at), (out, to), zero, parts)
        row = claim_part(address)


def _rounding(size: int) -> Any:
    """An intrinsic that rounds a block of `size` numbers.

    A number that is not finite makes the scale, and so every product, not finite.
    """

    @to_intrinsic
    def rounding(context: Any, x: Any, out: Any, zero: Any, parts: Any) -> Any:
        def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
            (left, at), (right, to) = matrices_of(target, builder, signature, values[:2])
            line = [_load(builder, left, builder.add(at, WHOLE(i))) for i in range(0, size, LANES)]
            sizes = [
                builder.and_(builder.bitcast(vector, PAIRS), ir.Constant(PAIRS, [0x7FFFFFFF] * LANES))
                for vector in line
            ]
            while len(sizes) > 1:
                sizes = [_larger(builder, *sizes[:2]), *sizes[2:]]
            largest = builder.bitcast(call(builder, f"llvm.vector.reduce.smax.v{LANES}i32", _I32, *sizes), _FLOAT)
            is_large = builder.fcmp_ordered("<", _FLOAT(_SMALLEST), largest)
            is_whole = builder.and_(is_large, builder.fcmp_ordered("<", largest, _FLOAT(float("inf"))))
            factor, whole = spread(builder, builder.fdiv(_FLOAT(_LARGEST), largest)), []
            for i, value in enumerate(line):
                near = call(builder, f"llvm.rint.v{LANES}f32", VECTOR, builder.fmul(value, factor))
                near = builder.select(is_whole, near, ir.Constant(VECTOR, None))
                whole.append(builder.fptosi(near, PAIRS))
                kind = ir.VectorType(ir.IntType(8), LANES)
                numbers = builder.bitcast(builder.gep(right, [to]), ir.IntType(8).as_pointer())
                place = vector_at(builder, numbers, WHOLE(i * LANES), kind)
                builder.store(builder.trunc(whole[-1], kind), place, align=4)
            middle = len(whole) // 2
            sums = [_sum(builder, half) for half in (whole[:middle], whole[middle:])]
            total = builder.add(*sums)
            is_one = builder.icmp_signed("==", values[3], WHOLE(1))
            scale = builder.fdiv(largest, _FLOAT(_LARGEST))
            ends = [builder.select(is_one, total, sums[0]), sums[1]]
            ends = [builder.mul(end, builder.trunc(builder.neg(values[2]), _I32)) for end in ends]
            ends += [
                builder.bitcast(number, _I32) for number in (scale, builder.fmul(builder.sitofp(total, _FLOAT), scale))
            ]
            for i, value in enumerate(ends, size // BYTES_OF):
                builder.store(value, builder.gep(right, [builder.add(to, WHOLE(i))]))
            return target.get_dummy_value()

        return types.void(x, out, zero, parts), emit

    return rounding


def _load(builder: Any, array: Any, at: Any) -> Any:
    """Numbers as float32."""
    if array.type.pointee == _FLOAT:
        return builder.load(vector_at(builder, array, at), align=4)
    halves = builder.load(vector_at(builder, array, at, ir.VectorType(ir.IntType(16), LANES)), align=2)
    return builder.bitcast(builder.shl(builder.zext(halves, PAIRS), ir.Constant(PAIRS, [16] * LANES)), VECTOR)


def _larger(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.icmp_signed(">", left, right), left, right)


def _sum(builder: Any, vectors: list[Any]) -> Any:
    """The sum of all lanes."""
    total = vectors[0]
    for vector in vectors[1:]:
        total = builder.add(total, vector)
    return call(builder, f"llvm.vector.reduce.add.v{LANES}i32", _I32, total)


_round_block, _round_wide = _rounding(32), _rounding(_WIDE)
