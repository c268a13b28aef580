"""Products of rows with a weight that is laid out in the order in which a CPU reads it.

A pass over a few nodes waits for the weights. Here each is read once for all rows, in one stream.

In bfloat16 the bits are those of torch's product of one row, whatever the number of rows: where oneDNN multiplies one
row, it adds the products of some hundred inputs in the order of the inputs, two at a time, and then the sums of these
blocks. With several rows it takes larger blocks, and bits change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np
import torch
from torch import Tensor

from lookahead.kernels.jobs import Job, run, take
from lookahead.kernels.large_pages import zeros
from lookahead.kernels.microkernel import LANES, ROWS, array_at, jit_part, narrow, tile_of, widen

COLUMNS = 2 * LANES  # outputs of a panel of the packed weight
_PART = 1 << 19  # bytes of the weight that a thread takes at a time
_LARGEST = 127  # int8
_SHARED, _EACH = 9, 6  # numbers that a call of the kernel receives, and those of each weight
_F = np.float32
_NEEDS = {torch.float32: "avx512f", torch.bfloat16: "avx512bf16"}
_TERM = {torch.float32: torch.float32, torch.bfloat16: torch.int32}  # what a sum adds at a time: one product, or two


def is_supported(weight: Tensor) -> bool:
    """Whether a weight of this type and shape can be packed, and this CPU has the instructions."""
    needed = _NEEDS.get(weight.dtype)
    is_whole = weight.dtype == torch.float32 or weight.shape[1] % 2 == 0
    return needed is not None and is_whole and bool(llvm.get_host_cpu_features().get(needed))


@cache
def multiplies_pairs(inputs: int) -> bool:
    """Whether rows of bfloat16 are multiplied by a quantized weight of so many inputs; those of float32 always are."""
    return inputs % 2 == 0 and bool(llvm.get_host_cpu_features().get(_NEEDS[torch.bfloat16]))


class PackedWeight(NamedTuple):
    """A weight that is laid out, and the sizes that every product needs."""

    packed: Tensor  # `[panels, terms, line]`
    outputs: int
    block: int  # inputs whose products are added before the sums of such blocks are added; even
    panels: int
    terms: int
    line: int
    together: int  # panels that a thread takes at a time
    steps: Tensor | None  # float32 `[outputs]`, of one that `quantize` made

    @classmethod
    def of(cls, packed: Tensor, outputs: int, block: int, steps: Tensor | None = None) -> PackedWeight:
        """A weight of so many outputs, whose layout is that of `pack` or `quantize`."""
        panels, terms, line = packed.shape
        return cls(packed, outputs, block, panels, terms, line, max(1, _PART * panels // packed.nbytes), steps)


def pack(weight: Tensor, block: int) -> PackedWeight:
    """Lay a contiguous weight `[outputs, inputs]` out in panels of `COLUMNS` outputs, the last padded with zeros.

    The layout is `[panels, inputs, COLUMNS]` of a float32 one; of bfloat16 int32 `[panels, inputs / 2, COLUMNS]`, with
    two inputs an element.
    """
    return PackedWeight.of(_panels_of(weight.detach().view(_TERM[weight.dtype])), len(weight), block)


def _panels_of(terms: Tensor) -> Tensor:
    packed = zeros(-(-len(terms) // COLUMNS), terms.shape[1], COLUMNS, dtype=terms.dtype)
    for panel, columns in zip(packed, terms.split(COLUMNS), strict=True):  # a panel at a time fits a near cache
        panel[:, : len(columns)] = columns.T
    return packed


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight `[outputs, inputs]` to 255 steps for each output.

    Returns int8 `[panels, inputs, COLUMNS]`, laid out as by `pack`, and the steps, float32 `[outputs]`.
    """
    wide = weight.detach().float()
    steps = wide.abs().amax(1) / _LARGEST
    whole = (wide / steps.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
    return _panels_of(whole), steps


def multiply(weight: PackedWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows by a packed weight.

    Args:
        weight: The weight.
        x: `[..., inputs]`, of the type of the weight; bfloat16 or float32 if that is quantized.
        bias: `[outputs]` of that type, or None.

    Returns:
        `[..., outputs]` of the type of `x`.
    """
    x, out = x.contiguous(), x.new_empty((*x.shape[:-1], weight.outputs))
    run(product([weight], x, [bias], [out]))
    return out


def product(weights: Sequence[PackedWeight], x: Tensor, biases: Sequence[Tensor | None], outs: Sequence[Tensor]) -> Job:
    """A job that multiplies contiguous rows by several weights of one type, one number of inputs and one block."""
    packed, _, block, _, terms, line, together, steps = weights[0]
    inputs = x.shape[-1]
    rows, is_wide = x.numel() // inputs, False
    if steps is not None and x.dtype == torch.bfloat16:
        terms, line, is_wide = terms // 2, 2 * line, rows > 2 * ROWS
    numbers, parts = [x.data_ptr(), rows, terms, block * terms // inputs, together, line, steps is not None], 0
    for each, bias, out in zip(weights, biases, outs, strict=True):
        numbers += (
            each.packed.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr(),
            0 if each.steps is None else each.steps.data_ptr(), each.panels, each.outputs,
        )  # fmt: skip
        parts += -(-each.panels // together)
    return _ENTRIES[packed.dtype, x.dtype, is_wide], parts, numbers, (weights, x, biases, outs)


_tile: Any = tile_of(2)


def _multiply_floats(address: Any) -> None:
    _multiply(address, np.float32, np.float32, np.float32, _as_packed)


def _multiply_pairs(address: Any) -> None:
    _multiply(address, np.int32, np.int32, np.uint16, _as_packed)


def _multiply_floats_by_bytes(address: Any) -> None:
    _multiply(address, np.float32, np.int8, np.float32, _as_packed)


def _multiply_pairs_by_bytes(address: Any) -> None:
    _multiply(address, np.int32, np.int8, np.uint16, _as_packed)


def _multiply_many_pairs_by_bytes(address: Any) -> None:
    _multiply(address, np.int32, np.int8, np.uint16, _as_pairs)


# By the types of a packed weight and of rows, and whether a quantized weight is widened once for many rows.
_ENTRIES = {
    (torch.float32, torch.float32, False): _multiply_floats,
    (torch.int32, torch.bfloat16, False): _multiply_pairs,
    (torch.int8, torch.float32, False): _multiply_floats_by_bytes,
    (torch.int8, torch.bfloat16, False): _multiply_pairs_by_bytes,
    (torch.int8, torch.bfloat16, True): _multiply_many_pairs_by_bytes,
}


@jit_part
def _as_packed(panel, kind):
    return panel


@jit_part
def _as_pairs(panel, kind):
    """A quantized panel, two inputs a line, as pairs of bfloat16."""
    wide = np.empty((len(panel), COLUMNS), kind)
    for term in range(len(panel)):
        for i in range(COLUMNS):
            even, odd = _F(panel[term, i]).view(np.int32), _F(panel[term, COLUMNS + i]).view(np.int32)
            wide[term, i] = (even >> np.int32(16)) & np.int32(0xFFFF) | odd
    return wide


@jit_part
def _multiply(address, kind, of_weight, number, prepare):
    """Panel by panel, which stays in a near cache for all rows; the results are numbers of such a type."""
    _, parts, x_at, rows, terms, block, together, line, has_steps = array_at(address, (_SHARED,), np.int64)
    x = array_at(x_at, (rows, terms), kind)
    sums, others = np.empty(ROWS * COLUMNS, np.float32), np.empty(ROWS * COLUMNS, np.float32)
    part = take(address)
    while part < parts:
        of, own = address + 8 * _SHARED, part
        packed_at, out_at, bias_at, steps_at, panels, outputs = array_at(of, (_EACH,), np.int64)
        while own * together >= panels:  # the part is one of a later weight
            own, of = own - (panels + together - 1) // together, of + 8 * _EACH
            packed_at, out_at, bias_at, steps_at, panels, outputs = array_at(of, (_EACH,), np.int64)
        packed = array_at(packed_at, (panels, terms, line), of_weight)
        out, bias = array_at(out_at, (rows, outputs), number), array_at(bias_at, (outputs,), number)
        steps = array_at(steps_at, (outputs,), np.float32)
        for place in range(own * together, min(panels, (own + 1) * together)):
            first, begin, panel = 0, place * COLUMNS, prepare(packed[place], kind)
            step = panel.shape[1]
            while first < rows:
                taken = min(ROWS, rows - first)
                for term in range(0, terms, block):
                    count, to = min(block, terms - term), others if term else sums
                    at, column = first * terms + term, term * step
                    _tile(x, at, terms, 1, panel, column, step, to, 0, COLUMNS, taken, count)
                    if term:
                        for i in range(taken * COLUMNS):
                            sums[i] = others[i] + sums[i]
                count = min(COLUMNS, outputs - begin)
                for row in range(taken):
                    sum_of = sums[row * COLUMNS : row * COLUMNS + count]
                    if has_steps:
                        _scale(sum_of, steps[begin : begin + count])
                    if bias_at:
                        _shift(sum_of, bias[begin : begin + count])
                    _store(sum_of, out[first + row, begin : begin + count])
                first += taken
        part = take(address)


@jit_part
def _scale(line, steps):
    for i in range(len(line)):
        line[i] *= steps[i]


@jit_part
def _shift(line, bias):
    for i in range(len(line)):
        line[i] += widen(bias[i])


@jit_part
def _store(line, out):
    """Copy a row of a panel to its place, rounded. A constant count becomes vector instructions."""
    if len(line) == COLUMNS:
        for i in range(COLUMNS):
            out[i] = narrow(line[i], out[0])
    else:
        for i in range(len(line)):
            out[i] = narrow(line[i], out[0])
