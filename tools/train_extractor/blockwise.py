"""Causal attention in blocks of queries: the training loop's attention on a CPU.

Torch's fused CPU attention works at a small part of the bf16 matrix speed. Plain batched matrix
products over blocks of queries, each against the keys up to its end, take a fifth to a half of its
time for forward and backward, at the price of keeping the probabilities: length² / 2 a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "lookahead_blockwise"
"""The name it is registered under, for `model.set_attn_implementation`."""

BLOCK = 128
"""Queries in a block."""


class _Blockwise(torch.autograd.Function):
    """softmax(q kᵀ) v with a causal mask over (batch x heads, length, head_dim) tensors."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[1]
        future = torch.full((BLOCK, BLOCK), float("-inf"), dtype=query.dtype).triu(1)
        output = torch.empty_like(query)
        kept = []
        for begin in range(0, length, BLOCK):
            end = min(begin + BLOCK, length)
            scores = query[:, begin:end] @ key[:, :end].transpose(1, 2)
            scores[:, :, begin:end] += future[: end - begin, : end - begin]
            probabilities = torch.softmax(scores, dim=-1)
            output[:, begin:end] = probabilities @ value[:, :end]
            kept.append(probabilities)
        ctx.save_for_backward(query, key, value, output, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, output, *kept = ctx.saved_tensors
        gradient = gradients[0]
        d_query, d_key, d_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        mean = (gradient * output).sum(-1, keepdim=True)  # of the score gradients, under the probabilities
        for index, probabilities in enumerate(kept):
            begin, end = index * BLOCK, min((index + 1) * BLOCK, query.shape[1])
            block = gradient[:, begin:end]
            d_value[:, :end] += probabilities.transpose(1, 2) @ block
            d_scores = block @ value[:, :end].transpose(1, 2)
            d_scores -= mean[:, begin:end]
            d_scores *= probabilities
            d_query[:, begin:end] = d_scores @ key[:, :end]
            d_key[:, :end] += d_scores.transpose(1, 2) @ query[:, begin:end]
        return d_query, d_key, d_value


def blockwise_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal self-attention (batch, heads, length, head_dim) without a cache, in the form transformers calls.

    Rows are right-padded, so there is no mask. Returns (batch, length, heads, head_dim) and no weights.
    """
    batch, heads, length, head_dim = query.shape
    if attention_mask is not None or key.shape[2] != length:
        raise ValueError("blockwise attention takes no mask and no cache")
    scale = head_dim**-0.5 if scaling is None else scaling
    group = heads // key.shape[1]
    flat = (batch * heads, length, head_dim)
    output = _Blockwise.apply(  # type: ignore[no-untyped-call]
        (query * scale).reshape(flat),
        key.repeat_interleave(group, dim=1).reshape(flat),
        value.repeat_interleave(group, dim=1).reshape(flat),
    )
    return output.view(batch, heads, length, head_dim).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, blockwise_attention)
