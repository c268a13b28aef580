"""Products of bfloat16 that sum in the order of torch's product of one row, for several rows on a CPU.

Where oneDNN multiplies a single row by a long weight, it adds the products of some hundred inputs in the order of the
inputs, two at a time, and then the sums of these blocks. With several rows it takes larger blocks, and bits change.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.nn.functional import pad

from lookahead.kernels.microkernel import LANES, ROWS, STRIDE, tile_of

COLUMNS = 2 * LANES  # outputs of a panel of the packed weight


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
    x = x.contiguous()
    if x.storage_offset() % 2:  # a pair would stand across two elements
        x = x.clone()
    sums = torch.empty(len(x), len(packed) * COLUMNS)
    _multiply(x.view(torch.int32).numpy(), packed.numpy(), sums.numpy(), block // 2)
    sums = sums[:, :outputs]
    return (sums if bias is None else sums + bias).to(x.dtype)


_tile: Any = tile_of(2, "pairs")


@njit(cache=True, error_model="numpy", nogil=True)
def _multiply(x, packed, sums, block):
    """Panel by panel, whose blocks stay in the fastest cache for all rows."""
    rows, terms = x.shape
    padded = np.zeros(((rows + ROWS - 1) // ROWS * ROWS, terms), np.int32)
    padded[:rows] = x
    part = np.empty(ROWS * STRIDE, np.float32)
    for panel in range(len(packed)):
        column = panel * COLUMNS
        for begin in range(0, terms, block):
            count = min(block, terms - begin)
            for first in range(0, rows, ROWS):
                at, column_at = first * terms + begin, (panel * terms + begin) * COLUMNS
                _tile(padded, at, terms, 1, packed, column_at, COLUMNS, part, 0, STRIDE, count)
                for row in range(first, min(rows, first + ROWS)):
                    line = part[(row - first) * STRIDE : (row - first) * STRIDE + COLUMNS]
                    for i in range(COLUMNS):
                        if begin:
                            sums[row, column + i] += line[i]
                        else:
                            sums[row, column + i] = line[i]
