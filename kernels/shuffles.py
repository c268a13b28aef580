"""Blocks of numbers moved through registers: transposed, paired, and rounded to bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from llvmlite import ir
from numba import types

from lookahead.kernels.microkernel import (
    LANES,
    PAIRS,
    VECTOR,
    WHOLE,
    emit_fetch,
    emit_loop,
    half_of,
    matrices_of,
    vector_at,
)
from lookahead.kernels.scalars import to_intrinsic

_QUARTER = 4  # 32-bit numbers of a quarter, within which a CPU shuffles fastest
_SIXTEEN, _UPPER_HALVES = ir.Constant(PAIRS, [16] * LANES), ir.Constant(PAIRS, [-65536] * LANES)


@to_intrinsic
def transpose(context: Any, source: Any, out: Any) -> Any:
    """Store a square of `LANES` float32 rows transposed; or pairs of bfloat16, held as int32, widened to float32."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        (source, at, row_step), (out, to, out_step) = matrices_of(target, builder, signature, values)
        firsts = [builder.add(at, builder.mul(row_step, WHOLE(row))) for row in range(LANES)]
        is_wide = source.type.pointee == ir.FloatType()
        kind = VECTOR if is_wide else PAIRS
        rows = [builder.load(vector_at(builder, source, first, kind), align=4) for first in firsts]
        for row, pairs in enumerate(_transposed(builder, rows)):
            wide = [pairs] if is_wide else [half_of(builder, pairs, part) for part in (0, 1)]
            for i, vector in enumerate(wide):
                place = builder.add(to, builder.mul(out_step, WHOLE(len(wide) * row + i)))
                builder.store(vector, vector_at(builder, out, place), align=4)
        return target.get_dummy_value()

    return types.void(source, out), emit


@to_intrinsic
def transpose_fourths(context: Any, source: Any, out: Any) -> Any:
    """Store `LANES` rows of `2 * LANES` bfloat16, held as int32, transposed, and every number with the fourth after it.

    The pairs are int32 with the earlier number in the upper half, in four parts: the first part has the numbers 0, 8,
    16, ... with the numbers 4, 12, 20, ..., the second those after these. The output is an array, the index of the
    first element, and the steps between rows and between parts.
    """

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        (source, at, row_step), (out, to, out_step, part_step) = matrices_of(target, builder, signature, values)
        firsts = [builder.add(at, builder.mul(row_step, WHOLE(row))) for row in range(LANES)]
        rows = [builder.load(vector_at(builder, source, first, PAIRS), align=4) for first in firsts]
        rows = _transposed(builder, rows)
        for at, word in enumerate(row for row in range(LANES) if not row & 2):
            earlier, later = rows[word], rows[word + 2]
            lower = builder.or_(builder.shl(earlier, _SIXTEEN), builder.xor(later, builder.and_(later, _UPPER_HALVES)))
            upper = builder.or_(builder.and_(earlier, _UPPER_HALVES), builder.lshr(later, _SIXTEEN))
            for part, pairs in enumerate((lower, upper), 2 * (word & 1)):
                line = builder.add(builder.mul(out_step, WHOLE(at // 2)), builder.mul(part_step, WHOLE(part)))
                builder.store(pairs, vector_at(builder, out, builder.add(to, line), PAIRS), align=4)
        return target.get_dummy_value()

    return types.void(source, out), emit


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """The rows of a square transposed, by shuffles that are one instruction each: of quarters, then within them."""
    quarters = range(0, LANES, _QUARTER)

    def mixed(pairs: Sequence[Any], orders: Sequence[Sequence[int]], *, within: bool) -> list[Any]:
        """Every pair of registers in every order: of its quarters, or of the numbers in the same quarter of both."""
        made = []
        for (first, second), order in product(pairs, orders):
            lanes = [_QUARTER * quarter + i for quarter in order for i in range(_QUARTER)]
            if within:
                lanes = [start + i % _QUARTER + i // _QUARTER * LANES for start in quarters for i in order]
            made.append(builder.shuffle_vector(first, second, ir.Constant(PAIRS, lanes)))
        return made

    groups = []
    for row in range(_QUARTER):
        some = rows[row::_QUARTER]
        if len(some) == 2:
            groups.append(mixed([some], ((0, 2), (1, 3)), within=False))
        else:
            (x, y), (z, w) = (
                mixed([pair], ((0, 1, 4, 5), (2, 3, 6, 7)), within=False) for pair in (some[:2], some[2:])
            )
            groups.append(mixed([(x, z), (y, w)], ((0, 2, 4, 6), (1, 3, 5, 7)), within=False))
    transposed = []
    for first, second, third, fourth in zip(*groups, strict=True):
        x, y, z, w = mixed([(first, second), (third, fourth)], ((0, 4, 1, 5), (2, 6, 3, 7)), within=True)
        transposed += mixed([(x, z), (y, w)], ((0, 1, 4, 5), (2, 3, 6, 7)), within=True)
    return transposed


@to_intrinsic
def pair_weights(context: Any, weights: Any, out: Any) -> Any:
    """Pair bfloat16: of every four the first with the third, the second with the fourth.

    It takes `2 * LANES` float32 whose lower halves are 0, as int32, and stores `LANES` int32; both are an array and an
    index.
    """

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        (weights, at), (out, to) = matrices_of(target, builder, signature, values)
        places = (builder.add(at, WHOLE(i)) for i in (0, LANES))
        both = [builder.load(vector_at(builder, weights, place, PAIRS), align=4) for place in places]
        lower, upper = ([lane // 2 * 4 + lane % 2 + more for lane in range(LANES)] for more in (0, 2))
        early, late = (builder.shuffle_vector(*both, ir.Constant(PAIRS, order)) for order in (lower, upper))
        pairs = builder.or_(builder.lshr(early, _SIXTEEN), late)
        builder.store(pairs, vector_at(builder, out, to, PAIRS), align=4)
        return target.get_dummy_value()

    return types.void(weights, out), emit


@to_intrinsic
def pair_rows(context: Any, source: Any, out: Any) -> Any:
    """Store pairs of two rows of `LANES` bfloat16, held as uint16, as int32; those of the first row in the lower half.

    The source is an array, the index of its first element, and the step to the second row.
    """

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        (source, at, step), (out, to) = matrices_of(target, builder, signature, values)
        kind, firsts = ir.VectorType(ir.IntType(16), LANES), (at, builder.add(at, step))
        lower, upper = (builder.load(vector_at(builder, source, first, kind), align=2) for first in firsts)
        pairs = builder.or_(builder.zext(lower, PAIRS), builder.shl(builder.zext(upper, PAIRS), _SIXTEEN))
        builder.store(pairs, vector_at(builder, out, to, PAIRS), align=4)
        return target.get_dummy_value()

    return types.void(source, out), emit


@to_intrinsic
def fetch_rows(context: Any, source: Any) -> Any:
    """Prefetch a cache line of each of `LANES` rows: an array, the index of an element, and the step between rows."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        ((source, at, step),) = matrices_of(target, builder, signature, values)
        for row in range(LANES):
            first = builder.add(at, builder.mul(step, WHOLE(row)))
            emit_fetch(builder, (source, None, None, first, WHOLE(0)), WHOLE(0))
        return target.get_dummy_value()

    return types.void(source), emit


@to_intrinsic
def store_rows(context: Any, sums: Any, out: Any, rows: Any) -> Any:
    """Copy rows of two registers of float32 to rows of a matrix of float32, or of bfloat16 held as int16 or uint16.

    It takes arrays, each with the index of the first element and the step between rows; and the number of rows.
    """

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        (sums, at, step), (out, to, out_step) = matrices_of(target, builder, signature, values[:2])
        kind = ir.VectorType(out.type.pointee, LANES)

        def store_row(row: Any, _: list[Any]) -> list[Any]:
            first, place = (
                builder.add(begin, builder.mul(row, apart)) for begin, apart in ((at, step), (to, out_step))
            )
            for lane in (0, LANES):
                line = builder.load(vector_at(builder, sums, builder.add(first, WHOLE(lane))), align=4)
                line = line if kind == VECTOR else _to_halves(builder, line)
                builder.store(line, vector_at(builder, out, builder.add(place, WHOLE(lane)), kind), align=2)
            return []

        emit_loop(builder, values[2], [], store_row)
        return target.get_dummy_value()

    return types.void(sums, out, rows), emit


def _to_halves(builder: Any, numbers: Any) -> Any:
    """Float32 rounded to the nearest bfloat16, ties to even, as int16."""
    bits, sixteen = builder.bitcast(numbers, PAIRS), _SIXTEEN
    odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(PAIRS, [1] * LANES))
    nearest = builder.lshr(builder.add(builder.add(bits, ir.Constant(PAIRS, [0x7FFF] * LANES)), odd), sixteen)
    is_number = builder.fcmp_ordered("==", numbers, numbers)
    nearest = builder.select(is_number, nearest, ir.Constant(PAIRS, [0x7FC0] * LANES))
    return builder.trunc(nearest, ir.VectorType(ir.IntType(16), LANES))
