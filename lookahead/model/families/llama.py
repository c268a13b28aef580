"""Llama and the families that keep its layer: Mistral, Qwen2, Qwen3, SmolLM3, Granite."""

from __future__ import annotations

from typing import Any

from lookahead.model.families.operations import Family, Norm, Residual, SelfAttention, attention, gated


def _layer(layer: Any, attended: SelfAttention, factor: float = 1.0) -> tuple[Residual, ...]:
    return (
        Residual(attended, Norm(layer.input_layernorm), factor=factor),
        Residual(gated(layer.mlp), Norm(layer.post_attention_layernorm), factor=factor),
    )


def _llama(layer: Any) -> tuple[Residual, ...]:
    return _layer(layer, attention(layer.self_attn))


def _mistral(layer: Any) -> tuple[Residual, ...]:
    window = getattr(layer.self_attn.config, "sliding_window", None)
    return _layer(layer, attention(layer.self_attn, sliding_window=window))


def _qwen2(layer: Any) -> tuple[Residual, ...]:
    return _layer(layer, attention(layer.self_attn, sliding_window=layer.self_attn.sliding_window))


def _qwen3(layer: Any) -> tuple[Residual, ...]:
    module = layer.self_attn
    norms = Norm(module.q_norm), Norm(module.k_norm)
    return _layer(layer, attention(module, norms, sliding_window=module.sliding_window))


def _smollm3(layer: Any) -> tuple[Residual, ...]:
    module = layer.self_attn
    own = attention(module, sliding_window=module.sliding_window)
    return _layer(layer, own if module.use_rope else own._replace(rope=None))


def _granite(layer: Any) -> tuple[Residual, ...]:
    return _layer(layer, attention(layer.self_attn), layer.residual_multiplier)


FAMILIES = (
    Family("llama", "Llama", _llama),
    Family("mistral", "Mistral", _mistral),
    Family("qwen2", "Qwen2", _qwen2),
    Family("qwen3", "Qwen3", _qwen3),
    Family("smollm3", "SmolLM3", _smollm3),
    Family(
        "granite", "Granite", _granite, embedding_factor="embedding_multiplier", logits_divisor="logits_scaling"
    ),
)  # fmt: skip
