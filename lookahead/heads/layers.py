"""One decoder layer as Llama has it, with its own keys and values, for heads that look back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lookahead.errors import HeadsError

_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("rope_parameters", "rope_scaling", "rope_theta", "vocab_size", "max_position_embeddings", "attention_bias"),
)


class Norm(nn.Module):
    """Root mean square norm, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` to the same."""
        return F.rms_norm(x.float(), x.shape[-1:], None, self._eps).to(x.dtype) * self.weight


class Attention(nn.Module):
    """The projections of an attention layer; those of queries, keys and values may read something wider.

    Args:
        config: Sizes, as of a Llama.
        reads: Size of what is read.
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


class Mlp(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` to the same."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """Attention and an MLP, in parts: what stands at other places is attended to by whoever keeps it.

    Args:
        config: Sizes, as of a Llama.
        reads: Size of what queries, keys and values are made of.
    """

    def __init__(self, config: LlamaConfig, reads: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, reads)
        self.mlp = Mlp(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def query(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Queries `[batch, heads, tokens, dim]` of `[batch, tokens, reads]`."""
        return rotate(self.self_attn.heads_of(self.self_attn.q_proj(x)), rotation)

    def keys_values(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values, `[batch, kv heads, tokens, dim]` each, of `[batch, tokens, reads]`."""
        attention = self.self_attn
        return rotate(attention.heads_of(attention.k_proj(x)), rotation), attention.heads_of(attention.v_proj(x))

    def finish(self, residual: Tensor, context: Tensor) -> Tensor:
        """What the layer makes of what was attended to.

        Args:
            residual: `[batch, tokens, hidden]`, what attention is added to.
            context: `[batch, heads, tokens, dim]`.
        """
        hidden: Tensor = residual + self.self_attn.o_proj(context.transpose(1, 2).flatten(2))
        added: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + added


class Rotation(nn.Module):
    """Rotary positions of a configuration, scaled ones included."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self._rotary = LlamaRotaryEmbedding(config)

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[batch, 1, tokens, dim]` at positions, int64 `[batch, tokens]`, in the dtype of `like`."""
        cosine, sine = self._rotary(like, positions)
        return cosine[:, None], sine[:, None]


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn pairs of dimensions of `[batch, heads, tokens, dim]` by the angles of their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * rotation[0] + torch.cat((-second, first), dim=-1) * rotation[1]


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of few queries to keys of fewer heads.

    The heads that share keys stand below each other as queries, so that nothing is copied: on a CPU that is several
    times as fast as letting torch share them.

    Args:
        query: `[batch, heads, tokens, dim]`.
        keys: `[batch, kv heads, keys, dim]`.
        values: As the keys.
        mask: bool `[batch, tokens, keys]`, what may be seen.

    Returns:
        `[batch, heads, tokens, dim]`.
    """
    shared = query.shape[1] // keys.shape[1]
    packed = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[3])
    context = F.scaled_dot_product_attention(packed, keys, values, mask.repeat(1, shared, 1)[:, None])
    return context.view(query.shape)


@torch.no_grad()
def try_out(layer: DraftLayer, rotation: Rotation) -> None:
    """Run a layer over two places, so that sizes which do not go together are told before anything is decoded.

    Raises:
        Exception: As torch does.
    """
    attention = layer.self_attn
    read = attention.q_proj.weight.new_ones(1, 2, attention.q_proj.in_features)
    turned = rotation(read, torch.arange(2, device=read.device)[None])
    mask = torch.ones(1, 2, 2, dtype=torch.bool, device=read.device)
    context = attend(layer.query(read, turned), *layer.keys_values(read, turned), mask)
    layer.finish(read.new_ones(1, 2, attention.o_proj.out_features), context)


def layer_config(model: PreTrainedModel, **others: Any) -> LlamaConfig:
    """The sizes of a new layer: those of the model's own, as far as it has such."""
    base: Any = model.config.get_text_config()
    heads: int = base.num_attention_heads
    hidden: int = base.hidden_size
    own = getattr(base, "rope_parameters", None) or {}
    theta = own.get("rope_theta") if own.get("rope_type") == "default" else None
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
        **others,
    )


def write_sizes(config: LlamaConfig) -> dict[str, Any]:
    """The sizes of a layer for `config.json`."""
    own: dict[str, Any] = config.to_dict()
    return {name: own[name] for name in _SIZES if own.get(name) is not None}


def read_sizes(folder: Any, given: Mapping[str, Any]) -> LlamaConfig:
    """The sizes of a layer from `config.json`, which may hold more.

    Raises:
        HeadsError: They make no layer.
    """
    try:
        return LlamaConfig(**{name: given[name] for name in _SIZES if given.get(name) is not None}, num_hidden_layers=1)
    except Exception as error:  # of unrelated types, from transformers and what it checks with
        raise HeadsError(f"{folder}: config.json names no sizes of a layer: {' '.join(str(error).split())}") from error
