"""Products of rows with weights in the blocks of a GGUF file.

The weights are those of the file. Rows are rounded: every 32 numbers are integers from -127 to 127 times a scale.
Products of these integers are added exactly, and blocks in the order of the inputs, so that the bits of a row do not
depend on other rows.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lookahead.kernels.block_tiles import ROW_BLOCK, ROW_WORDS, BlockKernel, Group, tile_of_blocks
from lookahead.kernels.gguf_blocks import TYPES
from lookahead.kernels.jobs import claim_part
from lookahead.kernels.microkernel import FEATURES, LANES, ROWS
from lookahead.kernels.packed_product import COLUMNS, TILING_OF_QUANTIZED, PackedWeight, multiplying, round_block
from lookahead.kernels.scalars import jit_part, widen
from lookahead.utils.addresses import array_at

_HALF = ROW_BLOCK // 2
_SUMS = ROW_BLOCK // 4  # index of the sums of a block, after its words


def _round_floats(address: Any) -> None:
    _round(address, np.float32)


def _round_halves(address: Any) -> None:
    _round(address, np.uint16)


@jit_part
def _round(address, number):
    """Round rows. After the words of each block follow the sums of its halves, its scale, and that times both sums."""
    _, rows, x_at, out_at, inputs, length, _ = array_at(address, (7,), np.int64)
    x, out = array_at(x_at, (rows, inputs), number), array_at(out_at, (rows, length), np.int32)
    line = np.empty(ROW_BLOCK, np.float32)
    row = claim_part(address)
    while row < rows:
        for place in range(inputs // ROW_BLOCK):
            own = out[row, place * ROW_WORDS : (place + 1) * ROW_WORDS]
            for i in range(ROW_BLOCK):
                line[i] = widen(x[row, place * ROW_BLOCK + i])
            round_block(line, own[: _SUMS + 2], ROW_BLOCK)
            own[-2], numbers, whole = own[_SUMS + 1], own.view(np.int8), np.int32(0)
            for half in range(2):
                total = np.int32(0)
                for i in range(_HALF):
                    total = np.int32(total + numbers[half * _HALF + i])
                own[_SUMS + half], whole = total, np.int32(whole + total)
            own.view(np.float32)[-1] = np.float32(whole) * own.view(np.float32)[-2]
        row = claim_part(address)


_GROUPS = (*(Group(bits, "pair") for bits in (4, 5, 8)), *(Group(bits, "small") for bits in (4, 5)), Group(6, "halves"))
_FOUR, _FIVE, _EIGHT, _FOUR_SMALL, _FIVE_SMALL, _SIX = map(tile_of_blocks, _GROUPS)
# Constants are faster than attributes.
_LINES_OF_FOUR, _LINES_OF_FIVE, _LINES_OF_EIGHT, _LINES_OF_FOUR_SMALL, _LINES_OF_FIVE_SMALL, _LINES_OF_SIX = (
    each.lines for each in _GROUPS
)


@jit_part
def _add(tile, group, x, at, length, packed, place, ahead, step, sums, to, rows, lines):
    """Multiply by groups of `group` lines."""
    weights = packed, place, COLUMNS, ahead, step
    tile((x, at, length), weights, (sums, to, COLUMNS), rows, lines // group)


@jit_part
def _add_four(x, at, length, packed, place, ahead, step, sums, to, rows, lines):
    _add(_FOUR, _LINES_OF_FOUR, x, at, length, packed, place, ahead, step, sums, to, rows, lines)


@jit_part
def _add_five(x, at, length, packed, place, ahead, step, sums, to, rows, lines):
    _add(_FIVE, _LINES_OF_FIVE, x, at, length, packed, place, ahead, step, sums, to, rows, lines)


@jit_part
def _add_eight(x, at, length, packed, place, ahead, step, sums, to, rows, lines):
    _add(_EIGHT, _LINES_OF_EIGHT, x, at, length, packed, place, ahead, step, sums, to, rows, lines)


@jit_part
def _add_four_small(x, at, length, packed, place, ahead, step, sums, to, rows, lines):
    _add(_FOUR_SMALL, _LINES_OF_FOUR_SMALL, x, at, length, packed, place, ahead, step, sums, to, rows, lines)


@jit_part
def _add_five_small(x, at, length, packed, place, ahead, step, sums, to, rows, lines):
    _add(_FIVE_SMALL, _LINES_OF_FIVE_SMALL, x, at, length, packed, place, ahead, step, sums, to, rows, lines)


@jit_part
def _add_six(x, at, length, packed, place, ahead, step, sums, to, rows, lines):
    _add(_SIX, _LINES_OF_SIX, x, at, length, packed, place, ahead, step, sums, to, rows, lines)


def _kernel(group: Group, add: Callable[..., None]) -> BlockKernel:
    # Memory is prefetched from 2 rows on, for other weights from 5 or 6 on, because widening numbers takes time anyway.
    tiling = TILING_OF_QUANTIZED if group.bits == 8 and LANES == 16 else (ROWS, 2, 1)
    numbers = (torch.float32, np.float32), (torch.bfloat16, np.uint16)
    multiply = {dtype: multiplying((np.int32, np.int32, number), add, tiling) for dtype, number in numbers}
    prepare = {torch.float32: _round_floats, torch.bfloat16: _round_halves}
    return BlockKernel(group.lines, ROW_WORDS * group.blocks, prepare, multiply)


_ADD = _add_four, _add_five, _add_eight, _add_four_small, _add_five_small, _add_six
_KERNELS = {group: _kernel(group, add) for group, add in zip(_GROUPS, _ADD, strict=True)}


def weight_of(packed: Tensor, kind: str, outputs: int) -> PackedWeight:
    """Blocks of a kind in the layout of `gguf_blocks.lay_out`, as a weight for `packed_product`."""
    kernel = _KERNELS[TYPES[kind].group]
    return PackedWeight.of(packed, outputs, kernel.lines, kernel)


def is_supported() -> bool:
    """Whether this CPU has instructions to convert float16."""
    return bool(FEATURES.get("f16c")) or platform.machine().lower() in ("aarch64", "arm64")
