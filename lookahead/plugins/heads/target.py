"""What heads take from their model: hidden states, the LM head, and the sizes of a layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from lookahead.errors import HeadsError
from lookahead.utils.fingerprints import body_of


def lm_head(model: PreTrainedModel) -> nn.Linear:
    """The projection from hidden states of a layer's size to logits, or a HeadsError if the model has none here."""
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


def hidden_states(model: PreTrainedModel, input_ids: Tensor, layers: tuple[int, ...] = ()) -> Tensor:
    """The input of the LM head at every position, or the inputs of other layers.

    `input_ids`, int64 `[batch, tokens]`, may be padded on the right, so no mask is needed. The inputs of `layers`, with
    0 for the embedding, are concatenated: `[batch, tokens, layers · hidden]`.
    """
    body: Any = body_of(model)
    out = body(input_ids=input_ids, use_cache=False, output_hidden_states=bool(layers))
    return torch.cat([out.hidden_states[layer] for layer in layers], dim=-1) if layers else out.last_hidden_state


def unembed(model: PreTrainedModel, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Logits `[..., vocab]`, or those of `tokens`, of hidden states, scaled (Cohere, Granite) and capped (Gemma)."""
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
    """The sizes of a new layer, equal to the model's first layer; HeadsError if the model has no attention."""
    base: Any = model.config.get_text_config()
    layer = base.per_layer_config[0] if getattr(base, "is_heterogeneous", False) else base

    def size(name: str) -> Any:
        value = getattr(layer, name, None)
        return value[0] if isinstance(value, (list, tuple)) else value

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


def gather_positions(states: Tensor, index: Tensor) -> Tensor:
    """States `[rows, n, size]` at int64 positions `[rows, n]` of `[rows, tokens, size]`."""
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))
