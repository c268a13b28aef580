"""GLM 4, ERNIE 4.5 with its mixtures, and Helium: pairs of a rotary embedding are neighbours."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lookahead.model.families.family import Family
from lookahead.model.families.modules import attention, gated, gated_at_once
from lookahead.model.families.operations import WIDE, Experts, Norm, Residual, Rope


def _rope(layer: Any, *, is_wide: bool = False) -> Rope:
    module = layer.self_attn
    share = (getattr(module.config, "rope_parameters", None) or {}).get("partial_rotary_factor") or 1.0
    return Rope("", int(module.head_dim * share), is_wide=is_wide, are_neighbours=True)


def _glm(layer: Any) -> tuple[Residual, ...]:
    mlp = layer.mlp
    return (
        Residual(attention(layer.self_attn, rope=_rope(layer)), Norm(layer.input_layernorm)),
        Residual(
            gated_at_once(mlp, mlp.gate_up_proj, mlp.down_proj, mlp.activation_fn), Norm(layer.post_attention_layernorm)
        ),
    )


def _glm4(layer: Any) -> tuple[Residual, ...]:
    attended, fed = _glm(layer)
    after = Norm(layer.post_self_attn_layernorm), Norm(layer.post_mlp_layernorm)
    return attended._replace(after=after[0]), fed._replace(after=after[1])


def _ernie_attention(layer: Any) -> Residual:
    return Residual(attention(layer.self_attn, rope=_rope(layer, is_wide=True)), Norm(layer.input_layernorm))


def _ernie(layer: Any) -> tuple[Residual, ...]:
    return _ernie_attention(layer), Residual(gated(layer.mlp), Norm(layer.post_attention_layernorm))


def _corrected(logits: Tensor, router: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scores = torch.softmax(logits, 1, dtype=torch.float32)
    indices = torch.topk(router.moe_statics(scores), router.top_k, dim=-1)[1]
    factors = scores.gather(-1, indices)
    return (factors / factors.sum(dim=-1, keepdim=True).clamp(min=router.norm_min)).to(dtype), indices


def _ernie_moe(layer: Any) -> tuple[Residual, ...]:
    mlp = layer.mlp
    if not hasattr(mlp, "experts"):
        return _ernie(layer)
    router, own, shared = mlp.gate, mlp.experts, mlp.shared_experts and gated(mlp.shared_experts)
    route = partial(_corrected, router=router, dtype=own.gate_up_proj.dtype)
    feeding = Experts(
        mlp, router, own, router.top_k, route, own.act_fn, shared=shared, has_wide_router=True,
        of_router=(router.moe_statics,),
    )  # fmt: skip
    return _ernie_attention(layer), Residual(feeding, Norm(layer.post_attention_layernorm))


def _wide(module: Any) -> Norm:
    return Norm(module, WIDE)


def _helium(layer: Any) -> tuple[Residual, ...]:
    return (
        Residual(attention(layer.self_attn, rope=_rope(layer)), _wide(layer.input_layernorm)),
        Residual(gated(layer.mlp), _wide(layer.post_attention_layernorm)),
    )


FAMILIES = (
    Family("glm", "Glm", _glm),
    Family("glm4", "Glm4", _glm4),
    Family("ernie4_5", "Ernie4_5", _ernie),
    Family("ernie4_5_moe", "Ernie4_5_Moe", _ernie_moe),
    Family("helium", "Helium", _helium, _wide),
)
