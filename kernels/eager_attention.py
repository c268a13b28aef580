"""Attention of the nodes of token trees in bfloat16 on a CPU, with the bits of transformers' eager functions.

Such a function multiplies queries and keys, rounds the scores, scales them and maybe bounds them in bfloat16, takes a
softmax over all of them, rounds the weights, and multiplies them and the values. oneDNN adds products in pairs, by the
CPU's instruction, and those of every `CHUNK` keys apart. What a function makes of a score depends on this score alone,
so a table has it for all 65,536 numbers of bfloat16.

Source: for the exponential Shibata, Petrogalli 2020, "SLEEF: A Portable Vectorized Library of C Standard Mathematical
Functions", whose polynomial torch computes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lookahead.kernels.attention_rows import shallowest
from lookahead.kernels.jobs import Job, claim_part
from lookahead.kernels.microkernel import FEATURES, LANES, ROWS, tile_of
from lookahead.kernels.scalars import fma, jit_part, narrow, scaled, widen
from lookahead.kernels.shuffles import pair_rows, transpose
from lookahead.kernels.weighted_sums import COLUMNS, HAS_PAIRS, peak_of_line
from lookahead.utils.addresses import array_at

CHUNK = 512  # keys whose weighted values are added to each other before they are added to earlier ones
_FEW_PRODUCTS = 4096
_F = np.float32
_LOG2E, _LN2_HIGH, _LN2_LOW = _F(1.442695040888963407), _F(0.693145751953125), _F(1.428606765330187045e-06)
_SERIES = tuple(
    map(
        _F,
        (
            1.98527617612853646e-4,
            1.39304355252534151e-3,
            8.33336077630519867e-3,
            4.16664853692054749e-2,
            0.166666671633720398,
            0.5,
        ),
    )
)
_SMALLEST = _F(-104.0)  # below it the exponential is 0

_score: Any = tile_of(2, rows=[ROWS]) if HAS_PAIRS else None
_add: Any = tile_of(2, "more", rows=range(1, ROWS + 1)) if HAS_PAIRS else None


def is_supported(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the kernel accepts these tensors; additional leading dimensions are allowed."""
    return (
        query.dtype == keys.dtype == values.dtype == torch.bfloat16
        and query.device.type == "cpu"
        and query.shape[-1] == values.shape[-1]
        and query.shape[-1] % COLUMNS == 0
        and HAS_PAIRS
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and not FEATURES.get("amx-bf16")  # whose products oneDNN adds in another order
    )


def fewest_keys(heads: int, dim: int) -> int:
    """The number of keys from which torch multiplies by oneDNN; fewer products are added in another order."""
    return _FEW_PRODUCTS // (heads * dim) + 1


@lru_cache(maxsize=16)
@torch.inference_mode()
def scores_of(scale: float, softcap: float) -> Tensor:
    """What an eager function makes of every score, bfloat16 `[65536]` by its bits; a `softcap` of 0 is none."""
    scores = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16) * scale
    return torch.tanh(scores / softcap) * softcap if softcap else scores


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    *,
    nodes: Tensor,
    trees: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Job:
    """The job of `row_attention.attention` if its limits say so; its rows do not share the reading of keys.

    Args:
        query: bfloat16 `[any, width, heads, dim]`, contiguous.
        keys: bfloat16 `[rows, slots, kv_heads, dim]`, each row contiguous.
        values: Of the shape and strides of the keys.
        out: Like `query`; written by the job.
        nodes: int64 `[rows, 2, most nodes]`, contiguous.
        trees: int64 `[rows, 4]`, contiguous.
        scale: Factor of the scores.
        window: Positions that a query sees, its own included; 0 for all.
        softcap: Bound of the scores; 0 for none.
        sinks: bfloat16 `[heads]`, contiguous: scores without a value.
    """
    rows, heads, dim, (_, slots, kv_heads, _) = len(trees), query.shape[2], query.shape[3], keys.shape
    tensors = query, keys, values, nodes, trees, out, scores_of(scale, softcap)
    places = [*(tensor.data_ptr() for tensor in tensors), 0 if sinks is None else sinks.data_ptr()]
    sizes = rows, heads, dim, slots, kv_heads, keys.stride(0) if rows > 1 else 0, nodes.shape[2], window
    return _attend, rows * kv_heads, (*places, *sizes), (tensors, sinks)


def _attend(address: Any) -> None:
    """Attention per row and KV head: a tile of queries at a time, over all keys."""
    numbers = array_at(address, (18,), np.int64)
    parts, query_at, keys_at, values_at, nodes_at, trees_at, out_at, made_at, sinks_at = numbers[1:10]
    rows, heads, dim, slots, kv_heads, step, most, window = numbers[10:]
    per_kv, half, longest, trees = heads // kv_heads, dim // 2, 0, array_at(trees_at, (rows, 4), np.int64)
    for row in range(rows):
        longest = max(longest, trees[row, 0] + trees[row, 1])
    room = (longest + COLUMNS) // COLUMNS * COLUMNS  # of a line of scores, and a sink
    made, sinks = array_at(made_at, (1 << 16,), np.uint16), array_at(sinks_at, (heads,), np.uint16)
    panels, queries = np.empty(room * half, np.int32), np.zeros((ROWS, half), np.int32)
    paired, is_paired = np.empty((2 if window else 1, longest // 2 + 1, dim), np.int32), np.empty(2, np.bool_)
    lines, weights, lanes = np.empty((ROWS, room), _F), np.empty((ROWS, room // 2), np.int32), np.empty(LANES, _F)
    sums, of_chunk, last = np.empty((ROWS, dim), _F), np.empty((ROWS, dim), _F), np.empty((most + 1, dim), np.int32)
    spans, path = np.empty((ROWS, 3), np.int64), np.empty(most, np.int64)
    part = claim_part(address)
    while part < parts:
        row, head = part // kv_heads, part % kv_heads
        start, count, scored, first = trees[row]
        nodes = array_at(nodes_at + 16 * row * most, (2, most), np.int64)
        query = array_at(query_at + 2 * first * heads * dim, (count - scored, heads, half), np.int32)
        out = array_at(out_at + 2 * first * heads * dim, (count - scored, heads, dim), np.uint16)
        # The slots before the first window are skipped; the others are numbered from there on.
        skipped = max(0, start + shallowest(nodes[1], scored, count) + 1 - window) // COLUMNS * COLUMNS if window else 0
        before = 2 * (row * step + skipped * kv_heads * dim)
        keys = array_at(keys_at + before, ((slots - skipped) * kv_heads * half,), np.float32)
        values = array_at(values_at + before, (slots - skipped, kv_heads, dim), np.uint16)
        start -= skipped
        _lay_out_keys(keys, head, kv_heads, half, start + count, slots - skipped, panels)
        is_paired[:] = False
        asked = (count - scored) * per_kv
        for begin in range(0, asked, ROWS):
            tile = min(ROWS, asked - begin)
            for i in range(tile):
                queries[i] = query[(begin + i) // per_kv, head * per_kv + (begin + i) % per_kv]
            for column in range(0, start + count, COLUMNS):
                _score((queries, 0, half, 1), (panels, column * half, COLUMNS), (lines, column, room), ROWS, half)
            for i in range(tile):
                node = scored + (begin + i) // per_kv
                depth = _find_path(node, nodes, path)
                size = start + depth + 1
                base = max(0, size - window) if window else 0
                spans[i, 0], spans[i, 1], spans[i, 2] = node, base, size
                for at in range(depth + 1):
                    lines[i, start + at] = lines[i, start + path[at]]
                for at in range(base, size):
                    lines[i, at] = widen(made[narrow(lines[i, at], made[0])])
                sink = sinks[head * per_kv + (begin + i) % per_kv] if sinks_at else made[0]
                _weigh(lines[i][base:], size - base, sinks_at != 0, sink, lanes, weights[i])
            until = 0
            while until < tile:
                i, base = until, spans[until, 1]
                while until < tile and spans[until, 1] == base:
                    until += 1
                parity = base % 2
                if not is_paired[parity]:
                    _pair_values(values, head, parity, start, paired[parity])
                    is_paired[parity] = True
                ahead = paired[parity], base // 2, max(0, (start - base) // 2)
                _add_values(
                    weights[i:until], ahead, values, head, start, nodes, spans[i:until], path, last,
                    of_chunk[i:until], sums[i:until],
                )  # fmt: skip
            for i in range(tile):
                written = out[(begin + i) // per_kv, head * per_kv + (begin + i) % per_kv]
                for at in range(dim):
                    written[at] = narrow(sums[i, at], written[at])
        part = claim_part(address)


@jit_part
def _lay_out_keys(keys, head, kv_heads, half, size, slots, panels):
    """Lay some keys out in panels of `COLUMNS`, transposed."""
    step, out = kv_heads * half, panels.view(np.float32)
    for slot in range(0, size, LANES):
        to, first = slot // COLUMNS * COLUMNS * half + slot % COLUMNS, slot * step + head * half
        for word in range(0, half if slot + LANES <= slots else 0, LANES):
            transpose((keys, first + word, step), (out, to + word * COLUMNS, COLUMNS))
        for i in range(0 if slot + LANES <= slots else size - slot):
            for word in range(half):
                out[to + word * COLUMNS + i] = keys[first + i * step + word]


@jit_part
def _pair_values(values, head, begin, end, paired):
    """Pair the values of neighbouring slots from `begin` on, as far as both are before `end`."""
    _, kv_heads, dim = values.shape
    flat, out, step = values.reshape(values.size), paired.reshape(paired.size), kv_heads * dim
    for pair in range((end - begin) // 2):
        first = (begin + 2 * pair) * step + head * dim
        for at in range(0, dim, LANES):
            pair_rows((flat, first + at, step), (out, pair * dim + at))


@jit_part
def _find_path(node, nodes, path):
    """Write the nodes from the root to a node; returns its depth."""
    depth = nodes[1, node]
    for at in range(depth, -1, -1):
        path[at] = node
        node = nodes[0, node]
    return depth


@jit_part
def _exponential(x):
    """The exponential of a number of at most 0, with the bits of torch's vectors."""
    whole = np.rint(x * _LOG2E)
    rest = fma(whole, -_LN2_LOW, fma(whole, -_LN2_HIGH, x))
    series = _SERIES[0]
    for i in range(1, 6):
        series = fma(series, rest, _SERIES[i])
    series = _F(1.0) + fma(rest * rest, series, rest)
    return _F(0.0) if x < _SMALLEST else scaled(series, whole)


@jit_part
def _weigh(line, size, has_sink, sink, lanes, weights):
    """Pair the weights of scores, the earlier one in the lower half.

    Without a sink they are those of torch's softmax in float32. With a sink they are those in bfloat16, after the peak
    is subtracted: it adds the weights of a last register that is not full one by one, of single numbers.
    """
    count = size
    if has_sink:
        line[size] = widen(sink)
        count += 1
    peak, whole = peak_of_line(line, count, _F(-np.inf)), count // LANES * LANES
    for i in range(count):
        shifted = line[i] - peak
        line[i] = widen(narrow(shifted, sink)) if has_sink else shifted
    alone = whole if has_sink else count
    for i in range(alone, count):
        line[i] = _F(math.exp(np.float64(line[i])))  # rounded once, as torch's exponentials of single numbers are
    for i in range(alone):
        line[i] = _exponential(line[i])
    lanes[:] = 0.0
    for first in range(0, whole, LANES):
        for i in range(LANES):
            lanes[i] += line[first + i]
    if whole and not has_sink:
        for i in range(count - whole):
            lanes[i] += line[whole + i]
    half = LANES // 2
    while half:
        for i in range(half):
            lanes[i] += lanes[i + half]
        half //= 2
    total = lanes[0]
    for i in range(whole if has_sink or whole == 0 else count, count):
        total += line[i]
    share = _F(1.0) / total
    line[size] = 0.0  # what the last key is paired with
    for pair in range((size + 1) // 2):
        lower, upper = narrow(line[2 * pair] * share, sink), narrow(line[2 * pair + 1] * share, sink)
        weights[pair] = np.int32(lower) | (np.int32(upper) << np.int32(16))


@jit_part
def _add_values(weights, ahead, values, head, start, nodes, spans, path, last, of_chunk, sums):
    """Add the weighted values of some queries whose first key is the same.

    `ahead` has the paired values of the prompt, the index of the first pair, and the number of pairs.
    """
    (paired, first, shared), dim, step, pairs = ahead, sums.shape[1], weights.shape[1], 0
    for span in spans:
        pairs = max(pairs, (span[2] - span[1] + 1) // 2)
    sums[:] = 0.0
    for begin in range(0, pairs, CHUNK // 2):
        of_chunk[:] = 0.0
        end = min(shared, begin + CHUNK // 2)
        for column in range(0, dim if begin < end else 0, COLUMNS):
            right = paired.reshape(paired.size), (first + begin) * dim + column, dim
            _add((weights, begin, step, 1), right, (of_chunk, column, dim), len(spans), end - begin)
        until = 0
        while until < len(spans):
            i, (node, base, size) = until, spans[until]
            while until < len(spans) and spans[until, 0] == node:
                until += 1
            own, end = max(shared, begin), min((size - base + 1) // 2, begin + CHUNK // 2)
            if own < end:
                _find_path(node, nodes, path)
                _pair_path(values, head, start, base + 2 * own, min(size, base + 2 * end), path, last)
            for column in range(0, dim if own < end else 0, COLUMNS):
                right, to = (last.reshape(last.size), column, dim), (of_chunk, i * dim + column, dim)
                _add((weights, i * step + own, step, 1), right, to, until - i, end - own)
        for i in range(len(spans)):
            for at in range(dim):
                sums[i, at] += of_chunk[i, at]


@jit_part
def _pair_path(values, head, start, begin, end, path, out):
    """Pair the values of a prompt's last keys and of a path; a last value alone is paired with 0."""
    for pair in range((end - begin + 1) // 2):
        key = begin + 2 * pair
        lower = values[key if key < start else start + path[key - start], head]
        upper = values[key + 1 if key + 1 < start else start + path[key + 1 - start], head] if key + 1 < end else lower
        for at in range(len(lower)):
            second = np.int32(upper[at]) << np.int32(16) if key + 1 < end else np.int32(0)
            out[pair, at] = np.int32(lower[at]) | second
