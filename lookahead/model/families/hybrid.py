"""Hybrids of attention and recurrent layers: Qwen3-Next, Qwen3.5 (gated delta nets), LFM2 and LFM3 (convolutions)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lookahead.model.families.family import Family
from lookahead.model.families.mixtures import shared_mixture, sigmoid_of_rows
from lookahead.model.families.modules import attention, gated, recurrence, whole
from lookahead.model.families.operations import (
    PLUS_ONE,
    Experts,
    Mlp,
    Norm,
    Recurrence,
    Residual,
    Rope,
    SelfAttention,
    UndeclaredError,
)

_SILU = nn.SiLU()


def _norm(module: Any) -> Norm:
    return Norm(module, PLUS_ONE, "eps")


def _qwen(layer: Any, inputs: tuple[str, ...], gates: tuple[str, ...]) -> tuple[Residual, ...]:
    mlp, mixer = layer.mlp, _delta_net(layer, inputs, gates) if hasattr(layer, "linear_attn") else _attention(layer)
    feeding: Mlp | Experts = shared_mixture(mlp) if hasattr(mlp, "experts") else gated(mlp)
    return (
        Residual(mixer, _norm(layer.input_layernorm)),
        Residual(feeding, _norm(layer.post_attention_layernorm)),
    )


def _attention(layer: Any) -> SelfAttention:
    module = layer.self_attn
    share = module.config.rope_parameters.get("partial_rotary_factor", 1.0)
    rope = Rope("", int(module.head_dim * share))
    return attention(module, (_norm(module.q_norm), _norm(module.k_norm)), rope)._replace(has_gate=True)


def _delta_net(layer: Any, inputs: tuple[str, ...], gates: tuple[str, ...]) -> Recurrence:
    return recurrence(layer.linear_attn, inputs, gates, "out_proj", "cache_params", ("conv1d", "norm"))


def _qwen3_5(layer: Any) -> tuple[Residual, ...]:
    return _qwen(layer, ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))


def _qwen3_next(layer: Any) -> tuple[Residual, ...]:
    return _qwen(layer, ("in_proj_qkvz",), ("in_proj_ba",))


def _fed(layer: Any, mixer: SelfAttention | Recurrence) -> tuple[Residual, Residual]:
    mlp = layer.feed_forward
    feeding = Mlp(mlp, whole(mlp.w1), whole(mlp.w3), whole(mlp.w2), _SILU)
    return Residual(mixer, Norm(layer.operator_norm)), Residual(feeding, Norm(layer.ffn_norm))


def _lfm2(layer: Any) -> tuple[Residual, ...]:
    return _fed(layer, _lfm2_mixer(layer))


def _lfm3(layer: Any) -> tuple[Residual, ...]:
    mixing, feeding = _fed(layer, _lfm3_attention(layer.self_attn) if layer.is_attention_layer else _short(layer))
    if isinstance(layer.post_operator_norm, nn.Identity):
        raise UndeclaredError("it has no norms after its operations")
    return mixing._replace(after=Norm(layer.post_operator_norm)), feeding._replace(after=Norm(layer.post_ffn_norm))


def _lfm3_attention(module: Any) -> SelfAttention:
    norms, rope = (Norm(module.q_norm), Norm(module.k_norm)), Rope(module.layer_type, module.head_dim, is_wide=True)
    attended = attention(module, norms, rope, sliding_window=module.sliding_window)
    return attended if module.g_proj is None else attended._replace(gates=(module.g_proj,))


def _corrected(logits: Tensor, mixture: Any) -> tuple[Tensor, Tensor]:
    router = mixture.gate
    factors = sigmoid_of_rows(logits)
    choice = factors + mixture.expert_bias if router.use_expert_bias else factors
    indices = torch.topk(choice, k=router.top_k, dim=-1)[1]
    factors = factors.gather(1, indices)
    if router.norm_topk_prob:
        factors = factors / (factors.sum(dim=-1, keepdim=True) + 1e-6)
    return factors * router.routed_scaling_factor, indices


def _lfm2_moe(layer: Any) -> tuple[Residual, ...]:
    mixture = layer.feed_forward
    if not hasattr(mixture, "experts"):
        return _lfm2(layer)
    router, route = mixture.gate, partial(_corrected, mixture=mixture)
    feeding = Experts(mixture, router, mixture.experts, router.top_k, route, _SILU)
    return Residual(_lfm2_mixer(layer), Norm(layer.operator_norm)), Residual(feeding, Norm(layer.ffn_norm))


def _lfm2_mixer(layer: Any) -> SelfAttention | Recurrence:
    if not layer.is_attention_layer:
        return _short(layer)
    module = layer.self_attn
    return attention(module, (Norm(module.q_layernorm), Norm(module.k_layernorm)), output="out_proj")


def _short(layer: Any) -> Recurrence:
    return recurrence(layer.conv, ("in_proj",), (), "out_proj", "past_key_values", ("conv",))


FAMILIES = (
    Family("qwen3_next", "Qwen3Next", _qwen3_next, _norm),
    Family("qwen3_5", "Qwen3_5", _qwen3_5, _norm, "TextModel"),
    Family("qwen3_5_moe", "Qwen3_5Moe", _qwen3_5, _norm, "TextModel"),
    Family("lfm2", "Lfm2", _lfm2, last_norm="embedding_norm"),
    Family("lfm3", "Lfm3", _lfm3, last_norm="embedding_norm"),
    Family("lfm2_moe", "Lfm2Moe", _lfm2_moe, last_norm="embedding_norm", rotary="pos_emb"),
)
