"""Products of bfloat16 that sum in the order of torch's product of one row, for several rows on a CPU.

Where oneDNN multiplies a single row by a long weight, it adds the products of some hundred inputs in the order of the
inputs, two at a time, and then the sums of these blocks. With several rows it takes larger blocks, and bits change.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lookahead.kernels.microkernel import LANES, ROWS, STRIDE, jit_part, tile_of
from lookahead.kernels.threads import array_at, run, take

COLUMNS = 2 * LANES  # outputs of a panel of the packed weight
_PART = 1 << 17  # weights that a thread takes at a time


def is_supported(weight: Tensor) -> bool:
    """Whether a weight of this type and shape can be packed, and this CPU has dot products of bfloat16."""
    return (
        weight.dtype == torch.bfloat16
        and weight.shape[1] % 2 == 0
        and bool(llvm.get_host_cpu_features().get("avx512bf16"))
    )


def pack(weight: Tensor) -> Tensor:
    """Lay a weight out in panels of `COLUMNS` outputs, for `multiply`.

    Args:
        weight: bfloat16 `[outputs, inputs]`, contiguous.

    Returns:
        int32 `[panels, inputs / 2, COLUMNS]`, two inputs an element; the last panel is padded with zeros.
    """
    pairs = weight.detach().view(torch.int32)
    packed: Tensor = (
        pad(pairs, (0, 0, 0, -len(pairs) % COLUMNS)).unflatten(0, (-1, COLUMNS)).transpose(1, 2).contiguous()
    )
    return packed


def multiply(x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None, block: int) -> Tensor:
    """Multiply rows by a packed weight.

    Args:
        x: bfloat16 `[rows, inputs]`.
        packed: int32 `[panels, inputs / 2, COLUMNS]`, from `pack`.
        outputs: Outputs of the weight.
        bias: bfloat16 `[outputs]` or None.
        block: Inputs whose products are added before the sums of such blocks are added; even.

    Returns:
        bfloat16 `[rows, outputs]`.
    """
    rows, inputs = x.shape
    padded = x.new_zeros(-(-rows // ROWS) * ROWS, inputs)
    padded[:rows] = x
    sums = torch.empty(rows, len(packed) * COLUMNS)
    panels = max(1, _PART // (inputs * COLUMNS))
    run(
        _multiply, -(-len(packed) // panels), [padded, packed, sums], rows, inputs // 2, len(packed), block // 2, panels
    )
    sums = sums[:, :outputs]
    return (sums if bias is None else sums + bias).to(x.dtype)


_tile: Any = tile_of(2, "pairs")


def _multiply(address: Any) -> None:
    """Panel by panel, whose blocks stay in the fastest cache for all rows."""
    _, parts, x_at, packed_at, sums_at, rows, terms, panels, block, together = array_at(address, (10,), np.int64)
    x = array_at(x_at, ((rows + ROWS - 1) // ROWS * ROWS, terms), np.int32)
    packed = array_at(packed_at, (panels, terms, COLUMNS), np.int32)
    sums = array_at(sums_at, (rows, panels * COLUMNS), np.float32)
    scratch = np.empty(ROWS * STRIDE, np.float32)
    part = take(address)
    while part < parts:
        for panel in range(part * together, min(panels, (part + 1) * together)):
            _multiply_panel(x, packed, sums, rows, terms, block, panel, scratch)
        part = take(address)


@jit_part
def _multiply_panel(x, packed, sums, rows, terms, block, panel, scratch):
    """All rows times one panel."""
    for begin in range(0, terms, block):
        count, column = min(block, terms - begin), (panel * terms + begin) * COLUMNS
        for first in range(0, rows, ROWS):
            _tile(x, first * terms + begin, terms, 1, packed, column, COLUMNS, scratch, 0, STRIDE, count)
            for row in range(first, min(rows, first + ROWS)):
                line = sums[row, panel * COLUMNS : (panel + 1) * COLUMNS]
                other = scratch[(row - first) * STRIDE : (row - first) * STRIDE + COLUMNS]
                for i in range(COLUMNS):
                    line[i] = other[i] + (line[i] if begin else np.float32(0.0))
