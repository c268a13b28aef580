"""What heads read of the model they belong to: the hidden states its LM head reads, and that LM head itself."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lookahead.errors import HeadsError


def lm_head(model: PreTrainedModel) -> nn.Linear:
    """The projection from hidden states to logits.

    Raises:
        HeadsError: The model has none, or its weights are elsewhere.
    """
    head = model.get_output_embeddings()
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
    """What the LM head reads at every position, after the final norm.

    Args:
        model: The model.
        input_ids: int64 `[batch, tokens]`, padded on the right if at all, so that no mask is needed.
        layers: Instead of it the inputs of these decoder layers, side by side: 0 is the embedding.

    Returns:
        `[batch, tokens, hidden]`, times the number of layers where they are named.
    """
    body: Any = body_of(model)
    if not layers:
        last: Tensor = body(input_ids=input_ids, use_cache=False).last_hidden_state
        return last
    states = body(input_ids=input_ids, use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[layer] for layer in layers], dim=-1)


def unembed(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits of hidden states as the model itself computes them, `[..., vocab]` of `[..., hidden]`.

    Cohere and Granite scale them and Gemma caps them, which their LM head alone would leave out.
    """
    head = lm_head(model)
    logits: Tensor = head(hidden.to(head.weight.dtype))  # heads in training are float32, whatever the model is
    config: Any = model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    logits = logits if scale == 1.0 else logits * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits
