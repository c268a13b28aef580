"""Mixtures of experts: products of rows with the weights of the experts that are chosen for them.

Every chosen expert is read once for all its rows. Its weights are packed in the layout of
`lookahead.kernels.packed_product`, or are those of the model, `[experts, outputs, inputs]` or transposed, where a copy
would take too much memory. Then a part of a panel is laid out in a near cache before its rows multiply it, which takes
more than half as long again. The bits of a row are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from lookahead.kernels.jobs import Job, claim_part
from lookahead.kernels.large_pages import zeros
from lookahead.kernels.microkernel import LANES, MOST_ROWS, tile_of
from lookahead.kernels.packed_product import (
    COLUMNS,
    HAS_DOT,
    PART_OF_BLOCK,
    add_part,
    add_stored,
    is_supported,
    pack_panels,
)
from lookahead.kernels.scalars import jit_part, narrow, widen
from lookahead.utils.addresses import array_at

AS_ROWS, AS_COLUMNS, PACKED = range(3)
"""Layouts: the inputs of an output side by side, the outputs of an input side by side, and panels."""
_TOGETHER = 8  # panels of a part of a job
MOST_CHOSEN = 64  # experts of a token, up to which sums have the levels of `_add_results`
_LEVEL = 16  # results whose sum is added to that of the earlier ones; torch adds as many rows
_SIDE_BY_SIDE = 32  # numbers of a result that torch adds in order; of the last ones, every fourth
_PARTIALS = 4
_tile: Any = tile_of(2, "sums", range(1, MOST_ROWS + 1))


class ExpertWeight(NamedTuple):
    """The weights of experts.

    Attributes:
        tensor: As stored by the model; packed 32-bit terms `[experts, panels, terms, COLUMNS]`.
        outputs: Outputs of an expert.
        terms: 32-bit terms of a row.
        block: Terms whose products are added before the sums of blocks are added.
        layout: `AS_ROWS`, `AS_COLUMNS` or `PACKED`.
    """

    tensor: Tensor
    outputs: int
    terms: int
    block: int
    layout: int


def weight_of(weight: Tensor, block: int, *, packs: bool) -> ExpertWeight:
    """The weights of experts, `[experts, outputs, inputs]`, contiguous or transposed, for which `multiplies` holds.

    Args:
        weight: bfloat16 or float32.
        block: Inputs of a block of sums.
        packs: Whether to make a packed copy.
    """
    of_term = 4 // weight.element_size()
    sizes = weight.shape[1], weight.shape[2] // of_term, block // of_term
    if not packs:
        return ExpertWeight(weight, *sizes, AS_ROWS if weight.is_contiguous() else AS_COLUMNS)
    dtype = torch.float32 if of_term == 1 else torch.int32
    packed = zeros(len(weight), -(-weight.shape[1] // COLUMNS), sizes[1], COLUMNS, dtype=dtype)
    for expert, panels in zip(weight.detach(), packed, strict=True):
        pack_panels(expert.contiguous().view(dtype), panels)
    return ExpertWeight(packed, *sizes, PACKED)


def multiplies(weight: Tensor) -> bool:
    """Whether the weights of experts, `[experts, outputs, inputs]`, contiguous or transposed, can be multiplied."""
    return (
        is_supported(weight[0])
        and (weight.dtype == torch.float32 or HAS_DOT)
        and (weight.is_contiguous() or weight.mT.is_contiguous())
        and weight.shape[1] % LANES == 0
        and weight.shape[2] % (2 * LANES) == 0
        and weight.device.type == "cpu"
    )


def products(x: Tensor, weight: ExpertWeight, bias: Tensor | None, out: Tensor, chosen: Tensor, most: int) -> Job:
    """A job that multiplies rows, grouped by experts, by the weights of their experts.

    Args:
        x: `[rows, inputs]`, contiguous, of the dtype of the weights.
        weight: The weights.
        bias: `[experts, outputs]`, contiguous, added to rounded results; or None.
        out: `[rows, outputs]`, contiguous; written by the job.
        chosen: int64 `[any, 3]`, contiguous: an expert, the first of its rows and their number, which is 0 after the
            last expert.
        most: Experts that may be chosen for these rows.
    """
    tensors, outputs = (x, weight.tensor, bias, out, chosen), weight.outputs
    parts = -(-outputs // (_TOGETHER * COLUMNS))
    places = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    numbers = *places, outputs, weight.terms, min(weight.block, weight.terms), parts, weight.layout
    return _ENTRIES[x.dtype], most * parts, numbers, tensors


def gather(x: Tensor, out: Tensor, places: Tensor) -> Job:
    """A job that copies rows `[tokens, size]` to `[rows, size]`: row r from token `places[r]`, int64 `[rows]`."""
    sizes = len(out), x.shape[-1] * x.element_size() // 2
    tensors = x, out, places
    return _gather_rows, len(out), (*(tensor.data_ptr() for tensor in tensors), *sizes), tensors


def combine(
    rows: Tensor,
    factors: Tensor,
    places: Tensor,
    out: Tensor,
    *,
    is_wide: bool,
    shared: Tensor | None = None,
    shares: Tensor | None = None,
) -> Job:
    """A job that adds the weighted results of the experts of each token, in the order of torch's `sum` over them.

    Args:
        rows: `[rows, size]`, the results, bfloat16 or float32.
        factors: float32 `[tokens, chosen]`; at most `MOST_CHOSEN` experts.
        places: int64 `[tokens, chosen]`: the row of each result.
        out: `[tokens, size]`, of the dtype of the rows.
        is_wide: Whether weighted results are not rounded before they are added.
        shared: Like `out`, contiguous: the results of a shared expert, added to the rounded sum; or None.
        shares: float32 `[tokens]`, their factors, which are 1 if it is None.
    """
    tensors = rows, factors, places, out, shared, shares
    sizes = len(out), factors.shape[1], out.shape[-1], int(is_wide)
    entry = _combine_floats if rows.dtype == torch.float32 else _combine_halves
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return entry, len(out), (*addresses, *sizes), tensors


def _take_terms(values: Any, at: Any, step: Any, scratch: Any, line: Any, count: Any) -> Any:
    """Write a line of terms: floats from `at` on, or pairs of halves that are `step` apart."""


@overload(_take_terms, strict=False)
def _take_terms_of(values: Any, at: Any, step: Any, scratch: Any, line: Any, count: Any) -> Any:
    if values.dtype == types.float32:

        def take(values: Any, at: Any, step: Any, scratch: Any, line: Any, count: Any) -> None:
            terms, own = scratch[line * COLUMNS : line * COLUMNS + count], values[at : at + count]
            for i in range(count):
                terms[i] = own[i]

        return take

    def take_pairs(values: Any, at: Any, step: Any, scratch: Any, line: Any, count: Any) -> None:
        pairs = scratch[line * COLUMNS : line * COLUMNS + count].view(np.uint32)
        first, second = values[at : at + count], values[at + step : at + step + count]
        for i in range(count):
            pairs[i] = np.uint32(first[i]) | np.uint32(np.uint32(second[i]) << np.uint32(16))

    return take_pairs


@jit_part
def _multiply(address, left, number, size):
    """Multiply some panels of an expert at a time; `size` is that of an input, in bytes."""
    numbers = array_at(address, (12,), np.int64)
    _, parts, x_at, weight_at, bias_at, out_at, chosen_at, outputs, terms, lines, per_expert, layout = numbers
    chosen = array_at(chosen_at, (parts // per_expert, 3), np.int64)
    panels = (outputs + COLUMNS - 1) // COLUMNS
    is_packed, of_term, together = layout == PACKED, 4 // size, _TOGETHER * COLUMNS
    # Outputs side by side are read for all panels of a part at once: a panel alone would miss the cache at every input.
    kept = together * terms if layout == AS_COLUMNS else PART_OF_BLOCK * COLUMNS
    scratch = np.empty(1 if is_packed else kept, np.float32)
    part = claim_part(address)
    while part < parts:
        expert, first_row, rows = chosen[part // per_expert]
        if rows == 0:
            part = claim_part(address)
            continue
        size_of_expert = (panels * COLUMNS if is_packed else outputs) * terms
        at_weight = weight_at + expert * size_of_expert * 4
        weight = array_at(at_weight, (size_of_expert,), np.float32)
        columns = weight.view(number)
        right = (weight if is_packed else scratch).view(left)
        x = array_at(x_at + first_row * terms * 4, (rows * terms,), left)
        out = array_at(out_at + first_row * outputs * size, (rows, outputs), number)
        bias = array_at(bias_at + expert * outputs * size, (outputs,), number)
        sums = np.empty(rows * COLUMNS, np.float32)
        first = part % per_expert * together
        for term in range(terms if layout == AS_COLUMNS else 0):
            for column in range(first, min(outputs, first + together), COLUMNS):
                line, count = (column - first) // COLUMNS * terms + term, min(COLUMNS, outputs - column)
                _take_terms(columns, term * of_term * outputs + column, outputs, scratch, line, count)
        for column in range(first, min(outputs, first + together), COLUMNS):
            count = min(COLUMNS, outputs - column)
            sums[:] = -0.0  # neutral: adding any number, even -0, gives that number
            for line in range(0, terms, lines):
                some, begin = (
                    min(lines, terms - line),
                    (column if is_packed else column - first) * terms + line * COLUMNS,
                )
                if layout == AS_ROWS:
                    of, near = (
                        (weight, column, outputs, terms),
                        (scratch, right, (at_weight - scratch.ctypes.data) // 4),
                    )
                    tiles = (rows + MOST_ROWS - 1) // MOST_ROWS
                    add_stored((x, line, terms, terms), of, (line, some), near, (sums, rows, tiles), add_part, -1)
                for row in range(0, 0 if layout == AS_ROWS else rows, MOST_ROWS):
                    tile = min(MOST_ROWS, rows - row)
                    at = row * terms + line
                    _tile((x, at, terms, 1), (right, begin, COLUMNS), (sums, row * COLUMNS, COLUMNS), tile, some)
            for row in range(rows):
                for i in range(count):
                    out[row, column + i] = narrow(sums[row * COLUMNS + i], out[row, 0])
                for i in range(count if bias_at else 0):
                    total = widen(out[row, column + i]) + widen(bias[column + i])
                    out[row, column + i] = narrow(total, out[row, 0])
        part = claim_part(address)


def _multiply_floats(address: Any) -> None:
    _multiply(address, np.float32, np.float32, 4)


def _multiply_halves(address: Any) -> None:
    _multiply(address, np.int32, np.uint16, 2)


_ENTRIES: dict[torch.dtype, Callable[[Any], None]] = {
    torch.float32: _multiply_floats,
    torch.bfloat16: _multiply_halves,
}


def _gather_rows(address: Any) -> None:
    """Copy rows as 16-bit numbers."""
    _, rows, x_at, out_at, places_at, _, size = array_at(address, (7,), np.int64)
    places = array_at(places_at, (rows,), np.int64)
    row = claim_part(address)
    while row < rows:
        source = array_at(x_at + 2 * places[row] * size, (size,), np.uint16)
        out = array_at(out_at + 2 * row * size, (size,), np.uint16)
        for i in range(size):
            out[i] = source[i]
        row = claim_part(address)


@jit_part
def _add_weighted(result, factor, is_wide, sums):
    """Add the numbers of a weighted result to as many sums."""
    if is_wide:
        for i in range(len(sums)):
            sums[i] += widen(result[i]) * factor
    else:
        for i in range(len(sums)):
            sums[i] += widen(narrow(widen(result[i]) * factor, result[i]))


@jit_part
def _add_to(sums, others):
    for i in range(len(sums)):
        sums[i] += others[i]


@jit_part
def _add_results(results, factors, places, is_wide, line, later):
    """Add the weighted results of a token in the order of torch's `sum`; `later` is memory for partial sums.

    Most numbers are added as they were chosen, with levels. The last ones, fewer than torch takes side by side, have a
    partial sum of every fourth result; what is left after whole fours comes to the first partial sum.
    """
    size, count = len(line), len(places)
    whole, fours = size // _SIDE_BY_SIDE * _SIDE_BY_SIDE, count // _PARTIALS * _PARTIALS
    sums, levels, rest = line[:whole], later[0, :whole], later[:, whole:]
    line[:], later[:] = 0.0, 0.0
    for choice in range(count):
        result, factor = results[places[choice]], factors[choice]
        _add_weighted(result, factor, is_wide, sums)
        if choice % _LEVEL == _LEVEL - 1:
            _add_to(levels, sums)
            sums[:] = 0.0
        if whole < size:
            _add_weighted(result[whole:], factor, is_wide, rest[choice % _PARTIALS if choice < fours else 0])
    _add_to(sums, levels)
    for partial in range(_PARTIALS):
        _add_to(line[whole:], rest[partial])


@jit_part
def _combine(address, number):
    """Weigh and add the results of a token at a time."""
    numbers = array_at(address, (12,), np.int64)
    _, _, rows_at, factors_at, places_at, out_at, shared_at, shares_at, tokens, chosen, size, is_wide = numbers
    factors, places = (
        array_at(factors_at, (tokens, chosen), np.float32),
        array_at(places_at, (tokens, chosen), np.int64),
    )
    results, out = array_at(rows_at, (tokens * chosen, size), number), array_at(out_at, (tokens, size), number)
    shared, shares = array_at(shared_at, (tokens, size), number), array_at(shares_at, (tokens,), np.float32)
    line, later = np.empty(size, np.float32), np.empty((_PARTIALS, size), np.float32)
    token = claim_part(address)
    while token < tokens:
        _add_results(results, factors[token], places[token], is_wide, line, later)
        for i in range(size):
            out[token, i] = narrow(line[i], out[token, 0])
        share = shares[token] if shares_at else np.float32(1.0)
        for i in range(size if shared_at else 0):
            own = widen(narrow(widen(shared[token, i]) * share, out[token, 0]))
            out[token, i] = narrow(widen(out[token, i]) + own, out[token, 0])
        token = claim_part(address)


def _combine_floats(address: Any) -> None:
    _combine(address, np.float32)


def _combine_halves(address: Any) -> None:
    _combine(address, np.uint16)
