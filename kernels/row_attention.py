"""Attention of the nodes of token trees on a CPU, each with the bits that torch computes for one query alone.

The order of every sum is that of `torch.nn.functional.scaled_dot_product_attention` for a single query in bfloat16,
where its matrix products are those of MKL on a CPU that MKL has no half-precision instructions for. There one call for
one query takes longer than this takes for a whole tree. The keys and values behind the prompt stand in the order of the
tree; the sums run over the path of each node, as if nothing else were there.

Source of the softmax by blocks: Dao et al. 2022, "FlashAttention", §3.1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from lookahead.kernels.jobs import Job, claim_part, run
from lookahead.kernels.microkernel import FEATURES, LANES, ROWS, tile_of, transpose
from lookahead.kernels.scalars import bits_of, exp, jit_part, narrow, to_intrinsic, widen
from lookahead.utils.addresses import array_at

BLOCK = 512  # keys whose weights are computed before their values are added
_STEP = BLOCK + LANES  # elements from one dimension of the transposed keys to the next
_COLUMNS = 2 * LANES
_FEW = 4  # rows of a tile for so many queries
_SIZES = sorted({_FEW, ROWS})
_PARTS = 4  # partial sums of a score
_TOGETHER = 4  # keys whose weighted values are added before they are added to the sum

_F = np.float32
_LOWEST = _F(-87.33654475)  # the exponential of less is 0
_LOG2E = _F(1.4426950408889634)
# 2 to a fraction x is nearly 1 + x less this polynomial, whose coefficients stand from the cube down.
_POLYNOMIAL = _F(-0.079204240219773236), _F(-0.22433836478672356), _F(0.30354260500649682), _F(0.00010703434948458272)
_EXPONENT, _BIAS = _F(1 << 23), _F(127 << 23)  # a number times the one, plus the other: the bits of 2 to that number


def row_attention(query: Tensor, keys: Tensor, values: Tensor, *, nodes: Tensor, trees: Tensor, scale: float) -> Tensor:
    """Attention of some nodes of a tree per row, each over the row's prompt and its own path.

    Args:
        query: bfloat16 or float32 `[rows, width, heads, dim]`; the nodes of each tree that were not scored before, and
            padding.
        keys: Likewise `[rows, slots, kv_heads, dim]`, each row contiguous; the prompt, and behind it all nodes.
        values: Likewise, with the strides of the keys.
        nodes: int64 `[rows, 2, most nodes]`; the parents of the nodes of each tree, and their depths.
        trees: int64 `[rows, 3]`; the slots before each root, the nodes of the tree, how many were scored before.
        scale: Factor on the scores.

    Returns:
        `[rows, width, heads, dim]` of that type, contiguous; zeros for padding.
    """
    query = query.contiguous()
    out = torch.empty_like(query) if len(query) == 1 else torch.zeros_like(query)
    places = torch.arange(len(query), device="cpu")[:, None] * query.shape[1]
    run(attention(query, keys, values, out, nodes=nodes, trees=torch.cat([trees, places], 1), scale=scale))
    return out


def attention(
    query: Tensor, keys: Tensor, values: Tensor, out: Tensor, *, nodes: Tensor, trees: Tensor, scale: float
) -> Job:
    """`row_attention` as a job, whose rows may have queries of any number.

    Args:
        query: `[any, width, heads, dim]`, contiguous; no row has more than `width` queries.
        keys: As of `row_attention`.
        values: As of `row_attention`.
        out: As `query`; the job writes it, but for padding.
        nodes: As of `row_attention`, contiguous.
        trees: int64 `[rows, 4]`, contiguous: as of `row_attention`, and the place of each first query among all.
        scale: Factor on the scores.
    """
    rows, (_, width, heads, dim), (_, slots, kv_heads, _) = len(trees), query.shape, keys.shape
    tensors = query, keys, values, nodes, trees, out
    sizes = rows, width, heads, dim, slots, kv_heads, keys.stride(0) if rows > 1 else 0, nodes.shape[2]
    places = [each.data_ptr() for each in tensors]
    return _ENTRIES[query.dtype], rows * kv_heads, (*places, *sizes, bits_of(scale)), tensors


def is_supported(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `row_attention` takes such tensors; they may have more dimensions before those that it takes."""
    return (
        query.dtype == keys.dtype == values.dtype
        and query.dtype in _ENTRIES
        and query.device.type == "cpu"
        and query.shape[-1] == values.shape[-1]
        and query.shape[-1] % LANES == 0
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        # For CPUs too: the sums of flash attention are the ones followed. MKL sums otherwise where it has AMX.
        and (query.dtype == torch.float32 or (torch.backends.cuda.flash_sdp_enabled() and not FEATURES.get("amx-bf16")))
    )


@to_intrinsic
def _fma(context: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z of float32, rounded once."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fma(*values)

    return types.float32(types.float32, types.float32, types.float32), emit


_score_tile: Any = tile_of(2, rows=_SIZES)
_one_register: Any = tile_of(1, "fours", rows=_SIZES)
_two_registers: Any = tile_of(2, "fours", rows=_SIZES)


def _attend_floats(address: Any) -> None:
    _attend(address, np.float32, np.float32, 4)


def _attend_halves(address: Any) -> None:
    _attend(address, np.uint16, np.int32, 2)


_ENTRIES = {torch.float32: _attend_floats, torch.bfloat16: _attend_halves}


@jit_part
def _attend(address, number, word, size):
    """Per row and KV head, the nodes of the row's tree and the query heads that share the KV head.

    The tensors hold such numbers, of such a size in bytes; words have 4 bytes.
    """
    numbers = array_at(address, (17,), np.int64)
    parts, query_at, keys_at, values_at, nodes_at, trees_at, out_at = numbers[1:8]
    rows, width, heads, dim, slots, kv_heads, step, most, bits = numbers[8:]
    scale, groups = np.int32(bits).view(np.float32), heads // kv_heads
    trees = array_at(trees_at, (rows, 4), np.int64)
    most_rows = _padded(width * groups)
    queries, sums = np.zeros((most_rows, dim), np.float32), np.empty((most_rows, dim), np.float32)
    scores = np.zeros((most_rows, BLOCK), np.float32)
    peaks, totals = np.empty(most_rows, np.float32), np.empty(most_rows, np.float32)
    transposed, block = np.empty((dim, _STEP), np.float32), np.empty((BLOCK, dim), np.float32)
    held = np.empty(most, np.int64)  # by depth, the node whose values stand in the block
    part = claim_part(address)
    while part < parts:
        row, head = part // kv_heads, part % kv_heads
        start, count, scored, first = trees[row]
        query, out = (
            array_at(query_at + size * first * heads * dim, (width, heads, dim), number),
            array_at(out_at + size * first * heads * dim, (width, heads, dim), number),
        )
        keys, values = (
            array_at(keys_at + size * row * step, (slots, kv_heads, dim), number),
            array_at(values_at + size * row * step, (slots, kv_heads, dim), number),
        )
        words = array_at(keys_at + size * row * step, (slots, kv_heads, dim * size // 4), word)
        nodes = array_at(nodes_at + 16 * row * most, (2, most), np.int64)
        padded = _padded((count - scored) * groups)
        _attend_tree(
            query, keys, values, words, nodes[0], nodes[1], start, count, scored, head, groups, scale,
            queries[:padded], scores[:padded], sums[:padded], peaks, totals, transposed, block, held, out,
        )  # fmt: skip
        part = claim_part(address)


@jit_part
def _padded(rows):
    """The rows of whole tiles."""
    return _FEW if rows <= _FEW else (rows + ROWS - 1) // ROWS * ROWS


@jit_part
def _attend_tree(
    query, keys, values, words, parents, depths, start, count, scored, head, groups, scale,
    queries, scores, sums, peaks, totals, transposed, block, held, out,
):  # fmt: skip
    """One pass over the blocks of keys."""
    dim, rows, deepest = queries.shape[1], (count - scored) * groups, 0
    is_half = words.shape[2] < dim
    for node in range(scored, count):
        deepest = max(deepest, depths[node])
    for row in range(rows):
        line = query[row // groups, head * groups + row % groups]
        for i in range(dim):
            queries[row, i] = widen(line[i])
    peaks[:], totals[:], sums[:] = -np.inf, 0.0, 0.0
    for begin in range(0, start + deepest + 1, BLOCK):
        common = max(0, min(BLOCK, start - begin))  # keys of the prompt
        _load(keys, words, values, begin, common, head, transposed, block)
        _score_prompt(queries, transposed, common, scale, scores)
        for node in range(scored, count):
            first, size = (node - scored) * groups, min(BLOCK, start + depths[node] + 1 - begin)
            if size > common:
                _score_path(
                    node, size, common, start - begin, keys, start, head, parents, depths,
                    queries[first : first + groups], scale, scores[first : first + groups],
                )  # fmt: skip
            if size > 0:
                for row in range(first, first + groups):
                    peak, total = _weigh(scores[row], size, peaks[row], is_half)
                    fade = _F(math.exp(peaks[row] - peak))
                    totals[row], peaks[row] = _fma(fade, totals[row], total), peak
                    if begin:
                        for i in range(dim):
                            sums[row, i] *= fade
        whole = common // _TOGETHER * _TOGETHER
        if whole:
            _add_prompt(scores, block, whole, sums)
        held[:] = -1
        for node in range(scored, count):
            first, size = (node - scored) * groups, min(BLOCK, start + depths[node] + 1 - begin)
            if size > whole:
                _load_path(node, size, common, start - begin, values, start, head, parents, depths, held, block)
                for row in range(first, first + groups):
                    _add_rest(scores[row], block, whole, size, sums[row])
    for row in range(rows):
        share, written = _F(1.0) / totals[row], out[row // groups, head * groups + row % groups]
        for i in range(dim):
            written[i] = narrow(sums[row, i] * share, written[i])


@jit_part
def _load(keys, words, values, begin, size, head, transposed, block):
    """Copy the prompt's keys of a block, transposed, and its values, as float32."""
    dim = keys.shape[2]
    for slot in range(size):
        line, to = values[begin + slot, head], block[slot]
        for i in range(dim):
            to[i] = widen(line[i])
    whole = size // LANES * LANES
    heads, count = words.shape[1:]
    each, step, together = dim // count, heads * count, count // LANES * LANES
    for slot in range(0, whole, LANES):
        at = (begin + slot) * step + head * count
        for word in range(0, together, LANES):
            transpose((words, at + word, step), (transposed, each * word * _STEP + slot, _STEP))
        for i in range(each * together, dim):
            for lane in range(LANES):
                transposed[i, slot + lane] = widen(keys[begin + slot + lane, head, i])
    for slot in range(whole, size):
        for i in range(dim):
            transposed[i, slot] = widen(keys[begin + slot, head, i])


@jit_part
def _score_prompt(queries, transposed, size, scale, scores):
    """Score the prompt's keys of a block for all queries: four partial sums of every fourth dimension."""
    rows, dim = queries.shape
    parts = np.empty((_PARTS, ROWS * _COLUMNS), np.float32)
    for first in range(0, rows, ROWS):
        for column in range(0, size, _COLUMNS):
            for i in range(_PARTS):
                at, line, step = first * dim + i, i * _STEP + column, _PARTS * _STEP
                count, terms = min(ROWS, rows), dim // _PARTS
                _score_tile((queries, at, dim, _PARTS), (transposed, line, step), (parts[i], 0, _COLUMNS), count, terms)
            for row in range(min(ROWS, rows)):
                scored, at = scores[first + row, column : column + _COLUMNS], row * _COLUMNS
                a, b, c, d = (
                    parts[0, at : at + _COLUMNS], parts[1, at : at + _COLUMNS],
                    parts[2, at : at + _COLUMNS], parts[3, at : at + _COLUMNS],
                )  # fmt: skip
                for i in range(_COLUMNS):
                    scored[i] = ((a[i] + c[i]) + (b[i] + d[i])) * scale


@jit_part
def _score_path(node, size, common, root, keys, start, head, parents, depths, queries, scale, scores):
    """Score the nodes of a path that stand in a block whose place `root` is that of the tree's root."""
    dim = keys.shape[2]
    at = root + depths[node]
    while at >= common:
        if at < size:
            key = keys[start + node, head]
            for row in range(len(queries)):
                a = b = c = d = _F(0.0)
                for i in range(0, dim, _PARTS):
                    a += widen(key[i]) * queries[row, i]
                    b += widen(key[i + 1]) * queries[row, i + 1]
                    c += widen(key[i + 2]) * queries[row, i + 2]
                    d += widen(key[i + 3]) * queries[row, i + 3]
                scores[row, at] = ((a + c) + (b + d)) * scale
        if at == root:
            break
        node = parents[node]
        at -= 1


@jit_part
def _load_path(node, size, common, root, values, start, head, parents, depths, held, block):
    """Put the values of a path's nodes where they stand in a block, but for those that are there."""
    at = root + depths[node]
    while at >= common:
        if at < size and held[depths[node]] != node:
            held[depths[node]] = node
            line, to = values[start + node, head], block[at]
            for i in range(len(to)):
                to[i] = widen(line[i])
        if at == root:
            break
        node = parents[node]
        at -= 1


@jit_part
def _weigh(scores, size, peak, is_half):
    """Replace scores by weights, rounded to bfloat16 where keys are.

    Returns the highest of the scores and `peak`, and the sum of the weights before they are rounded.

    Source of the exponential: Malossi et al. 2015, "Fast exponential computation on SIMD architectures".
    """
    whole = size // LANES * LANES
    lanes = np.empty(2 * LANES, np.float32)
    lanes[:] = peak
    for first in range(0, whole, LANES):
        line = scores[first : first + LANES]
        for lane in range(LANES):
            lanes[lane] = max(lanes[lane], line[lane])
    for lane in range(LANES):
        peak = max(peak, lanes[lane])
    for i in range(whole, size):
        peak = max(peak, scores[i])
    lanes[:] = 0.0
    for i in range(whole if is_half else 0):
        shifted = scores[i] - peak
        power = shifted * _LOG2E
        fraction = power - np.floor(power)
        error = _fma(fraction, _POLYNOMIAL[0], _POLYNOMIAL[1])
        error = _fma(fraction, error, _POLYNOMIAL[2])
        error = _fma(fraction, error, _POLYNOMIAL[3])
        weight = np.int32(_fma(_EXPONENT, power - error, _BIAS)).view(np.float32)
        scores[i] = weight if shifted >= _LOWEST else _F(0.0)
    for i in range(0 if is_half else whole):
        scores[i] = exp(scores[i] - peak)
    for first in range(0, whole, LANES):
        turn = first % (2 * LANES)
        line, sums = scores[first : first + LANES], lanes[turn : turn + LANES]
        for lane in range(LANES):
            sums[lane] += line[lane]
    half = LANES
    while half:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    total = lanes[0]
    for i in range(whole, size):
        scores[i] = _F(math.exp(scores[i] - peak))
        total += scores[i]
    bits = scores.view(np.int32)
    for i in range(size if is_half else 0):  # to the nearest bfloat16, ties to even
        bits[i] = (bits[i] + np.int32(0x7FFF) + ((bits[i] >> np.int32(16)) & np.int32(1))) & np.int32(-65536)
    return peak, total


@jit_part
def _add_prompt(weights, values, size, sums):
    """Add weighted values of a block, four keys at a time. The products are exact, so that only the sums round."""
    rows, dim = sums.shape
    for first in range(0, rows, ROWS):
        for column in range(0, dim, _COLUMNS):
            at, to, count = first * BLOCK, first * dim + column, min(ROWS, rows)
            if dim - column > LANES:
                _two_registers((weights, at, BLOCK, 1), (values, column, dim), (sums, to, dim), count, size)
            else:
                _one_register((weights, at, BLOCK, 1), (values, column, dim), (sums, to, dim), count, size)


@jit_part
def _add_rest(weights, values, begin, size, sums):
    """Add weighted values: four keys at a time, then the rest from the last one on."""
    whole = begin + (size - begin) // _TOGETHER * _TOGETHER
    for i in range(begin, whole, _TOGETHER):
        a, b, c, d = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        for at in range(len(sums)):
            even = a * values[i, at] + c * values[i + 2, at]
            odd = b * values[i + 1, at] + d * values[i + 3, at]
            sums[at] += even + odd
    for i in range(size - 1, whole - 1, -1):
        for at in range(len(sums)):
            sums[at] += weights[i] * values[i, at]
