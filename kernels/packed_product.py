"""Products of rows with a weight that is laid out in the order in which a CPU reads it.

A pass over a few nodes is bound by reading the weights. Here each is read once for all rows, in one stream.

In bfloat16 the bits are those of torch's product of one row, whatever the number of rows. With AVX512-BF16 torch calls
oneDNN, which adds the products of some hundred inputs in order, two at a time, and then the sums of these blocks. With
several rows it uses larger blocks, and bits change. With AVX2 torch adds every 64th product, and then the 64 sums by
halves, for each row alone (`ReducedPrecisionFloatGemvFastPathKernel.cpp`).

A quantized weight is multiplied in integers, whose sums are exact in any order, and sums of blocks are added in the
order of the inputs. So the bits of a row do not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lookahead.kernels.block_tiles import BlockKernel
from lookahead.kernels.jobs import Job, claim_part, run
from lookahead.kernels.large_pages import zeros
from lookahead.kernels.microkernel import CACHE_LINE, FEATURES, HALVES, LANES, MOST_ROWS, tile_of
from lookahead.kernels.scalars import jit_part, narrow, widen
from lookahead.kernels.shuffles import fetch_rows, store_rows, transpose
from lookahead.utils.addresses import array_at

COLUMNS = 2 * LANES  # outputs of a panel of the packed weight
_PART = 1 << 19  # bytes of the weight per part of a job
_SHARED, _EACH = 12, 5  # numbers that a call of the kernel receives, and numbers of each weight
HAS_DOT = bool(FEATURES.get("avx512bf16"))  # the instruction that multiplies pairs of bfloat16
_SUMS = 2 * HALVES  # sums per row and output in bfloat16 with AVX2
_IN_CACHE = 512  # rows that every part of a weight is multiplied by at a time: more leave a cache before the next part
_LINE = CACHE_LINE // 4  # float32 of a cache line
_SQUARES = _LINE // LANES  # of registers, which have as many bytes as `fetch_rows` prefetches
PART_OF_BLOCK = 64  # terms of a panel as stored that are laid out at a time
_AT_ONCE = 512  # approximate lines of a quantized panel that are multiplied at a time
# Most rows of a tile, rows from which memory is prefetched, and fewest tiles then, as measured on a Zen 4: for products
# in one step, and for 64 sums added by halves.
_TILING = (MOST_ROWS, 6, 1) if LANES == 16 else (MOST_ROWS, 2, 2)
_TILING_OF_HALVES = MOST_ROWS, 2, 1
_TERM = {torch.float32: torch.float32, torch.bfloat16: torch.int32}  # a term of a sum: one product, or two


def is_supported(weight: Tensor) -> bool:
    """Whether a weight of this dtype and shape can be packed, and this CPU has the instructions."""
    if weight.dtype != torch.bfloat16:
        return weight.dtype == torch.float32 and bool(FEATURES.get("fma"))
    if HAS_DOT:
        return weight.shape[1] % 2 == 0
    return weight.shape[1] % _SUMS == 0 and bool(FEATURES.get("fma")) and not FEATURES.get("avx512f")


class PackedWeight(NamedTuple):
    """A weight as our kernel takes it, and the sizes that every product needs."""

    packed: Tensor  # in the layout of `pack` or of a kernel; `[outputs, terms]` as the model stores it
    outputs: int
    block: int  # inputs whose products are added before the sums of blocks are added; even
    panels: int
    terms: int  # lines of a panel
    together: int  # panels per part of a job
    kernel: BlockKernel | None = None  # of a quantized weight
    prepared: int = 0  # elements of a prepared row; 0 if rows are used unchanged

    @classmethod
    def of(cls, packed: Tensor, outputs: int, block: int, kernel: BlockKernel | None = None) -> PackedWeight:
        """A weight with `outputs` outputs in the layout of `pack` or of a kernel."""
        panels, terms, _ = packed.shape
        prepared = 2 * terms if packed.dtype == torch.bfloat16 else 0
        if kernel:
            prepared = terms // kernel.group.lines * kernel.group.blocks * kernel.group.row_words
        return cls(packed, outputs, block, panels, terms, max(1, _PART * panels // packed.nbytes), kernel, prepared)

    @property
    def is_stored(self) -> bool:
        """Whether this is the memory of the model's own weight."""
        return self.packed.dim() == 2


def as_stored(weight: Tensor, block: int) -> PackedWeight:
    """A contiguous weight `[outputs, inputs]` without a copy, for products with the bits of a packed one.

    A panel is laid out in a near cache before rows are multiplied by it, which takes about half as long again.
    """
    outputs, terms = (own := weight.detach().view(_TERM[weight.dtype])).shape
    panels = -(-outputs // COLUMNS)
    has_halves = weight.dtype == torch.bfloat16 and not HAS_DOT
    own, block = (weight.detach(), _SUMS) if has_halves else (own, block)
    together = max(1, _PART * panels // weight.nbytes)
    return PackedWeight(own, outputs, block, panels, terms, together, None, 2 * terms if has_halves else 0)


def pack(weight: Tensor, block: int) -> PackedWeight:
    """Lay a contiguous weight `[outputs, inputs]` out in panels of `COLUMNS` outputs, the last padded with zeros.

    The layout is float32 `[panels, inputs, COLUMNS]`; for bfloat16 int32 `[panels, inputs / 2, COLUMNS]` with two
    inputs per element. With AVX2 the lines of bfloat16 are in the order of their sums, and have dtype `torch.bfloat16`.
    """
    terms = weight.detach().view(_TERM[weight.dtype])
    if weight.dtype == torch.float32 or HAS_DOT:
        return PackedWeight.of(_panels_of(terms), len(weight), block)
    return PackedWeight.of(_panels_of(terms, HALVES).view(torch.bfloat16), len(weight), _SUMS)


def _panels_of(terms: Tensor, apart: int | None = None) -> Tensor:
    """Lay 32-bit terms `[outputs, terms]` out by outputs; in a panel, terms at distance `apart` are adjacent."""
    packed = zeros(-(-len(terms) // COLUMNS), terms.shape[1], COLUMNS, dtype=terms.dtype)
    pack_panels(terms.contiguous(), packed, apart)
    return packed


def pack_panels(terms: Tensor, packed: Tensor, apart: int | None = None) -> None:
    """Lay contiguous 32-bit terms `[outputs, terms]` out in panels, `[panels, terms, COLUMNS]`."""
    of_job = terms.data_ptr(), packed.data_ptr(), *terms.shape, apart or terms.shape[1]
    run((_lay_out, len(packed), of_job, (terms, packed)))


def _lay_out(address: Any) -> None:
    """Lay out panel by panel."""
    _, panels, terms_at, packed_at, outputs, count, apart = array_at(address, (7,), np.int64)
    terms = array_at(terms_at, (outputs * count,), np.float32)
    packed = array_at(packed_at, (panels * count * COLUMNS,), np.float32)
    panel = claim_part(address)
    while panel < panels:
        to = packed[panel * count * COLUMNS : (panel + 1) * count * COLUMNS]
        _lay_out_panel((terms, panel * COLUMNS, outputs, count), (0, count), to, apart, _SQUARES)
        panel = claim_part(address)


@jit_part
def _lay_out_panel(weight, some, panel, apart, every):
    """Lay some terms of a panel out, one square of registers at a time.

    Args:
        weight: The terms `[outputs, terms]` as float32, the first output of the panel, and both sizes.
        some: The first of the terms, and their number.
        panel: The array to fill.
        apart: Terms at this distance are adjacent.
        every: Squares for which as many bytes of the next panel are prefetched as `fetch_rows` takes.
    """
    (values, row, outputs, count), (begin, number) = weight, some
    step, rows, ahead = count // apart * COLUMNS, min(COLUMNS, outputs - row), (row + COLUMNS) * count + begin * COLUMNS
    for column in range(0, rows, LANES):
        whole = number // LANES * LANES if column + LANES <= rows else 0
        for term in range(0, whole, LANES):
            if term // LANES % every == 0:
                fetch_rows((values, ahead, _LINE))
                ahead += LANES * _LINE
            place = term % apart * step + term // apart * COLUMNS + column
            transpose((values, (row + column) * count + begin + term, count), (panel, place, step))
        for term in range(whole, number):
            place = term % apart * step + term // apart * COLUMNS + column
            for i in range(min(LANES, rows - column)):
                panel[place + i] = values[(row + column + i) * count + begin + term]


def multiply(weight: PackedWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows `[..., inputs]` by a weight, and add a bias `[outputs]`: `[..., outputs]`, all in the rows' dtype.

    It is the dtype of the weight; bfloat16 or float32 if the weight is quantized.
    """
    x, out = x.contiguous(), x.new_empty((*x.shape[:-1], weight.outputs))
    rows = x.view(-1, x.shape[-1])
    prepared = prepared_rows([weight], min(_IN_CACHE, len(rows))) if weight.prepared else None
    parts = zip(rows.split(_IN_CACHE), out.view(-1, weight.outputs).split(_IN_CACHE), strict=True)
    run(*(job for some, sums in parts for job in product([weight], some, [bias], [sums], prepared)))
    return out


def prepared_rows(weights: Sequence[PackedWeight], rows: int) -> Tensor | None:
    """A buffer for rows as `product` prepares them, int32; None if all weights take rows unchanged."""
    length = max([weight.prepared for weight in weights])
    return torch.empty(rows * length, dtype=torch.int32, device="cpu") if length else None


def product(
    weights: Sequence[PackedWeight],
    x: Tensor,
    biases: Sequence[Tensor | None],
    outs: Sequence[Tensor],
    prepared: Tensor | None,
    chosen: Tensor | None = None,
) -> list[Job]:
    """Jobs that multiply rows by several weights of one dtype, with equal numbers of inputs and equal blocks.

    If weights are quantized, rows are too: the numbers of each block are integers from -127 to 127 times a scale. If
    lines of bfloat16 have another order, rows are reordered accordingly, as float32.

    Args:
        weights: At least one weight.
        x: `[..., inputs]`, contiguous, of a dtype that `multiply` accepts.
        biases: `[outputs]` of the dtype of `x` for each weight, or None.
        outs: `[..., outputs]` of the dtype of `x` for each weight, contiguous; written by the jobs.
        prepared: The result of `prepared_rows` for at least these weights and rows; the first job may write it.
        chosen: For mixtures, whose experts have weights one after the other, the first of which is in `weights`, and no
            biases: int64 `[any, 3]`, contiguous, an expert, the first of its rows and their number, which is 0 after
            the last expert. None if all rows are multiplied by one weight.
    """
    packed, _, block, _, terms, together, kernel, prepared_length = weights[0]
    inputs, jobs = x.shape[-1], list[Job]()
    rows, left, length = x.numel() // inputs, x, terms
    lines = numbers = block * terms // inputs  # of a panel at a time, and elements of the rows for them
    step = length  # between rows of one tile, or between blocks of a row
    if prepared is not None and prepared_length:
        of_rows, left = [x.data_ptr(), prepared.data_ptr(), inputs, prepared_length, block], prepared
        prepare, length, step, lines = _order_halves, prepared_length, prepared_length, terms  # all at a time
        if kernel:
            group, prepare, at_once = kernel.group, kernel.prepare[x.dtype], _AT_ONCE // kernel.group.lines
            of_rows += group.zero, group.parts
            length, step, lines = group.row_words, rows * group.row_words, at_once * group.lines
            numbers = at_once * group.blocks * step
        jobs.append((prepare, rows, of_rows, (x, left)))
    of_weights, parts = list[int](), 0
    for weight, bias, out in zip(weights, biases, outs, strict=True):
        places = weight.packed.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr()
        of_weights += (*places, weight.panels, weight.outputs)
        parts += -(-weight.panels // together)
    of_job = [left.data_ptr(), rows, length, step, terms, lines, numbers, together]
    of_job += [0 if chosen is None else chosen.data_ptr(), parts, *of_weights]
    entry = kernel.multiply[x.dtype] if kernel else _ENTRIES[packed.dtype, packed.dim() == 2]
    turns = 1 if chosen is None else min(len(chosen), rows)
    return [*jobs, (entry, turns * parts, of_job, (weights, left, biases, outs, chosen))]


_tile: Any = tile_of(2, "sums", range(1, MOST_ROWS + 1))
_tile_of_part: Any = tile_of(2, "more", range(1, MOST_ROWS + 1))
_tile_of_halves: Any = tile_of(2, "halves", range(1, MOST_ROWS + 1))


def multiplying(
    types: tuple[Any, Any, Any], add: Any, tiling: tuple[int, int, int], apart: int = 0
) -> Callable[[Any], None]:
    """A job function that multiplies, given the dtypes of rows, weight and results.

    Weights are packed, or as stored if `apart` is not 0: terms at this distance are then added after one another, and
    -1 stands for the order of the inputs.

    It goes panel by panel, `lines` lines at a time, which stay in a near cache for all tiles of rows. While a tile is
    multiplied, its share of the next lines is prefetched. With few rows the CPU waits for memory anyway, and its own
    prefetcher is faster.

    Source of tiles whose right matrix stays in a cache: Goto, van de Geijn 2008, "Anatomy of High-Performance Matrix
    Multiplication", §4.
    """
    left, kind, number = types

    # All in one function: a compiler takes the code of another one through all its passes twice.
    def multiply_panels(address: Any) -> None:
        shared = array_at(address, (_SHARED,), np.int64)
        _, parts, x_at, rows, length, step, terms, lines, numbers, together, chosen_at, of_expert = shared
        x, sums = array_at(x_at, (rows * step,), left), np.empty(rows * COLUMNS, np.float32)
        laid_out = np.empty((lines if apart > 0 else PART_OF_BLOCK) * COLUMNS, np.float32)
        chosen, expert, first_row, all_rows = array_at(chosen_at, (parts // of_expert, 3), np.int64), 0, 0, rows
        most, fetched, fewest = tiling
        part = claim_part(address)
        while part < parts:
            of, own = address + 8 * _SHARED, part % of_expert
            if chosen_at:
                expert, first_row, rows = chosen[part // of_expert]
                if rows == 0:
                    part = claim_part(address)
                    continue
            tiles = max(-(-rows // most), fewest if rows >= fetched else 1)
            share = -(-CACHE_LINE // tiles)
            packed_at, out_at, bias_at, panels, outputs = array_at(of, (_EACH,), np.int64)
            while own * together >= panels:  # the part belongs to a later weight
                own, of = own - (panels + together - 1) // together, of + 8 * _EACH
                packed_at, out_at, bias_at, panels, outputs = array_at(of, (_EACH,), np.int64)
            before = expert * panels
            packed = array_at(packed_at, ((before + panels) * terms * COLUMNS,), kind)
            out = array_at(out_at, (all_rows * outputs,), number)[first_row * outputs :]
            bias = array_at(bias_at, (outputs,), number)
            for panel in range(own * together, min(panels, (own + 1) * together)):
                sums[: rows * COLUMNS] = -0.0  # neutral: adding any number, even -0, gives that number
                at = first_row * length
                for line in range(0, terms, lines):
                    count, place, end = min(lines, terms - line), ((before + panel) * terms + line) * COLUMNS, 0
                    if apart:
                        stored = array_at(packed_at, (outputs * terms,), np.float32), panel * COLUMNS, outputs, terms
                        near = laid_out, laid_out.view(kind), (packed_at - laid_out.ctypes.data) // 4
                        add_stored((x, at, length, step), stored, (line, count), near, (sums, rows, tiles), add, apart)
                    for tile in range(0 if apart else tiles):
                        first, end, ahead, fetch = end, rows * (tile + 1) // tiles, place, 0
                        if rows >= fetched:  # fetching a line twice costs less than missing one
                            ahead, fetch = place + (lines + count * tile // tiles) * COLUMNS, share
                        right, to = (packed, place, COLUMNS, ahead, fetch), (sums, first * COLUMNS, COLUMNS)
                        add((x, at + first * length, step), right, to, end - first, count)
                    at += numbers
                _store(sums, bias, bias_at != 0, out, rows, panel * COLUMNS, outputs)
            part = claim_part(address)

    return multiply_panels


def _order_halves(address: Any) -> None:
    """Widen rows of bfloat16, and reorder their numbers into the order of the sums."""
    _, rows, x_at, out_at, inputs, _ = array_at(address, (6,), np.int64)
    turns = inputs // _SUMS
    x = array_at(x_at, (rows, turns, _SUMS // 2, 2), np.uint16)
    out = array_at(out_at, (rows, _SUMS // 2, turns, 2), np.float32)
    row = claim_part(address)
    while row < rows:
        for i in range(_SUMS // 2):
            for turn in range(turns):
                pair = x[row, turn, i]
                out[row, i, turn, 0], out[row, i, turn, 1] = widen(pair[0]), widen(pair[1])
        row = claim_part(address)


@jit_part
def _add_products(left, right, out, rows, lines):
    """Add the sums of a block to those of earlier blocks."""
    _tile((*left, 1), right, out, rows, lines)


@jit_part
def add_part(left, right, out, rows, lines):
    """Add the products of a part of a block to those of earlier parts."""
    _tile_of_part((*left, 1), right, out, rows, lines)


@jit_part
def _add_by_halves(left, right, out, rows, lines):
    """Sum every 64th product. Then add each sum to the one 32 further on, these to those 16 further on, and so on."""
    _tile_of_halves((*left, 2), right, out, rows, 2 * lines // _SUMS)


@jit_part
def add_stored(left, weight, some, near, to, add, apart):
    """Add the products of a block of a panel as stored, part by part, each laid out in a near cache for all rows.

    While a part is laid out, half of that part of the next panel is prefetched, and the other half while it is
    multiplied: a CPU waits for few lines at a time.
    """
    (x, at, length, step), (_, row, _, terms), (line, count), (sums, rows, tiles) = left, weight, some, to
    laid_out, right, before = near
    block, part = np.zeros(rows * COLUMNS, np.float32), PART_OF_BLOCK if apart < 0 else count
    fetch = -(-CACHE_LINE // (2 * tiles))
    for begin in range(0, count, part):
        number, end = min(part, count - begin), 0
        _lay_out_panel(weight, (line + begin, number), laid_out, terms if apart < 0 else apart, 2 * _SQUARES)
        ahead = before + (row + COLUMNS) * terms + (line + begin + number // 2) * COLUMNS
        for tile in range(tiles):
            first, end = end, rows * (tile + 1) // tiles
            own = right, 0, COLUMNS, ahead + number * tile // (2 * tiles) * COLUMNS, fetch
            add((x, at + begin + first * length, step), own, (block, first * COLUMNS, COLUMNS), end - first, number)
    for i in range(len(block)):
        sums[i] += block[i]


@jit_part
def _store(sums, bias, has_bias, out, rows, begin, outputs):
    """Add a bias to the sums of a panel, and store them at their places, rounded."""
    count = min(COLUMNS, outputs - begin)
    for row in range(rows if has_bias else 0):
        for i in range(count):
            sums[row * COLUMNS + i] += widen(bias[begin + i])
    if count == COLUMNS:
        store_rows((sums, 0, COLUMNS), (out, begin, outputs), rows)
    else:
        for row in range(rows):
            for i in range(count):
                out[row * outputs + begin + i] = narrow(sums[row * COLUMNS + i], out[0])


# By the dtype of a weight, and whether it is as stored.
_ENTRIES = {
    (torch.float32, False): multiplying((np.float32, np.float32, np.float32), _add_products, _TILING),
    (torch.float32, True): multiplying((np.float32, np.float32, np.float32), add_part, _TILING, -1),
    (torch.int32, False): multiplying((np.int32, np.int32, np.uint16), _add_products, _TILING),
    (torch.int32, True): multiplying((np.int32, np.int32, np.uint16), add_part, _TILING, -1),
    (torch.bfloat16, False): multiplying((np.float32, np.int32, np.uint16), _add_by_halves, _TILING_OF_HALVES),
    (torch.bfloat16, True): multiplying((np.float32, np.int32, np.uint16), _add_by_halves, _TILING_OF_HALVES, HALVES),
}
