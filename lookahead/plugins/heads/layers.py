"""Building blocks of heads: the model's hidden states and LM head, a Llama decoder layer, and its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from lookahead.errors import HeadsError


def lm_head(model: PreTrainedModel) -> nn.Linear:
    """The projection from hidden states to logits.

    HeadsError if the model has none, its weights are offloaded, or its input size differs from the layers'.
    """
    head = model.get_output_embeddings()
    if getattr(model, "is_quantized", False) and not isinstance(head, nn.Linear):
        whose = f"the LM head of this {type(model).__name__}"
        raise HeadsError(f"{whose} is quantized; heads take one of fp32 or bf16: load it with such a dtype")
    if not isinstance(head, nn.Linear):
        raise HeadsError(f"{type(model).__name__} has no LM head of its own, so it takes no heads")
    if head.weight.device.type == "meta":
        raise HeadsError(f"the LM head of this {type(model).__name__} is offloaded; heads are not served then")
    if head.in_features != (size := model.config.get_text_config().hidden_size):
        sizes = f"{head.in_features} numbers, and its layers have {size}"
        raise HeadsError(f"the LM head of this {type(model).__name__} reads {sizes}, so it takes no heads")
    return head


def body_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its LM head."""
    body = model.base_model
    return cast(PreTrainedModel, body if body is not model else getattr(model, "model", model))


def hidden_states(model: PreTrainedModel, input_ids: Tensor, layers: tuple[int, ...] = ()) -> Tensor:
    """The input of the LM head at every position, or the inputs of other layers.

    `input_ids`, int64 `[batch, tokens]`, may be padded on the right, so no mask is needed. The inputs of `layers`, with
    0 for the embedding, are concatenated: `[batch, tokens, layers · hidden]`.
    """
    body: Any = body_of(model)
    out = body(input_ids=input_ids, use_cache=False, output_hidden_states=bool(layers))
    return torch.cat([out.hidden_states[layer] for layer in layers], dim=-1) if layers else out.last_hidden_state


def unembed(model: PreTrainedModel, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Logits `[..., vocab]` of hidden states `[..., hidden]`, scaled (Cohere, Granite) and capped (Gemma).

    Only for `tokens` if they are given.
    """
    head = lm_head(model)
    hidden = hidden.to(head.weight.dtype)  # heads are trained in float32 for any model
    if tokens is None:
        logits: Tensor = head(hidden)
    else:
        logits = F.linear(hidden, head.weight[tokens], None if head.bias is None else head.bias[tokens])
    config: Any = model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    logits = logits if scale == 1.0 else logits * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def layer_config(model: PreTrainedModel) -> LlamaConfig:
    """The sizes of a new layer, equal to the model's first layer.

    HeadsError if the model has no attention.
    """
    base: Any = model.config.get_text_config()
    layer = base.per_layer_config[0] if getattr(base, "is_heterogeneous", False) else base

    def size(name: str) -> Any:
        found = getattr(layer, name, None)
        return found[0] if isinstance(found, (list, tuple)) else found

    if not size("num_attention_heads"):
        raise HeadsError(f"{type(model).__name__} has no attention, so it takes heads of Medusa alone")
    rope = getattr(base, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") if rope.get("rope_type") == "default" else None
    return LlamaConfig(
        hidden_size=base.hidden_size,
        intermediate_size=size("intermediate_size") or 4 * base.hidden_size,
        num_attention_heads=size("num_attention_heads"),
        num_key_value_heads=size("num_key_value_heads"),
        head_dim=size("head_dim"),
        rms_norm_eps=size("rms_norm_eps") or 1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": theta or 10_000.0},
        vocab_size=base.vocab_size,
        num_hidden_layers=1,
    )


class Attention(nn.Module):
    """The projections of an attention layer with input size `reads`, which may exceed the hidden size."""

    def __init__(self, config: LlamaConfig, reads: int) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim or config.hidden_size // config.num_attention_heads
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        self.kv_heads: int = kv_heads
        self.q_proj = nn.Linear(reads, heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(reads, kv_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(reads, kv_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=False)


class DraftLayer(nn.Module):
    """Attention and an MLP; the caller keeps the keys and values."""

    def __init__(self, config: LlamaConfig, reads: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, reads)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        read: Tensor,
        add: Tensor,
        rotation: LlamaRotaryEmbedding,
        positions: Tensor,
        mask: Tensor,
        at: Tensor | None = None,
        past: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output `[batch, n, hidden]`, and the keys and values of the earlier tokens and the new ones.

        Args:
            read: `[batch, new, reads]`, the input of attention.
            add: `[batch, new, hidden]`, the residual.
            rotation: The rotary embedding.
            positions: int64 `[batch, new]`.
            mask: bool `[batch, n, tokens + new]`, true if a token is attended to.
            at: int64 `[batch, n]`, the new tokens that attend; all when None.
            past: Keys and values of earlier tokens, `[batch, tokens, 2, kv heads, dim]`.
        """
        attention, dim = self.self_attn, self.self_attn.head_dim
        keys, values = (each(read).unflatten(-1, (-1, dim)) for each in (attention.k_proj, attention.v_proj))
        states = torch.stack((_rotated(keys, rotation(read, positions)), values), 2)
        states = states if past is None else torch.cat((past, states), 1)
        if at is not None:
            read, add, positions = gather_positions(read, at), gather_positions(add, at), positions.gather(1, at)
        query = _rotated(attention.q_proj(read).unflatten(-1, (-1, dim)), rotation(read, positions)).transpose(1, 2)
        keys, values = states.permute(2, 0, 3, 1, 4)
        # Query heads that share keys are stacked as further queries, so keys are not copied. On a CPU this is several
        # times as fast as `enable_gqa`.
        packed = query.reshape(len(query), keys.shape[1], -1, dim)
        seen = mask.repeat(1, query.shape[1] // keys.shape[1], 1)[:, None]
        context = F.scaled_dot_product_attention(packed, keys, values, seen).view(query.shape)
        hidden = add + attention.o_proj(context.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), states


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate `[batch, tokens, heads, dim]` by cosines and sines `[batch, tokens, dim]`."""
    cosine, sine = (each[:, :, None] for each in rotation)
    return cast(Tensor, x * cosine + rotate_half(x) * sine)


def gather_positions(states: Tensor, index: Tensor) -> Tensor:
    """States `[rows, n, size]` at int64 positions `[rows, n]` of `[rows, tokens, size]`."""
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))


class DraftCache(dict[int, Tensor]):
    """Keys and values of one layer at the committed tokens of each row, `[tokens, 2, kv heads, dim]`."""

    def padded(self, layer: DraftLayer, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """States of rows, `[rows, most, 2, kv heads, dim]`; their lengths, `[rows, 1]`; their mask, `[rows, most]`."""
        attention = layer.self_attn
        nothing = layer.post_attention_layernorm.weight.new_zeros(0, 2, attention.kv_heads, attention.head_dim)
        held = [self.get(row, nothing) for row in rows]
        past = pad_sequence(held, batch_first=True)
        lengths = torch.tensor([[len(each)] for each in held], device=past.device)
        return past, lengths, torch.arange(past.shape[1], device=past.device) < lengths

    def extend(
        self,
        layer: DraftLayer,
        rotation: LlamaRotaryEmbedding,
        rows: Sequence[int],
        new: Sequence[int],
        read: Tensor,
        add: Tensor,
    ) -> Tensor:
        """Commit new tokens; returns the output `[rows, 1, hidden]` of the layer at the last token of each row.

        Args:
            layer: The layer of this cache.
            rotation: Its rotary embedding.
            rows: The rows.
            new: Number of new tokens in each row, at least 1.
            read: The input of attention, `[rows, most new, reads]`, padded on the right.
            add: The residual, `[rows, most new, hidden]`, padded on the right.
        """
        past, lengths, is_past = self.padded(layer, rows)
        index = torch.arange(read.shape[1], device=read.device)
        last = torch.tensor(new, device=read.device)[:, None] - 1
        mask = torch.cat((is_past, index <= last), 1)[:, None]
        out, states = layer(read, add, rotation, lengths + index, mask, last, past)
        for row, n, each in zip(rows, new, states, strict=True):
            before = each[: len(self.get(row, ()))]
            self[row] = torch.cat((before, each[past.shape[1] : past.shape[1] + n]))
        return cast(Tensor, out)
