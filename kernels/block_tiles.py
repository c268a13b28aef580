"""Products of a few rows with the blocks of a GGUF file, laid out by `kernels.gguf_blocks`, in LLVM IR.

Numbers of 4, 5 and 6 bits are widened to bytes in registers, once for all rows of a tile. The sums over a block are
integers, so they are exact in any order; blocks are added in the order of the inputs, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from lookahead.kernels.microkernel import (
    BYTES,
    CACHE_LINE,
    FUSED,
    LANES,
    PAIRS,
    ROWS,
    VECTOR,
    WHOLE,
    call,
    emit_bytes,
    emit_sums_of_pairs,
    has_dot_of_bytes,
    matrices_of,
    spread,
    sums_of_neighbours,
    vector_at,
)
from lookahead.kernels.scalars import to_intrinsic

ROW_BLOCK = 32  # numbers of a row that share a scale
# Words: four bytes each, the sums of the first and the last 16, and as float32 the scale, and it times both sums.
ROW_WORDS = 12
_REGISTERS = 2  # of columns
_BYTES_OF = 4  # bytes per column in a line
_PARTS = ROW_BLOCK // _BYTES_OF  # words of a block
_HALF, _BYTE = ir.HalfType(), ir.IntType(8)
_I32 = ir.IntType(32)
# Products of a row's byte and a number of this many bits fit int16 if this many words are added.
_WORDS_OF_INT16 = {4: 8, 5: 4, 6: 2}


class Group(NamedTuple):
    """The lines of a group of blocks, each with four bytes for every column of a panel.

    First come the lower 4 bits of all numbers, two words of a block per line, then the upper bits, then the scales.
    With 8 bits a line is a word.

    Attributes:
        bits: Bits of a number; unsigned except with 8 bits.
        steps: Contents of the last lines, for all columns one after the other. `"pair"`: scale and offset, float16; no
            offset with 8 bits. `"small"`: for two blocks one line of 6-bit scales and minimums of both, in bytes, and
            one of their float16 units; minimums are subtracted. `"halves"`: float16 units, and scales of the first and
            the last 16 numbers, signed bytes; 32 is subtracted from the numbers.
    """

    bits: int
    steps: str

    @property
    def blocks(self) -> int:
        """Blocks of 32 inputs in a group."""
        return 2 if self.steps == "small" else 1

    @property
    def words(self) -> int:
        """Lines of a block's numbers, without upper bits."""
        return _PARTS if self.bits == 8 else _PARTS // 2

    @property
    def upper(self) -> int:
        """Lines of a block's upper bits."""
        return 0 if self.bits == 8 else self.bits - 4

    @property
    def lines(self) -> int:
        """Lines of a group."""
        return self.blocks * (self.words + self.upper) + (2 if self.steps == "small" else 1)


class BlockKernel(NamedTuple):
    """The multiplication of weights in such groups, made by `kernels.gguf_product`."""

    lines: int  # of a group
    words: int  # int32 of a prepared row for a group
    prepare: dict[Any, Any]  # job function that prepares rows, by their dtype
    multiply: dict[Any, Any]  # job function that multiplies them


def tile_of_blocks(group: Group) -> Any:
    """An intrinsic: some rows times two registers of columns, over groups of blocks.

    It takes the rows, int32, with the index of the first and the step between rows; the weight, int32, with the index
    of the first group, the step between lines, and the prefetch arguments of `tile_of`; the output matrix, float32,
    with the index of the first row and the step between rows, to which it adds; the number of rows; and the number of
    groups, at least 1.
    """

    @to_intrinsic
    def tile(context: Any, left: Any, right: Any, out: Any, count: Any, groups: Any) -> Any:
        def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
            *operands, asked, groups = values
            matrices = matrices_of(target, builder, signature, operands)
            done = builder.append_basic_block("done")
            choice = builder.switch(asked, done)
            for count in range(1, ROWS + 1):
                case = builder.append_basic_block("rows")
                choice.add_case(WHOLE(count), case)
                builder.position_at_end(case)
                _emit_groups(builder, group, count, matrices, groups)
                builder.branch(done)
            builder.position_at_end(done)
            return target.get_dummy_value()

        return types.void(left, right, out, count, groups), emit

    return tile


def _emit_groups(builder: Any, group: Group, count: int, matrices: Any, groups: Any) -> None:
    """Emit a loop over groups that adds their sums to the output."""
    (left, at, row_step), (panel, begin, line_step, *ahead), (out, to, out_step) = matrices
    columns = [
        builder.add(to, builder.add(builder.mul(out_step, WHOLE(row)), WHOLE(register * LANES)))
        for row in range(count)
        for register in range(_REGISTERS)
    ]
    places = [vector_at(builder, out, column) for column in columns]
    begun = [builder.load(each, align=4) for each in places]
    before, loop, after = builder.block, builder.append_basic_block("group"), builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    number, held = builder.phi(WHOLE), [builder.phi(VECTOR) for _ in begun]
    line = builder.add(begin, builder.mul(builder.mul(number, WHOLE(group.lines)), line_step))
    place = builder.add(at, builder.mul(number, WHOLE(ROW_WORDS * group.blocks)))
    first = [builder.gep(left, [builder.add(place, builder.mul(row_step, WHOLE(row)))]) for row in range(count)]
    load, load_steps = (partial(each, builder, panel, line, line_step) for each in (_load, _load_steps))
    _emit_fetch(builder, group, panel, ahead, number)
    totals: list[Any] = [*held]
    for block in range(group.blocks):
        rows = [builder.gep(row, [WHOLE(ROW_WORDS * block)]) for row in first]
        sums = _emit_sums(builder, group, block, rows, load)
        steps, added = _STEPS[group.steps](builder, group, block, load_steps)
        for i, total in enumerate(totals):
            row, register = divmod(i, _REGISTERS)
            products = [each[row][register] for each in sums], [each[register] for each in steps]
            totals[i] = _added(builder, total, rows[row], *products, added and added[register])
    following = builder.add(number, WHOLE(1))
    builder.cbranch(builder.icmp_signed("<", following, groups), loop, after)
    for phi, begin, update in zip([number, *held], [WHOLE(0), *begun], [following, *totals], strict=True):
        phi.add_incoming(begin, before)
        phi.add_incoming(update, loop)
    builder.position_at_end(after)
    for total, place in zip(totals, places, strict=True):
        builder.store(total, place, align=4)


def _emit_fetch(builder: Any, group: Group, panel: Any, ahead: list[Any], number: Any) -> None:
    """Prefetch the lines after a group, as tiles of other weights do."""
    start = builder.bitcast(builder.gep(panel, ahead[:1]), _BYTE.as_pointer())
    lines = group.lines * _REGISTERS * LANES * _BYTES_OF // CACHE_LINE
    for i in range(lines):
        line = builder.add(builder.mul(number, WHOLE(lines)), WHOLE(i))
        place = builder.gep(start, [builder.mul(line, ahead[1])])
        call(builder, "llvm.prefetch.p0i8", ir.VoidType(), place, *map(_I32, (0, 2, 1)))


def _added(builder: Any, total: Any, row: Any, sums: list[Any], steps: list[Any], added: Any) -> Any:
    """A total plus a block: the integer sums of its parts times their scales, and the sum of a row times the offset.

    Only one of two products can be fused with their sum, and it must always be the same one.
    """
    step, of_sum = (
        spread(builder, builder.bitcast(_word(builder, row, place), ir.FloatType()))
        for place in (ROW_WORDS - 2, ROW_WORDS - 1)
    )
    floats = [builder.sitofp(each, VECTOR) for each in sums]
    product = builder.fmul(floats[0], steps[0])
    for number, each in zip(floats[1:], steps[1:], strict=True):
        product = builder.fadd(product, builder.fmul(number, each, **FUSED), **FUSED)
    total = builder.fadd(total, builder.fmul(product, step, **FUSED), **FUSED)
    if added is None:
        return total
    return builder.fadd(total, builder.fmul(of_sum, added, **FUSED), **FUSED)


def _load(builder: Any, panel: Any, line: Any, line_step: Any, place: int) -> list[Any]:
    """Load the registers of a line of a group."""
    at = builder.add(line, builder.mul(line_step, WHOLE(place)))
    places = [builder.add(at, WHOLE(register * LANES)) for register in range(_REGISTERS)]
    return [builder.load(vector_at(builder, panel, each, PAIRS), align=4) for each in places]


def _load_steps(
    builder: Any, panel: Any, line: Any, line_step: Any, place: int, part: int, kind: Any, signed: bool = False
) -> list[Any]:
    """Load the registers of a part of a line of scales: float16 as float32, or bytes as int32."""
    at = builder.gep(panel, [builder.add(line, builder.mul(line_step, WHOLE(place)))])
    numbers = builder.bitcast(at, kind.as_pointer())
    lanes, registers = ir.VectorType(kind, LANES), []
    for register in range(_REGISTERS):
        here = vector_at(builder, numbers, WHOLE((part * _REGISTERS + register) * LANES), lanes)
        loaded = builder.load(here, align=kind.width // 8 if isinstance(kind, ir.IntType) else 2)
        if kind == _HALF:
            registers.append(builder.fpext(loaded, VECTOR))
        else:
            registers.append((builder.sext if signed else builder.zext)(loaded, PAIRS))
    return registers


def _word(builder: Any, row: Any, place: int) -> Any:
    return builder.load(builder.gep(row, [WHOLE(place)]))


def _emit_sums(builder: Any, group: Group, block: int, rows: list[Any], load: Any) -> list[list[list[Any]]]:
    """The sums of products over a block, or over its halves if these have scales: `[parts][rows][registers]`."""
    zero, parts, sums = ir.Constant(PAIRS, None), 2 if group.steps == "halves" else 1, []
    has_dot = has_dot_of_bytes()
    adds_shorts = not has_dot and group.bits in _WORDS_OF_INT16
    for part in range(parts):
        totals = [[zero] * _REGISTERS for _ in rows]
        if group.bits == 8 and has_dot:
            totals = [[_offset(builder, row, (0, 1), -128)] * _REGISTERS for row in rows]
        elif group.bits == 6:
            totals = [[_offset(builder, row, (part,), -32)] * _REGISTERS for row in rows]
        shorts: list[list[Any]] = [[None] * _REGISTERS for _ in rows]
        words = range(part * _PARTS // parts, (part + 1) * _PARTS // parts)
        for word in words:
            weights = _emit_word(builder, group, block, word, load)
            for row, address in enumerate(rows):
                x = spread(builder, _word(builder, address, word))
                for register, weight in enumerate(weights):
                    if not adds_shorts:
                        totals[row][register] = emit_bytes(builder, totals[row][register], [x], [weight])
                        continue
                    pair = emit_sums_of_pairs(builder, builder.bitcast(weight, BYTES), builder.bitcast(x, BYTES))
                    held = shorts[row][register]
                    held = pair if held is None else builder.add(held, pair)
                    if (word + 1) % _WORDS_OF_INT16[group.bits] == 0 or word == words[-1]:
                        added = sums_of_neighbours(builder, held)
                        totals[row][register], held = builder.add(totals[row][register], added), None
                    shorts[row][register] = held
        sums.append(totals)
    return sums


def _offset(builder: Any, row: Any, halves: Sequence[int], zero: int) -> Any:
    """The sum of halves of a block of a row, times the offset `zero` of its weights, in every lane."""
    total = _word(builder, row, _PARTS + halves[0])
    for half in halves[1:]:
        total = builder.add(total, _word(builder, row, _PARTS + half))
    return spread(builder, builder.mul(total, _I32(zero)))


def _emit_word(builder: Any, group: Group, block: int, word: int, load: Any) -> list[Any]:
    """Unpack four numbers of every column to bytes."""
    if group.bits == 8:
        loaded: list[Any] = load(word)
        return loaded
    made = []
    upper = group.blocks * group.words + block * group.upper
    places = [word] if group.bits == 5 else [word % 4 * 2]  # of the upper bits in each byte
    lines = load(block * group.words + word // 2)
    above = load(upper + (word // 4 if group.bits == 6 else 0)) if group.upper else [None] * _REGISTERS
    for line, bits in zip(lines, above, strict=True):
        number = _masked(builder, _shifted(builder, line, -4 * (word % 2)), 0x0F)
        if bits is not None:
            mask = ((1 << group.upper) - 1) << 4
            number = builder.or_(number, _masked(builder, _shifted(builder, bits, 4 - places[0]), mask))
        made.append(number)
    return made


def _shifted(builder: Any, line: Any, left: int) -> Any:
    """Words shifted left, or right by a negative number."""
    if left == 0:
        return line
    shift = ir.Constant(PAIRS, [abs(left)] * LANES)
    return builder.shl(line, shift) if left > 0 else builder.lshr(line, shift)


def _masked(builder: Any, line: Any, mask: int) -> Any:
    """Words with a mask applied to every byte."""
    return builder.and_(line, ir.Constant(PAIRS, [mask * 0x01010101] * LANES))


def _pairs(builder: Any, group: Group, block: int, load: Any) -> Any:
    return [load(group.lines - 1, 0, _HALF)], load(group.lines - 1, 1, _HALF) if group.bits != 8 else None


def _small(builder: Any, group: Group, block: int, load: Any) -> Any:
    """Float16 units times 6-bit numbers, as float32."""
    units = [load(group.lines - 1, place, _HALF) for place in range(2)]
    steps, minimums = (load(group.lines - 2, 2 * block + place, _BYTE) for place in range(2))
    minimums = [builder.sub(ir.Constant(PAIRS, None), each) for each in minimums]
    steps, minimums = (
        [builder.fmul(unit, builder.sitofp(each, VECTOR)) for unit, each in zip(*pair, strict=True)]
        for pair in zip(units, (steps, minimums), strict=True)
    )
    return [steps], minimums


def _halves(builder: Any, group: Group, block: int, load: Any) -> Any:
    """Float16 units times signed bytes, as float32."""
    units = load(group.lines - 1, 0, _HALF)
    parts = [load(group.lines - 1, part, _BYTE, signed=True) for part in (2, 3)]
    return [
        [builder.fmul(unit, builder.sitofp(each, VECTOR)) for unit, each in zip(units, part, strict=True)]
        for part in parts
    ], None


_STEPS = {"pair": _pairs, "small": _small, "halves": _halves}
