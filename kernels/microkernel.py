"""Products of small matrices, the building blocks of CPU kernels.

They are written in LLVM IR, which keeps their sums in registers. Compiled from loops over arrays they have a third of
the speed, because sums are stored after every few products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core.cgutils import unpack_tuple

from lookahead.kernels.scalars import to_intrinsic
from lookahead.utils.cpu_features import cpu_features

FEATURES = cpu_features()
LANES = 16 if FEATURES.get("avx512f") else 8  # float32 per vector register
ROWS = LANES // 2  # of a tile: with 2 registers per row, sums fill half of all, and no product waits for an earlier one
MOST_ROWS = max(6, ROWS)  # of 16 registers 12 hold sums, 2 a line of the right matrix, and one a number of the left one
HALVES = 32  # sums that are added by halves, each of pairs
CACHE_LINE = 64  # bytes
_BY_ADDRESS = "pairs", "quarters"  # kinds whose instruction reads numbers of the left matrix itself
_FEW_SUMS = 8  # sums up to which registers are left for both parts of an element of the right matrix

VECTOR = ir.VectorType(ir.FloatType(), LANES)
PAIRS = ir.VectorType(ir.IntType(32), LANES)  # two bfloat16 per lane
_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)
BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_FIRST_LANE = ir.Constant(PAIRS, None)
_UPPER_HALVES = ir.Constant(PAIRS, [-65536] * LANES)
WHOLE = ir.IntType(64)
_ZERO, _START = ir.Constant(VECTOR, None), WHOLE(0)
FUSED = {"flags": ("contract",)}
_DOT_OF_PAIRS = "llvm.x86.avx512bf16.dpbf16ps.512"
HAS_DOT_OF_PAIRS = LANES == 16 and bool(FEATURES.get("avx512bf16"))
_DOT_OF_BYTES = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
_SUMS_OF_PAIRS = {  # sums of two products: of unsigned and signed bytes as int16, and of int16
    8: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    16: ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
}[LANES]
_LOOKUP = {8: "llvm.x86.avx2.pshuf.b", 16: "llvm.x86.avx512.pshuf.b.512"}[LANES]


class _Tile(NamedTuple):
    """The arguments of a product while it is emitted."""

    builder: Any
    kind: str
    registers: int  # per row
    rows: list[Any]  # addresses of the left matrix
    inner_step: Any
    # The matrix address, the index of its first element, the step between its terms, and maybe an index in it and bytes
    # to prefetch from there per cache line.
    right: Sequence[Any]
    terms: Any
    places: list[Any]  # addresses of the registers of the product, row by row


def tile_of(registers: int, kind: str = "product", rows: Sequence[int] = range(1, ROWS + 1)) -> Any:
    """An intrinsic: some rows of the left matrix times `registers` registers of columns of the right one.

    Elements of both are float32, or int32 that hold two bfloat16; then sums are those of the CPU's instruction.

    It takes the left matrix, with the index of its first element and the steps between its rows and its terms; the
    right matrix, with the index of its first element and the step between its terms; the output matrix, with the index
    of its first element and the step between its rows; the number of rows, one of `rows`; and the number of terms. A
    row of the output fills `registers` registers. The output may come with a factor of what is stored. The right matrix
    may come with the index of elements that are read later, and the bytes to prefetch from there for each cache line of
    the tile.

    The kind `"sums"` adds the product to the output, and `"fours"` adds four products at a time, paired by twos. So
    does `"pairs"`, whose elements are int32 that hold the first and third, and the second and fourth, bfloat16.

    The kind `"quarters"` takes int32 whose terms are in four parts of `terms` each; the sums of the first and third
    part, and of the second and fourth, are added to each other, then both.

    The kind `"halves"` takes int32 that hold two bfloat16 in the right matrix, and the two float32 to multiply them by
    in the left one, next to each other. Both have `HALVES` times the terms. The sums of `HALVES` terms are added by
    halves, separately for the first and the second bfloat16; finally these two are added, to 0.
    """

    @to_intrinsic
    def tile(context: Any, left: Any, right: Any, out: Any, count: Any, terms: Any) -> Any:
        def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
            *operands, asked, terms = values
            matrices = matrices_of(target, builder, signature, operands)
            done = builder.append_basic_block("done")
            choice = builder.switch(asked, done)  # a constant leaves one case
            for count in rows:
                case = builder.append_basic_block("rows")
                choice.add_case(WHOLE(count), case)
                builder.position_at_end(case)
                emit_tile(builder, kind, (count, registers), (*matrices, terms))
                builder.branch(done)
            builder.position_at_end(done)
            return target.get_dummy_value()

        return types.void(left, right, out, count, terms), emit

    return tile


def emit_tile(builder: Any, kind: str, size: tuple[int, int], operands: Sequence[Any]) -> None:
    """Emit a product of rows and registers, for matrices as in `tile_of`, given by address, and a number of terms."""
    (rows, registers), ((left, at, row_step, inner_step), right, (out, to, out_step, *factor), terms) = size, operands
    lefts = [builder.gep(left, [builder.add(at, builder.mul(row_step, WHOLE(row)))]) for row in range(rows)]
    firsts = [builder.gep(out, [builder.add(to, builder.mul(out_step, WHOLE(row)))]) for row in range(rows)]
    places = [vector_at(builder, first, WHOLE(i * LANES)) for first in firsts for i in range(registers)]
    tile = _Tile(builder, kind, registers, lefts, inner_step, right, terms, places)
    for total, place in zip(_KINDS[kind][0](tile), places, strict=True):
        scaled = builder.fmul(total, spread(builder, factor[0])) if factor else total
        builder.store(scaled, place, align=4)


def matrices_of(target: Any, builder: Any, signature: Any, values: Any) -> list[list[Any]]:
    """Unpack tuples of an array, an index and steps; the array is replaced by its address."""
    matrices = []
    for kind, value in zip(signature.args, values, strict=False):
        array, *numbers = unpack_tuple(builder, value)
        matrices.append([target.make_array(kind[0])(target, builder, array).data, *numbers])
    return matrices


def _load_line(tile: _Tile, term: Any) -> list[Any]:
    """Load a line of the right matrix."""
    builder, (array, column, step, *_) = tile.builder, tile.right
    line = builder.gep(array, [builder.add(column, builder.mul(term, step))])
    kind = ir.VectorType(array.type.pointee, LANES)
    places = [vector_at(builder, line, WHOLE(i * LANES), kind) for i in range(tile.registers)]
    return [builder.load(place, align=4) for place in places]


def emit_fetch(builder: Any, matrix: Sequence[Any], number: Any) -> None:
    """Prefetch, for a cache line of a right matrix as in `tile_of`, the one ahead into a farther cache."""
    array, _, _, *ahead = matrix
    if ahead:
        start = builder.bitcast(builder.gep(array, ahead[:1]), ir.IntType(8).as_pointer())
        place = builder.gep(start, [builder.mul(number, ahead[1])])
        call(builder, "llvm.prefetch.p0i8", ir.VoidType(), place, *map(ir.IntType(32), (0, 2, 1)))


def vector_at(builder: Any, array: Any, place: Any, kind: Any = VECTOR) -> Any:
    """A pointer to the `LANES` elements from `place` on."""
    return builder.bitcast(builder.gep(array, [place]), kind.as_pointer())


def spread(builder: Any, number: Any) -> Any:
    """A vector with a number in every lane."""
    empty = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(empty, number, ir.IntType(32)(0)), empty, _FIRST_LANE)


def emit_product(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Add the product of vectors: of float32 by one fused instruction, else both products of every lane."""
    if left.type == VECTOR:
        return builder.fadd(total, builder.fmul(left, right, **FUSED), **FUSED)
    return call(builder, _DOT_OF_PAIRS, total.type, total, left, right)


def _emit_product(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """`emit_product` of the only term."""
    return emit_product(builder, total, left[0], right[0])


def emit_bytes(builder: Any, total: Any, row: Any, weight: Any) -> Any:
    """Add the four products of every lane, of signed bytes from -127 on of a row, and of weights with 128 added.

    Without an instruction for that, rows take the signs of weights, so that the sum of two products fits int16.
    """
    if has_dot_of_bytes():
        return call(builder, _DOT_OF_BYTES, total.type, total, weight, row)
    row, weight = (builder.bitcast(lane, BYTES) for lane in (row, weight))
    weight, zero = builder.xor(weight, ir.Constant(BYTES, [-128] * 4 * LANES)), ir.Constant(BYTES, None)
    is_negative = builder.icmp_signed("<", weight, zero)
    size, signed = (builder.select(is_negative, builder.sub(zero, lane), lane) for lane in (weight, row))
    if LANES == 8 and FEATURES.get("avx2"):
        signed = call(builder, "llvm.x86.avx2.psign.b", BYTES, row, weight)
    return builder.add(total, sums_of_neighbours(builder, emit_sums_of_pairs(builder, size, signed)))


def has_dot_of_bytes() -> bool:
    """Whether one instruction adds the four products of every lane."""
    return bool(FEATURES.get("avx512vnni") or FEATURES.get("avxvnni"))


def sums_of_neighbours(builder: Any, shorts: Any) -> Any:
    """Add neighbouring int16."""
    return emit_sums_of_pairs(builder, shorts, ir.Constant(_SHORTS, [1] * 2 * LANES))


def emit_sums_of_pairs(builder: Any, left: Any, right: Any) -> Any:
    """Multiply unsigned bytes by signed bytes, or int16 by int16, and add neighbours."""
    is_bytes = left.type == BYTES
    kind, widen_left = (_SHORTS, builder.zext) if is_bytes else (PAIRS, builder.sext)
    if FEATURES.get("avx512bw" if LANES == 16 else "avx2"):
        return call(builder, _SUMS_OF_PAIRS[not is_bytes], kind, left, right)
    products = []
    for place in (0, 1):
        order = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), list(range(place, 2 * kind.count, 2)))
        first, second = (builder.shuffle_vector(lane, lane, order) for lane in (left, right))
        products.append(builder.mul(widen_left(first, kind), builder.sext(second, kind)))
    return builder.add(*products)


def emit_lookup(builder: Any, numbers: Any, table: Sequence[int]) -> Any:
    """The entries of a table of 16 bytes at the places that the bytes of a vector name, each from 0 to 15."""
    places, zero = builder.bitcast(numbers, BYTES), ir.Constant(BYTES, None)
    if FEATURES.get("avx512bw" if LANES == 16 else "avx2"):
        entries = ir.Constant(BYTES, [*table] * (LANES // 4))
        return builder.bitcast(call(builder, _LOOKUP, BYTES, entries, places), numbers.type)
    selected = zero
    for place, entry in enumerate(table):
        is_here = builder.icmp_unsigned("==", places, ir.Constant(BYTES, [place] * 4 * LANES))
        selected = builder.or_(selected, builder.select(is_here, ir.Constant(BYTES, [entry] * 4 * LANES), zero))
    return builder.bitcast(selected, numbers.type)


def _emit_floats(tile: _Tile) -> list[Any]:
    def held() -> list[Any]:
        return [tile.builder.load(place, align=4) for place in tile.places]

    sums = _emit_terms(tile, held() if tile.kind in ("fours", "pairs", "more") else [_ZERO] * len(tile.places))
    return [tile.builder.fadd(*pair) for pair in zip(held(), sums, strict=True)] if tile.kind == "sums" else sums


def _emit_quarters(tile: _Tile) -> list[Any]:
    builder, pairs = tile.builder, []
    for parts in ((0, 2), (1, 3)):  # two at once: the sums of one would wait for the CPU's instruction
        begins, size = [builder.mul(WHOLE(part), tile.terms) for part in parts], len(tile.places)
        both = _emit_terms(tile, [_ZERO] * 2 * size, begins)
        pairs.append([builder.fadd(*halves) for halves in zip(both[:size], both[size:], strict=True)])
    return [builder.fadd(*halves) for halves in zip(*pairs, strict=True)]


def _emit_by_halves(tile: _Tile) -> list[Any]:
    """Keep sums in memory until they are added; those of the second half are added to those of the first at once."""
    builder, size = tile.builder, len(tile.places)
    with builder.goto_entry_block():
        waiting = builder.alloca(ir.ArrayType(VECTOR, HALVES * size))

    def at(first: Any, i: int = 0) -> Any:
        return builder.gep(waiting, [_START, builder.add(first, WHOLE(i))])

    def clear(i: Any, _: list[Any]) -> list[Any]:
        builder.store(ir.Constant(VECTOR, [-0.0] * LANES), at(i), align=4)  # adding any number gives that number
        return []

    def add_terms(turn: Any, _: list[Any]) -> list[Any]:
        first = builder.mul(builder.and_(turn, WHOLE(HALVES // 2 - 1)), WHOLE(2 * size))
        for parts in [(0, 1)] if 2 * size <= _FEW_SUMS else [(0,), (1,)]:
            sums = _emit_terms(tile, [_ZERO] * size * len(parts), [builder.mul(turn, tile.terms)], parts)
            for i, total in enumerate(sums, parts[0] * size):
                builder.store(builder.fadd(builder.load(at(first, i), align=4), total), at(first, i), align=4)
        return []

    def sum_of(i: Any, place: int = 0, step: int = 1) -> Any:
        if step == HALVES:
            return builder.load(at(i, place * size), align=4)
        return builder.fadd(sum_of(i, place, 2 * step), sum_of(i, place + step, 2 * step))

    def add_halves(i: Any, _: list[Any]) -> list[Any]:
        builder.store(sum_of(i), at(i), align=4)
        return []

    for count, emit in ((HALVES * size, clear), (HALVES, add_terms), (size, add_halves)):
        emit_loop(builder, WHOLE(count), [], emit)
    return [builder.fadd(_ZERO, builder.load(at(WHOLE(i)), align=4)) for i in range(size)]


def call(builder: Any, name: str, kind: Any, *values: Any) -> Any:
    """Call an LLVM intrinsic by name."""
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(kind, [value.type for value in values]), name)
    return builder.call(function, values)


def _emit_four(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Add the sum of the first and third product, plus the sum of the second and fourth."""
    products = [builder.fmul(x, y, **FUSED) for x, y in zip(left, right, strict=True)]
    even, odd = (builder.fadd(*pair, **FUSED) for pair in (products[::2], products[1::2]))
    return builder.fadd(total, builder.fadd(even, odd))


def _emit_pair_of_fours(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """`_emit_four` of pairs: the first and third bfloat16, and the second and fourth."""
    even, odd = (_emit_dot_at(builder, _ZERO, [x], [y]) for x, y in zip(left, right, strict=True))
    return builder.fadd(total, builder.fadd(even, odd))


def _emit_dot_at(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Add both products of every lane of a pair, given by its address, and a vector.

    The instruction itself spreads the pair. LLVM would spread a pair once for all registers of a row, which takes the
    units of the CPU that add.
    """
    llvm.initialize_native_asmparser()
    (pair,), (line,) = left, right
    kind = ir.FunctionType(VECTOR, [VECTOR, line.type, pair.type])
    return builder.asm(kind, "vdpbf16ps ($3){1to16}, $2, $0", "=v,0,v,r,~{memory}", [total, line, pair], False)


def to_halves(builder: Any, first: Any, second: Any) -> Any:
    """Normal float32 rounded to bfloat16, as int16, by the CPU's instruction."""
    llvm.initialize_native_asmparser()
    kind = ir.FunctionType(_SHORTS, [VECTOR, VECTOR])
    return builder.asm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", [first, second], False)


def _emit_terms(
    tile: _Tile, begun: list[Any], firsts: Sequence[Any] = (_START,), parts: Sequence[int] = (0,)
) -> list[Any]:
    """Emit a loop over the terms from each of `firsts` on, which adds to the sums in `begun`, in registers.

    Sums are stored row by row, for each of `firsts` and each part of the right matrix's elements in turn. If `begun`
    has only one sum per output register, the sums of all parts are added.
    """
    builder, (_, emit_term, part_of, together) = tile.builder, _KINDS[tile.kind]

    def add_terms(turn: Any, sums: list[Any]) -> list[Any]:
        grown, lines = list(sums), tile.registers * LANES * 4 // CACHE_LINE
        for number, first in enumerate(firsts):
            start = builder.add(first, builder.mul(turn, WHOLE(together)))
            terms = [builder.add(start, WHOLE(i)) for i in range(together)]
            for i in range(lines if 0 in parts else 0):
                emit_fetch(builder, tile.right, builder.add(builder.mul(start, WHOLE(lines)), WHOLE(i)))
            columns = list(zip(*(_load_line(tile, term) for term in terms), strict=True))
            for i, (part, row) in enumerate(product(parts, tile.rows), number * len(tile.rows)):
                places = [builder.add(builder.mul(term, tile.inner_step), WHOLE(part)) for term in terms]
                left = [builder.gep(row, [place]) for place in places]
                if tile.kind not in _BY_ADDRESS:
                    left = [spread(builder, builder.load(address)) for address in left]
                for register, column in enumerate(columns):
                    right = [part_of(builder, value, part) for value in column] if part_of else column
                    at = (i * tile.registers + register) % len(sums)
                    grown[at] = emit_term(builder, grown[at], left, right)
        return grown

    return emit_loop(builder, builder.udiv(tile.terms, WHOLE(together)), begun, add_terms)


def emit_loop(builder: Any, count: Any, begun: list[Any], emit: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Emit a loop of `count` turns, each of which maps its number and the previous values to new values."""
    before, head, body, after = builder.block, *(builder.append_basic_block(name) for name in ("turn", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    turn, *values = phis = [builder.phi(begin.type) for begin in (count, *begun)]
    builder.cbranch(builder.icmp_signed("<", turn, count), body, after)
    builder.position_at_end(body)
    following = [*emit(turn, values), builder.add(turn, WHOLE(1))]
    for phi, first, update in zip(phis, (WHOLE(0), *begun), (following.pop(), *following), strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(update, builder.block)
    # Unrolling leaves too few registers for all sums, and a remainder of turns.
    rolled = builder.module.add_metadata([ir.MetaDataString(builder.module, "llvm.loop.unroll.runtime.disable")])
    loop = builder.module.add_metadata([WHOLE(len(builder.module.metadata)), rolled])
    loop.operands = loop, rolled  # by convention the first operand is the loop itself
    builder.branch(head).set_metadata("llvm.loop", loop)
    builder.position_at_end(after)
    return values


def half_of(builder: Any, pairs: Any, part: int) -> Any:
    """The lower or the upper bfloat16 of every lane as float32."""
    half = builder.and_(pairs, _UPPER_HALVES) if part else builder.shl(pairs, ir.Constant(PAIRS, [16] * LANES))
    return builder.bitcast(half, VECTOR)


# By kind: the emitters of a product and of a term, the extractor of a part of the right matrix's elements, and the
# number of terms added at once.
_KINDS: dict[str, tuple[Callable[[_Tile], list[Any]], Callable[..., Any], Callable[..., Any] | None, int]] = {
    "product": (_emit_floats, _emit_product, None, 1),
    "sums": (_emit_floats, _emit_product, None, 1),
    "more": (_emit_floats, _emit_product, None, 1),
    "fours": (_emit_floats, _emit_four, None, 4),
    "pairs": (_emit_floats, _emit_pair_of_fours, None, 2),
    "quarters": (_emit_quarters, _emit_dot_at, None, 1),
    "halves": (_emit_by_halves, _emit_product, half_of, 1),
}
