"""OLMo 2 and 3: norms after attention and MLP, and of whole queries and keys; rotated in float32."""

from __future__ import annotations

from typing import Any

from lookahead.model.families.family import Family
from lookahead.model.families.modules import attention, gated
from lookahead.model.families.operations import WIDE, Norm, Residual, Rope


def _norm(module: Any) -> Norm:
    return Norm(module, WIDE)


def _layer(layer: Any, kind: str, **options: Any) -> tuple[Residual, ...]:
    module = layer.self_attn
    norms, rope = (_norm(module.q_norm), _norm(module.k_norm)), Rope(kind, module.head_dim, is_wide=True)
    return (
        Residual(attention(module, norms, rope, **options), None, _norm(layer.post_attention_layernorm)),
        Residual(gated(layer.mlp), None, _norm(layer.post_feedforward_layernorm)),
    )


def _olmo2(layer: Any) -> tuple[Residual, ...]:
    return _layer(layer, "")


def _olmo3(layer: Any) -> tuple[Residual, ...]:
    module = layer.self_attn
    kind = module.config.layer_types[module.layer_idx]
    return _layer(layer, kind, sliding_window=module.sliding_window)


FAMILIES = Family("olmo2", "Olmo2", _olmo2, _norm), Family("olmo3", "Olmo3", _olmo3, _norm)
