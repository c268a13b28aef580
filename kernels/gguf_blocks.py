"""Weights in the blocks of a GGUF file, laid out in panels: the numbers of the file in another order.

A block of 32 or 256 inputs of an output has numbers of 4 to 8 bits and float16 scales. In a panel, the blocks of
`COLUMNS` outputs are next to each other, as `kernels.block_tiles` multiplies them. Nothing is rounded: a row that is
looked up equals the result of `gguf.quants.dequantize`.

Source: llama.cpp, `ggml-common.h`, for the types; their dequantization in `gguf/quants.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.kernels.block_tiles import ROW_BLOCK, Group
from lookahead.kernels.jobs import claim_part, run
from lookahead.kernels.large_pages import zeros
from lookahead.kernels.packed_product import COLUMNS
from lookahead.kernels.scalars import jit_part
from lookahead.utils.addresses import array_at

_SUPER = 256  # inputs of the larger blocks
_U = np.uint32


class BlockType(NamedTuple):
    """A block type.

    Attributes:
        inputs: Inputs of a block.
        nbytes: Size of a block in a file.
        group: Layout of the blocks.
        zero: Offset subtracted from each number that has a scale and no minimum.
        at: Offset of the first byte of the numbers of a block of 32; upper bits are in the 4 bytes before.
    """

    inputs: int
    nbytes: int
    group: Group
    zero: int = 0
    at: int = 0


_FOUR, _FIVE, _EIGHT = Group(4, "pair"), Group(5, "pair"), Group(8, "pair")
TYPES = {
    "Q4_0": BlockType(32, 18, _FOUR, zero=8, at=2),
    "Q4_1": BlockType(32, 20, _FOUR, at=4),
    "Q5_0": BlockType(32, 22, _FIVE, zero=16, at=6),
    "Q5_1": BlockType(32, 24, _FIVE, at=8),
    "Q8_0": BlockType(32, 34, _EIGHT, at=2),
    "Q4_K": BlockType(_SUPER, 144, Group(4, "small")),
    "Q5_K": BlockType(_SUPER, 176, Group(5, "small")),
    "Q6_K": BlockType(_SUPER, 210, Group(6, "halves")),
}
"""The types that are multiplied as they are stored, by their names in files."""


def packed_shape(kind: str, outputs: int, inputs: int) -> tuple[int, int, int]:
    """The shape of the result of `lay_out`; ValueError if inputs are not a multiple of a block's."""
    of_kind = TYPES[kind]
    if inputs % of_kind.inputs:
        raise ValueError(f"inputs of {kind} must be a multiple of {of_kind.inputs}, got {inputs}")
    lines = inputs // (ROW_BLOCK * of_kind.group.blocks) * of_kind.group.lines
    return -(-outputs // COLUMNS), lines, COLUMNS


def lay_out(blocks: NDArray[np.uint8], kind: str, order: NDArray[np.int64] | None = None) -> Tensor:
    """Lay blocks `[outputs, bytes]` out in panels, int32 `[panels, lines, COLUMNS]`.

    Args:
        blocks: The bytes of a tensor in a file, contiguous; may be a memory map.
        kind: One of `TYPES`.
        order: The row of the blocks for each output; their own order if None.

    Raises:
        ValueError: The bytes are not whole blocks, or a scale is not finite.
    """
    of_kind, outputs = TYPES[kind], len(blocks)
    if blocks.ndim != 2 or blocks.shape[1] % of_kind.nbytes or not blocks.flags.c_contiguous:
        raise ValueError(f"rows of {kind} must be blocks of {of_kind.nbytes} bytes, got {blocks.shape}")
    inputs = blocks.shape[1] // of_kind.nbytes * of_kind.inputs
    steps = _steps_of(blocks.reshape(outputs, -1, of_kind.nbytes), kind)
    order = np.arange(outputs) if order is None else np.ascontiguousarray(order, np.int64)
    packed = zeros(*packed_shape(kind, outputs, inputs), dtype=torch.int32)
    group = of_kind.group
    sizes = group.bits, of_kind.inputs, of_kind.nbytes, of_kind.at, group.blocks, group.words, group.upper, group.lines
    own = np.array(sizes, np.int64)
    places = blocks.ctypes.data, order.ctypes.data, steps.ctypes.data, packed.data_ptr(), own.ctypes.data
    numbers = *places, outputs, blocks.shape[1], packed.shape[1]
    run((_lay_out, len(packed), numbers, (blocks, order, steps, packed, own)))
    return packed


def _steps_of(blocks: NDArray[np.uint8], kind: str) -> NDArray[np.uint32]:
    """The float16 of blocks `[outputs, blocks, bytes]` in the halves of a word, as in a panel."""
    of_kind = TYPES[kind]
    first = of_kind.nbytes - 2 if kind == "Q6_K" else 0
    has_two = kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    halves = np.zeros((*blocks.shape[:2], 2), np.float16)
    found = blocks[..., first : first + 2 * (1 + has_two)].copy().view(np.float16)
    halves[..., : 1 + has_two] = found
    if of_kind.zero:
        with np.errstate(over="ignore"):
            halves[..., 1] = -of_kind.zero * found[..., 0].astype(np.float32)  # a power of two
    if not np.isfinite(halves).all():
        raise ValueError(f"a step of a {kind} block is no number, or too large")
    return halves.view(np.uint32)[..., 0]


def _lay_out(address: Any) -> None:
    """Lay out column by column of a panel, whose lines stay in a near cache."""
    _, panels, blocks_at, order_at, steps_at, packed_at, of_kind_at, outputs, row_bytes, terms = array_at(
        address, (10,), np.int64
    )
    bits, inputs, nbytes, at, together, words, upper, lines = array_at(of_kind_at, (8,), np.int64)
    count = row_bytes // nbytes
    blocks, order = array_at(blocks_at, (outputs, row_bytes), np.uint8), array_at(order_at, (outputs,), np.int64)
    steps, packed = array_at(steps_at, (outputs, count), np.uint32), array_at(packed_at, (panels, terms, COLUMNS), _U)
    numbers, small = np.empty(_SUPER, np.uint8), np.empty(_SUPER // 16, np.uint8)
    panel = claim_part(address)
    while panel < panels:
        for place in range(panel * COLUMNS, min(outputs, (panel + 1) * COLUMNS)):
            column = packed[panel, :, place % COLUMNS]
            for block in range(count):
                own = blocks[order[place], block * nbytes : (block + 1) * nbytes]
                if inputs == 32:
                    _read_block(own, bits, at, numbers)
                elif bits == 6:
                    _read_six(own, numbers, small)
                else:
                    _read_small(own, bits, numbers, small)
                for i in range(inputs // 32):
                    part = block * inputs // 32 + i
                    line, half = part // together * lines, part % together
                    first, above = line + half * words, line + together * words + half * upper
                    _store_numbers(numbers[32 * i : 32 * i + 32], bits, column, first, above)
                    halves, last = packed[panel, line + lines - 1].view(np.uint16), place % COLUMNS
                    halves[last] = steps[order[place], block]
                    if bits == 6:
                        signed = packed[panel, line + lines - 1].view(np.uint8)
                        signed[2 * COLUMNS + last], signed[3 * COLUMNS + last] = small[2 * i], small[2 * i + 1]
                        continue
                    halves[COLUMNS + last] = steps[order[place], block] >> _U(16)
                    if inputs > 32:
                        own_steps = packed[panel, line + lines - 2].view(np.uint8)
                        first = 2 * half * COLUMNS + last
                        own_steps[first], own_steps[first + COLUMNS] = small[2 * i], small[2 * i + 1]
        panel = claim_part(address)


@jit_part
def _pair(numbers, place):
    return _U(numbers[place]) | _U(numbers[place + 1]) << _U(8)


@jit_part
def _store_numbers(numbers, bits, column, first, above):
    """Store 32 numbers: with 8 bits four per line, else eight, with their upper bits in other lines."""
    for word in range(8):
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
def _read_block(own, bits, at, numbers):
    """Blocks of 32: the first 16 numbers are in the lower halves of bytes, and the last 16 in the upper halves."""
    for i in range(16):
        if bits == 8:
            numbers[i], numbers[16 + i] = own[at + i] ^ 128, own[at + 16 + i] ^ 128
        else:
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
def _read_six(own, numbers, small):
    """Blocks of 256 with 16 signed scales."""
    for i in range(256):
        part, place = i // 128, i % 32
        low = own[64 * part + i % 64] >> (4 * (i // 64 % 2)) & 15
        numbers[i] = low | (own[128 + 32 * part + place] >> (2 * (i // 32 % 4)) & 3) << 4
    small[:] = own[192:208]


def rows_of(packed: Tensor, kind: str, outputs: Tensor) -> Tensor:
    """The weights of some outputs, int64 `[n]`, in the layout of `lay_out`: float32 `[n, inputs]`."""
    group = TYPES[kind].group
    panel, column = outputs // COLUMNS, outputs % COLUMNS
    groups = packed.unflatten(1, (-1, group.lines))
    lines = groups[panel, :, :, column]  # [n, groups, lines]
    upper = group.blocks * group.words
    numbers = lines[..., :upper]
    numbers = (_bytes_of(numbers) if group.bits == 8 else _fields(numbers, 4)).flatten(2)
    if group.upper:
        numbers |= _fields(lines[..., upper : upper + group.blocks * group.upper], group.upper).flatten(2) << 4
    blocks = numbers.unflatten(2, (group.blocks, -1)).float()  # [n, groups, blocks, 32]

    def steps(line: int, dtype: torch.dtype, part: int) -> Tensor:
        """A part of a line of scales, `[n, groups]`."""
        found: Tensor = groups[:, :, line].view(dtype)[panel, :, part * COLUMNS + column].float()
        return found

    unit, other = (steps(-1, torch.float16, part)[..., None, None] for part in range(2))
    if group.steps == "halves":
        own = torch.stack([steps(-1, torch.int8, part) for part in (2, 3)], 2)[..., None]
        values = (blocks - 32).unflatten(3, (2, -1)).squeeze(2) * (unit * own)
    elif group.steps == "small":
        small = torch.stack([steps(-2, torch.uint8, part) for part in range(4)], 2).unflatten(2, (2, 2))
        values = blocks * (unit * small[..., :1]) - other * small[..., 1:]
    elif group.bits == 8:
        values = (blocks - 128) * unit
    else:
        values = blocks * unit + other
    rows: Tensor = values.flatten(1)
    return rows


def _bytes_of(words: Tensor) -> Tensor:
    """The bytes of int32 `[..., n]`: uint8 `[..., n, 4]`."""
    found: Tensor = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    return found


def _fields(words: Tensor, bits: int) -> Tensor:
    """Numbers of `bits` bits in int32 `[..., n]`, uint8 `[..., n, 8 / bits, 4]`: the lowest bits of bytes first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device="cpu")
    return _bytes_of(words)[..., None, :] >> shifts[:, None] & (1 << bits) - 1
