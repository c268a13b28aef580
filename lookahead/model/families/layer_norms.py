"""StarCoder2, GPT-NeoX, Phi, StableLM, Jais 2: layer norms, and mostly plain MLPs, in sequence or parallel."""

from __future__ import annotations

from typing import Any

from lookahead.model.families.family import Family
from lookahead.model.families.modules import attention, gated, plain, whole
from lookahead.model.families.operations import (
    LAYER,
    Mlp,
    Norm,
    Residual,
    Rope,
    SelfAttention,
    UndeclaredError,
)


def layer_norm(module: Any) -> Norm:
    """A layer norm of torch."""
    return Norm(module, LAYER, "eps")


def _starcoder2(layer: Any) -> tuple[Residual, ...]:
    mlp, window = layer.mlp, getattr(layer.self_attn.config, "sliding_window", None)
    return (
        Residual(attention(layer.self_attn, sliding_window=window), layer_norm(layer.input_layernorm)),
        Residual(
            Mlp(mlp, whole(mlp.c_fc), None, whole(mlp.c_proj), mlp.act), layer_norm(layer.post_attention_layernorm)
        ),
    )


def _gpt_neox(layer: Any) -> tuple[Residual, ...]:
    module, mlp = layer.attention, layer.mlp
    options, rope = {"dropout": 0.0, "scaling": module.scaling}, Rope("", module.rotary_ndims)
    attended = SelfAttention(
        module, whole(module.query_key_value), None, None, whole(module.dense), options, rope, has_keys=True
    )
    feeding = Mlp(mlp, whole(mlp.dense_h_to_4h), None, whole(mlp.dense_4h_to_h), mlp.act)
    return (
        Residual(attended, layer_norm(layer.input_layernorm)),
        Residual(feeding, layer_norm(layer.post_attention_layernorm), is_parallel=layer.use_parallel_residual),
    )


def _phi(layer: Any) -> tuple[Residual, ...]:
    module, mlp, norm = layer.self_attn, layer.mlp, layer_norm(layer.input_layernorm)
    return (
        Residual(attention(module, rope=_rope(module), output="dense"), norm),
        Residual(Mlp(mlp, whole(mlp.fc1), None, whole(mlp.fc2), mlp.activation_fn), norm, is_parallel=True),
    )


def _stablelm(layer: Any) -> tuple[Residual, ...]:
    is_parallel = layer.use_parallel_residual
    second = layer.input_layernorm if is_parallel else layer.post_attention_layernorm
    return (
        Residual(attention(layer.self_attn, rope=_rope(layer.self_attn)), layer_norm(layer.input_layernorm)),
        Residual(gated(layer.mlp), layer_norm(second), is_parallel=is_parallel, is_last=is_parallel),
    )


def _jais2(layer: Any) -> tuple[Residual, ...]:
    return (
        Residual(attention(layer.self_attn), layer_norm(layer.input_layernorm)),
        Residual(plain(layer.mlp), layer_norm(layer.post_attention_layernorm)),
    )


def _rope(module: Any) -> Rope:
    if module.qk_layernorm:
        raise UndeclaredError("heads have layer norms")
    return Rope("", module.rotary_ndims)


FAMILIES = (
    Family("phi", "Phi", _phi, layer_norm, last_norm="final_layernorm"),
    Family("stablelm", "StableLm", _stablelm, layer_norm),
    Family("starcoder2", "Starcoder2", _starcoder2, layer_norm),
    Family("jais2", "Jais2", _jais2, layer_norm),
    Family(
        "gpt_neox", "GPTNeoX", _gpt_neox, layer_norm, kind="Layer", decoder="gpt_neox", embedding="embed_in",
        cache="layer_past", last_norm="final_layer_norm",
    ),
)  # fmt: skip
