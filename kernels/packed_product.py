"""Products of rows with a weight that is laid out in the order in which a CPU reads it.

A pass over a few nodes waits for the weights. Here each is read once for all rows, in one stream.

In bfloat16 the bits are those of torch's product of one row, whatever the number of rows: where oneDNN multiplies one
row, it adds the products of some hundred inputs in the order of the inputs, two at a time, and then the sums of these
blocks. With several rows it takes larger blocks, and bits change.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from torch import Tensor

from lookahead.kernels.microkernel import LANES, ROWS, jit_part, narrow, tile_of, widen
from lookahead.kernels.threads import array_at, run, take

COLUMNS = 2 * LANES  # outputs of a panel of the packed weight
_PART = 1 << 19  # bytes of the weight that a thread takes at a time
_NEEDS = {torch.float32: "avx512f", torch.bfloat16: "avx512bf16"}
_TERM = {torch.float32: torch.float32, torch.bfloat16: torch.int32}  # what a sum adds at a time: one product, or two


def is_supported(weight: Tensor) -> bool:
    """Whether a weight of this type and shape can be packed, and this CPU has the instructions."""
    needed = _NEEDS.get(weight.dtype)
    is_whole = weight.dtype == torch.float32 or weight.shape[1] % 2 == 0
    return needed is not None and is_whole and bool(llvm.get_host_cpu_features().get(needed))


def pack(weight: Tensor) -> Tensor:
    """Lay a weight out in panels of `COLUMNS` outputs, for `multiply`.

    Args:
        weight: float32 or bfloat16 `[outputs, inputs]`, contiguous.

    Returns:
        float32 `[panels, inputs, COLUMNS]`, or int32 `[panels, inputs / 2, COLUMNS]` with two inputs an element; the
        last panel is padded with zeros.
    """
    terms = weight.detach().view(_TERM[weight.dtype])
    packed = terms.new_zeros(-(-len(terms) // COLUMNS), terms.shape[1], COLUMNS)
    for panel, columns in zip(packed, terms.split(COLUMNS), strict=True):  # a panel at a time fits a near cache
        panel[:, : len(columns)] = columns.T
    return packed


def multiply(packed: Tensor, outputs: int, block: int, x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows by a packed weight.

    Args:
        packed: From `pack`.
        outputs: Outputs of the weight.
        block: Inputs whose products are added before the sums of such blocks are added; even.
        x: `[..., inputs]`, of the type of the weight.
        bias: `[outputs]` of that type, or None.

    Returns:
        `[..., outputs]` of that type.
    """
    x, (panels, terms, _), shape = x.contiguous(), packed.shape, x.shape
    inputs = shape[-1]
    out = x.new_empty((*shape[:-1], outputs))
    together = max(1, _PART // (4 * COLUMNS * terms))
    run(
        _multiply_floats if terms == inputs else _multiply_pairs, -(-panels // together),
        [x, packed, out, x if bias is None else bias],
        x.numel() // inputs, terms, panels, outputs, block * terms // inputs, together, bias is not None,
    )  # fmt: skip
    return out


_tile: Any = tile_of(2)


def _multiply_floats(address: Any) -> None:
    _multiply(address, np.float32, np.float32)


def _multiply_pairs(address: Any) -> None:
    _multiply(address, np.int32, np.uint16)


@jit_part
def _multiply(address, kind, number):
    """Panel by panel, which stays in a near cache for all rows; the results are numbers of such a type."""
    _, parts, x_at, packed_at, out_at, bias_at, rows, terms, panels, outputs, block, together, has_bias = array_at(
        address, (13,), np.int64
    )
    x, packed = array_at(x_at, (rows, terms), kind), array_at(packed_at, (panels, terms, COLUMNS), kind)
    out, bias = array_at(out_at, (rows, outputs), number), array_at(bias_at, (outputs,), number)
    sums, others = np.empty(ROWS * COLUMNS, np.float32), np.empty(ROWS * COLUMNS, np.float32)
    part = take(address)
    while part < parts:
        for panel in range(part * together, min(panels, (part + 1) * together)):
            first, begin = 0, panel * COLUMNS
            while first < rows:
                taken = min(ROWS, rows - first)
                for term in range(0, terms, block):
                    count, to = min(block, terms - term), others if term else sums
                    at, column = first * terms + term, (panel * terms + term) * COLUMNS
                    _tile(x, at, terms, 1, packed, column, COLUMNS, to, 0, COLUMNS, taken, count)
                    if term:
                        for i in range(taken * COLUMNS):
                            sums[i] = others[i] + sums[i]
                if has_bias:
                    for row in range(taken):
                        for i in range(min(COLUMNS, outputs - begin)):
                            sums[row * COLUMNS + i] += widen(bias[begin + i])
                _store(sums, taken, out, first, begin, outputs)
                first += taken
        part = take(address)


@jit_part
def _store(sums, taken, out, first, begin, outputs):
    """Copy rows of a panel to their places, rounded."""
    if outputs - begin >= COLUMNS:  # a constant count becomes vector instructions
        for row in range(taken):
            for i in range(COLUMNS):
                out[first + row, begin + i] = narrow(sums[row * COLUMNS + i], out[0, 0])
    else:
        for row in range(taken):
            for i in range(outputs - begin):
                out[first + row, begin + i] = narrow(sums[row * COLUMNS + i], out[0, 0])
