"""Inputs of attention for comparisons of bits, where any other order of sums, or any other function, changes a result.

Random inputs seldom do: a result in bfloat16 shows the last bit of a float32 once in thousands of times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lookahead.kernels.weighted_sums import BLOCK

_LENGTHS = (1, 7, 16, 40, 100, 530, 1060)  # numbers of keys of single queries
# Scores times 2 ** 15. Their exponentials are so near the middle of two numbers that functions of float32 round them
# otherwise than those of float64, which changes the sum of weights.
_BETWEEN = (-25757, -30663, -30955, -37541, -45145)
_FALLING = tuple(-1.5 - 2 * at for at in range(6))  # scores of keys whose values make outputs ever more exact
_MANY, _SUMS = (24, 52, 560), 16  # more keys, whose weights are alike, and sums of as many
_FEW_KEYS, _TIES, _NEAREST = (7, 20, 60), 1 << 14, 64  # numbers of keys, and of queries that are tried and taken
_EXACT: Any = {"dtype": torch.float64, "device": "cpu"}  # a user may have set others


def cancelling(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    prompts: Sequence[int] = (),
    lengths: Sequence[int] = _LENGTHS,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values whose scores, or values, nearly cancel, which reveals any other order of sums.

    Args:
        dtype: Their type.
        heads: Heads of queries.
        kv_heads: Heads of keys and of values.
        dim: Numbers of a head.
        prompts: Lengths of prompts, of which every token has a query; if there are none, queries are single.
        lengths: Numbers of keys of single queries.

    Yields:
        Queries `[1, heads, 1 or length, dim]`, keys and values `[1, kv_heads, length, dim]`.
    """
    source = torch.Generator().manual_seed(0)
    for length in prompts or lengths:
        query, key, value = (
            torch.randn(1, count, rows, dim, generator=source, dtype=torch.float32, device="cpu")
            for count, rows in ((heads, length if prompts else 1), (kv_heads, length), (kv_heads, length))
        )
        half = dim // 2
        # The remaining scores are near 1.
        near = torch.cat([key[..., :half], key[..., :half]], 3) * 2**11
        far = torch.cat([query[..., :half], -query[..., :half]], 3) * 2**11
        pairs = value.clone()
        pairs[:, :, 1::2] = -pairs[:, :, : length // 2 * 2 : 2]
        same = key.clone()
        same[:, :, 1::2] = same[:, :, : length // 2 * 2 : 2]
        # Shuffled, because an order that starts with neighbours would lose nothing of adjacent pairs.
        places = torch.randperm(length, generator=source, device="cpu")
        same, pairs = same[:, :, places], pairs[:, :, places]
        for inputs in ((query, key, value), (far, near, value), (query, same, pairs)):
            one, keys, values = (tensor.to(dtype) for tensor in inputs)
            yield one, keys, values


def few_weights() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Single queries, and few keys and values, whose outputs are next to the middle of two numbers of bfloat16.

    So these show the last bit of the sum of weights, and with it how the exponentials of single numbers are rounded.
    """
    for between in _BETWEEN:
        yield _near_middles(torch.tensor([[0, between / 2**15, *_FALLING]], **_EXACT), 2**-26)


def many_weights() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The same of so many keys of about one weight that the last bit shows the order of their sum.

    It also shows the exponentials of whole vectors, and the factor of earlier blocks, whose peaks are lower.
    """
    source = torch.Generator().manual_seed(0)
    for length in _MANY:
        more = torch.rand(_SUMS, length, generator=source, **_EXACT) * -0.75
        more += torch.arange(length, device="cpu") // BLOCK * 0.25
        few = torch.tensor([[0, -0.25, *_FALLING]] * _SUMS, **_EXACT)
        # Torch's exponentials of vectors are less exact, and so is what is known here about their sums.
        yield _near_middles(torch.cat([few, more], 1), 2**-22)


def near_ties(made: Tensor, sink: float | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Single queries of heads with keys of their own, whose weights are next to the middle of two bfloat16 numbers.

    So these show the last bit of the sum of weights. Values are units: outputs are the weights.

    Args:
        made: What becomes of every score before the softmax, bfloat16 `[65536]` by its bits.
        sink: A score without a value, if there is one.
    """
    source, dim = torch.Generator().manual_seed(0), 64
    for length in _FEW_KEYS:
        scores = torch.rand(_TIES, length, generator=source, dtype=torch.float32, device="cpu") * -16
        scores = scores.bfloat16()
        shown = made[scores.view(torch.int16).int() & 0xFFFF]
        if sink is not None:
            shown = torch.cat([shown, torch.full_like(shown[:, :1], sink)], 1)
            shown = shown - shown.amax(1, keepdim=True)
        weights = shown.double().softmax(1)
        places = weights.frexp().mantissa * 2**8 % 1
        scores = scores[(places - 0.5).abs().amin(1).topk(_NEAREST, largest=False).indices]
        query, keys = (torch.zeros(1, _NEAREST, rows, dim, dtype=torch.bfloat16, device="cpu") for rows in (1, length))
        query[..., 0], keys[0, ..., 0] = 1.0, scores
        yield query, keys, torch.eye(length, dim, dtype=torch.bfloat16, device="cpu").expand_as(keys).contiguous()


def _near_middles(scores: Tensor, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """Single queries, keys and values of heads with these scores, float64 `[heads, keys]`.

    The first keys have values such that outputs are next to the middle of two numbers, a relative `step` apart; those
    of the others are 0.
    """
    heads, count = scores.shape
    query, keys, values = (
        torch.zeros(1, heads, rows, 64, dtype=torch.bfloat16, device="cpu") for rows in (1, count, count)
    )
    first = scores.bfloat16()
    query[..., :2] = 8.0  # the root of 64, as scores are divided by it
    keys[0, ..., 0], keys[0, ..., 1] = first, scores - first
    scores = keys[0, ..., :2].double().sum(2)[..., None]
    peak, weights = scores[:, :BLOCK].amax(1, keepdim=True).exp(), scores[:, : 2 + len(_FALLING)].exp()
    weights = (weights / peak).bfloat16() * peak  # those of the first block
    aims = (1 + 2**-8) * scores.exp().sum(1) * (1 + torch.arange(-32, 32, **_EXACT) * step)
    for key, weight in enumerate(weights.unbind(1)):
        values[0, :, key] = aims / weight
        aims = aims - values[0, :, key] * weight
    return query, keys, values
