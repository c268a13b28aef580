"""Causal attention of the tokens of a prompt on a CPU, with the bits of torch's flash attention in bfloat16.

Torch multiplies blocks of queries and keys by MKL, which has no half-precision instructions for CPUs of AMD: it adds
products in float32, one after the other. The CPU's instruction for pairs does so twice as fast. No sum depends on which
queries are multiplied together, except in blocks of a few queries or keys.

Source: for the softmax by blocks Dao et al. 2022, "FlashAttention", §3.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lookahead.kernels.jobs import claim_part, run
from lookahead.kernels.microkernel import FEATURES, LANES, ROWS, tile_of
from lookahead.kernels.scalars import bits_of, jit_part, narrow, widen
from lookahead.kernels.shuffles import pair_rows, transpose
from lookahead.kernels.weighted_sums import BLOCK, COLUMNS, HAS_PAIRS, LINE, peak_of_line, weigh_more
from lookahead.utils.addresses import array_at

FEWEST = 192  # tokens from which the kernel is faster than torch
_TERMS = 192  # most products that MKL adds to each other before it adds their sum to earlier ones
_FEW_QUERIES, _FEW_KEYS = 4, 12  # of a block, below which MKL adds in another order
_TOGETHER = 32  # queries that a thread takes at once
_F = np.float32

_score: Any = tile_of(2, rows=[ROWS]) if HAS_PAIRS else None
_add_one: Any = tile_of(1, "sums", rows=[ROWS]) if HAS_PAIRS else None
_add_two: Any = tile_of(2, "sums", rows=[ROWS]) if HAS_PAIRS else None


def is_supported(query: Tensor, keys: Tensor, values: Tensor, *, as_whole: bool = False) -> bool:
    """Whether `prompt_attention` accepts these tensors."""
    (width, _, dim), slots = query.shape, len(keys)
    few_queries, few_keys = width % _queries_of(width), slots % BLOCK
    is_whole = width == slots or as_whole
    return (
        query.dtype == keys.dtype == values.dtype == torch.bfloat16
        and query.device.type == "cpu"
        and dim == values.shape[2]
        and dim % LANES == 0
        and dim <= _TERMS
        and (width >= FEWEST or (is_whole and width < slots))
        and (is_whole or not (as_whole or 0 < few_queries < _FEW_QUERIES or 0 < few_keys < _FEW_KEYS))
        and HAS_PAIRS
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.cuda.flash_sdp_enabled()  # also for CPUs
        and not FEATURES.get("amx-bf16")  # MKL adds in another order
    )


def prompt_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float, *, as_whole: bool = False) -> Tensor:
    """Attention of the last tokens of a text, each to itself and all tokens before it.

    Whole blocks of `BLOCK` keys are added in the same order in longer texts. So a text that copies some of them from
    another text is as if it had been read as a whole.

    Args:
        query: bfloat16 `[width, heads, dim]`.
        keys: bfloat16 `[slots, kv_heads, dim]`; the last `width` are those of the queries.
        values: Like the keys.
        scale: Factor of the scores.
        as_whole: Whether the tokens have the bits that they have in a pass over the whole text, behind whole blocks;
            else those of torch's call with a mask.

    Returns:
        bfloat16 `[width, heads, dim]`, contiguous.
    """
    query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
    (width, heads, dim), (slots, kv_heads, _) = query.shape, keys.shape
    out, blocks, last = torch.empty_like(query), -(-slots // BLOCK), _of_other_order(slots)
    laid_out = torch.empty((2, kv_heads, blocks, BLOCK * dim // 2), dtype=torch.int32, device="cpu")
    places = [tensor.data_ptr() for tensor in (query, keys, values, laid_out, out)]
    numbers = *places, width, heads, dim, slots, kv_heads, bits_of(scale)
    run(
        (_lay_out, kv_heads * blocks, numbers, (keys, values, laid_out)),
        (_attend, heads * -(-width // _TOGETHER), numbers, (query, laid_out, out)),
    )
    if (width == slots or as_whole) and last:
        seen = torch.ones(last, slots, dtype=torch.bool, device="cpu").tril(slots - last)
        q, k, v = (states.transpose(0, 1)[None] for states in (query[-last:], keys, values))
        rest = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=heads > kv_heads)
        out[-last:] = rest[0].transpose(0, 1)
    return out


def tokens_alike(shared: int, size: int, other: int) -> int:
    """The first of `shared` tokens that two texts of `size` and `other` tokens read with the same bits.

    A token's sums depend on how many keys its block has in the whole text. All but the last block of the shorter text
    are whole. In that one the values of both texts are added in parts of the same number of keys, or the tokens up to
    the first smaller part are alike; the weights of the last keys, fewer than a register holds, are other ones. The
    last tokens of a text may be multiplied in another order.
    """
    shared = min(shared, *(length - _of_other_order(length) for length in (size, other)))
    begin = min(size, other) // BLOCK * BLOCK
    keys = [min(BLOCK, length - begin) for length in (size, other)]
    terms, registers = [_terms_of(count) for count in keys], min(keys) // LANES * LANES
    return min(shared, begin + (registers if terms[0] == terms[1] else min(*terms, registers)))


def _of_other_order(slots: int) -> int:
    """How many of the last tokens of a text torch multiplies in another order, since they are few."""
    last = slots % _queries_of(slots)
    return last if last < _FEW_KEYS else 0


def _queries_of(width: int) -> int:
    """Queries that torch multiplies together."""
    return 256 if width >= 768 else 64 if width >= 192 else 32


@jit_part
def _terms_of(size):
    """How many of `size` products are added to each other before their sum is added to earlier ones."""
    if size <= _TERMS:
        return size
    return size // 2 if size < 2 * _TERMS else _TERMS


@jit_part
def _swap(pairs):
    """Exchange the numbers of every pair: the instruction adds the product of the upper ones at first."""
    for i in range(len(pairs)):
        pairs[i] = (pairs[i] << np.int32(16)) | ((pairs[i] >> np.int32(16)) & np.int32(0xFFFF))


def _lay_out(address: Any) -> None:
    """Lay out the keys of a block in panels, transposed, and pairs of its values; both for one KV head."""
    parts, _, keys_at, values_at, laid_at, _, _, _, dim, slots, kv_heads, _ = array_at(address, (13,), np.int64)[1:]
    blocks, half = parts // kv_heads, dim // 2
    keys, step = array_at(keys_at, (slots * kv_heads * half,), np.int32), kv_heads * half
    values = array_at(values_at, (slots, kv_heads, dim), np.uint16)
    laid_out = array_at(laid_at, (2, parts, BLOCK * half), np.int32)
    part = claim_part(address)
    while part < parts:
        head, begin = part // blocks, part % blocks * BLOCK
        size, panels = min(BLOCK, slots - begin), laid_out[0, part]
        for slot in range(0, (size + COLUMNS - 1) // COLUMNS * COLUMNS, LANES):
            to, first = slot // COLUMNS * COLUMNS * half + slot % COLUMNS, (begin + slot) * step + head * half
            together = half // LANES * LANES if slot + LANES <= size else 0
            for word in range(0, together, LANES):
                source = keys.view(np.float32), first + word, step
                transpose(source, (panels.view(np.float32), to + word * COLUMNS, COLUMNS))
            for word in range(together, half):
                for i in range(LANES):
                    panels[to + word * COLUMNS + i] = keys[first + i * step + word] if slot + i < size else 0
        _swap(panels)
        _pair_values(values, begin, head, size, laid_out[1, part].reshape(BLOCK // 2, dim))
        part = claim_part(address)


@jit_part
def _pair_values(values, begin, head, size, pairs):
    """Pair the values of neighbouring keys of a part, the earlier one in the upper half."""
    terms, at, (_, kv_heads, dim), flat = _terms_of(size), 0, values.shape, values.reshape(values.size)
    step = kv_heads * dim
    for first in range(begin, begin + size, terms):
        end = min(begin + size, first + terms)
        for slot in range(first, end - 1, 2):
            for i in range(0, dim, LANES):
                place = (slot + 1) * step + head * dim + i
                pair_rows((flat, place, -step), (pairs.reshape(pairs.size), at * dim + i))
            at += 1
        if (end - first) % 2:
            for i in range(dim):
                pairs[at, i] = np.int32(values[end - 1, head, i]) << np.int32(16)
            at += 1


def _attend(address: Any) -> None:
    """Attention of some tokens in one head."""
    numbers = array_at(address, (13,), np.int64)
    parts, query_at, _, _, laid_at, out_at, width, heads, dim, slots, kv_heads, bits = numbers[1:]
    half, start, blocks = dim // 2, slots - width, (slots + BLOCK - 1) // BLOCK
    scale, chunks = np.int32(bits).view(np.float32), parts // heads
    query = array_at(query_at, (width, heads, half), np.int32)
    laid_out = array_at(laid_at, (2, kv_heads, blocks, BLOCK * half), np.int32)
    out = array_at(out_at, (width, heads, dim), np.uint16)
    queries, sums = np.zeros((_TOGETHER, half), np.int32), np.empty((_TOGETHER, dim), np.float32)
    peaks, totals = np.empty(_TOGETHER, np.float32), np.empty(_TOGETHER, np.float32)
    scores = np.zeros((_TOGETHER, LINE), np.float32)
    part = claim_part(address)
    while part < parts:
        head, first = part % heads, (chunks - 1 - part // heads) * _TOGETHER  # the longest at first
        count = min(_TOGETHER, width - first)
        for row in range(count):
            line, own_query = query[first + row, head], queries[row]
            for at in range(half):
                own_query[at] = line[at]
            _swap(own_query)
        peaks[:], totals[:], sums[:] = -np.inf, 0.0, 0.0
        tiled, of_head = (count + ROWS - 1) // ROWS * ROWS, head // (heads // kv_heads)
        for block in range((start + first + count + BLOCK - 1) // BLOCK):
            begin = block * BLOCK
            size = min(BLOCK, slots - begin)
            seen = min(size, start + first + count - begin)  # by the last query
            keys, values = laid_out[0, of_head, block], laid_out[1, of_head, block]
            for column in range(0, seen, COLUMNS):
                for row in range(0, tiled, ROWS):
                    to = scores, row * LINE + column, LINE, scale
                    _score((queries, row * half, half, 1), (keys, column * half, COLUMNS), to, ROWS, half)
            for row in range(count):
                own = min(size, start + first + row + 1 - begin)
                _weigh(scores[row], own, seen, size, row, begin, peaks, totals, sums)
            _add(scores.view(np.int32), values, seen, size, sums, tiled)
        for row in range(count):
            share, written = _F(1.0) / totals[row], out[first + row, head]
            for at in range(dim):
                written[at] = narrow(sums[row, at] * share, written[at])
        part = claim_part(address)


@jit_part
def _weigh(line, own, seen, size, row, begin, peaks, totals, sums):
    """Turn the scores of a query, which sees the first `own` keys of a block, into pairs of weights from `BLOCK` on."""
    whole, bits, weighed = size // LANES * LANES, line.view(np.int32), max(0, own)
    if own > 0:
        if own < whole:
            weighed = min(whole, (own + COLUMNS - 1) // COLUMNS * COLUMNS)
            for i in range(own, weighed):
                line[i] = -np.inf
        peak = peak_of_line(line, weighed, peaks[row])
        weigh_more(line, weighed, row, begin, peak, True, peaks, totals, sums, True)
    terms, end = _terms_of(size), (seen + 1) // 2 * 2
    if terms % 2 and terms < size:
        for i in range(end):
            line[i] = widen(narrow(line[i], np.uint16(0))) if i < weighed else _F(0.0)
        _pair_parts(bits, terms, seen)
        return
    for i in range(weighed // COLUMNS * COLUMNS, end, 2):
        one, other = bits[i] if i < weighed else np.int32(0), bits[i + 1] if i + 1 < weighed else np.int32(0)
        bits[BLOCK + i // 2] = one | ((other >> np.int32(16)) & np.int32(0xFFFF))


@jit_part
def _pair_parts(bits, terms, seen):
    """Pair weights of parts that have an odd number of them."""
    to = BLOCK
    for first in range(0, seen, terms):
        for i in range(first, min(seen, first + terms), 2):
            bits[to] = bits[i]
            if i + 1 < min(seen, first + terms):
                bits[to] |= (bits[i + 1] >> np.int32(16)) & np.int32(0xFFFF)
            to += 1


@jit_part
def _add(pairs, values, seen, size, sums, tiled):
    """Add the weighted values of a block."""
    terms, dim, at = _terms_of(size), sums.shape[1], 0
    for first in range(0, seen, terms):
        count = (min(seen, first + terms) - first + 1) // 2
        for row in range(0, tiled, ROWS):
            of_rows = pairs, row * LINE + BLOCK + at, LINE, 1
            for column in range(0, dim, COLUMNS):
                right, to = (values, at * dim + column, dim), (sums, row * dim + column, dim)
                if dim - column > LANES:
                    _add_two(of_rows, right, to, ROWS, count)
                else:
                    _add_one(of_rows, right, to, ROWS, count)
        at += (terms + 1) // 2
