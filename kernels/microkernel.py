"""Products of small matrices, of which kernels for a CPU are made.

They are written in LLVM IR, which keeps their sums in registers. Compiled from loops over arrays they have a
third of the speed, because their sums are stored after every few products.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core.cgutils import unpack_tuple

from lookahead.kernels.scalars import to_intrinsic

FEATURES = llvm.get_host_cpu_features()
LANES = 16 if FEATURES.get("avx512f") else 8  # float32 of a vector register
ROWS = LANES // 2  # of a tile: with 2 registers each its sums fill half of them, and a product waits for no earlier one

_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_PAIRS = ir.VectorType(ir.IntType(32), LANES)  # two bfloat16 a lane
_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_FIRST_LANE = ir.Constant(_PAIRS, None)
_UPPER_HALVES = ir.Constant(_PAIRS, [-65536] * LANES)
_WHOLE = ir.IntType(64)
_FUSED = {"flags": ("contract",)}
_DOT_OF_PAIRS = "llvm.x86.avx512bf16.dpbf16ps.512"
_DOT_OF_BYTES = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
_SUMS_OF_PAIRS = {  # the sum of two products of unsigned and signed bytes as int16, and of two of int16
    8: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    16: ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
}[LANES]


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

    The kind `"bytes"` adds to that too. Its elements are int32 that hold four signed bytes in the left matrix, from
    -127 on, and in the right four such with 128 added. Behind the terms of both stands the float32 by which their sum
    is multiplied; a row of the left one has before that -128 times the sum of its bytes.

    The kind `"nibbles"` has at most 4 terms, each of four numbers from 0 to 15 in the lower halves of the right
    matrix's bytes, and of four in the upper halves; the left matrix has two elements a term. Behind the terms of the
    right one stand two bfloat16: the upper one is its factor, and the lower one, times what the left one has before
    its own, is added to the sum that is multiplied by that factor.
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
        if kind in ("bytes", "nibbles"):
            sums = _emit_quantized(builder, kind, lefts, right, terms, places)
        else:
            begun = [[ir.Constant(_VECTOR, None)] * len(line) for line in places]
            if kind == "fours":
                begun = [[builder.load(place, align=4) for place in line] for line in places]
            sums = _emit_sums(builder, kind, registers, begun, lefts, inner_step, right, terms)
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
    return _call(builder, _DOT_OF_PAIRS, total.type, total, left[0], right[0])


def _emit_bytes(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Add the four products of every lane.

    Without an instruction for that, rows take the signs of weights, so that the sum of two products fits int16.
    """
    if _has_dot_of_bytes():
        return _call(builder, _DOT_OF_BYTES, total.type, total, right[0], left[0])
    row, weight = (builder.bitcast(each[0], _BYTES) for each in (left, right))
    weight, zero = builder.xor(weight, ir.Constant(_BYTES, [-128] * 4 * LANES)), ir.Constant(_BYTES, None)
    is_negative = builder.icmp_signed("<", weight, zero)
    size, signed = (builder.select(is_negative, builder.sub(zero, each), each) for each in (weight, row))
    if LANES == 8 and FEATURES.get("avx2"):
        signed = _call(builder, "llvm.x86.avx2.psign.b", _BYTES, row, weight)
    return builder.add(total, _sums_of_neighbours(builder, _emit_sums_of_pairs(builder, size, signed)))


def _emit_nibbles(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Add the four products of every lane; or the sums of two to int16, which holds 16 products of 15 and 127."""
    if _has_dot_of_bytes():
        return _emit_bytes(builder, total, left, right)
    weight, row = (builder.bitcast(each[0], _BYTES) for each in (right, left))
    return builder.add(total, _emit_sums_of_pairs(builder, weight, row))


def _has_dot_of_bytes() -> bool:
    return bool(FEATURES.get("avx512vnni") or FEATURES.get("avxvnni"))


def _sums_of_neighbours(builder: Any, shorts: Any) -> Any:
    return _emit_sums_of_pairs(builder, shorts, ir.Constant(_SHORTS, [1] * 2 * LANES))


def _emit_sums_of_pairs(builder: Any, left: Any, right: Any) -> Any:
    """Multiply unsigned bytes by signed ones, or int16 by int16, and add neighbours."""
    is_bytes = left.type == _BYTES
    kind, widen_left = (_SHORTS, builder.zext) if is_bytes else (_PAIRS, builder.sext)
    if FEATURES.get("avx512bw" if LANES == 16 else "avx2"):
        return _call(builder, _SUMS_OF_PAIRS[not is_bytes], kind, left, right)
    products = []
    for place in (0, 1):
        order = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), list(range(place, 2 * kind.count, 2)))
        first, second = (builder.shuffle_vector(each, each, order) for each in (left, right))
        products.append(builder.mul(widen_left(first, kind), builder.sext(second, kind)))
    return builder.add(*products)


def _emit_quantized(builder: Any, kind: str, lefts: list[Any], right: Any, terms: Any, places: Any) -> list[list[Any]]:
    """Whole sums times the steps of columns and of rows, plus what stands at the places."""
    (array, column, right_step), registers, of_term = right, len(places[0]), _WHOLE(2 if kind == "nibbles" else 1)
    line = builder.add(column, builder.mul(terms, right_step))
    ends = [builder.gep(left, [builder.mul(terms, of_term)]) for left in lefts]
    numbers = [_spread(builder, builder.load(end)) for end in ends]
    adds_neighbours = kind == "nibbles" and not _has_dot_of_bytes()
    begun = [[ir.Constant(_SHORTS if adds_neighbours else _PAIRS, None)] * registers for _ in lefts]
    if kind == "bytes" and _has_dot_of_bytes():
        begun = [[number] * registers for number in numbers]
    sums = _emit_sums(builder, kind, registers, begun, lefts, of_term, right, terms)
    steps = _load_line(builder, array, line, registers, _PAIRS)
    scaled = list[list[Any]]()
    for totals, number, end, to_line in zip(sums, numbers, ends, places, strict=True):
        own = builder.bitcast(_spread(builder, builder.load(builder.gep(end, [_WHOLE(1)]))), _VECTOR)
        scaled.append([])
        for total, step, place in zip(totals, steps, to_line, strict=True):
            whole = builder.sitofp(_sums_of_neighbours(builder, total) if adds_neighbours else total, _VECTOR)
            if kind == "bytes":
                product = builder.fmul(whole, builder.bitcast(step, _VECTOR))
            else:  # of two products one can be fused with their sum: it has to be the same always
                least, factor = _halves_of(builder, step)
                least = builder.fmul(builder.sitofp(number, _VECTOR), least)
                product = builder.fadd(least, builder.fmul(whole, factor, **_FUSED), **_FUSED)
            product = builder.fmul(product, own, **_FUSED)
            scaled[-1].append(builder.fadd(builder.load(place, align=4), product, **_FUSED))
    return scaled


def _call(builder: Any, name: str, kind: Any, *values: Any) -> Any:
    """Call an instruction of the CPU by its name in LLVM."""
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(kind, [each.type for each in values]), name)
    return builder.call(function, values)


def _emit_four(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Add the sum of the first and third product, plus that of the second and fourth."""
    products = [builder.fmul(x, y, **_FUSED) for x, y in zip(left, right, strict=True)]
    even, odd = (builder.fadd(*pair, **_FUSED) for pair in (products[::2], products[1::2]))
    return builder.fadd(total, builder.fadd(even, odd))


def _emit_sums(
    builder: Any,
    kind: str,
    registers: int,
    begun: list[list[Any]],
    rows: list[Any],
    inner_step: Any,
    right: Any,
    terms: Any,
) -> list[list[Any]]:
    """Emit a loop over the terms, at least once; returns the sums of each row, in registers.

    An element of the right matrix may have two parts. Where the sums of a row fill more registers, each has its own.
    """
    emit_term, together, halves_of = _EMIT[kind], 4 if kind == "fours" else 1, _PARTS.get(kind)
    (array, column, right_step), parts = right, range(2 if halves_of else 1)
    before, loop, after = builder.block, builder.append_basic_block("terms"), builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    term = builder.phi(_WHOLE)
    sums = [[builder.phi(each.type) for each in line] for line in begun]
    here = [builder.add(term, _WHOLE(i)) for i in range(together)]
    lines = [builder.add(column, builder.mul(each, right_step)) for each in here]
    vectors = ir.VectorType(array.type.pointee, LANES)
    loaded = list(zip(*(_load_line(builder, array, line, registers, vectors) for line in lines), strict=True))
    if halves_of:
        halves = [halves_of(builder, each) for (each,) in loaded]
        loaded = [(each[part],) for part in parts for each in halves]
    grown = []
    for row, totals in zip(rows, sums, strict=True):
        places = [builder.mul(each, inner_step) for each in here]
        factors = [
            [_spread(builder, builder.load(builder.gep(row, [builder.add(place, _WHOLE(part))]))) for place in places]
            for part in parts
            for _ in range(registers)
        ]
        line = list(totals)
        for i, each in enumerate(zip(factors, loaded, strict=True)):
            line[i % len(line)] = emit_term(builder, line[i % len(line)], *each)
        grown.append(line)
    following = builder.add(term, _WHOLE(together))
    builder.cbranch(builder.icmp_signed("<", following, terms), loop, after)
    loops = (term, sums), (_WHOLE(0), begun), (following, grown)
    for phi, begin, update in zip(*([first, *chain(*lines)] for first, lines in loops), strict=True):
        phi.add_incoming(begin, before)
        phi.add_incoming(update, loop)
    builder.position_at_end(after)
    return grown


def _halves_of(builder: Any, pairs: Any) -> list[Any]:
    """The lower and the upper bfloat16 of every lane as float32."""
    halves = builder.shl(pairs, ir.Constant(_PAIRS, [16] * LANES)), builder.and_(pairs, _UPPER_HALVES)
    return [builder.bitcast(each, _VECTOR) for each in halves]


def _nibbles_of(builder: Any, pairs: Any) -> list[Any]:
    """The lower and the upper half of every byte."""
    halves = pairs, builder.lshr(pairs, ir.Constant(_PAIRS, [4] * LANES))
    return [builder.and_(each, ir.Constant(_PAIRS, [0x0F0F0F0F] * LANES)) for each in halves]


_EMIT = {
    "product": _emit_product,
    "pairs": _emit_product,
    "fours": _emit_four,
    "bytes": _emit_bytes,
    "nibbles": _emit_nibbles,
}
_PARTS = {"pairs": _halves_of, "nibbles": _nibbles_of}


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
