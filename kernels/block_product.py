"""Products of rows with quantized weights, in the blocks of `kernels.block_formats`.

Rows are rounded: the numbers of each block are integers from -127 to 127 times a scale. Products of these integers are
added exactly, and blocks in the order of the inputs, so that the bits of a row do not depend on other rows.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lookahead.kernels.block_formats import (
    EIGHT,
    EIGHT_WIDE,
    FIVE,
    FIVE_SMALL,
    FORMATS,
    FOUR,
    FOUR_SMALL,
    SIX_HALVES,
    TABLE,
    TABLE_SINGLE,
    TABLE_UNIT,
    THREE_HALVES,
)
from lookahead.kernels.block_rows import round_floats, round_halves
from lookahead.kernels.block_tiles import BlockKernel, Group, tile_of_blocks
from lookahead.kernels.microkernel import FEATURES, LANES, ROWS
from lookahead.kernels.packed_product import PackedWeight, multiplying
from lookahead.kernels.scalars import jit_part

_TILE_OF_FOUR = tile_of_blocks(FOUR)
_TILE_OF_FIVE = tile_of_blocks(FIVE)
_TILE_OF_EIGHT = tile_of_blocks(EIGHT)
_TILE_OF_EIGHT_WIDE = tile_of_blocks(EIGHT_WIDE)
_TILE_OF_FOUR_SMALL = tile_of_blocks(FOUR_SMALL)
_TILE_OF_FIVE_SMALL = tile_of_blocks(FIVE_SMALL)
_TILE_OF_THREE_HALVES = tile_of_blocks(THREE_HALVES)
_TILE_OF_SIX_HALVES = tile_of_blocks(SIX_HALVES)
_TILE_OF_TABLE = tile_of_blocks(TABLE)
_TILE_OF_TABLE_UNIT = tile_of_blocks(TABLE_UNIT)
_TILE_OF_TABLE_SINGLE = tile_of_blocks(TABLE_SINGLE)


@jit_part
def _add_four(left, right, out, rows, lines):
    _TILE_OF_FOUR(left, right, out, rows, lines)


@jit_part
def _add_five(left, right, out, rows, lines):
    _TILE_OF_FIVE(left, right, out, rows, lines)


@jit_part
def _add_eight(left, right, out, rows, lines):
    _TILE_OF_EIGHT(left, right, out, rows, lines)


@jit_part
def _add_eight_wide(left, right, out, rows, lines):
    _TILE_OF_EIGHT_WIDE(left, right, out, rows, lines)


@jit_part
def _add_four_small(left, right, out, rows, lines):
    _TILE_OF_FOUR_SMALL(left, right, out, rows, lines)


@jit_part
def _add_five_small(left, right, out, rows, lines):
    _TILE_OF_FIVE_SMALL(left, right, out, rows, lines)


@jit_part
def _add_three_halves(left, right, out, rows, lines):
    _TILE_OF_THREE_HALVES(left, right, out, rows, lines)


@jit_part
def _add_six_halves(left, right, out, rows, lines):
    _TILE_OF_SIX_HALVES(left, right, out, rows, lines)


@jit_part
def _add_table(left, right, out, rows, lines):
    _TILE_OF_TABLE(left, right, out, rows, lines)


@jit_part
def _add_table_unit(left, right, out, rows, lines):
    _TILE_OF_TABLE_UNIT(left, right, out, rows, lines)


@jit_part
def _add_table_single(left, right, out, rows, lines):
    _TILE_OF_TABLE_SINGLE(left, right, out, rows, lines)


def _kernel(group: Group, add: Callable[..., None]) -> BlockKernel:
    # Most rows of a tile, rows from which memory is prefetched, and fewest tiles then, as measured on a Zen 4. Widening
    # numbers takes time anyway.
    tiling = ROWS, 6 if group.bits == 8 and LANES == 16 else 2, 1
    numbers = (torch.float32, np.float32), (torch.bfloat16, np.uint16)
    multiply = {dtype: multiplying((np.int32, np.int32, number), add, tiling) for dtype, number in numbers}
    prepare = {torch.float32: round_floats, torch.bfloat16: round_halves}
    return BlockKernel(group, prepare, multiply)


_KERNELS = {
    FOUR: _kernel(FOUR, _add_four),
    FIVE: _kernel(FIVE, _add_five),
    EIGHT: _kernel(EIGHT, _add_eight),
    EIGHT_WIDE: _kernel(EIGHT_WIDE, _add_eight_wide),
    FOUR_SMALL: _kernel(FOUR_SMALL, _add_four_small),
    FIVE_SMALL: _kernel(FIVE_SMALL, _add_five_small),
    THREE_HALVES: _kernel(THREE_HALVES, _add_three_halves),
    SIX_HALVES: _kernel(SIX_HALVES, _add_six_halves),
    TABLE: _kernel(TABLE, _add_table),
    TABLE_UNIT: _kernel(TABLE_UNIT, _add_table_unit),
    TABLE_SINGLE: _kernel(TABLE_SINGLE, _add_table_single),
}


def weight_of(packed: Tensor, kind: str, outputs: int) -> PackedWeight:
    """Blocks of a format in the layout of `block_formats.lay_out`, as a weight for `packed_product`."""
    group = FORMATS[kind].group
    return PackedWeight.of(packed, outputs, group.size, _KERNELS[group])


def is_supported() -> bool:
    """Whether this CPU has instructions to convert float16."""
    return bool(FEATURES.get("f16c")) or platform.machine().lower() in ("aarch64", "arm64")
