"""Llama and families with its layer: Mistral, Ministral, Qwen, SmolLM3, Seed-OSS, Hunyuan, EXAONE, CWM, Arcee."""

from __future__ import annotations

from typing import Any

from lookahead.model.families.family import Family
from lookahead.model.families.modules import attention, gated, plain
from lookahead.model.families.operations import Norm, Residual, SelfAttention


def _layer(layer: Any, attended: SelfAttention) -> tuple[Residual, ...]:
    return (
        Residual(attended, Norm(layer.input_layernorm)),
        Residual(gated(layer.mlp), Norm(layer.post_attention_layernorm)),
    )


def _llama(layer: Any) -> tuple[Residual, ...]:
    return _layer(layer, attention(layer.self_attn))


def _mistral(layer: Any) -> tuple[Residual, ...]:
    window = getattr(layer.self_attn.config, "sliding_window", None)
    return _layer(layer, attention(layer.self_attn, sliding_window=window))


def _ministral3(layer: Any) -> tuple[Residual, ...]:
    config = layer.self_attn.config
    reach = config.rope_parameters["original_max_position_embeddings"]  # from there on queries get a factor
    attended = attention(layer.self_attn, sliding_window=getattr(config, "sliding_window", None))
    return _layer(layer, attended._replace(reach=reach))


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


def hunyuan_attention(module: Any) -> SelfAttention:
    """Attention whose queries and keys are normed after they are rotated."""
    norms = Norm(module.query_layernorm), Norm(module.key_layernorm)
    return attention(module, norms)._replace(norms_last=True)


def _hunyuan(layer: Any) -> tuple[Residual, ...]:
    return _layer(layer, hunyuan_attention(layer.self_attn))


def _arcee(layer: Any) -> tuple[Residual, ...]:
    attended, fed = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
    return Residual(attention(layer.self_attn), attended), Residual(plain(layer.mlp), fed)


def _exaone4(layer: Any) -> tuple[Residual, ...]:
    module = layer.self_attn
    window, norms = module.sliding_window, (Norm(module.q_norm), Norm(module.k_norm))
    attended = attention(module, norms, sliding_window=window if module.is_sliding else None)
    if window is not None and not module.is_sliding:
        attended = attended._replace(rope=None)
    return (
        Residual(attended, None, Norm(layer.post_attention_layernorm)),
        Residual(gated(layer.mlp), None, Norm(layer.post_feedforward_layernorm)),
    )


FAMILIES = (
    Family("llama", "Llama", _llama),
    Family("mistral", "Mistral", _mistral),
    Family("qwen2", "Qwen2", _qwen2),
    Family("qwen3", "Qwen3", _qwen3),
    Family("ministral", "Ministral", _qwen2),
    Family("ministral3", "Ministral3", _ministral3),
    Family("cwm", "Cwm", _qwen2),
    Family("smollm3", "SmolLM3", _smollm3),
    Family("seed_oss", "SeedOss", _llama),
    Family("hunyuan_v1_dense", "HunYuanDenseV1", _hunyuan),
    Family("exaone4", "Exaone4", _exaone4),
    Family("arcee", "Arcee", _arcee),
)
