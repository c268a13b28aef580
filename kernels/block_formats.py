"""The formats of quantized weights, and their layout in panels: the same numbers in another order.

A block of 32 to 256 inputs of an output has numbers of 4 to 8 bits, and scales. In a panel, the blocks of
`COLUMNS` outputs are next to each other, as `kernels.block_tiles` multiplies them. Nothing is rounded: a row that is
looked up equals the result of `gguf.quants.dequantize`.

Source: llama.cpp, `ggml-common.h`, for all formats but int8; their dequantization in `gguf/quants.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.kernels.block_tiles import Group
from lookahead.kernels.jobs import claim_part, run
from lookahead.kernels.large_pages import zeros
from lookahead.kernels.packed_product import COLUMNS
from lookahead.kernels.scalars import jit_part
from lookahead.utils.addresses import array_at

SUPER = 256  # inputs of the larger blocks
_AT_ONCE = 1 << 16  # weights that are rounded at a time, which fit a near cache
_LARGEST, _SMALLEST = 127, 1e-30  # largest number of 8 bits; blocks with no larger weight are rounded to zeros
_TURNS = 4  # iterations of rounding to 4 bits and of fitting a line
_PLAIN, _THREE, _TABLE, _SMALL, _SIX = range(5)  # orders of numbers and scales in a block
STEPS = "single", "pair", "small", "unit", "halves"
_U = np.uint32


class Format(NamedTuple):
    """A format of quantized weights.

    Attributes:
        inputs: Inputs of a block.
        nbytes: Bytes of a block, as in a file.
        group: Layout of the blocks in a panel.
        zero: Offset subtracted from each number that has a scale and no minimum.
        at: Offset of the first byte of the numbers of a block without 6-bit scales; upper bits are in the 4 bytes
            before.
        scale_at: Offset of the scale: float16, or float32 in int8, or in MXFP4 the exponent of 2.
        has_minimum: Whether a float16 minimum follows it.
        round: Rounds float32 weights `[outputs, blocks, inputs]` to blocks, uint8 `[outputs, blocks, nbytes]`; None for
            formats that are only read.
        layout: The order of the numbers and the 6-bit scales of a block.
    """

    inputs: int
    nbytes: int
    group: Group
    zero: int = 0
    at: int = 0
    scale_at: int = 0
    has_minimum: bool = False
    round: Callable[[Tensor], Tensor] | None = None
    layout: int = _PLAIN


def _to_bytes(blocks: Tensor) -> Tensor:
    """Numbers from -127 to 127 times a scale, which comes first."""
    largest = blocks.abs().amax(2, keepdim=True)
    whole = (blocks * (_LARGEST / largest.clamp_min(_SMALLEST))).round_().to(torch.int8)
    return torch.cat([(largest / _LARGEST).view(torch.uint8), whole.view(torch.uint8)], 2)


def _to_nibbles(blocks: Tensor) -> Tensor:
    """Numbers from 0 to 15 times a scale, plus a minimum. Each iteration reduces the squared error of a block."""
    least, most = blocks.aminmax(dim=2, keepdim=True)
    step, center, tiny = (most - least) / 15, blocks.mean(2, keepdim=True), torch.finfo(torch.float32).tiny
    for _ in range(_TURNS):
        halves = torch.cat([step, least], 2).half()
        step, least = halves.float().split(1, 2)
        whole = (blocks - least).div_(step.clamp_min(tiny)).round_().clamp_(0, 15)
        mean = whole.mean(2, keepdim=True)
        apart = whole - mean
        step = (apart * blocks).sum(2, keepdim=True) / apart.square_().sum(2, keepdim=True).clamp_min_(tiny)
        least = center - step * mean
    low, high = whole.to(torch.uint8).chunk(2, 2)
    return torch.cat([halves.view(torch.uint8), low | high << 4], 2)


_NEAR_ZERO = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113  # denser around zero
_FLOATS = 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12  # twice those of two bits of exponent and one more
FOUR, FIVE = Group(4, "pair"), Group(5, "pair")
EIGHT, EIGHT_WIDE = Group(8, "pair", zero=128), Group(8, "single", 64, zero=128)
THREE_HALVES, SIX_HALVES = Group(4, "halves", zero=4), Group(6, "halves", zero=32)
FOUR_SMALL, FIVE_SMALL = Group(4, "small"), Group(5, "small")
TABLE, TABLE_UNIT = Group(4, "pair", zero=128, table=_NEAR_ZERO), Group(4, "unit", zero=128, table=_NEAR_ZERO)
TABLE_SINGLE = Group(4, "single", zero=128, table=_FLOATS)
FORMATS = {
    "int8": Format(64, 68, EIGHT_WIDE, at=4, round=_to_bytes),
    "Q4_0": Format(32, 18, FOUR, zero=8, at=2),
    "Q4_1": Format(32, 20, FOUR, at=4, has_minimum=True, round=_to_nibbles),
    "Q5_0": Format(32, 22, FIVE, zero=16, at=6),
    "Q5_1": Format(32, 24, FIVE, at=8, has_minimum=True),
    "Q8_0": Format(32, 34, EIGHT, at=2),
    "IQ4_NL": Format(32, 18, TABLE, at=2),
    "MXFP4": Format(32, 17, TABLE_SINGLE, at=1),
    "Q3_K": Format(SUPER, 110, THREE_HALVES, scale_at=108, layout=_THREE),
    "IQ4_XS": Format(SUPER, 136, TABLE_UNIT, layout=_TABLE),
    "Q4_K": Format(SUPER, 144, FOUR_SMALL, has_minimum=True, layout=_SMALL),
    "Q5_K": Format(SUPER, 176, FIVE_SMALL, has_minimum=True, layout=_SMALL),
    "Q6_K": Format(SUPER, 210, SIX_HALVES, scale_at=208, layout=_SIX),
}
"""Formats by name. Those named as in GGUF files are multiplied as a file stores them.

Blocks of 64 inputs are multiplied by many rows a sixth faster than those of Q8_0.
"""


def quantize(weight: Tensor, kind: str) -> Tensor:
    """Round a weight `[outputs, inputs]` to a format, in the layout of `lay_out`, with zeros behind the last input."""
    of_kind = FORMATS[kind]
    assert of_kind.round is not None, kind
    padded = torch.nn.functional.pad(weight.detach(), (0, -weight.shape[1] % of_kind.inputs))
    parts = padded.unflatten(1, (-1, of_kind.inputs)).split(-(-_AT_ONCE // weight.shape[1]))
    blocks = torch.cat([of_kind.round(part.float()).flatten(1) for part in parts])
    return lay_out(blocks.numpy(), kind)


def packed_shape(kind: str, outputs: int, inputs: int) -> tuple[int, int, int]:
    """The shape of the result of `lay_out`; ValueError if inputs are not a multiple of a block's."""
    of_kind = FORMATS[kind]
    if inputs % of_kind.inputs:
        raise ValueError(f"inputs of {kind} must be a multiple of {of_kind.inputs}, got {inputs}")
    lines = inputs // (of_kind.group.size * of_kind.group.blocks) * of_kind.group.lines
    return -(-outputs // COLUMNS), lines, COLUMNS


def lay_out(blocks: NDArray[np.uint8], kind: str, order: NDArray[np.int64] | None = None) -> Tensor:
    """Lay blocks `[outputs, bytes]` out in panels, int32 `[panels, lines, COLUMNS]`.

    Args:
        blocks: The bytes of a tensor in a file, contiguous; may be a memory map.
        kind: One of `FORMATS`.
        order: The row of the blocks for each output, which may stand there twice; their own order if None.

    Raises:
        ValueError: The bytes are not whole blocks, or a scale is not finite.
    """
    of_kind = FORMATS[kind]
    if blocks.ndim != 2 or blocks.shape[1] % of_kind.nbytes or not blocks.flags.c_contiguous:
        raise ValueError(f"rows of {kind} must be blocks of {of_kind.nbytes} bytes, got {blocks.shape}")
    inputs = blocks.shape[1] // of_kind.nbytes * of_kind.inputs
    steps = steps_of(blocks.reshape(len(blocks), -1, of_kind.nbytes), kind)
    order = np.arange(len(blocks)) if order is None else np.ascontiguousarray(order, np.int64)
    packed = zeros(*packed_shape(kind, len(order), inputs), dtype=torch.int32)
    group = of_kind.group
    sizes = group.bits, group.size, group.blocks, group.main, group.upper, group.lines
    of_block = of_kind.inputs, of_kind.nbytes, of_kind.at, of_kind.layout, STEPS.index(group.steps)
    own = np.array([*of_block, *sizes], np.int64)
    places = blocks.ctypes.data, order.ctypes.data, steps.ctypes.data, packed.data_ptr(), own.ctypes.data
    numbers = *places, len(order), blocks.shape[1], packed.shape[1]
    run((_lay_out, len(packed), numbers, (blocks, order, steps, packed, own)))
    return packed


def steps_of(blocks: NDArray[np.uint8], kind: str) -> NDArray[np.uint32]:
    """The scale of blocks `[outputs, blocks, bytes]`; two float16 are in the halves of a word, as in a panel."""
    of_kind = FORMATS[kind]
    if of_kind.group.steps == "single" and of_kind.at == 4:
        return blocks[..., :4].copy().view(np.uint32)[..., 0]
    if of_kind.group.steps == "single":
        exponents = blocks[..., 0].astype(np.uint32)  # of 2, plus 128
        return np.where(exponents < 2, _U(1 << 21) << exponents, (exponents - _U(1)) << _U(23)).astype(np.uint32)
    halves, count = np.zeros((*blocks.shape[:2], 2), np.float16), 1 + of_kind.has_minimum
    scales = blocks[..., of_kind.scale_at : of_kind.scale_at + 2 * count].copy().view(np.float16)
    halves[..., :count] = scales
    if of_kind.zero:
        with np.errstate(over="ignore"):
            halves[..., 1] = -of_kind.zero * scales[..., 0].astype(np.float32)  # a power of two
    if not np.isfinite(halves).all():
        raise ValueError(f"a step of a {kind} block is not a number, or too large")
    return halves.view(np.uint32)[..., 0]


def _lay_out(address: Any) -> None:
    """Lay out column by column of a panel, whose lines stay in a near cache."""
    _, panels, blocks_at, order_at, steps_at, packed_at, of_kind_at, outputs, row_bytes, terms = array_at(
        address, (10,), np.int64
    )
    inputs, nbytes, at, layout, kind, bits, size, together, main, upper, lines = array_at(of_kind_at, (11,), np.int64)
    count = row_bytes // nbytes
    blocks, order = array_at(blocks_at, (outputs, row_bytes), np.uint8), array_at(order_at, (outputs,), np.int64)
    steps, packed = array_at(steps_at, (outputs, count), np.uint32), array_at(packed_at, (panels, terms, COLUMNS), _U)
    numbers, small = np.empty(SUPER, np.uint8), np.empty(SUPER // 16, np.uint8)
    panel = claim_part(address)
    while panel < panels:
        for place in range(panel * COLUMNS, min(outputs, (panel + 1) * COLUMNS)):
            column = packed[panel, :, place % COLUMNS]
            for block in range(count):
                own = blocks[order[place], block * nbytes : (block + 1) * nbytes]
                read_numbers(own, layout, bits, at, size, numbers, small)
                for i in range(inputs // size):
                    part = block * inputs // size + i
                    line, half = part // together * lines, part % together
                    first, above = line + half * main, line + together * main + half * upper
                    _store_numbers(numbers[size * i : size * (i + 1)], bits, column, first, above)
                    if kind == 0:
                        column[line + lines - 1] = steps[order[place], block]
                        continue
                    halves, last = packed[panel, line + lines - 1].view(np.uint16), place % COLUMNS
                    halves[last] = steps[order[place], block]
                    if kind > 2:
                        signed = packed[panel, line + lines - 1].view(np.uint8)
                        signed[2 * COLUMNS + last], signed[3 * COLUMNS + last] = small[2 * i], small[2 * i + 1]
                        continue
                    halves[COLUMNS + last] = steps[order[place], block] >> _U(16)
                    if kind == 2:
                        own_steps = packed[panel, line + lines - 2].view(np.uint8)
                        first = 2 * half * COLUMNS + last
                        own_steps[first], own_steps[first + COLUMNS] = small[2 * i], small[2 * i + 1]
        panel = claim_part(address)


@jit_part
def _pair(numbers, place):
    return _U(numbers[place]) | _U(numbers[place + 1]) << _U(8)


@jit_part
def _store_numbers(numbers, bits, column, first, above):
    """Store a block: with 8 bits four numbers per line, else eight, with their upper bits in other lines."""
    for word in range(len(numbers) // 4):
        four = _pair(numbers, 4 * word) | _pair(numbers, 4 * word + 2) << _U(16)
        if bits == 8:
            column[first + word] = four
            continue
        column[first + word // 2] |= (four & _U(0x0F0F0F0F)) << _U(4 * (word % 2))
        if bits == 5:
            column[above] |= (four >> _U(4) & _U(0x01010101)) << _U(word)
        elif bits == 6:
            column[above + word // 4] |= (four >> _U(4) & _U(0x03030303)) << _U(2 * (word % 4))


@jit_part
def read_numbers(own, layout, bits, at, size, numbers, small):
    """The numbers of a block, uint8, and its scales of 6 bits, with the minimums or for every 16 numbers."""
    if layout == _PLAIN:
        _read_block(own, bits, at, size, numbers)
    elif layout == _THREE:
        _read_three(own, numbers, small)
    elif layout == _TABLE:
        _read_table(own, numbers, small)
    elif layout == _SMALL:
        _read_small(own, bits, numbers, small)
    else:
        _read_six(own, numbers, small)


@jit_part
def _read_block(own, bits, at, size, numbers):
    """Blocks of one scale: numbers of 8 bits, or the first half in the lower and the last half in the upper 4 bits."""
    if bits == 8:
        for i in range(size):
            numbers[i] = own[at + i] ^ 128
        return
    for i in range(16):
        numbers[i], numbers[16 + i] = own[at + i] & 15, own[at + i] >> 4
    if bits == 5:
        for i in range(32):
            numbers[i] |= (own[at - 4 + i // 8] >> (i % 8) & 1) << 4


@jit_part
def _read_small(own, bits, numbers, small):
    """Blocks of 256 with 8 scales and 8 minimums of 6 bits, which alternate in `small`."""
    scales, high, low = own[4:16], own[16:48], own[len(own) - 128 :]
    for i in range(4):
        small[2 * i], small[2 * i + 1] = scales[i] & 63, scales[4 + i] & 63
        small[2 * i + 8] = scales[8 + i] & 15 | scales[i] >> 6 << 4
        small[2 * i + 9] = scales[8 + i] >> 4 | scales[4 + i] >> 6 << 4
    for i in range(256):
        numbers[i] = low[i // 64 * 32 + i % 32] >> (4 * (i // 32 % 2)) & 15
        if bits == 5:
            numbers[i] |= (high[i % 32] >> (i // 32) & 1) << 4


@jit_part
def _read_three(own, numbers, small):
    """Blocks of 256 of 3 bits, the upper ones first, with 16 signed scales of 6 bits."""
    for i in range(256):
        number = own[32 + i // 128 * 32 + i % 32] >> (2 * (i // 32 % 4)) & 3
        numbers[i] = number | (own[i % 32] >> (i // 32) & 1) << 2
    for i in range(16):
        scale = own[96 + i % 8] >> (4 * (i // 8)) & 15 | (own[104 + i % 4] >> (2 * (i // 4)) & 3) << 4
        small[i] = scale - 32


@jit_part
def _read_table(own, numbers, small):
    """Blocks of 256 of 4 bits with 8 signed scales of 6 bits, which `small` holds twice."""
    for i in range(256):
        numbers[i] = own[8 + i // 32 * 16 + i % 16] >> (4 * (i // 16 % 2)) & 15
    for i in range(16):
        part = i // 2
        scale = own[4 + part // 2] >> (4 * (part % 2)) & 15 | (own[2 + part // 4] >> (2 * (part % 4)) & 3) << 4
        small[i] = scale - 32


@jit_part
def _read_six(own, numbers, small):
    """Blocks of 256 with 16 signed scales."""
    for i in range(256):
        part, place = i // 128, i % 32
        low = own[64 * part + i % 64] >> (4 * (i // 64 % 2)) & 15
        numbers[i] = low | (own[128 + 32 * part + place] >> (2 * (i // 32 % 4)) & 3) << 4
    for i in range(16):
        small[i] = own[192 + i]


def rows_of(packed: Tensor, kind: str, outputs: Tensor) -> Tensor:
    """The weights of some outputs, int64 `[n]`, in the layout of `lay_out`: float32 `[n, inputs]`."""
    group = FORMATS[kind].group
    panel, column = outputs // COLUMNS, outputs % COLUMNS
    groups = packed.unflatten(1, (-1, group.lines))
    lines = groups[panel, :, :, column]  # [n, groups, lines]
    upper = group.blocks * group.main
    numbers = lines[..., :upper]
    numbers = (_bytes_of(numbers) if group.bits == 8 else _fields(numbers, 4)).flatten(2)
    if group.upper:
        numbers |= _fields(lines[..., upper : upper + group.blocks * group.upper], group.upper).flatten(2) << 4
    blocks = numbers.unflatten(2, (group.blocks, -1)).float() - group.zero  # [n, groups, blocks, size]
    if group.table:
        table = torch.tensor(group.table, dtype=torch.float32, device="cpu")
        blocks = table[numbers.int()].unflatten(2, (group.blocks, -1))

    def steps(line: int, dtype: torch.dtype, part: int) -> Tensor:
        """A part of a line of scales, `[n, groups]`."""
        steps: Tensor = groups[:, :, line].view(dtype)[panel, :, part * COLUMNS + column].float()
        return steps

    if group.steps == "single":
        wide: Tensor = (blocks * steps(-1, torch.float32, 0)[..., None, None]).flatten(1)
        return wide
    unit, other = (steps(-1, torch.float16, part)[..., None, None] for part in range(2))
    if group.steps in ("unit", "halves"):
        parts = (2, 3) if group.steps == "halves" else (2,)
        own = torch.stack([steps(-1, torch.int8, part) for part in parts], 2)[..., None]
        values = blocks.unflatten(3, (len(parts), -1)).squeeze(2) * (unit * own)
    elif group.steps == "small":
        small = torch.stack([steps(-2, torch.uint8, part) for part in range(4)], 2).unflatten(2, (2, 2))
        values = blocks * (unit * small[..., :1]) - other * small[..., 1:]
    else:
        values = blocks * unit if group.zero else blocks * unit + other
    rows: Tensor = values.flatten(1)
    return rows


def _bytes_of(words: Tensor) -> Tensor:
    """The bytes of int32 `[..., n]`: uint8 `[..., n, 4]`."""
    columns: Tensor = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    return columns


def _fields(words: Tensor, bits: int) -> Tensor:
    """Numbers of `bits` bits in int32 `[..., n]`, uint8 `[..., n, 8 / bits, 4]`: the lowest bits of bytes first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device="cpu")
    return _bytes_of(words)[..., None, :] >> shifts[:, None] & (1 << bits) - 1
