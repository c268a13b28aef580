"""The numbers that blocks of a file stand for, as `gguf.quants.dequantize` computes them, several times as fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.kernels.block_formats import FORMATS, STEPS, SUPER, read_numbers, steps_of
from lookahead.kernels.jobs import claim_part, run
from lookahead.kernels.scalars import jit_part, narrow, widen
from lookahead.utils.addresses import array_at

_PART = 16  # numbers with one scale
_F = np.float32


def dequantize(blocks: NDArray[np.uint8], kind: str, order: NDArray[np.int64], out: Tensor) -> None:
    """Dequantize rows of blocks, rounded to bfloat16.

    Args:
        blocks: The bytes of a tensor in a file, `[rows, bytes]`, contiguous; may be a memory map.
        kind: One of `FORMATS`, named as in GGUF files.
        order: The row of the blocks for each output row.
        out: `[outputs, inputs]`, contiguous, bfloat16 or float32.

    Raises:
        ValueError: A scale is not finite.
    """
    of_kind, group = FORMATS[kind], FORMATS[kind].group
    assert out.is_contiguous() and out.shape == (len(order), blocks.shape[1] // of_kind.nbytes * of_kind.inputs)
    order = np.ascontiguousarray(order, np.int64)
    table = np.zeros(256, np.float32)
    meanings = group.table or np.arange(256) - (group.zero or of_kind.zero)
    table[: len(meanings)] = meanings
    steps = steps_of(blocks.reshape(len(blocks), -1, of_kind.nbytes), kind)
    halves = steps.view(np.float32 if group.steps == "single" else np.float16).reshape(*steps.shape, -1)
    units = np.full((*steps.shape, 2), -0.0, np.float32)  # that adds nothing, to a zero of either sign too
    units[..., : 1 + of_kind.has_minimum] = halves[..., : 1 + of_kind.has_minimum]
    layout = of_kind.inputs, of_kind.nbytes, of_kind.at, of_kind.layout, STEPS.index(group.steps), group.bits
    places = (array.ctypes.data for array in (blocks, order, units, table))
    numbers = *places, out.data_ptr(), len(blocks), out.shape[1], blocks.shape[1], *layout
    job = _to_halves if out.dtype == torch.bfloat16 else _to_floats
    run((job, len(order), numbers, (blocks, order, units, table, out)))


def _to_floats(address: Any) -> None:
    _dequantize(address, np.float32)


def _to_halves(address: Any) -> None:
    _dequantize(address, np.uint16)


@jit_part
def _dequantize(address, number):
    _, rows, blocks_at, order_at, units_at, table_at, out_at, stored, columns, row_bytes = array_at(
        address, (10,), np.int64
    )
    inputs, nbytes, at, layout, kind, bits = array_at(address + 80, (6,), np.int64)
    count = row_bytes // nbytes
    blocks, order = array_at(blocks_at, (stored, row_bytes), np.uint8), array_at(order_at, (rows,), np.int64)
    units, table = array_at(units_at, (stored, count, 2), np.float32), array_at(table_at, (256,), np.float32)
    out = array_at(out_at, (rows, columns), number)
    numbers, small = np.empty(SUPER, np.uint8), np.empty(SUPER // _PART, np.uint8)
    row = claim_part(address)
    while row < rows:
        for block in range(count):
            own = blocks[order[row], block * nbytes : (block + 1) * nbytes]
            read_numbers(own, layout, bits, at, inputs, numbers, small)
            for part in range(inputs // _PART):
                factor, offset = units[order[row], block, 0], units[order[row], block, 1]
                if kind == 2:  # scales and minimums of two parts
                    factor, offset = factor * _F(small[part // 2 * 2]), -offset * _F(small[part // 2 * 2 + 1])
                elif kind > 2:
                    factor *= _F(np.int8(small[part]))
                for i in range(part * _PART, (part + 1) * _PART):
                    rounded = widen(narrow(table[numbers[i]] * factor + offset, np.uint16(0)))
                    out[row, block * inputs + i] = narrow(rounded, out[row, 0])
        row = claim_part(address)
