"""Products of a few rows with quantized weights in blocks, laid out by `kernels.block_formats`, in LLVM IR.

Numbers of 4, 5 and 6 bits are widened to bytes in registers, once for all rows of a tile; those of 4 bits may stand for
entries of a table. The sums over a block are
integers, so they are exact in any order; blocks are added in the order of the inputs, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    emit_bytes,
    emit_fetch,
    emit_lookup,
    emit_sums_of_pairs,
    has_dot_of_bytes,
    matrices_of,
    spread,
    sums_of_neighbours,
    vector_at,
)
from lookahead.kernels.scalars import to_intrinsic

BYTES_OF = 4  # bytes per column in a line, and numbers per word of a row
# Words that follow those of a block of a row: what sums of parts begin with, which is what is subtracted from weights
# times the sum of the part; and as float32 the scale, and it times the sum of the block.
ROW_STEPS = 4
_REGISTERS = 2  # of columns
_COLUMNS = _REGISTERS * LANES  # of a panel
_MOST_SUMS = 28 if LANES == 16 else 12  # sums that are kept in registers
_HALF, _BYTE = ir.HalfType(), ir.IntType(8)
_I32 = ir.IntType(32)
# Products of a row's byte and a number of this many bits fit int16 if this many words are added.
_WORDS_OF_INT16 = {4: 8, 5: 4, 6: 2}
_SIGN = 128  # added to signed bytes


class Group(NamedTuple):
    """The lines of a group of blocks, each with four bytes for every column of a panel.

    First come the lower 4 bits of all numbers, two words of a block per line, then the upper bits, then the scales.
    With 8 bits a line is a word.

    Attributes:
        bits: Bits of a number.
        steps: Contents of the last lines, for all columns one after the other. `"single"`: scale, float32. `"pair"`:
            scale and offset, float16; no offset if there is a `zero`. `"small"`: for two blocks one line of 6-bit
            scales and minimums of both, in bytes, and one of their float16 units; minimums are subtracted. `"unit"`:
            float16 unit and scale, a signed byte. `"halves"`: the same with scales of the first and the last 16
            numbers.
        size: Numbers of a block, and of a block of a row: 32, or 64 with 8 bits.
        zero: What is subtracted from every number. Signed bytes have 128.
        table: The signed byte that each number of 4 bits stands for; empty if they stand for themselves.
    """

    bits: int
    steps: str
    size: int = 32
    zero: int = 0
    table: tuple[int, ...] = ()

    @property
    def blocks(self) -> int:
        """Blocks in a group."""
        return 2 if self.steps == "small" else 1

    @property
    def words(self) -> int:
        """Words of the numbers of a block."""
        return self.size // BYTES_OF

    @property
    def row_words(self) -> int:
        """Words of a block of a row."""
        return self.words + ROW_STEPS

    @property
    def parts(self) -> int:
        """Parts of a block with scales of their own."""
        return 2 if self.steps == "halves" else 1

    @property
    def main(self) -> int:
        """Lines of a block's numbers, without upper bits."""
        return self.words if self.bits == 8 else self.words // 2

    @property
    def upper(self) -> int:
        """Lines of a block's upper bits."""
        return 0 if self.bits == 8 else self.bits - 4

    @property
    def lines(self) -> int:
        """Lines of a group."""
        return self.blocks * (self.main + self.upper) + (2 if self.steps == "small" else 1)


class BlockKernel(NamedTuple):
    """The multiplication of weights in such groups, made by `kernels.block_product`."""

    group: Group
    prepare: dict[Any, Any]  # job function that prepares rows, by their dtype
    multiply: dict[Any, Any]  # job function that multiplies them


def tile_of_blocks(group: Group) -> Any:
    """An intrinsic: some rows times two registers of columns, over groups of blocks.

    It takes the rows, int32, with the index of the first block of the first row and the step between its blocks; the
    weight, int32, with the index of the first group, the step between lines, and the prefetch arguments of `tile_of`;
    the output matrix, float32, with the index of the first row and the step between rows, to which it adds; the number
    of rows; and the number of lines, of at least one group. Equal blocks of rows are next to each other.
    """

    @to_intrinsic
    def tile(context: Any, left: Any, right: Any, out: Any, count: Any, lines: Any) -> Any:
        def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
            *operands, asked, lines = values
            groups = builder.sdiv(lines, WHOLE(group.lines))
            matrices = matrices_of(target, builder, signature, operands)
            builder.function.attributes.add("noinline")  # its caller needs no registers meanwhile
            builder.function.attributes.alignstack = CACHE_LINE  # spilled registers cross no cache line
            done = builder.append_basic_block("done")
            choice = builder.switch(asked, done)
            for count in range(1, ROWS + 1):
                case = builder.append_basic_block("rows")
                choice.add_case(WHOLE(count), case)
                builder.position_at_end(case)
                _emit_tile(builder, group, count, matrices, groups)
                builder.branch(done)
            builder.position_at_end(done)
            return target.get_dummy_value()

        return types.void(left, right, out, count, lines), emit

    return tile


def _emit_tile(builder: Any, group: Group, count: int, matrices: Any, groups: Any) -> None:
    """Emit the product of a number of rows, for both registers of columns at once if there are registers for all sums.

    A second loop reads the rows once more, and a spilled sum is stored and loaded for every block.
    """
    at_once = _REGISTERS if count * _REGISTERS * (1 + group.parts) <= _MOST_SUMS else 1
    for first in range(0, _REGISTERS, at_once):
        _emit_groups(builder, group, count, range(first, first + at_once), matrices, groups)


class _Lines:
    """Registers of the lines of a group. The cache line ahead of one is prefetched when it is first used."""

    def __init__(self, builder: Any, matrix: Sequence[Any], group: Any, count: int, registers: range) -> None:
        (self._panel, begin, *_), self._matrix, self._builder = matrix, matrix, builder
        self._number, self.own = builder.mul(group, WHOLE(count)), registers
        self._first = builder.add(begin, builder.mul(self._number, WHOLE(_COLUMNS)))
        self._loaded = dict[int, list[Any]]()
        self._fetched = set[int]()

    def _at(self, line: int) -> Any:
        """The index of a line."""
        builder, per_line = self._builder, _COLUMNS * BYTES_OF // CACHE_LINE
        if line not in self._fetched:
            first = builder.mul(builder.add(self._number, WHOLE(line)), WHOLE(per_line))
            starts = [divmod(register * per_line, _REGISTERS) for register in self.own]
            for number in [number for number, rest in starts if not rest]:
                emit_fetch(builder, self._matrix, builder.add(first, WHOLE(number)))
            self._fetched.add(line)
        return builder.add(self._first, WHOLE(line * _COLUMNS))

    def registers(self, line: int) -> list[Any]:
        """The registers of a line."""
        if line not in self._loaded:
            at, builder = self._at(line), self._builder
            places = [builder.add(at, WHOLE(register * LANES)) for register in self.own]
            places = [vector_at(builder, self._panel, place, PAIRS) for place in places]
            self._loaded[line] = [builder.load(place, align=4) for place in places]
            # An empty statement that no load is moved across: the CPU's prefetcher expects lines in order.
            builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
        return self._loaded[line]

    def steps(self, line: int, part: int, kind: Any, signed: bool = False) -> list[Any]:
        """The registers of a part of a line of scales, as float32, or of bytes, as int32."""
        builder = self._builder
        numbers = builder.bitcast(builder.gep(self._panel, [self._at(line)]), kind.as_pointer())
        lanes, registers = ir.VectorType(kind, LANES), []
        for register in self.own:
            place = vector_at(builder, numbers, WHOLE((part * _REGISTERS + register) * LANES), lanes)
            loaded = builder.load(place, align=1)
            if kind == _BYTE:
                loaded = (builder.sext if signed else builder.zext)(loaded, PAIRS)
            elif kind == _HALF:
                loaded = builder.fpext(loaded, VECTOR)
            registers.append(loaded)
        return registers


def _emit_groups(builder: Any, group: Group, count: int, registers: range, matrices: Any, groups: Any) -> None:
    """Emit a loop over groups that adds their sums, for some registers of columns, to the output."""
    (left, at, step), panel, (out, to, out_step) = matrices
    columns = [
        builder.add(to, builder.add(builder.mul(out_step, WHOLE(row)), WHOLE(register * LANES)))
        for row in range(count)
        for register in registers
    ]
    places = [vector_at(builder, out, column) for column in columns]
    begun = [builder.load(place, align=4) for place in places]
    before, loop, after = builder.block, builder.append_basic_block("group"), builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    number, begins = builder.phi(WHOLE), [builder.phi(VECTOR) for _ in begun]
    lines, totals = _Lines(builder, panel, number, group.lines, registers), list[Any](begins)
    for block in range(group.blocks):
        place = builder.add(builder.mul(number, WHOLE(group.blocks)), WHOLE(block))
        first = builder.gep(left, [builder.add(at, builder.mul(place, step))])
        rows = [builder.gep(first, [WHOLE(group.row_words * row)]) for row in range(count)]
        sums = _emit_sums(builder, group, block, rows, lines)
        steps, offsets = _STEPS[group.steps](builder, group, block, lines)
        for i, total in enumerate(totals):
            row, register = divmod(i, len(registers))
            products = [part[row][register] for part in sums], [part[register] for part in steps]
            ends = builder.gep(rows[row], [WHOLE(group.words)])
            totals[i] = _added(builder, total, ends, *products, offsets and offsets[register])
    following = builder.add(number, WHOLE(1))
    builder.cbranch(builder.icmp_signed("<", following, groups), loop, after)
    for phi, begin, update in zip([number, *begins], [WHOLE(0), *begun], [following, *totals], strict=True):
        phi.add_incoming(begin, before)
        phi.add_incoming(update, loop)
    builder.position_at_end(after)
    for total, place in zip(totals, places, strict=True):
        builder.store(total, place, align=4)


def _added(builder: Any, total: Any, ends: Any, sums: list[Any], steps: list[Any], offset: Any) -> Any:
    """A total plus a block: the integer sums of its parts times their scales, and the sum of a row times the offset.

    Only one of two products can be fused with their sum, and it must always be the same one. `ends` are the words of a
    row that follow those of the block.
    """
    step, of_sum = (
        spread(builder, builder.bitcast(_word(builder, ends, place), ir.FloatType()))
        for place in (ROW_STEPS - 2, ROW_STEPS - 1)
    )
    floats = [builder.sitofp(total, VECTOR) for total in sums]
    product = builder.fmul(floats[0], steps[0])
    for number, scale in zip(floats[1:], steps[1:], strict=True):
        product = builder.fadd(product, builder.fmul(number, scale, **FUSED), **FUSED)
    total = builder.fadd(total, builder.fmul(product, step, **FUSED), **FUSED)
    if offset is None:
        return total
    return builder.fadd(total, builder.fmul(of_sum, offset, **FUSED), **FUSED)


def _word(builder: Any, row: Any, place: int) -> Any:
    return builder.load(builder.gep(row, [WHOLE(place)]))


def _emit_sums(builder: Any, group: Group, block: int, rows: list[Any], lines: _Lines) -> list[list[list[Any]]]:
    """The sums of products over a block, or over its halves if these have scales: `[parts][rows][registers]`."""
    zero, sums, count = ir.Constant(PAIRS, None), [], len(lines.own)
    has_dot = has_dot_of_bytes()
    is_signed = group.zero == _SIGN
    adds_shorts = not (has_dot or is_signed)
    for part in range(group.parts):
        begun = [zero] * len(rows)
        if group.zero and (has_dot or not is_signed):
            begun = [spread(builder, _word(builder, row, group.words + part)) for row in rows]
        totals = [[begin] * count for begin in begun]
        shorts: list[list[Any]] = [[None] * count for _ in rows]
        words = range(part * group.words // group.parts, (part + 1) * group.words // group.parts)
        for word in words:
            weights = _emit_word(builder, group, block, word, lines)
            for row, address in enumerate(rows):
                x = spread(builder, _word(builder, address, word))
                for register, weight in enumerate(weights):
                    if not adds_shorts:
                        totals[row][register] = emit_bytes(builder, totals[row][register], x, weight)
                        continue
                    pair = emit_sums_of_pairs(builder, builder.bitcast(weight, BYTES), builder.bitcast(x, BYTES))
                    waiting = shorts[row][register]
                    waiting = pair if waiting is None else builder.add(waiting, pair)
                    if (word + 1) % _WORDS_OF_INT16[group.bits] == 0 or word == words[-1]:
                        added = sums_of_neighbours(builder, waiting)
                        totals[row][register], waiting = builder.add(totals[row][register], added), None
                    shorts[row][register] = waiting
        sums.append(totals)
    return sums


def _emit_word(builder: Any, group: Group, block: int, word: int, lines: _Lines) -> list[Any]:
    """Unpack four numbers of every column to bytes."""
    if group.bits == 8:
        return lines.registers(word)
    unpacked = []
    upper = group.blocks * group.main + block * group.upper
    place = word if group.bits == 5 else word % 4 * 2  # of the upper bits in each byte
    above: Sequence[Any] = [None] * len(lines.own)
    if group.upper:
        above = lines.registers(upper + (word // 4 if group.bits == 6 else 0))
    for line, bits in zip(lines.registers(block * group.main + word // 2), above, strict=True):
        number = _masked(builder, _shifted(builder, line, -4 * (word % 2)), 0x0F)
        if bits is not None:
            mask = ((1 << group.upper) - 1) << 4
            number = builder.or_(number, _masked(builder, _shifted(builder, bits, 4 - place), mask))
        unpacked.append(number)
    if group.table:
        unpacked = [emit_lookup(builder, number, [entry + _SIGN for entry in group.table]) for number in unpacked]
    return unpacked


def _shifted(builder: Any, line: Any, left: int) -> Any:
    """Words shifted left, or right by a negative number."""
    if left == 0:
        return line
    shift = ir.Constant(PAIRS, [abs(left)] * LANES)
    return builder.shl(line, shift) if left > 0 else builder.lshr(line, shift)


def _masked(builder: Any, line: Any, mask: int) -> Any:
    """Words with a mask applied to every byte."""
    return builder.and_(line, ir.Constant(PAIRS, [mask * 0x01010101] * LANES))


def _pairs(builder: Any, group: Group, block: int, lines: _Lines) -> Any:
    last = group.lines - 1
    return [lines.steps(last, 0, _HALF)], None if group.zero else lines.steps(last, 1, _HALF)


def _small(builder: Any, group: Group, block: int, lines: _Lines) -> Any:
    """Float16 units times 6-bit numbers, as float32."""
    units = [lines.steps(group.lines - 1, part, _HALF) for part in range(2)]
    steps, minimums = (lines.steps(group.lines - 2, 2 * block + part, _BYTE) for part in range(2))
    minimums = [builder.sub(ir.Constant(PAIRS, None), minimum) for minimum in minimums]
    steps, minimums = map(_in_units, (builder, builder), units, (steps, minimums))
    return [steps], minimums


def _halves(builder: Any, group: Group, block: int, lines: _Lines, parts: Sequence[int] = (2, 3)) -> Any:
    """Float16 units times signed bytes, as float32."""
    last = group.lines - 1
    units = lines.steps(last, 0, _HALF)
    return [_in_units(builder, units, lines.steps(last, part, _BYTE, signed=True)) for part in parts], None


def _unit(builder: Any, group: Group, block: int, lines: _Lines) -> Any:
    return _halves(builder, group, block, lines, (2,))


def _in_units(builder: Any, units: list[Any], numbers: list[Any]) -> list[Any]:
    return [builder.fmul(unit, builder.sitofp(number, VECTOR)) for unit, number in zip(units, numbers, strict=True)]


def _single(builder: Any, group: Group, block: int, lines: _Lines) -> Any:
    return [lines.steps(group.lines - 1, 0, ir.FloatType())], None


_STEPS = {"pair": _pairs, "small": _small, "halves": _halves, "unit": _unit, "single": _single}
