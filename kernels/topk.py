"""The likeliest tokens of logits: found in one pass over them on a CPU, elsewhere by torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.kernels.scalars import exp, jit_part
from lookahead.utils.addresses import array_at
from lookahead.utils.jit import njit

IntArray = NDArray[np.int32]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of CPU logits that are read by the kernel
_BLOCK = 64  # logits; the maximum of a block is kept, so that most logits are read once
_AT_ONCE = 1 << 18  # logits converted to float32 at a time, so that the copy fits a core's cache
_LOWEST = np.iinfo(np.int32).min
_INFINITY = np.int32(0x7F800000)  # the bits of the float32


@dataclass(slots=True)  # not frozen, which would double the time to create one
class Scores:
    """The most likely tokens after every node, before any logits processor; empty or None if not requested."""

    argmax: IntArray  # int32 `[rows, nodes]`, negative if logits are NaN
    top: IntArray | None = None  # int32 `[rows, nodes, count]`, most likely first, -1 beyond the vocabulary
    probabilities: NDArray[np.float32] | None = None  # float32 `[rows, nodes, count]`, 0 if logits are not finite


def likeliest(scores: Tensor) -> Tensor:
    """The index of the highest of `[..., vocab]` scores, int32 `[...]`; negative if one is NaN."""
    values, indices = scores.max(-1)
    return torch.where(values.isnan(), -1, indices).to(torch.int32)


def read_scores(logits: Tensor, count: int = 0, ranks: Tensor | None = None) -> Scores:
    """Find the argmax and the `count` likeliest tokens of logits `[rows, nodes, vocab]`; one copy to the host.

    Ties are broken by the lower id, except by torch among the likeliest tokens. `ranks` are `ranked(logits, count)` if
    the pass made them; then the logits are not read.
    """
    if ranks is not None:
        return _read_ranks(ranks)
    if logits.device.type != "cpu" or logits.dtype not in DTYPES:
        return _read_ranks(ranked(logits, count))
    rows, nodes, vocabulary = logits.shape
    argmax = np.empty((rows, nodes), np.int32)
    top, chances = np.empty((rows, nodes, count), np.int32), np.empty((rows, nodes, count), np.float32)
    results = argmax.reshape(-1), top.reshape(rows * nodes, count), chances.reshape(rows * nodes, count)
    logits = logits.contiguous()
    # By their address: torch's operators would take longer than a small kernel.
    if logits.dtype == torch.float16:
        flat, step = logits.view(-1, vocabulary), max(1, _AT_ONCE // vocabulary)
        for begin in range(0, rows * nodes, step):
            part = flat[begin : begin + step].float()
            _rank(part.data_ptr(), vocabulary, *(result[begin : begin + step] for result in results))
    else:
        rank = _rank_halves if logits.dtype == torch.bfloat16 else _rank
        rank(logits.data_ptr(), vocabulary, *results)
    return Scores(argmax, top, chances) if count else Scores(argmax)


def ranked(logits: Tensor, count: int) -> Tensor:
    """The argmax, the likeliest tokens and the bits of their probabilities: int32 `[rows, nodes, 1 + 2 * count]`.

    A recorded pass may make them.
    """
    argmax = likeliest(logits)[..., None]
    if not count:
        return argmax
    chances, top = logits.softmax(-1, dtype=torch.float32).topk(min(count, logits.shape[-1]))
    chances = chances.nan_to_num(0.0)
    if top.shape[-1] < count:
        missing = (0, count - top.shape[-1])
        chances, top = torch.nn.functional.pad(chances, missing), torch.nn.functional.pad(top, missing, value=-1)
    # The first of the top may not be the argmax: among equal logits greedy decoding takes the lowest token.
    return torch.cat((argmax, top.int(), chances.view(torch.int32)), -1)


def _read_ranks(ranks: Tensor) -> Scores:
    packed = ranks.cpu().numpy()
    count = packed.shape[-1] // 2
    if not count:
        return Scores(np.ascontiguousarray(packed[..., 0]))
    return Scores(
        np.ascontiguousarray(packed[..., 0]),
        np.ascontiguousarray(packed[..., 1 : count + 1]),
        np.ascontiguousarray(packed[..., count + 1 :]).view(np.float32),
    )


@jit_part
def _key(bits):
    """An integer with the order of the float32 with these bits, unless it is NaN; 0 for both zeros."""
    return bits if bits >= 0 else np.int32(_LOWEST - bits)


@jit_part
def _highest(bits):
    """The maximum key of a block, and the maximum bits of its magnitudes, which exceed infinity's for a NaN."""
    key, magnitude = np.int32(_LOWEST), np.int32(0)
    for i in range(bits.size):
        key = max(key, _key(bits[i]))
        magnitude = max(magnitude, np.int32(bits[i] & 0x7FFFFFFF))
    return key, magnitude


@njit(error_model="numpy", nogil=True)
def _rank(address, vocabulary, argmax, top, chances):
    """Rank the float32 logits of some nodes, which begin at an address."""
    shape = argmax.size, vocabulary
    values, bits = array_at(address, shape, np.float32), array_at(address, shape, np.int32)
    blocks = np.empty((vocabulary + _BLOCK - 1) // _BLOCK, np.int32)
    for row in range(argmax.size):
        argmax[row] = _rank_row(values[row], bits[row], blocks, top[row], chances[row])


@njit(error_model="numpy", nogil=True)
def _rank_halves(address, vocabulary, argmax, top, chances):
    """The same of bfloat16 logits."""
    halves = array_at(address, (argmax.size, vocabulary), np.int16)
    bits = np.empty(vocabulary, np.int32)
    values = bits.view(np.float32)
    blocks = np.empty((vocabulary + _BLOCK - 1) // _BLOCK, np.int32)
    for row in range(argmax.size):
        for at in range(vocabulary):
            bits[at] = np.int32(halves[row, at]) << 16
        argmax[row] = _rank_row(values, bits, blocks, top[row], chances[row])


@jit_part
def _rank_row(values, bits, blocks, top, chances):
    """Fill the likeliest tokens of a node and their probabilities; returns the likeliest, or -1 for a NaN."""
    magnitude = np.int32(0)
    top[:], chances[:] = -1, 0.0
    for block in range(blocks.size):
        blocks[block], largest = _highest(bits[block * _BLOCK : (block + 1) * _BLOCK])
        magnitude = max(magnitude, largest)
    if magnitude > _INFINITY:
        return -1
    highest = blocks.argmax()
    token = highest * _BLOCK
    while _key(bits[token]) != blocks[highest]:
        token += 1
    if top.size > 0:
        _insert_best(bits, blocks, np.empty(top.size, np.int32), top)
        _weigh(values, values[token], top, chances)
    return token


@jit_part
def _insert_best(bits, blocks, best, top):
    """Fill `top` with the tokens of the highest keys by insertion; skips blocks below the lowest of them."""
    count, last = 0, best.size - 1
    best[:] = _LOWEST
    for block in range(blocks.size):
        if count > last and blocks[block] <= best[last]:
            continue
        for token in range(block * _BLOCK, min(bits.size, (block + 1) * _BLOCK)):
            key = _key(bits[token])
            if count > last and key <= best[last]:
                continue
            at = min(count, last)
            while at > 0 and best[at - 1] < key:
                best[at], top[at] = best[at - 1], top[at - 1]
                at -= 1
            best[at], top[at] = key, token
            count += 1


@njit(fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")
def _weigh(values, peak, top, chances):
    """Compute the probabilities of the tokens in `top`; `peak` is the maximum of the logits."""
    total = np.float32(0.0)
    for token in range(values.size):
        total += exp(values[token] - peak)
    if total > 0.0:  # else the maximum is infinite
        for i in range(min(top.size, values.size)):
            chances[i] = exp(values[top[i]] - peak) / total
