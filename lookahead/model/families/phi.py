"""Phi-3 and Phi-4: one linear layer for queries, keys and values, one for gates and factors; partly rotated heads."""

from __future__ import annotations

from typing import Any

from lookahead.model.families.family import Family
from lookahead.model.families.modules import gated_at_once, split, whole
from lookahead.model.families.operations import Norm, Residual, Rope, SelfAttention


def _layer(layer: Any) -> tuple[Residual, ...]:
    module, mlp = layer.self_attn, layer.mlp
    config, dim = module.config, module.head_dim
    heads, kv_heads = config.num_attention_heads, module.num_key_value_heads
    query, key, value = split(module.qkv_proj, heads * dim, kv_heads * dim, kv_heads * dim)
    options = {"dropout": 0.0, "scaling": module.scaling, "sliding_window": getattr(config, "sliding_window", None)}
    rotated = int(dim * (config.rope_parameters.get("partial_rotary_factor") or 1.0))
    attended = SelfAttention(module, query, key, value, whole(module.o_proj), options, Rope("", rotated))
    feeding = gated_at_once(mlp, mlp.gate_up_proj, mlp.down_proj, mlp.activation_fn)
    return Residual(attended, Norm(layer.input_layernorm)), Residual(feeding, Norm(layer.post_attention_layernorm))


FAMILIES = (Family("phi3", "Phi3", _layer),)
