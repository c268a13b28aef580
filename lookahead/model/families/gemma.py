"""Gemma 2 and 3: norms before and after, with 1 added to their weights."""

from __future__ import annotations

from typing import Any

from lookahead.model.families.operations import PLUS_ONE, Family, Norm, Residual, Rope, SelfAttention, attention, gated


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


FAMILIES = (
    Family("gemma", "Gemma", _gemma, _norm),
    Family("gemma2", "Gemma2", _gemma2, _norm, logits_cap="final_logit_softcapping"),
    Family("gemma3", "Gemma3", _gemma3, _norm, "TextModel", logits_cap="final_logit_softcapping"),
)
