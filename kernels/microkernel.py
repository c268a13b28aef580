"""What kernels for a CPU are made of: products of small matrices, the exponential function, arrays at addresses.

The products are written in LLVM IR, which keeps their sums in registers. Compiled from loops over arrays they have a
third of the speed, because their sums are stored after every few products.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import unpack_tuple
from numba.extending import intrinsic, overload, register_jitable

# Compiled into its callers only, with no entry point for Python.
jit_part: Any = register_jitable(error_model="numpy")
to_intrinsic: Any = intrinsic

FEATURES = llvm.get_host_cpu_features()
LANES = 16 if FEATURES.get("avx512f") else 8  # float32 of a vector register
ROWS = LANES // 2  # of a tile: with 2 registers each its sums fill half of them, and a product waits for no earlier one
COLUMNS = 128  # most of a matrix of columns
STRIDE = COLUMNS + LANES  # elements from one of its rows to the next; no power of two, so that rows share no cache set

_F = np.float32
_LOG2E = _F(1.4426950408889634)
# ln 2 in two parts: a multiple of the first is exact, so that the rest of x keeps all its bits.
_LN2_HIGH, _LN2_LOW = _F(0.693359375), _F(-2.12194440e-4)
_SERIES = tuple(map(_F, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)))
_SMALLEST = _F(-87.0)  # below it the result is no normal float32
_LARGEST = _F(89.0)  # its exponential is no float32

_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_PAIRS = ir.VectorType(ir.IntType(32), LANES)  # two bfloat16 a lane
_FIRST_LANE = ir.Constant(_PAIRS, None)
_UPPER_HALVES = ir.Constant(_PAIRS, [-65536] * LANES)
_WHOLE = ir.IntType(64)
_FUSED = {"flags": ("contract",)}
_DOT_OF_PAIRS = "llvm.x86.avx512bf16.dpbf16ps.512"
_DOT_OF_BYTES = "llvm.x86.avx512.vpdpbusd.512"


def tile_of(registers: int, kind: str = "product", rows: Sequence[int] = range(1, ROWS + 1)) -> Any:
    """An intrinsic: some rows of the left matrix times so many registers of columns of the right one.

    Elements of both are float32, or int32 that hold two bfloat16; then sums are those of the CPU's instruction.

    It takes the left matrix, with the place of its first element and the steps between its rows and its terms; the
    right matrix, with the place of its first element and the step between its terms; the matrix for the product, with
    the place of its first element and the step between its rows; the number of rows, one of `rows`; and the number of
    terms. A row of the product fills so many registers. The kind `"fours"` adds four products at a time, paired by
    twos, to what the matrix for the product holds.

    The kind `"pairs"` takes int32 that hold two bfloat16 in the right matrix, and the two float32 that they are
    multiplied by in the left one, side by side. A row of the product fills so many registers with the sums of the
    first of them, and so many, `2 * LANES` elements further on, with those of the second.

    The kind `"bytes"` adds to that too. Its elements are int32 that hold four signed bytes in the left matrix, and four
    unsigned ones in the right. Behind the terms of both stands the float32 by which their sum is multiplied; a row of
    the left one has the number with which its sums begin before that.
    """
    parts = 2 if kind == "pairs" else 1

    def emit_rows(builder: Any, count: int, matrices: Any, terms: Any) -> None:
        (left, at, row_step, inner_step), right, (out, to, out_step) = matrices
        wholes = [_WHOLE(row) for row in range(count)]
        lefts = [builder.gep(left, [builder.add(at, builder.mul(row_step, row))]) for row in wholes]
        places = [
            [
                _vector_at(builder, out, builder.add(first, _WHOLE((2 * part + i) * LANES)))
                for part in range(parts)
                for i in range(registers)
            ]
            for first in [builder.add(to, builder.mul(out_step, row)) for row in wholes]
        ]
        ends = [builder.gep(left, [terms]) for left in lefts]
        if kind == "bytes":
            begun = [[_spread(builder, builder.load(end))] * registers for end in ends]
        elif kind == "fours":
            begun = [[builder.load(place, align=4) for place in line] for line in places]
        else:
            begun = [[ir.Constant(_VECTOR, None)] * len(line) for line in places]
        sums = _emit_sums(builder, kind, parts, begun, lefts, inner_step, right, terms)
        if kind == "bytes":
            array, column, right_step = right
            steps = _load_line(builder, array, builder.add(column, builder.mul(terms, right_step)), registers, _VECTOR)
            sums = [
                _emit_scaled(builder, line, end, steps, to) for line, end, to in zip(sums, ends, places, strict=True)
            ]
        for line, to_line in zip(sums, places, strict=True):
            for each, place in zip(line, to_line, strict=True):
                builder.store(each, place, align=4)

    @to_intrinsic
    def tile(context: Any, left: Any, right: Any, out: Any, count: Any, terms: Any) -> Any:
        def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
            *operands, asked, terms = values
            matrices = _matrices_of(target, builder, signature, operands)
            done = builder.append_basic_block("done")
            choice = builder.switch(asked, done)  # a constant leaves one case
            for count in rows:
                case = builder.append_basic_block("rows")
                choice.add_case(_WHOLE(count), case)
                builder.position_at_end(case)
                emit_rows(builder, count, matrices, terms)
                builder.branch(done)
            builder.position_at_end(done)
            return target.get_dummy_value()

        return types.void(left, right, out, count, terms), emit

    return tile


def _matrices_of(target: Any, builder: Any, signature: Any, values: Any) -> list[list[Any]]:
    """The parts of tuples of an array, a place in it and steps, with the array's address in place of the array."""
    matrices = []
    for kind, value in zip(signature.args, values, strict=False):
        array, *numbers = unpack_tuple(builder, value)
        matrices.append([target.make_array(kind[0])(target, builder, array).data, *numbers])
    return matrices


def _load_line(builder: Any, array: Any, place: Any, registers: int, kind: Any) -> list[Any]:
    """Load so many registers of a line of a matrix."""
    places = [_vector_at(builder, array, builder.add(place, _WHOLE(i * LANES)), kind) for i in range(registers)]
    return [builder.load(each, align=4) for each in places]


def _vector_at(builder: Any, array: Any, place: Any, kind: Any = _VECTOR) -> Any:
    """A pointer to the `LANES` elements from `place` on."""
    return builder.bitcast(builder.gep(array, [place]), kind.as_pointer())


def _spread(builder: Any, number: Any) -> Any:
    """A vector that holds a number in every lane."""
    empty = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(empty, number, ir.IntType(32)(0)), empty, _FIRST_LANE)


def _emit_product(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Add the product of vectors: of float32 by what becomes one instruction, else both products of every lane."""
    if left[0].type == _VECTOR:
        return builder.fadd(total, builder.fmul(left[0], right[0], **_FUSED), **_FUSED)
    return _call_dot(builder, _DOT_OF_PAIRS, total, left[0], right[0])


def _emit_bytes(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Add the four products of every lane."""
    if FEATURES.get("avx512vnni"):
        return _call_dot(builder, _DOT_OF_BYTES, total, right[0], left[0])
    kind = ir.VectorType(ir.IntType(16), 2 * LANES)
    byte, mask = (ir.Constant(kind, [n] * 2 * LANES) for n in (8, 255))
    first, second = (builder.bitcast(each[0], kind) for each in (left, right))
    for signed, unsigned in (
        (builder.ashr(builder.shl(first, byte), byte), builder.and_(second, mask)),
        (builder.ashr(first, byte), builder.lshr(second, byte)),
    ):
        total = builder.add(total, _emit_sums_of_pairs(builder, signed, unsigned))
    return total


def _emit_sums_of_pairs(builder: Any, left: Any, right: Any) -> Any:
    """Multiply int16, and add neighbours; where a CPU has an instruction for that, a compiler finds it."""
    products = []
    for place in (0, 1):
        order = ir.Constant(_PAIRS, list(range(place, 2 * LANES, 2)))
        wide = [builder.sext(builder.shuffle_vector(each, each, order), _PAIRS) for each in (left, right)]
        products.append(builder.mul(*wide))
    return builder.add(*products)


def _emit_scaled(builder: Any, line: list[Any], end: Any, steps: list[Any], to_line: list[Any]) -> list[Any]:
    """Whole sums times the steps of columns, and that of the row, which ends at `end`, plus what stands there."""
    own = builder.bitcast(_spread(builder, builder.load(builder.gep(end, [_WHOLE(1)]))), _VECTOR)
    sums = []
    for each, step, place in zip(line, steps, to_line, strict=True):
        scaled = builder.fmul(builder.fmul(builder.sitofp(each, _VECTOR), step), own, **_FUSED)
        sums.append(builder.fadd(builder.load(place, align=4), scaled, **_FUSED))
    return sums


def _call_dot(builder: Any, name: str, total: Any, first: Any, second: Any) -> Any:
    dot = builder.module.globals.get(name)
    if dot is None:
        dot = ir.Function(builder.module, ir.FunctionType(total.type, [total.type, _PAIRS, _PAIRS]), name)
    return builder.call(dot, [total, first, second])


def _emit_four(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Add the sum of the first and third product, plus that of the second and fourth."""
    products = [builder.fmul(x, y, **_FUSED) for x, y in zip(left, right, strict=True)]
    even, odd = (builder.fadd(*pair, **_FUSED) for pair in (products[::2], products[1::2]))
    return builder.fadd(total, builder.fadd(even, odd))


def _emit_sums(
    builder: Any,
    kind: str,
    parts: int,
    begun: list[list[Any]],
    rows: list[Any],
    inner_step: Any,
    right: Any,
    terms: Any,
) -> list[list[Any]]:
    """Emit a loop over the terms, at least once; returns the sums of each row, in registers.

    An element of the right matrix has so many parts, each with sums of its own.
    """
    emit_term, together = _EMIT[kind], 4 if kind == "fours" else 1
    (array, column, right_step), registers = right, len(begun[0]) // parts
    before, loop, after = builder.block, builder.append_basic_block("terms"), builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    term = builder.phi(_WHOLE)
    sums = [[builder.phi(each.type) for each in line] for line in begun]
    here = [builder.add(term, _WHOLE(i)) for i in range(together)]
    lines = [builder.add(column, builder.mul(each, right_step)) for each in here]
    vectors = ir.VectorType(array.type.pointee, LANES)
    loaded = list(zip(*(_load_line(builder, array, line, registers, vectors) for line in lines), strict=True))
    if parts == 2:
        halves = [_halves_of(builder, each) for (each,) in loaded]
        loaded = [(each[part],) for part in range(parts) for each in halves]
    grown = []
    for row, totals in zip(rows, sums, strict=True):
        places = [builder.mul(each, inner_step) for each in here]
        factors = [
            [_spread(builder, builder.load(builder.gep(row, [builder.add(place, _WHOLE(part))]))) for place in places]
            for part in range(parts)
            for _ in range(registers)
        ]
        grown.append([emit_term(builder, *each) for each in zip(totals, factors, loaded, strict=True)])
    following = builder.add(term, _WHOLE(together))
    builder.cbranch(builder.icmp_signed("<", following, terms), loop, after)
    loops = (term, sums), (_WHOLE(0), begun), (following, grown)
    for phi, begin, update in zip(*([first, *chain(*lines)] for first, lines in loops), strict=True):
        phi.add_incoming(begin, before)
        phi.add_incoming(update, loop)
    builder.position_at_end(after)
    return grown


_EMIT = {"product": _emit_product, "pairs": _emit_product, "fours": _emit_four, "bytes": _emit_bytes}


def _halves_of(builder: Any, pairs: Any) -> list[Any]:
    """The lower and the upper bfloat16 of every lane as float32."""
    halves = builder.shl(pairs, ir.Constant(_PAIRS, [16] * LANES)), builder.and_(pairs, _UPPER_HALVES)
    return [builder.bitcast(each, _VECTOR) for each in halves]


def widen(number: Any) -> Any:
    """A number of a tensor as float32; a bfloat16 is held as int16 or uint16."""


def narrow(number: Any, like: Any) -> Any:
    """A float32 as a number of a tensor that holds `like`; a bfloat16 is the nearest, ties to even."""


@overload(widen, strict=False)
def _widen_as(number: Any) -> Any:
    if number in (types.int16, types.uint16):
        return lambda number: np.int32(np.int32(number) << np.int32(16)).view(np.float32)
    return lambda number: number


@overload(narrow, strict=False)
def _narrow_as(number: Any, like: Any) -> Any:
    if like != types.uint16:
        return lambda number, like: number

    def narrow(number: Any, like: Any) -> Any:
        bits = np.float32(number).view(np.int32)
        nearest = (bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16)
        return np.uint16(nearest if number == number else np.int32(0x7FC0))

    return narrow


@to_intrinsic
def transpose(context: Any, source: Any, out: Any) -> Any:
    """Store `LANES` rows of as many float32 by columns; or of pairs of bfloat16, held as int32, widened to float32."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        (source, at, row_step), (out, to, out_step) = _matrices_of(target, builder, signature, values)
        firsts = [builder.add(at, builder.mul(row_step, _WHOLE(row))) for row in range(LANES)]
        is_wide = source.type.pointee == ir.FloatType()
        kind = _VECTOR if is_wide else _PAIRS
        rows = [builder.load(_vector_at(builder, source, first, kind), align=4) for first in firsts]
        step = 1
        while step < LANES:  # exchange blocks of `step` by `step` beside the diagonal of blocks twice as large
            for row in (row for row in range(LANES) if not row & step):
                upper, lower = rows[row], rows[row + step]
                left = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
                right = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
                rows[row], rows[row + step] = (
                    builder.shuffle_vector(upper, lower, ir.Constant(_PAIRS, order)) for order in (left, right)
                )
            step *= 2
        for row, pairs in enumerate(rows):
            wide = [pairs] if is_wide else _halves_of(builder, pairs)
            for i, each in enumerate(wide):
                place = builder.add(to, builder.mul(out_step, _WHOLE(len(wide) * row + i)))
                builder.store(each, _vector_at(builder, out, place), align=4)
        return target.get_dummy_value()

    return types.void(source, out), emit


_one, _two = tile_of(1), tile_of(2)


@jit_part
def multiply(left, row_step, inner_step, right, out, rows, inner, columns):
    """Store the product of two matrices of float32.

    Element (r, k) of the left one stands at r * row_step + k * inner_step; rows of the right one, and of the product,
    are `STRIDE` elements apart. Rows are rounded up to a multiple of `ROWS`, columns, at most 128, to one of `LANES`.
    Every sum has `inner` terms, at least 1.
    """
    for column in range(0, columns, 2 * LANES):
        for row in range(0, rows, ROWS):
            at, to = row * row_step, row * STRIDE + column
            if columns - column > LANES:
                _two((left, at, row_step, inner_step), (right, column, STRIDE), (out, to, STRIDE), ROWS, inner)
            else:
                _one((left, at, row_step, inner_step), (right, column, STRIDE), (out, to, STRIDE), ROWS, inner)


@njit(cache=True, fastmath={"contract", "nsz"}, error_model="numpy")
def exp(x):
    """The exponential of a float32, with a relative error of 1e-7; 0 where it is no normal float32, NaN for NaN.

    A compiler turns this code into vector instructions; it cannot for a call of libm.

    Source: Moshier 1989, "Methods and Programs for Mathematical Functions", the polynomial of Cephes' expf.
    """
    bounded = _LARGEST if x > _LARGEST else x
    whole = np.floor(bounded * _LOG2E + _F(0.5))
    rest = bounded - whole * _LN2_HIGH - whole * _LN2_LOW
    series = _SERIES[0]
    for i in range(1, 6):
        series = series * rest + _SERIES[i]
    series = series * rest * rest + rest + _F(1.0)
    # 2 to the whole in two factors: those of the largest and the smallest results are no normal float32.
    power = np.int32(whole)
    first = np.int32(power >> np.int32(1))
    second = np.int32(power - first)
    scaled = series * np.int32((first + np.int32(127)) << np.int32(23)).view(np.float32)
    scaled *= np.int32((second + np.int32(127)) << np.int32(23)).view(np.float32)
    return _F(0.0) if x < _SMALLEST else scaled


@to_intrinsic
def _pointer(context: Any, address: Any) -> Any:
    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), emit


_view: Any = vars(numba)["carray"]


@jit_part
def array_at(address, shape, dtype):
    """The array at an address."""
    return _view(_pointer(address), shape, dtype)
