"""Products of small matrices and the exponential function on a CPU, in vector instructions.

The products are written in LLVM IR, which keeps their sums in registers. Compiled from loops over arrays they have a
third of the speed, because their sums are stored after every few products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, register_jitable

# Compiled into its callers only, with no entry point for Python.
jit_part: Any = register_jitable(error_model="numpy")

LANES = 16  # float32 of a vector register of 512 bits
ROWS = 8  # of a tile: with 2 registers each its sums fill 16 of 32, and a product waits for no earlier one
COLUMNS = 128  # most of a matrix of columns
STRIDE = COLUMNS + LANES  # elements from one of its rows to the next; no power of two, so that rows share no cache set

_F = np.float32
_LOG2E = _F(1.4426950408889634)
# ln 2 in two parts: a multiple of the first is exact, so that the rest of x keeps all its bits.
_LN2_HIGH, _LN2_LOW = _F(0.693359375), _F(-2.12194440e-4)
_SMALLEST = _F(-87.0)  # below it the result is no normal float32

_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_PAIRS = ir.VectorType(ir.IntType(32), LANES)  # two bfloat16 a lane
_FIRST_LANE = ir.Constant(_PAIRS, None)
_DOT_OF_PAIRS = "llvm.x86.avx512bf16.dpbf16ps.512"


def tile_of(registers: int, step: int = STRIDE, *, is_paired: bool = False) -> Any:
    """An intrinsic: 8 rows of the left matrix times so many registers of columns of the right one.

    Args:
        registers: Vector registers of a row of the product.
        step: Elements from one row of the right matrix to the next.
        is_paired: Whether an element is an int32 that holds two bfloat16, instead of a float32.
    """

    @intrinsic
    def tile(
        context: Any, left: Any, at: Any, row_step: Any, inner_step: Any, right: Any, column: Any, out: Any, to: Any,
        terms: Any,
    ) -> Any:  # fmt: skip
        def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
            left, at, row_step, inner_step, right, column, out, to, terms = (
                target.make_array(kind)(target, builder, value).data if isinstance(kind, types.Array) else value
                for kind, value in zip(signature.args, values, strict=True)
            )
            emit_term = _emit_dot_of_pairs if is_paired else _emit_product
            rows = [builder.gep(left, [builder.add(at, builder.mul(row_step, ir.IntType(64)(i)))]) for i in range(ROWS)]
            sums = _emit_sums(builder, registers, step, emit_term, rows, inner_step, right, column, terms)
            for row, line in enumerate(sums):
                for i, each in enumerate(line):
                    place = builder.add(to, ir.IntType(64)(row * STRIDE + i * LANES))
                    builder.store(each, _vector_at(builder, out, place), align=4)
            return target.get_dummy_value()

        return types.void(left, at, row_step, inner_step, right, column, out, to, terms), emit

    return tile


def _vector_at(builder: Any, array: Any, place: Any, kind: Any = _VECTOR) -> Any:
    """A pointer to the `LANES` elements from `place` on."""
    return builder.bitcast(builder.gep(array, [place]), kind.as_pointer())


def _emit_product(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Add the product of float32 vectors: a multiplication and an addition, which become one instruction."""
    fused = {"flags": ("contract",)}
    return builder.fadd(total, builder.fmul(left, right, **fused), **fused)


def _emit_dot_of_pairs(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Add the products of both bfloat16 of every lane."""
    dot = builder.module.globals.get(_DOT_OF_PAIRS)
    if dot is None:
        dot = ir.Function(builder.module, ir.FunctionType(_VECTOR, [_VECTOR, _PAIRS, _PAIRS]), _DOT_OF_PAIRS)
    return builder.call(dot, [total, left, right])


def _emit_sums(
    builder: Any,
    registers: int,
    step: int,
    emit_term: Any,
    rows: list[Any],
    inner_step: Any,
    right: Any,
    column: Any,
    terms: Any,
) -> list[list[Any]]:
    """Emit a loop over the terms, at least 1; returns the sums of each row, in registers."""
    whole, kind = ir.IntType(64), ir.VectorType(rows[0].type.pointee, LANES)
    before, loop, after = builder.block, builder.append_basic_block("terms"), builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    term = builder.phi(whole)
    sums = [[builder.phi(_VECTOR) for _ in range(registers)] for _ in rows]
    line, inner = builder.add(column, builder.mul(term, whole(step))), builder.mul(term, inner_step)
    places = [builder.add(line, whole(i * LANES)) for i in range(registers)]
    loaded = [builder.load(_vector_at(builder, right, place, kind), align=4) for place in places]
    grown = []
    for row, totals in zip(rows, sums, strict=True):
        lane = builder.insert_element(
            ir.Constant(kind, ir.Undefined), builder.load(builder.gep(row, [inner])), ir.IntType(32)(0)
        )
        factors = builder.shuffle_vector(lane, ir.Constant(kind, ir.Undefined), _FIRST_LANE)
        grown.append([emit_term(builder, *pair, factors) for pair in zip(totals, loaded, strict=True)])
    following = builder.add(term, whole(1))
    builder.cbranch(builder.icmp_signed("<", following, terms), loop, after)
    updates = [pair for old, new in zip(sums, grown, strict=True) for pair in zip(old, new, strict=True)]
    for phi, update in [(term, following), *updates]:
        phi.add_incoming(ir.Constant(phi.type, None), before)
        phi.add_incoming(update, loop)
    builder.position_at_end(after)
    return grown


_one, _two = tile_of(1), tile_of(2)


@jit_part
def multiply(left, row_step, inner_step, right, out, rows, inner, columns):
    """Store the product of two matrices of float32.

    Args:
        left: float32 `[…]`; element (r, k) stands at r * row_step + k * inner_step.
        row_step: Elements.
        inner_step: Elements.
        right: float32 `[inner * STRIDE]`, rows `STRIDE` elements apart.
        out: float32 `[rows * STRIDE]`, likewise.
        rows: Rows of the product, rounded up to a multiple of 8.
        inner: Terms of every sum, at least 1.
        columns: Columns of the product, rounded up to a multiple of 16; at most 128.
    """
    for column in range(0, columns, 2 * LANES):
        for row in range(0, rows, ROWS):
            to = row * STRIDE + column
            if columns - column > LANES:
                _two(left, row * row_step, row_step, inner_step, right, column, out, to, inner)
            else:
                _one(left, row * row_step, row_step, inner_step, right, column, out, to, inner)


@njit(cache=True, fastmath={"contract", "nsz"}, error_model="numpy")
def exp(x):
    """The exponential of a float32 of at most 0, with a relative error of 1e-7; 0 below -87, NaN for NaN.

    A compiler turns this code into vector instructions; it cannot for a call of libm.

    Source: Moshier 1989, "Methods and Programs for Mathematical Functions", the polynomial of Cephes' expf.
    """
    whole = np.floor(x * _LOG2E + _F(0.5))
    rest = x - whole * _LN2_HIGH - whole * _LN2_LOW
    series = _F(1.9875691500e-4)
    series = series * rest + _F(1.3981999507e-3)
    series = series * rest + _F(8.3334519073e-3)
    series = series * rest + _F(4.1665795894e-2)
    series = series * rest + _F(1.6666665459e-1)
    series = series * rest + _F(5.0000001201e-1)
    series = series * rest * rest + rest + _F(1.0)
    power = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)  # 2 to the whole
    return _F(0.0) if x < _SMALLEST else series * power
