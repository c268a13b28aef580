"""DeepSeek-V2 and -V3, GLM 4.5 and 4.7 Flash, Dots: routers in float32 that choose among groups of experts.

Latent attention keeps what keys and values are made of, and makes those of the whole text in every pass. It is called,
but a pass over one row makes those of a text once (`lookahead.backend.cpu.latents`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lookahead.model.families.family import Family
from lookahead.model.families.mixtures import sigmoid_of_rows
from lookahead.model.families.modules import attention, gated
from lookahead.model.families.operations import Called, Experts, Norm, Residual, Rope, SelfAttention


def _of_groups(scores: Tensor, values: Tensor, router: Any, outside: float) -> Tensor:
    """The scores, with those outside the groups of the largest values replaced."""
    if router.topk_group >= router.num_group:
        return scores
    chosen = torch.topk(values, k=router.topk_group, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(values).scatter_(1, chosen, 1).bool()
    return scores.masked_fill(~mask.repeat_interleave(scores.shape[-1] // router.num_group, 1), outside)


def _likeliest(logits: Tensor, router: Any) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(dim=-1, dtype=torch.float32)
    if router.topk_method == "group_limited_greedy":
        scores = _of_groups(scores, scores.unflatten(1, (router.num_group, -1)).max(dim=-1).values, router, 0.0)
    factors, indices = torch.topk(scores, k=router.top_k, dim=-1, sorted=False)
    return factors * router.routed_scaling_factor, indices


def _corrected(logits: Tensor, router: Any) -> tuple[Tensor, Tensor]:
    scores = sigmoid_of_rows(logits)
    choice = scores + router.e_score_correction_bias
    values = choice.unflatten(1, (router.num_group, -1)).topk(2, dim=-1)[0].sum(dim=-1)
    choice = _of_groups(choice, values, router, float("-inf"))
    indices = torch.topk(choice, k=router.top_k, dim=-1, sorted=False)[1]
    factors = scores.gather(1, indices)
    if router.norm_topk_prob:
        factors /= factors.sum(dim=-1, keepdim=True) + 1e-20
    return factors * router.routed_scaling_factor, indices


def _layer(
    layer: Any, mixer: SelfAttention | Called, route: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Residual, ...]:
    mlp = layer.mlp
    feeding: Any = gated(mlp) if not hasattr(mlp, "experts") else Experts(
        mlp, mlp.gate, mlp.experts, mlp.gate.top_k, partial(route, router=mlp.gate), mlp.experts.act_fn,
        is_wide=True, has_wide_router=True, shared=gated(mlp.shared_experts),
    )  # fmt: skip
    return Residual(mixer, Norm(layer.input_layernorm)), Residual(feeding, Norm(layer.post_attention_layernorm))


def _rotation(module: Any, name: str) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """A rotary embedding of the module's file; None if another release of transformers keeps no latents."""
    return vars(sys.modules[type(module).__module__])[name] if hasattr(module, "expand_kv") else None


def _deepseek2(layer: Any) -> tuple[Residual, ...]:
    module = layer.self_attn
    rotate = _rotation(module, "apply_rotary_emb")
    return _layer(layer, Called(module, module.qk_rope_head_dim // 2, is_complex=True, rotate=rotate), _likeliest)


def _latent(layer: Any) -> tuple[Residual, ...]:
    module = layer.self_attn
    name = "apply_rotary_pos_emb_interleave" if module.config.rope_interleave else "apply_rotary_pos_emb"
    function = _rotation(module, name)
    rotate = function and (lambda query, key, positions: function(query, key, *positions))
    return _layer(layer, Called(module, module.qk_rope_head_dim, rotate=rotate), _corrected)


def _glm4_moe(layer: Any) -> tuple[Residual, ...]:
    module = layer.self_attn
    norms = (Norm(module.q_norm), Norm(module.k_norm)) if module.use_qk_norm else ()
    share = module.rope_parameters.get("partial_rotary_factor") or 1.0
    return _layer(layer, attention(module, norms, Rope("", int(module.head_dim * share))), _corrected)


def _dots1(layer: Any) -> tuple[Residual, ...]:
    module = layer.self_attn
    norms = Norm(module.q_norm), Norm(module.k_norm)
    return _layer(layer, attention(module, norms, sliding_window=module.sliding_window), _corrected)


FAMILIES = (
    Family("deepseek_v2", "DeepseekV2", _deepseek2),
    Family("deepseek_v3", "DeepseekV3", _latent),
    Family("glm4_moe_lite", "Glm4MoeLite", _latent),
    Family("glm4_moe", "Glm4Moe", _glm4_moe),
    Family("dots1", "Dots1", _dots1),
)
