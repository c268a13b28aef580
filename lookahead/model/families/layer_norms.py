"""StarCoder2 and GPT-NeoX: layer norms and plain MLPs, one after the other or parallel."""

from __future__ import annotations

from typing import Any

from lookahead.model.families.modules import attention, whole
from lookahead.model.families.operations import LAYER, Family, Mlp, Norm, Residual, Rope, SelfAttention


def _norm(module: Any) -> Norm:
    return Norm(module, LAYER, "eps")


def _starcoder2(layer: Any) -> tuple[Residual, ...]:
    mlp, window = layer.mlp, getattr(layer.self_attn.config, "sliding_window", None)
    return (
        Residual(attention(layer.self_attn, sliding_window=window), _norm(layer.input_layernorm)),
        Residual(Mlp(mlp, whole(mlp.c_fc), None, whole(mlp.c_proj), mlp.act), _norm(layer.post_attention_layernorm)),
    )


def _gpt_neox(layer: Any) -> tuple[Residual, ...]:
    module, mlp = layer.attention, layer.mlp
    options, rope = {"dropout": 0.0, "scaling": module.scaling}, Rope("", module.rotary_ndims)
    attended = SelfAttention(
        module, whole(module.query_key_value), None, None, whole(module.dense), options, rope, has_keys=True
    )
    feeding = Mlp(mlp, whole(mlp.dense_h_to_4h), None, whole(mlp.dense_4h_to_h), mlp.act)
    return (
        Residual(attended, _norm(layer.input_layernorm)),
        Residual(feeding, _norm(layer.post_attention_layernorm), is_parallel=layer.use_parallel_residual),
    )


FAMILIES = (
    Family("starcoder2", "Starcoder2", _starcoder2, _norm),
    Family(
        "gpt_neox", "GPTNeoX", _gpt_neox, _norm, kind="Layer", decoder="gpt_neox", embedding="embed_in",
        cache="layer_past", last_norm="final_layer_norm",
    ),
)  # fmt: skip
