"""One Llama decoder layer in parts, and its KV cache, for heads that attend to earlier positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

_GROWTH = 1.5  # spare capacity of a cache that is made anew

Rotation = LlamaRotaryEmbedding
"""Cosines and sines `[batch, tokens, dim]` at int64 positions `[batch, tokens]`, in the dtype of its first argument."""


class Norm(nn.Module):
    """Root mean square norm, computed in fp32 by one fused operation."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` to the same."""
        return F.rms_norm(x.float(), x.shape[-1:], None, self._eps).to(x.dtype) * self.weight


class Attention(nn.Module):
    """The projections of an attention layer.

    Args:
        config: Sizes, as of a Llama.
        reads: Size of the input of queries, keys and values, which may be wider than the hidden states.
    """

    def __init__(self, config: LlamaConfig, reads: int) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim or config.hidden_size // config.num_attention_heads
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        self.q_proj = nn.Linear(reads, heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(reads, kv_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(reads, kv_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=False)

    def heads_of(self, projected: Tensor) -> Tensor:
        """`[batch, tokens, heads · dim]` to `[batch, heads, tokens, dim]`."""
        heads: Tensor = projected.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)


class DraftLayer(nn.Module):
    """Attention and an MLP, in parts: the caller keeps the keys and values.

    Args:
        config: Sizes, as of a Llama.
        reads: Size of the input of queries, keys and values.
    """

    def __init__(self, config: LlamaConfig, reads: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, reads)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def query(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Queries `[batch, heads, tokens, dim]` of `[batch, tokens, reads]`."""
        return rotate(self.self_attn.heads_of(self.self_attn.q_proj(x)), rotation)

    def keys_values(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values, `[batch, kv heads, tokens, dim]` each, of `[batch, tokens, reads]`."""
        attention = self.self_attn
        return rotate(attention.heads_of(attention.k_proj(x)), rotation), attention.heads_of(attention.v_proj(x))

    def finish(self, residual: Tensor, context: Tensor) -> Tensor:
        """The output of the layer, `[batch, tokens, hidden]`.

        Args:
            residual: `[batch, tokens, hidden]`, what attention is added to.
            context: `[batch, heads, tokens, dim]`, what attention gives.
        """
        hidden: Tensor = residual + self.self_attn.o_proj(context.transpose(1, 2).flatten(2))
        added: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + added


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of dimensions of `[batch, heads, tokens, dim]` by cosines and sines `[batch, tokens, dim]`."""
    (first, second), (cosine, sine) = x.chunk(2, dim=-1), (each[:, None] for each in rotation)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of few queries to keys of fewer heads.

    Query heads that share keys are stacked as further queries, so that no key is copied. On a CPU that is several
    times as fast as `enable_gqa`.

    Args:
        query: `[batch, heads, tokens, dim]`.
        keys: `[batch, kv heads, keys, dim]`.
        values: As the keys.
        mask: bool `[batch, tokens, keys]`, the visible keys.

    Returns:
        `[batch, heads, tokens, dim]`.
    """
    shared = query.shape[1] // keys.shape[1]
    packed = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[3])
    context = F.scaled_dot_product_attention(packed, keys, values, mask.repeat(1, shared, 1)[:, None])
    return context.view(query.shape)


def take(states: Tensor, index: Tensor) -> Tensor:
    """States `[rows, n, size]` at int64 positions `[rows, n]` of `[rows, tokens, size]`."""
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))


class DraftCache:
    """Keys and values of one layer: those of committed tokens first, those of a draft tree behind them.

    Args:
        rows: Maximum number of rows.

    Attributes:
        lengths: Committed tokens of each row.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._states: tuple[Tensor, Tensor] | None = None
        self.lengths = [0] * rows

    def write(self, rows: Sequence[int], first: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Write keys and values `[rows, kv heads, n, dim]` into the n slots from `first` on of each row."""
        end = max(first) + keys.shape[2]
        if self._states is None or self._states[0].shape[1] < end:
            self._grow(end, keys)
        assert self._states is not None
        for held, new in zip(self._states, (keys, values), strict=True):
            for i, (row, slot) in enumerate(zip(rows, first, strict=True)):
                held[row, slot : slot + new.shape[2]] = new[i].transpose(0, 1)

    def read(self, rows: Sequence[int], end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some rows, `[rows, kv heads, end, dim]` each; adjacent rows are not copied."""
        assert self._states is not None
        is_adjacent = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        index = slice(rows[0], rows[0] + len(rows)) if is_adjacent else list(rows)
        keys, values = (held[index][:, :end].transpose(1, 2) for held in self._states)
        return keys, values

    def extend(
        self, layer: DraftLayer, rotation: Rotation, rows: Sequence[int], new: Sequence[int], read: Tensor, add: Tensor
    ) -> Tensor:
        """Commit the new tokens of some rows, and run the layer at the last one of each row.

        Args:
            layer: The layer.
            rotation: Its rotary embedding.
            rows: The rows.
            new: Number of new tokens of each.
            read: `[rows, most, reads]`, the input of attention; shorter rows are padded on the right.
            add: `[rows, most, hidden]`, what attention is added to.

        Returns:
            `[rows, hidden]`.
        """
        first = [self.lengths[row] for row in rows]
        positions = torch.tensor(first, device=read.device)[:, None] + torch.arange(max(new), device=read.device)
        self.write(rows, first, *layer.keys_values(read, rotation(read, positions)))
        for row, n in zip(rows, new, strict=True):
            self.lengths[row] += n
        last = torch.tensor(new, device=read.device)[:, None] - 1
        end = max(self.lengths[row] for row in rows)
        at = positions.gather(1, last)
        query = layer.query(take(read, last), rotation(read, at))
        mask = torch.arange(end, device=read.device) <= at[..., None]
        return layer.finish(take(add, last), attend(query, *self.read(rows, end), mask))[:, 0]

    def _grow(self, end: int, like: Tensor) -> None:
        """Allocate at least `end` slots a row, keeping what is there."""
        old = self._states
        # Zeros, because a masked slot still takes part in 0 · value.
        shape = self._rows, int(end * _GROWTH), like.shape[1], like.shape[3]
        keys, values = like.new_zeros(shape), like.new_zeros(shape)
        if old is not None:
            keys[:, : old[0].shape[1]], values[:, : old[1].shape[1]] = old
        self._states = keys, values


def layer_config(model: PreTrainedModel) -> LlamaConfig:
    """The sizes of a new layer: those of the model's own layers, as far as it has them."""
    base: Any = model.config.get_text_config()
    heads: int = base.num_attention_heads
    hidden: int = base.hidden_size
    rope = getattr(base, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") if rope.get("rope_type") == "default" else None
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=getattr(base, "intermediate_size", None) or 4 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=getattr(base, "num_key_value_heads", None) or heads,
        head_dim=getattr(base, "head_dim", None) or hidden // heads,
        rms_norm_eps=getattr(base, "rms_norm_eps", None) or 1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": theta or 10_000.0},
        vocab_size=base.vocab_size,
        num_hidden_layers=1,
    )
