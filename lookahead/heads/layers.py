"""What heads are made of: the model's hidden states and LM head, a Llama decoder layer in parts, and its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from lookahead.errors import HeadsError

_GROWTH = 1.5  # capacity of a new cache relative to what it must hold


def lm_head(model: PreTrainedModel) -> nn.Linear:
    """The projection from hidden states to logits; HeadsError if the model has none, or its weights are offloaded."""
    head = model.get_output_embeddings()
    if getattr(model, "is_quantized", False) and not isinstance(head, nn.Linear):
        raise HeadsError(f"the LM head of this {type(model).__name__} is quantized; heads take one of fp32 or bf16")
    if not isinstance(head, nn.Linear):
        raise HeadsError(f"{type(model).__name__} has no LM head of its own, so it takes no heads")
    if head.weight.device.type == "meta":
        raise HeadsError(f"the LM head of this {type(model).__name__} is offloaded; heads are not served then")
    return head


def body_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its LM head."""
    body = model.base_model
    return cast(PreTrainedModel, body if body is not model else getattr(model, "model", model))


def hidden_states(model: PreTrainedModel, input_ids: Tensor, layers: tuple[int, ...] = ()) -> Tensor:
    """The input of the LM head at every position, or the inputs of other layers.

    Of int64 `[batch, tokens]`, padded on the right if at all, so that no mask is needed. The inputs of `layers`, 0 the
    embedding, stand side by side: `[batch, tokens, layers · hidden]`.
    """
    body: Any = body_of(model)
    out = body(input_ids=input_ids, use_cache=False, output_hidden_states=bool(layers))
    return torch.cat([out.hidden_states[layer] for layer in layers], dim=-1) if layers else out.last_hidden_state


def unembed(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits `[..., vocab]` of hidden states `[..., hidden]`, scaled (Cohere, Granite) and capped (Gemma)."""
    head = lm_head(model)
    logits: Tensor = head(hidden.to(head.weight.dtype))  # heads are trained in float32, whatever the model is
    config: Any = model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    logits = logits if scale == 1.0 else logits * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def layer_config(model: PreTrainedModel) -> LlamaConfig:
    """The sizes of a new layer: those of the model's own layers where it has them."""
    base: Any = model.config.get_text_config()
    rope = getattr(base, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") if rope.get("rope_type") == "default" else None
    return LlamaConfig(
        hidden_size=base.hidden_size,
        intermediate_size=getattr(base, "intermediate_size", None) or 4 * base.hidden_size,
        num_attention_heads=base.num_attention_heads,
        num_key_value_heads=getattr(base, "num_key_value_heads", None),
        head_dim=getattr(base, "head_dim", None),
        rms_norm_eps=getattr(base, "rms_norm_eps", None) or 1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": theta or 10_000.0},
        vocab_size=base.vocab_size,
        num_hidden_layers=1,
    )


class Attention(nn.Module):
    """The projections of an attention layer whose input of size `reads` may be wider than the hidden states."""

    def __init__(self, config: LlamaConfig, reads: int) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim or config.hidden_size // config.num_attention_heads
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        self.q_proj = nn.Linear(reads, heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(reads, kv_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(reads, kv_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=False)


class DraftLayer(nn.Module):
    """Attention and an MLP, in parts: the caller keeps the keys and values."""

    def __init__(self, config: LlamaConfig, reads: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, reads)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def query(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Queries `[batch, heads, tokens, dim]` of `[batch, tokens, reads]`."""
        return _rotated(self._split(self.self_attn.q_proj(x)), rotation)

    def keys_values(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values, `[batch, kv heads, tokens, dim]` each, of `[batch, tokens, reads]`."""
        keys, values = self._split(self.self_attn.k_proj(x)), self._split(self.self_attn.v_proj(x))
        return _rotated(keys, rotation), values

    def finish(self, residual: Tensor, context: Tensor) -> Tensor:
        """The output `[batch, tokens, hidden]`, of the same without attention and of `[batch, heads, tokens, dim]`."""
        hidden = residual + self.self_attn.o_proj(context.transpose(1, 2).flatten(2))
        return cast(Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))

    def _split(self, projected: Tensor) -> Tensor:
        return cast(Tensor, projected.unflatten(-1, (-1, self.self_attn.head_dim))).transpose(1, 2)


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate `[batch, heads, tokens, dim]` by cosines and sines `[batch, tokens, dim]`."""
    cosine, sine = (each[:, None] for each in rotation)
    return cast(Tensor, x * cosine + rotate_half(x) * sine)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of queries `[batch, heads, n, dim]` to keys `[batch, kv heads, keys, dim]`, mask `[batch, n, keys]`.

    Query heads that share keys are stacked as further queries, so that no key is copied. On a CPU this is several times
    as fast as `enable_gqa`.
    """
    shared = query.shape[1] // keys.shape[1]
    packed = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[3])
    context = F.scaled_dot_product_attention(packed, keys, values, mask.repeat(1, shared, 1)[:, None])
    return context.view(query.shape)


def take(states: Tensor, index: Tensor) -> Tensor:
    """States `[rows, n, size]` at int64 positions `[rows, n]` of `[rows, tokens, size]`."""
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))


class DraftCache:
    """Keys and values of one layer: those of committed tokens first, those of a draft tree after them."""

    def __init__(self, rows: int) -> None:
        self._states: list[Tensor] = []  # keys and values, `[rows, slots, kv heads, dim]`
        self.lengths = [0] * rows  # committed tokens of each

    def write(self, rows: Sequence[int], first: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Write keys and values `[rows, kv heads, n, dim]` into the n slots from `first` on of each row."""
        end = max(first) + keys.shape[2]
        states = self._states or [keys.new_zeros(len(self.lengths), 0, keys.shape[1], keys.shape[3])] * 2
        if states[0].shape[1] < end:
            more = int(end * _GROWTH) - states[0].shape[1]
            # With zeros: masked slots take part in 0 · value.
            self._states = [F.pad(held, (0, 0, 0, 0, 0, more)) for held in states]
        for held, new in zip(self._states, (keys, values), strict=True):
            for i, (row, slot) in enumerate(zip(rows, first, strict=True)):
                held[row, slot : slot + new.shape[2]] = new[i].transpose(0, 1)

    def read(self, rows: Sequence[int], end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some rows, `[rows, kv heads, end, dim]` each; adjacent rows are not copied."""
        is_adjacent = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        index = slice(rows[0], rows[0] + len(rows)) if is_adjacent else list(rows)
        keys, values = (held[index][:, :end].transpose(1, 2) for held in self._states)
        return keys, values

    def extend(
        self,
        layer: DraftLayer,
        rotation: LlamaRotaryEmbedding,
        rows: Sequence[int],
        new: Sequence[int],
        read: Tensor,
        add: Tensor,
    ) -> Tensor:
        """Commit `new` tokens of each row; the output `[rows, hidden]` of the layer at the last token of each row.

        `read` `[rows, most, reads]` is what attention reads, `add` `[rows, most, hidden]` what is added; padded on the
        right.
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
