"""Attention of the nodes of token trees on a CPU, each with the bits that torch computes for one query alone.

Every sum has the order of `torch.nn.functional.scaled_dot_product_attention` for a single query in bfloat16, on CPUs
for which MKL has no half-precision instructions. There, one call for one query takes longer than this kernel does for a
whole tree. The keys and values after the prompt are in the order of the tree; the sums run over the path of each node,
as if nothing else were there.

In float32 the order of the sums is free. Keys that several rows share are read once for all of them.

Sources: for the softmax by blocks Dao et al. 2022, "FlashAttention", §3.1; for shared keys Juravsky et al. 2024,
"Hydragen: High-Throughput LLM Inference with Shared Prefixes", §3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lookahead.kernels import eager_attention
from lookahead.kernels.attention_blocks import (
    STEP,
    load_block,
    load_path,
    pair_fourths,
    score_nodes,
    score_prompt,
    take_path,
)
from lookahead.kernels.attention_rows import (
    MAX_SHARING,
    MAX_TURNS,
    end_of_depth,
    most_rows_of,
    nodes_of,
    shallowest,
    share_of,
    units_of,
    whole_tiles,
)
from lookahead.kernels.jobs import Job, claim_part, run
from lookahead.kernels.microkernel import FEATURES, LANES, ROWS
from lookahead.kernels.scalars import bits_of, exp, jit_part, narrow, widen
from lookahead.kernels.weighted_sums import (
    BLOCK,
    LINE,
    TOGETHER,
    add_fours,
    add_rest,
    add_sums,
    peak_of_line,
    weigh_more,
)
from lookahead.utils.addresses import array_at

_F = np.float32
_FAR = _F(1e30)  # from other scores; their weight is 0


class AttentionLimits(NamedTuple):
    """What bounds the attention of a layer."""

    window: int = 0  # positions that a query sees, its own included; 0 for all
    softcap: float = 0.0  # bound of the scores, in float32; 0 for none
    sinks: Tensor | None = None  # `[heads]`, contiguous: scores without a value; float32, or bfloat16 if `is_eager`
    is_eager: bool = False  # whether bits are those of transformers' eager functions, not of SDPA; in bfloat16


NO_LIMITS = AttentionLimits()


def row_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    nodes: Tensor,
    trees: Tensor,
    scale: float,
    limits: AttentionLimits = NO_LIMITS,
) -> Tensor:
    """Attention of some nodes of a tree per row, each over the row's prompt and its own path.

    Args:
        query: bfloat16 or float32 `[rows, width, heads, dim]`; the unscored nodes of each tree, and padding.
        keys: `[rows, slots, kv_heads, dim]` of that dtype, each row contiguous; the prompt, followed by all nodes.
        values: Of the shape, dtype and strides of the keys.
        nodes: int64 `[rows, 2, most nodes]`; the parents of the nodes of each tree, and their depths.
        trees: int64 `[rows, 3]`; the slots before each root, the nodes of the tree, and how many were scored before.
        scale: Factor of the scores.
        limits: What bounds the attention; in bfloat16 only a window, unless `is_eager`.

    Returns:
        `[rows, width, heads, dim]` of that dtype, contiguous; zeros for padding.
    """
    query = query.contiguous()
    out = torch.empty_like(query) if len(query) == 1 else torch.zeros_like(query)
    places = torch.arange(len(query), device="cpu")[:, None] * query.shape[1]
    trees, groups = torch.cat([trees, places], 1), torch.zeros(len(query), 2 + MAX_SHARING, dtype=torch.int64)
    groups[:, 1], groups[:, 2] = 1, torch.arange(len(query), device="cpu")
    passed = {"nodes": nodes, "trees": trees, "groups": groups, "threads": torch.tensor([torch.get_num_threads()])}
    run(attention(query, keys, values, out, **passed, scale=scale, limits=limits))
    return out


def sharing_step(dtype: torch.dtype) -> int:
    """Shared keys come in multiples of this number; in bfloat16 sums keep their order only after whole blocks."""
    return LANES if dtype == torch.float32 else BLOCK


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    *,
    nodes: Tensor,
    trees: Tensor,
    groups: Tensor,
    threads: Tensor,
    scale: float,
    limits: AttentionLimits = NO_LIMITS,
) -> Job:
    """`row_attention` as a job, whose rows may have different numbers of queries.

    Args:
        query: `[any, width, heads, dim]`, contiguous; no row has more than `width` queries.
        keys: See `row_attention`.
        values: See `row_attention`.
        out: Like `query`; written by the job, except for padding.
        nodes: See `row_attention`; contiguous.
        trees: int64 `[rows, 4]`, contiguous: as in `row_attention`, and the index of each row's first query.
        groups: int64 `[rows, 2 + MAX_SHARING]`, contiguous: for each group of rows the number of first slots whose keys
            and values they share, a multiple of `sharing_step`; the number of rows; and the rows. Padded with zeros.
        threads: int64 `[1]`, the threads that will share the job, at most those that torch is set to now.
        scale: Factor of the scores.
        limits: See `row_attention`.
    """
    if limits.is_eager:
        window, softcap, sinks, _ = limits
        return eager_attention.attention(
            query, keys, values, out, nodes=nodes, trees=trees, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
    rows, (_, width, heads, dim), (_, slots, kv_heads, _) = len(trees), query.shape, keys.shape
    tensors, sinks = (query, keys, values, nodes, trees, groups, threads, out), limits.sinks
    bounds = limits.window, bits_of(limits.softcap), 0 if sinks is None else sinks.data_ptr()
    sizes = rows, width, heads, dim, slots, kv_heads, keys.stride(0) if rows > 1 else 0, nodes.shape[2]
    places = [tensor.data_ptr() for tensor in tensors]
    most = rows * kv_heads + (torch.get_num_threads() - 1) * (MAX_TURNS - 1)
    return _ENTRIES[query.dtype], most, (*places, *sizes, bits_of(scale), *bounds), (tensors, sinks)


def is_supported(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `row_attention` accepts these tensors; additional leading dimensions are allowed."""
    return (
        query.dtype == keys.dtype == values.dtype
        and query.dtype in _ENTRIES
        and query.device.type == "cpu"
        and query.shape[-1] == values.shape[-1]
        and query.shape[-1] % LANES == 0
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        # Also for CPUs: the kernel follows the sums of flash attention. With AMX, MKL adds in another order.
        and (query.dtype == torch.float32 or (torch.backends.cuda.flash_sdp_enabled() and not FEATURES.get("amx-bf16")))
    )


def _attend_floats(address: Any) -> None:
    _attend(address, np.float32, np.float32, 4)


def _attend_halves(address: Any) -> None:
    _attend(address, np.uint16, np.int32, 2)


_ENTRIES = {torch.float32: _attend_floats, torch.bfloat16: _attend_halves}


@jit_part
def _attend(address, number, word, size):
    """Attention per group of rows and KV head, over the nodes of the rows' trees and the heads that share the KV head.

    `number` is the element type of the tensors, of `size` bytes; a `word` has 4 bytes.
    """
    numbers = array_at(address, (22,), np.int64)
    parts, query_at, keys_at, values_at, nodes_at, trees_at, groups_at, threads_at, out_at = numbers[1:10]
    rows, width, heads, dim, slots, kv_heads, step, most, bits, window, cap_bits, sinks_at = numbers[10:]
    softcap, sinks = np.int32(cap_bits).view(np.float32), array_at(sinks_at, (heads,), np.float32)
    per_kv, scale, is_half = heads // kv_heads, np.int32(bits).view(np.float32), size == 2
    trees = array_at(trees_at, (rows, 4), np.int64)
    groups = array_at(groups_at, (rows, 2 + MAX_SHARING), np.int64)
    most_rows = most_rows_of(groups, trees, per_kv) + ROWS  # a tile of one depth's nodes may end after the last row
    queries, sums = np.zeros((most_rows, dim), np.float32), np.empty((most_rows, dim), np.float32)
    pairs = np.zeros((most_rows, dim // 2), np.int32)  # of the queries, for the CPU's instruction
    peaks, totals, tops = np.empty(most_rows, np.float32), np.empty(most_rows, np.float32), np.empty(ROWS, np.float32)
    scores, of_nodes = np.zeros((ROWS, LINE), np.float32), np.empty((most_rows, most), np.float32)
    transposed, block = np.empty((dim, STEP), np.float32), np.empty((BLOCK, dim), np.float32)
    owners = np.empty(most, np.int64)  # by depth, the node whose values are in the block
    units, whole, turns = units_of(groups, trees, kv_heads, array_at(threads_at, (1,), np.int64)[0])
    part = claim_part(address)
    while part < parts:
        unit, turn, of = part, 0, 1
        if part >= whole:
            unit, turn, of = whole + (part - whole) // turns, (part - whole) % turns, turns
        if unit >= units:
            part = claim_part(address)
            continue
        group, head = groups[unit // kv_heads], unit % kv_heads
        shared, filled, before, of_group = group[0], 0, 0, nodes_of(group, trees)
        from_node, to_node = of_group * turn // of, of_group * (turn + 1) // of
        for row in group[2 : 2 + group[1]] if window else group[:0]:
            if trees[row, 0] + trees[row, 1] > window:  # keys are not all seen
                shared = 0
        peaks[:], totals[:], sums[:] = -np.inf, 0.0, 0.0
        for row in group[2 : 2 + group[1]]:
            _, count, scored, first = share_of(trees[row], before, from_node, to_node)
            before += trees[row, 1] - trees[row, 2]
            query = array_at(query_at + size * first * heads * dim, (width, heads, dim), number)
            rest = (count - scored) * per_kv
            _load_queries(query, head, per_kv, scale, is_half, queries[filled : filled + rest], pairs[filled:])
            filled += whole_tiles((count - scored) * per_kv)
        tiled, filled, before = (filled + ROWS - 1) // ROWS * ROWS, 0, 0
        for member in range(group[1]):
            row = group[2 + member]
            start, count, scored, first = share_of(trees[row], before, from_node, to_node)
            before += trees[row, 1] - trees[row, 2]
            out = array_at(out_at + size * first * heads * dim, (width, heads, dim), number)
            keys, values = (
                array_at(keys_at + size * row * step, (slots, kv_heads, dim), number),
                array_at(values_at + size * row * step, (slots, kv_heads, dim), number),
            )
            words = array_at(keys_at + size * row * step, (slots, kv_heads, dim * size // 4), word)
            flat = array_at(values_at + size * row * step, (slots * kv_heads * dim * size // 4,), np.float32)
            nodes = array_at(nodes_at + 16 * row * most, (2, most), np.int64)
            for begin in range(0, 0 if member else shared, BLOCK):
                common = min(BLOCK, shared - begin)
                load_block(keys, words, values, begin, common, head, transposed, block, is_half)
                _attend_shared(
                    queries[:tiled], pairs, transposed, block, words, flat, begin, common, head, kv_heads,
                    scale, softcap, is_half, scores, tops, peaks, totals, sums,
                )  # fmt: skip
            end = filled + whole_tiles((count - scored) * per_kv)
            node, own = scored, np.int64(0)
            while node < count:
                # In bfloat16 the sums of a window begin with its first key, which all nodes of one depth share.
                until = end_of_depth(nodes[1], node, count) if window and is_half else count
                begin = filled + own * per_kv
                ending = begin + whole_tiles((until - node) * per_kv)
                base = max(0, start + shallowest(nodes[1], node, until) + 1 - window) if window else 0
                _attend_tree(
                    keys[base:], values[base:], words[base:], flat[base * kv_heads * dim * size // 4 :],
                    nodes[0], nodes[1], start - base, until, node, shared, head, per_kv, scale, window, softcap,
                    is_half, queries[begin:ending], pairs[begin:ending], scores, of_nodes, tops, sums[begin:ending],
                    peaks[begin:ending], totals[begin:ending], transposed, block, owners,
                )  # fmt: skip
                own += until - node
                node = until
                sums[filled + own * per_kv : ending] = 0.0  # of the last tile, which later depths share
            for i in range((count - scored) * per_kv):
                of_head, total = head * per_kv + i % per_kv, totals[filled + i]
                if sinks_at:
                    total += exp(sinks[of_head] - peaks[filled + i])
                share, written = _F(1.0) / total, out[i // per_kv, of_head]
                for at in range(dim):
                    written[at] = narrow(sums[filled + i, at] * share, written[at])
            filled = end
        part = claim_part(address)


@jit_part
def _cap(line, size, softcap):
    """Bound scores smoothly."""
    for i in range(size):
        line[i] = softcap - _F(2.0) * softcap / (exp(_F(2.0) * line[i] / softcap) + _F(1.0))


@jit_part
def _load_queries(query, head, per_kv, scale, is_half, queries, pairs):
    for row in range(len(queries)):
        line = query[row // per_kv, head * per_kv + row % per_kv]
        for i in range(len(line)):
            queries[row, i] = widen(line[i]) * (_F(1.0) if is_half else scale)
        if is_half:
            pair_fourths(line, 0, pairs[row])


@jit_part
def _attend_shared(
    queries, pairs, transposed, block, words, flat, begin, common, head, kv_heads, scale, softcap, is_half, scores,
    tops, peaks, totals, sums,
):  # fmt: skip
    """Attend to a block of keys that all queries see."""
    lines = BLOCK // LANES * (words.shape[2] // LANES)
    for first in range(0, len(queries), ROWS):
        ahead = (
            words,
            flat.reshape(words.shape),
            begin + BLOCK,
            head,
            lines * first // len(queries),
            lines * (first + ROWS) // len(queries),
        )
        score_prompt(queries, pairs, first, ROWS, transposed, common, scale, is_half, scores, ahead)
        for row in range(ROWS):
            if softcap:
                _cap(scores[row], common, softcap)
            tops[row] = peak_of_line(scores[row], common, peaks[first + row])
        for row in range(ROWS):
            weigh_more(scores[row], common, first + row, begin, tops[row], is_half, peaks, totals, sums)
        if is_half:
            add_fours(scores, block, common, sums, first, ROWS)
        else:
            add_sums(scores, flat, begin, common, head, kv_heads, sums, first, ROWS)


@jit_part
def _attend_tree(
    keys, values, words, flat, parents, depths, start, count, scored, shared, head, per_kv, scale, window,
    softcap, is_half, queries, pairs, scores, of_nodes, tops, sums, peaks, totals, transposed, block, owners,
):  # fmt: skip
    """One pass over the blocks of keys after the shared ones."""
    rows, deepest, kv_heads = (count - scored) * per_kv, 0, keys.shape[1]
    lines = BLOCK // LANES * (words.shape[2] // LANES)
    for node in range(scored, count):
        deepest = max(deepest, depths[node])
    score_nodes(
        keys, words, values, flat, start, count, head, queries, pairs, transposed, scale, is_half, scores, of_nodes,
    )  # fmt: skip
    for begin in range(shared, start + deepest + 1, BLOCK):
        common = max(0, min(BLOCK, start - begin))  # keys of the prompt
        whole = common // TOGETHER * TOGETHER if is_half else common
        load_block(keys, words, values, begin, common, head, transposed, block, is_half)
        owners[:] = -1
        for first in range(0, rows, ROWS):
            tile = min(ROWS, len(queries) - first)
            ahead = (
                words,
                flat.reshape(words.shape),
                begin + BLOCK,
                head,
                lines * first // rows,
                lines * min(rows, first + ROWS) // rows,
            )
            score_prompt(queries, pairs, first, tile, transposed, common, scale, is_half, scores, ahead)
            for row in range(first, min(first + ROWS, rows)):
                node, line = scored + row // per_kv, scores[row - first]
                size = min(BLOCK, start + depths[node] + 1 - begin)
                if size > common:
                    take_path(node, size, common, start - begin, parents, depths, of_nodes[row], line)
                if softcap and size > 0:
                    _cap(line, size, softcap)
                if window:  # the first keys may be before it; a later one in the block is not
                    line[: max(0, min(size, start + depths[node] + 1 - window - begin))] = -_FAR
                tops[row - first] = peak_of_line(line, size, peaks[row]) if size > 0 else peaks[row]
            for row in range(first, min(first + ROWS, rows)):
                size = min(BLOCK, start + depths[scored + row // per_kv] + 1 - begin)
                if size > 0:
                    weigh_more(scores[row - first], size, row, begin, tops[row - first], is_half, peaks, totals, sums)
            if is_half:
                add_fours(scores, block, whole, sums, first, tile)
            else:
                add_sums(scores, flat, begin, whole, head, kv_heads, sums, first, tile)
            for row in range(first, min(first + ROWS, rows)):
                node = scored + row // per_kv
                size = min(BLOCK, start + depths[node] + 1 - begin)
                if size > whole:
                    load_path(node, size, common, start - begin, values, start, head, parents, depths, owners, block)
                    add_rest(scores[row - first], block, whole, size, sums[row], values[0, 0, 0])
