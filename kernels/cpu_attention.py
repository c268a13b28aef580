"""Attention of token trees over a slot cache on one thread of a CPU, packed by KV head, the tree mask as bits.

Computes what `lookahead.kernels.tree_attention` computes on a GPU, one block after the other. The columns of every
matrix are queries, so that all steps of the softmax are operations on whole registers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lookahead.kernels.microkernel import COLUMNS, LANES, ROWS, STRIDE, multiply
from lookahead.kernels.scalars import exp, jit_part
from lookahead.utils.jit import njit

BLOCK = 128  # slots worked on at once
_SHIFTS = {torch.float32: (torch.int32, 0), torch.bfloat16: (torch.int16, 16)}  # how many bits a float32 has more
_NO_LIMIT = 1 << 30  # positions
_NOTHING = np.float32(-1e30)  # a peak below all scores that is finite
_NO_SINKS = np.zeros(0, np.float32)


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    lengths: Tensor,
    nodes: Tensor,
    depths: Tensor,
    words: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`lookahead.kernels.tree_attention.tree_attention` on a CPU; see there for the arguments.

    The query is float32 or bfloat16, keys and values are slices of whole rows of contiguous buffers in the same type,
    and so is the result, which is computed in float32.
    """
    rows, heads, width, dim = query.shape
    out = query.new_empty(rows, width, heads, values.shape[3], dtype=torch.float32)
    bits, shift = _SHIFTS[query.dtype]
    # Buffers are contiguous; parts of them are not, and the core is compiled for contiguous arrays.
    buffers = [
        slots.as_strided((rows, slots.stride(0) // slots.stride(1), *slots.shape[2:]), slots.stride()).view(bits)
        for slots in (keys, values)
    ]
    tree = lengths.numpy(), nodes.numpy(), depths.numpy(), words.numpy()
    _attend(
        query.transpose(1, 2).float().contiguous().numpy(), buffers[0].numpy(), buffers[1].numpy(), shift, *tree,
        _NO_SINKS if sinks is None else sinks.float().numpy(), out.numpy(),
        dim**-0.5 if scaling is None else scaling, 0.0 if softcap is None else softcap,
        _NO_LIMIT if window is None else window, _NO_LIMIT if chunk is None else chunk,
    )  # fmt: skip
    return out.to(query.dtype)


@njit(cache=True, error_model="numpy", nogil=True)
def _attend(
    query, keys, values, shift, lengths, nodes, depths, words, sinks, out, scaling, softcap, window, chunk
):  # fmt: skip
    """The core of `tree_attention`: per row, tile of queries and KV head one pass over the slots."""
    rows, width, heads, dim = query.shape
    kv_heads, value_dim = keys.shape[2], values.shape[3]
    groups = heads // kv_heads
    queries, scores = np.empty(dim * STRIDE, np.float32), np.empty(BLOCK * STRIDE, np.float32)
    sums, part = np.empty(value_dim * STRIDE, np.float32), np.empty(value_dim * STRIDE, np.float32)
    peaks, totals, fades = np.empty(STRIDE, np.float32), np.empty(STRIDE, np.float32), np.empty(STRIDE, np.float32)
    block = np.empty(BLOCK * max(dim, value_dim), np.float32)
    # Columns beside the queries are computed with whatever mask stands there, and never stored.
    hidden, firsts = np.zeros(width * STRIDE, np.float32), np.empty(STRIDE, np.int64)
    for row in range(rows):
        length, packed = lengths[row], nodes[row] * groups
        for begin in range(0, packed, COLUMNS):
            columns = min(COLUMNS, packed - begin)
            padded = (columns + LANES - 1) // LANES * LANES
            last = (begin + columns + groups - 1) // groups  # nodes see no later ones
            end = length + last
            _build_mask(depths[row], words[row], length, last, begin, columns, groups, window, chunk, hidden, firsts)
            least, most = firsts[:columns].min(), firsts[:columns].max()
            for head in range(kv_heads):
                _load_queries(query[row], head, begin, columns, groups, scaling, sinks, queries, peaks, totals)
                sums[:] = 0.0
                for start in range(least // BLOCK * BLOCK, end, BLOCK):
                    size = min(BLOCK, end - start)
                    _load(keys[row], start, size, head, shift, block)
                    multiply(block, dim, 1, queries, scores, size, dim, padded)
                    if softcap > 0.0:
                        _apply_softcap(scores, size * STRIDE, np.float32(softcap))
                    if start < most:  # hide the slots before a query's first visible position
                        for slot in range(size):
                            for column in range(columns):
                                if start + slot < firsts[column]:
                                    scores[slot * STRIDE + column] = -np.inf
                    for node in range(max(0, start - length), start + size - length):
                        line, mask = scores[(length + node - start) * STRIDE :], hidden[node * STRIDE :]
                        for i in range(padded):
                            line[i] += mask[i]
                    _update_softmax(scores, size, padded, peaks, totals, fades)
                    _load(values[row], start, size, head, shift, block)
                    multiply(block, 1, value_dim, scores, part, value_dim, size, padded)
                    _accumulate(part, value_dim, padded, fades, sums)
                _store(sums, totals, head, begin, columns, groups, out[row])
        out[row, nodes[row] :] = 0.0


@jit_part
def _build_mask(depths, words, length, nodes, begin, columns, groups, window, chunk, hidden, firsts):
    """Fill in every query's first visible position, and the additive mask of its scores of the nodes."""
    for column in range(columns):
        node = (begin + column) // groups
        position = length + depths[node]
        first = max(0, position - window + 1, position // chunk * chunk)
        firsts[column] = first
        for other in range(nodes):
            sees = (words[node, other >> 6] >> (other & 63)) & 1 and length + depths[other] >= first
            hidden[other * STRIDE + column] = 0.0 if sees else -np.inf


@jit_part
def _load_queries(query, head, begin, columns, groups, scaling, sinks, queries, peaks, totals):
    """Put the queries of a KV head into columns, zeros beside them, and start their softmax."""
    factor = np.float32(scaling)
    queries[:] = 0.0
    peaks[:] = _NOTHING
    totals[:] = 0.0
    for column in range(columns):
        node = (begin + column) // groups
        asking = head * groups + begin + column - node * groups
        for i in range(query.shape[2]):
            queries[i * STRIDE + column] = query[node, asking, i] * factor
        if sinks.size > 0:
            peaks[column], totals[column] = sinks[asking], 1.0


@jit_part
def _load(slots, start, size, head, shift, block):
    """Copy the slots of a KV head side by side, as float32, and pad them with zeros to a whole tile of rows."""
    dim = slots.shape[2]
    for slot in range(size):
        source, to = slots[start + slot, head], block[slot * dim : (slot + 1) * dim]
        for i in range(dim):
            to[i] = np.int32(np.int32(source[i]) << shift).view(np.float32)
    block[size * dim : (size + ROWS - 1) // ROWS * ROWS * dim] = 0.0


@jit_part
def _apply_softcap(scores, size, softcap):
    """Apply softcapping; the exponential is at most 1, so that no score overflows."""
    for i in range(size):
        fade = exp(np.float32(-2.0) * abs(scores[i] / softcap))
        bent = softcap * (np.float32(1.0) - fade) / (np.float32(1.0) + fade)
        scores[i] = -bent if scores[i] < 0.0 else bent


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _update_softmax(scores, size, columns, peaks, totals, fades):
    """Replace a block's scores by weights, and compute the factors that rescale the sums of earlier blocks."""
    weights = np.zeros(STRIDE, np.float32)
    for column in range(columns):
        fades[column] = peaks[column]
    for slot in range(size):
        line = scores[slot * STRIDE : slot * STRIDE + columns]
        for column in range(columns):
            peaks[column] = max(peaks[column], line[column])
    for slot in range(size):
        line = scores[slot * STRIDE : slot * STRIDE + columns]
        for column in range(columns):
            line[column] = exp(line[column] - peaks[column])
            weights[column] += line[column]
    for column in range(columns):
        fades[column] = exp(fades[column] - peaks[column])
        totals[column] = totals[column] * fades[column] + weights[column]


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _accumulate(part, dims, columns, fades, sums):
    """Add a block's weighted values to those of earlier blocks."""
    for i in range(dims):
        line, new = sums[i * STRIDE : i * STRIDE + columns], part[i * STRIDE : i * STRIDE + columns]
        for column in range(columns):
            line[column] = line[column] * fades[column] + new[column]


@jit_part
def _store(sums, totals, head, begin, columns, groups, out):
    """Divide by the sums of weights, and write every column to its node and head."""
    for column in range(columns):
        node = (begin + column) // groups
        to = out[node, head * groups + begin + column - node * groups]
        share = np.float32(1.0) / totals[column]
        for i in range(to.size):
            to[i] = sums[i * STRIDE + column] * share
