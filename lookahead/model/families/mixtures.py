"""Mixtures of experts: Qwen2-MoE, Qwen3-MoE, OLMoE, Mixtral, gpt-oss, Hunyuan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lookahead.model.families.family import Family
from lookahead.model.families.llama import hunyuan_attention
from lookahead.model.families.modules import attention, gated
from lookahead.model.families.operations import (
    WIDE,
    ClampedGlu,
    Experts,
    Mlp,
    Norm,
    Residual,
    Rope,
    SelfAttention,
    UndeclaredError,
)


def _likeliest(logits: Tensor, count: int, *, is_normed: bool, is_rounded: bool) -> tuple[Tensor, Tensor]:
    """The experts with the largest probabilities."""
    factors, indices = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), count, dim=-1)
    if is_normed:
        factors /= factors.sum(dim=-1, keepdim=True)
    return factors.to(logits.dtype) if is_rounded else factors, indices


def sigmoid_of_rows(logits: Tensor) -> Tensor:
    """The sigmoid of logits `[tokens, experts]`, with the bits of each row alone.

    Torch computes the last numbers of a tensor, fewer than two of its vectors hold, one by one, by other code.
    """
    return torch.stack([row.sigmoid() for row in logits])


def softmax_of_largest(logits: Tensor, count: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """The experts with the largest logits, and their probabilities among each other, computed in a dtype."""
    largest, indices = torch.topk(logits.to(dtype or logits.dtype), count, dim=-1)
    return torch.softmax(largest, 1, dtype=largest.dtype).to(logits.dtype), indices


def _layer(
    layer: Any, attended: SelfAttention, feeding: Mlp | Experts, norm: Callable[[Any], Norm] = Norm
) -> tuple[Residual, ...]:
    return (
        Residual(attended, norm(layer.input_layernorm)),
        Residual(feeding, norm(layer.post_attention_layernorm)),
    )


def _mixture(module: Any, *, is_normed: bool, is_rounded: bool) -> Experts:
    router, own = module.gate, module.experts
    route = partial(_likeliest, count=router.top_k, is_normed=is_normed, is_rounded=is_rounded)
    return Experts(module, router, own, router.top_k, route, own.act_fn, is_wide=not is_rounded)


def shared_mixture(module: Any) -> Experts:
    """A mixture with a shared expert and its gate."""
    mixture = _mixture(module, is_normed=getattr(module.gate, "norm_topk_prob", True), is_rounded=True)
    return mixture._replace(shared=gated(module.shared_expert), gates=(module.shared_expert_gate,))


def _qwen3_moe(layer: Any) -> tuple[Residual, ...]:
    module, mlp = layer.self_attn, layer.mlp
    norms = Norm(module.q_norm), Norm(module.k_norm)
    attended = attention(module, norms, sliding_window=module.sliding_window)
    if not hasattr(mlp, "experts"):
        return _layer(layer, attended, gated(mlp))
    return _layer(layer, attended, _mixture(mlp, is_normed=mlp.gate.norm_topk_prob, is_rounded=True))


def _olmoe(layer: Any) -> tuple[Residual, ...]:
    module, mlp = layer.self_attn, layer.mlp
    if module.config.clip_qkv is not None:
        raise UndeclaredError("queries, keys and values are clipped")
    norms, window = (Norm(module.q_norm), Norm(module.k_norm)), getattr(module.config, "sliding_window", None)
    attended = attention(module, norms, sliding_window=window)
    return _layer(layer, attended, _mixture(mlp, is_normed=mlp.gate.norm_topk_prob, is_rounded=True))


def _qwen2_moe(layer: Any) -> tuple[Residual, ...]:
    module, mlp = layer.self_attn, layer.mlp
    attended = attention(module)
    if not hasattr(mlp, "experts"):
        return _layer(layer, attended, gated(mlp))
    return _layer(layer, attended, shared_mixture(mlp))


def _mixtral(layer: Any) -> tuple[Residual, ...]:
    module = layer.self_attn
    attended = attention(module, sliding_window=getattr(module.config, "sliding_window", None))
    return _layer(layer, attended, _mixture(layer.mlp, is_normed=True, is_rounded=False))


def _wide(module: Any) -> Norm:
    return Norm(module, WIDE)


def _gpt_oss(layer: Any) -> tuple[Residual, ...]:
    module, mlp = layer.self_attn, layer.mlp
    rope = Rope("", module.head_dim, shares=True)
    attended = attention(module, (), rope, sliding_window=module.sliding_window, s_aux=module.sinks)
    router, own = mlp.router, mlp.experts
    route, glu = partial(softmax_of_largest, count=router.top_k), ClampedGlu(own.limit, own.alpha)
    feeding = Experts(mlp, router, own, router.top_k, route, glu, is_transposed=True)
    return _layer(layer, attended, feeding, _wide)


def _hunyuan_moe(layer: Any) -> tuple[Residual, ...]:
    mlp, router, own = layer.mlp, layer.mlp.gate.wg, layer.mlp.experts
    route = partial(_likeliest, count=mlp.gate.top_k, is_normed=True, is_rounded=True)
    feeding = Experts(
        mlp, router, own, mlp.gate.top_k, route, own.act_fn, shared=gated(mlp.shared_mlp),
        has_wide_router=router.weight.dtype != own.gate_up_proj.dtype, of_router=(mlp.gate,),
    )  # fmt: skip
    return _layer(layer, hunyuan_attention(layer.self_attn), feeding)


FAMILIES = (
    Family("qwen2_moe", "Qwen2Moe", _qwen2_moe),
    Family("qwen3_moe", "Qwen3Moe", _qwen3_moe),
    Family("olmoe", "Olmoe", _olmoe),
    Family("mixtral", "Mixtral", _mixtral),
    Family("gpt_oss", "GptOss", _gpt_oss, _wide),
    Family("hunyuan_v1_moe", "HunYuanMoEV1", _hunyuan_moe),
)
