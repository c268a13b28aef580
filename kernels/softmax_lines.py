"""A line of scores of one query: its maximum, and its weights in bfloat16 with the bits of torch's softmax by blocks.

They are written in LLVM IR: from loops over arrays, Numba makes code that takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from lookahead.kernels.microkernel import (
    HAS_DOT_OF_PAIRS,
    LANES,
    PAIRS,
    VECTOR,
    WHOLE,
    call,
    emit_loop,
    matrices_of,
    spread,
    to_halves,
    vector_at,
)
from lookahead.kernels.scalars import to_intrinsic

_LOWEST = -87.33654475  # the exponential of smaller numbers is 0
_LOG2E = 1.4426950408889634
# 2 ** x for a fraction x is nearly 1 + x minus this polynomial, whose coefficients start with the cube.
_POLYNOMIAL = -0.079204240219773236, -0.22433836478672356, 0.30354260500649682, 0.00010703434948458272
_NORMAL = 1 << 23  # the bits of the smallest normal float32
_EXPONENT, _BIAS = float(1 << 23), float(127 << 23)  # a number times the first plus the second: the bits of 2 ** number


def _floats(number: float) -> Any:
    return ir.Constant(VECTOR, [float(np.float32(number))] * LANES)


def _words(number: int) -> Any:
    return ir.Constant(PAIRS, [number] * LANES)


@to_intrinsic
def peak_of(context: Any, line: Any, peak: Any) -> Any:
    """The maximum of `peak` and of scores: an array, the first's index, and how many registers; NaN does not count."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        ((line, at, count),) = matrices_of(target, builder, signature, values[:1])

        def more(turn: Any, peaks: list[Any]) -> list[Any]:
            return [_larger(builder, peaks[0], builder.load(_at(builder, line, at, turn), align=4))]

        (peaks,) = emit_loop(builder, count, [spread(builder, values[1])], more)
        return _by_halves(builder, peaks, _larger)

    return types.float32(line, peak), emit


def _weighing(order: Sequence[int]) -> Any:
    """An intrinsic: replace scores, as in `peak_of`, by weights in bfloat16; returns the sum of the float32 weights.

    If the CPU multiplies pairs, every `2 * LANES` weights are also stored as bfloat16 in an order, from another index
    on, and those in the place of the scores are not rounded, except for the last ones, of an odd register.

    Source of the exponential: Malossi et al. 2015, "Fast exponential computation on SIMD architectures".
    """

    def weigh_line(context: Any, line: Any, pairs: Any, peak: Any) -> Any:
        def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
            (line, at, count), (pairs, to) = matrices_of(target, builder, signature, values[:2])
            peaks, one = spread(builder, values[2]), WHOLE(1)

            def weigh(place: Any, *, is_rounded: bool) -> Any:
                weight = _weight(builder, builder.fsub(builder.load(place, align=4), peaks))
                stored = _rounded(builder, weight) if is_rounded else weight
                builder.store(stored, builder.bitcast(place, stored.type.as_pointer()), align=4)
                return weight

            def weigh_two(turn: Any, totals: list[Any]) -> list[Any]:
                first = builder.shl(turn, one)
                places = [_at(builder, line, at, offset) for offset in (first, builder.add(first, one))]
                weights = [weigh(place, is_rounded=not HAS_DOT_OF_PAIRS) for place in places]
                if HAS_DOT_OF_PAIRS:
                    halves = to_halves(builder, *weights)
                    halves = builder.shuffle_vector(
                        halves, halves, ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), [*order])
                    )
                    builder.store(builder.bitcast(halves, PAIRS), _at(builder, pairs, to, turn, PAIRS), align=4)
                return [builder.fadd(*terms) for terms in zip(totals, weights, strict=True)]

            def weigh_last(_: Any, totals: list[Any]) -> list[Any]:
                place = _at(builder, line, at, builder.sub(count, one))
                return [builder.fadd(totals[0], weigh(place, is_rounded=True)), totals[1]]

            totals = emit_loop(builder, builder.lshr(count, one), [_floats(0.0)] * 2, weigh_two)
            totals = emit_loop(builder, builder.and_(count, one), totals, weigh_last)
            return _by_halves(builder, builder.fadd(*totals), lambda builder, *some: builder.fadd(*some))

        return types.float32(line, pairs, peak), emit

    return to_intrinsic(weigh_line)


# Of every four the first with the third, the second with the fourth, or neighbours, the earlier one in the upper half.
weigh_line = _weighing([lane // 4 * 4 + lane % 4 // 2 + lane % 2 * 2 for lane in range(2 * LANES)])
weigh_in_order = _weighing([lane ^ 1 for lane in range(2 * LANES)])


def _rounded(builder: Any, weight: Any) -> Any:
    """Round to the nearest bfloat16."""
    bits = builder.bitcast(weight, PAIRS)
    odd = builder.and_(builder.lshr(bits, _words(16)), _words(1))
    return builder.and_(builder.add(builder.add(bits, _words(0x7FFF)), odd), _words(-65536))


def _weight(builder: Any, shifted: Any) -> Any:
    """The exponentials of numbers of at most 0."""

    def fma(*some: Any) -> Any:
        return call(builder, f"llvm.fma.v{LANES}f32", VECTOR, *some)

    power = builder.fmul(shifted, _floats(_LOG2E))
    fraction = builder.fsub(power, call(builder, f"llvm.floor.v{LANES}f32", VECTOR, power))
    error = _floats(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        error = fma(fraction, error, _floats(coefficient))
    bits = builder.fptosi(fma(_floats(_EXPONENT), builder.fsub(power, error), _floats(_BIAS)), PAIRS)
    # The least are below the normal numbers. Rounded, they are the smallest one.
    bits = builder.select(builder.icmp_signed(">", bits, _words(_NORMAL)), bits, _words(_NORMAL))
    is_seen = builder.fcmp_ordered(">=", shifted, _floats(_LOWEST))
    return builder.bitcast(builder.select(is_seen, bits, _words(0)), VECTOR)


def _larger(builder: Any, peaks: Any, line: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", line, peaks), line, peaks)


def _by_halves(builder: Any, lanes: Any, emit: Callable[..., Any]) -> Any:
    """Combine the lanes of a register, those of the upper half with those of the lower one at first."""
    half = LANES // 2
    while half:
        order = [min(lane + half, LANES - 1) for lane in range(LANES)]
        lanes = emit(builder, lanes, builder.shuffle_vector(lanes, lanes, ir.Constant(PAIRS, order)))
        half //= 2
    return builder.extract_element(lanes, ir.IntType(32)(0))


def _at(builder: Any, array: Any, first: Any, register: Any, kind: Any = VECTOR) -> Any:
    """A pointer to a register of an array, counted from an index on."""
    return vector_at(builder, array, builder.add(first, builder.mul(register, WHOLE(LANES))), kind)
