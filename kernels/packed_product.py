"""Products of rows with a weight that is laid out in the order in which a CPU reads it.

A pass over a few nodes waits for the weights. Here each is read once for all rows, in one stream.

In bfloat16 the bits are those of torch's product of one row, whatever the number of rows: where oneDNN multiplies one
row, it adds the products of some hundred inputs in the order of the inputs, two at a time, and then the sums of these
blocks. With several rows it takes larger blocks, and bits change.

A quantized weight is multiplied in whole numbers, whose sums are exact in any order, and sums of blocks are added in
the order of the inputs. So a row has the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Sequence
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
_LARGEST, _ZERO = 127, 128  # a quantized number, and what is added to one of a weight: bytes of a weight have no sign
_INPUTS = 64  # of a row that share a step where the weight is quantized
_TERMS = _INPUTS // 4  # int32 that hold them
_SHARED, _EACH = 8, 5  # numbers that a call of the kernel receives, and those of each weight
_F = np.float32
_SMALLEST = _F(1e-30)  # largest number of a block that is not taken for zeros
_NEEDS = {torch.float32: "avx512f", torch.bfloat16: "avx512bf16"}
_TERM = {torch.float32: torch.float32, torch.bfloat16: torch.int32}  # what a sum adds at a time: one product, or two


def is_supported(weight: Tensor) -> bool:
    """Whether a weight of this type and shape can be packed, and this CPU has the instructions."""
    needed = _NEEDS.get(weight.dtype)
    is_whole = weight.dtype == torch.float32 or weight.shape[1] % 2 == 0
    return needed is not None and is_whole and bool(llvm.get_host_cpu_features().get(needed))


class PackedWeight(NamedTuple):
    """A weight that is laid out, and the sizes that every product needs."""

    packed: Tensor  # as `pack` or `quantize` lays it out
    outputs: int
    block: int  # inputs whose products are added before the sums of such blocks are added; even
    panels: int
    terms: int  # lines of a panel
    together: int  # panels that a thread takes at a time

    @classmethod
    def of(cls, packed: Tensor, outputs: int, block: int = _INPUTS) -> PackedWeight:
        """A weight of so many outputs, whose layout is that of `pack` or `quantize`."""
        panels, terms, _ = packed.shape
        return cls(packed, outputs, block, panels, terms, max(1, _PART * panels // packed.nbytes))


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


def quantize(weight: Tensor) -> Tensor:
    """Round a weight `[outputs, inputs]` to 255 steps for every 64 inputs of an output.

    Returns uint8 `[panels, lines, 4 * COLUMNS]`, laid out as by `pack` with four inputs an element of 32 bits. To each
    number 128 is added. Behind 16 lines, which hold 64 inputs, stands one of their steps, float32.
    """
    wide = torch.nn.functional.pad(weight.detach().float(), (0, -weight.shape[1] % _INPUTS))
    blocks = wide.unflatten(1, (-1, _INPUTS))
    steps = blocks.abs().amax(2, keepdim=True) / _LARGEST
    whole = (blocks / steps.clamp_min(torch.finfo(torch.float32).tiny)).round() + _ZERO
    lines = torch.cat([whole.to(torch.uint8).view(torch.int32), steps.view(torch.int32)], 2)
    return _panels_of(lines.flatten(1)).view(torch.uint8)


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
    run(*product([weight], x, [bias], [out], rounded_rows([weight], x.numel() // x.shape[-1])))
    return out


def rounded_rows(weights: Sequence[PackedWeight], rows: int) -> Tensor | None:
    """What `product` needs for rows that are multiplied by quantized weights, int32; None for others."""
    if weights[0].packed.dtype != torch.uint8:
        return None
    return torch.empty(rows * max(_rounded_length(each) for each in weights), dtype=torch.int32, device="cpu")


def _rounded_length(weight: PackedWeight) -> int:
    return weight.terms // (_TERMS + 1) * (_TERMS + 2)


def product(
    weights: Sequence[PackedWeight],
    x: Tensor,
    biases: Sequence[Tensor | None],
    outs: Sequence[Tensor],
    rounded: Tensor | None,
) -> list[Job]:
    """Jobs that multiply contiguous rows by several weights of one type, one number of inputs and one block.

    Where weights are quantized, rows are too, into what `rounded_rows` made: every 64 numbers of a row are multiples,
    from -127 to 127, of a step.
    """
    packed, _, block, _, terms, together = weights[0]
    inputs, jobs = x.shape[-1], list[Job]()
    rows, left, length, of_block = x.numel() // inputs, x, terms, block * terms // inputs
    if rounded is not None:
        left, length, of_block = rounded, _rounded_length(weights[0]), _TERMS
        jobs.append((_ROUNDING[x.dtype], rows, (x.data_ptr(), left.data_ptr(), inputs, length), (x, left)))
    of_job, parts = [left.data_ptr(), rows, length, terms, of_block, together], 0
    for each, bias, out in zip(weights, biases, outs, strict=True):
        places = each.packed.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr()
        of_job += (*places, each.panels, each.outputs)
        parts += -(-each.panels // together)
    jobs.append((_ENTRIES[packed.dtype, x.dtype], parts, of_job, (weights, left, biases, outs)))
    return jobs


_tile: Any = tile_of(2)
_tile_of_bytes: Any = tile_of(2, "bytes")


def _multiply_floats(address: Any) -> None:
    _multiply(address, np.float32, np.float32, _add_products)


def _multiply_pairs(address: Any) -> None:
    _multiply(address, np.int32, np.uint16, _add_products)


def _multiply_bytes_to_floats(address: Any) -> None:
    _multiply(address, np.int32, np.float32, _add_bytes)


def _multiply_bytes_to_halves(address: Any) -> None:
    _multiply(address, np.int32, np.uint16, _add_bytes)


# By the types of a packed weight and of rows.
_ENTRIES = {
    (torch.float32, torch.float32): _multiply_floats,
    (torch.int32, torch.bfloat16): _multiply_pairs,
    (torch.uint8, torch.float32): _multiply_bytes_to_floats,
    (torch.uint8, torch.bfloat16): _multiply_bytes_to_halves,
}


def _round_floats(address: Any) -> None:
    _round(address, np.float32)


def _round_halves(address: Any) -> None:
    _round(address, np.uint16)


_ROUNDING = {torch.float32: _round_floats, torch.bfloat16: _round_halves}


@jit_part
def _round(address, number):
    """Round rows to whole numbers of steps. Behind each 64 stand what the `_ZERO` of a weight adds, and the step."""
    _, rows, x_at, out_at, inputs, length = array_at(address, (6,), np.int64)
    x, out = array_at(x_at, (rows, inputs), number), array_at(out_at, (rows, length), np.int32)
    line = np.zeros(-(-inputs // _INPUTS) * _INPUTS, np.float32)
    row = take(address)
    while row < rows:
        for i in range(inputs):
            line[i] = widen(x[row, i])
        for block in range(len(line) // _INPUTS):
            begin = block * (_TERMS + 2)
            _round_block(line[block * _INPUTS : (block + 1) * _INPUTS], out[row, begin : begin + _TERMS + 2])
        row = take(address)


@jit_part
def _round_block(line, out):
    """A number that is not finite makes the step so, and with it every product."""
    bits, highest, total = line.view(np.int32), np.int32(0), np.int32(0)
    for i in range(_INPUTS):
        highest = max(highest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    largest, numbers = np.int32(highest).view(np.float32), out.view(np.int8)
    factor = _F(_LARGEST) / largest if _SMALLEST < largest < np.inf else _F(0.0)
    for i in range(_INPUTS):
        rounded = np.int32(np.rint(line[i] * factor)) if factor > 0 else np.int32(0)
        numbers[i] = np.int8(rounded)
        total = np.int32(total + rounded)
    out[_TERMS] = -_ZERO * total
    out[_TERMS + 1] = _F(largest / _F(_LARGEST)).view(np.int32)


@jit_part
def _add_products(x, first, rows, terms, block, panel, sums, others):
    """The sums of blocks, and their sum."""
    length = x.shape[1]
    for term in range(0, terms, block):
        count, to = min(block, terms - term), others if term else sums
        _tile(x, first * length + term, length, 1, panel, term * COLUMNS, COLUMNS, to, 0, COLUMNS, rows, count)
        if term:
            for i in range(rows * COLUMNS):
                sums[i] = others[i] + sums[i]


@jit_part
def _add_bytes(x, first, rows, terms, block, panel, sums, others):
    """The sums of blocks, which have steps."""
    length, sums[:] = x.shape[1], 0.0
    for place in range(terms // (block + 1)):
        at, column = first * length + place * (block + 2), place * (block + 1) * COLUMNS
        _tile_of_bytes(x, at, length, 1, panel, column, COLUMNS, sums, 0, COLUMNS, rows, block)


@jit_part
def _multiply(address, kind, number, add):
    """Panel by panel, which stays in a near cache for all rows; the results are numbers of such a type."""
    _, parts, x_at, rows, length, terms, block, together = array_at(address, (_SHARED,), np.int64)
    x = array_at(x_at, (rows, length), kind)
    sums, others = np.empty(ROWS * COLUMNS, np.float32), np.empty(ROWS * COLUMNS, np.float32)
    part = take(address)
    while part < parts:
        of, own = address + 8 * _SHARED, part
        packed_at, out_at, bias_at, panels, outputs = array_at(of, (_EACH,), np.int64)
        while own * together >= panels:  # the part is one of a later weight
            own, of = own - (panels + together - 1) // together, of + 8 * _EACH
            packed_at, out_at, bias_at, panels, outputs = array_at(of, (_EACH,), np.int64)
        packed = array_at(packed_at, (panels, terms, COLUMNS), kind)
        out, bias = array_at(out_at, (rows, outputs), number), array_at(bias_at, (outputs,), number)
        for place in range(own * together, min(panels, (own + 1) * together)):
            begin = place * COLUMNS
            count = min(COLUMNS, outputs - begin)
            for first in range(0, rows, ROWS):
                taken = min(ROWS, rows - first)
                add(x, first, taken, terms, block, packed[place], sums, others)
                for row in range(taken):
                    sum_of = sums[row * COLUMNS : row * COLUMNS + count]
                    if bias_at:
                        _shift(sum_of, bias[begin : begin + count])
                    _store(sum_of, out[first + row, begin : begin + count])
        part = take(address)


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
