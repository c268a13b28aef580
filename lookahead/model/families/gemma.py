"""Gemma: norms before and after, with 1 added to their weights before Gemma 4."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lookahead.model.families.family import Family
from lookahead.model.families.modules import attention, gated, whole
from lookahead.model.families.operations import (
    PLUS_ONE,
    WIDE,
    Mlp,
    Norm,
    Residual,
    Rope,
    SelfAttention,
    UndeclaredError,
)


def _norm(module: Any) -> Norm:
    return Norm(module, PLUS_ONE, "eps")


def _layer(layer: Any, attended: SelfAttention) -> tuple[Residual, ...]:
    names = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    first, second, third, fourth = (_norm(getattr(layer, name)) for name in names)
    return Residual(attended, first, second), Residual(gated(layer.mlp), third, fourth)


def _gemma(layer: Any) -> tuple[Residual, ...]:
    return (
        Residual(attention(layer.self_attn), _norm(layer.input_layernorm)),
        Residual(gated(layer.mlp), _norm(layer.post_attention_layernorm)),
    )


def _gemma2(layer: Any) -> tuple[Residual, ...]:
    module = layer.self_attn
    return _layer(layer, attention(module, sliding_window=module.sliding_window, softcap=module.attn_logit_softcapping))


def _gemma3(layer: Any) -> tuple[Residual, ...]:
    module = layer.self_attn
    norms, rope = (_norm(module.q_norm), _norm(module.k_norm)), Rope(module.layer_type, module.head_dim)
    return _layer(layer, attention(module, norms, rope, sliding_window=module.sliding_window))


@lru_cache(maxsize=16)
def _ones(size: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(size, dtype=dtype, device="cpu")


def _wide(module: Any) -> Norm:
    return Norm(module, WIDE, "eps")


def _attention4(module: Any) -> SelfAttention:
    dim, norms, key, value = module.head_dim, [_wide(module.q_norm)], None, None
    options = {"dropout": 0.0, "scaling": module.scaling, "sliding_window": module.sliding_window}
    if not module.is_kv_shared_layer:
        ones = _ones(dim, module.q_norm.weight.dtype)
        norms += [_wide(module.k_norm), _wide(module.v_norm)._replace(ones=ones)]
        key, value = whole(module.k_proj), module.v_proj and whole(module.v_proj)
    kinds, source = module.config.layer_types, None
    if module.is_kv_shared_layer:
        first = module.config.num_hidden_layers - module.config.num_kv_shared_layers
        source = max(at for at in range(first) if kinds[at] == module.layer_type)
    return SelfAttention(
        module, whole(module.q_proj), key, value, whole(module.o_proj), options, Rope(module.layer_type, dim),
        tuple(norms), source=source,
        shared=module.layer_type if module.is_kv_shared_layer or module.store_full_length_kv else "",
    )  # fmt: skip


def _gemma4(layer: Any) -> tuple[Residual, ...]:
    if layer.enable_moe_block:
        raise UndeclaredError("it has experts beside its MLP")
    if not layer.self_attn.is_causal:
        raise UndeclaredError("tokens attend to later ones")
    names = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    first, second, third, fourth = (_wide(getattr(layer, name)) for name in names)
    parts = [Residual(_attention4(layer.self_attn), first, second), Residual(gated(layer.mlp), third, fourth)]
    if layer.hidden_size_per_layer_input:
        gate, down = whole(layer.per_layer_input_gate), whole(layer.per_layer_projection)
        own = Mlp(layer, gate, None, down, layer.act_fn, is_beside=True)
        parts.append(Residual(own, None, _wide(layer.post_per_layer_input_norm)))
    parts[-1] = parts[-1]._replace(scaled=(layer._buffers, "layer_scalar"))
    return tuple(parts)


FAMILIES = (
    Family("gemma", "Gemma", _gemma, _norm),
    Family("gemma2", "Gemma2", _gemma2, _norm, logits_cap="final_logit_softcapping"),
    Family("gemma3", "Gemma3", _gemma3, _norm, "TextModel", logits_cap="final_logit_softcapping"),
    Family(
        "gemma4", "Gemma4", _gemma4, _wide, "TextModel", "TextDecoderLayer", "per_layer_input",
        logits_cap="final_logit_softcapping",
    ),
)  # fmt: skip
