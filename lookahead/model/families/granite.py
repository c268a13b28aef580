"""Granite 3 and 4, factors around a layer like Llama's with an MLP, experts, or both; and Mamba-2, as in Nemotron-H."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lookahead.model.families.family import Family
from lookahead.model.families.mixtures import softmax_of_largest
from lookahead.model.families.modules import attention, gated, gated_at_once, plain, recurrence
from lookahead.model.families.operations import (
    WIDE,
    Experts,
    Mixer,
    Mlp,
    Norm,
    Recurrence,
    Residual,
    SelfAttention,
    UndeclaredError,
)


def _layer(layer: Any, mixer: SelfAttention | Recurrence, feeding: Mlp | Experts) -> tuple[Residual, ...]:
    factor = layer.residual_multiplier
    return (
        Residual(mixer, Norm(layer.input_layernorm), factor=factor),
        Residual(feeding, Norm(layer.post_attention_layernorm), factor=factor),
    )


def _granite(layer: Any) -> tuple[Residual, ...]:
    return _layer(layer, attention(layer.self_attn), gated(layer.mlp))


def _mixture(layer: Any) -> Mlp | Experts:
    """The experts of a layer, its MLP, or both."""
    mixture, shared = layer.block_sparse_moe, getattr(layer, "shared_mlp", None)
    mlp = None
    if shared is not None:
        mlp = gated_at_once(shared, shared.input_linear, shared.output_linear, shared.activation)
    if mixture is None and mlp is not None:
        return mlp
    router, own = mixture.router, mixture.experts
    route = partial(softmax_of_largest, count=router.top_k, dtype=torch.float32)
    return Experts(mixture, router, own, router.top_k, route, own.act_fn, shared=mlp)


def _granite_moe(layer: Any) -> tuple[Residual, ...]:
    return _layer(layer, attention(layer.self_attn), _mixture(layer))


def _mamba(module: Any) -> Recurrence:
    return recurrence(module, ("in_proj",), (), "out_proj", "cache_params", ("conv1d", "norm", "act"))


def _granite_hybrid(layer: Any) -> tuple[Residual, ...]:
    if layer.self_attn is None:
        return _layer(layer, _mamba(layer.mamba), _mixture(layer))
    attended = attention(layer.self_attn)
    if layer.self_attn.config.position_embedding_type != "rope":
        attended = attended._replace(rope=None)
    return _layer(layer, attended, _mixture(layer))


def _wide(module: Any) -> Norm:
    return Norm(module, WIDE)


def _nemotron_h(layer: Any) -> tuple[Residual, ...]:
    mixer: Mixer
    if layer.block_type == "linear_attention":
        mixer = _mamba(layer.mixer)
    elif layer.block_type == "full_attention":
        mixer = attention(layer.mixer)._replace(rope=None)
    elif layer.block_type == "mlp":
        mixer = plain(layer.mixer)
    else:
        raise UndeclaredError("its experts have no gates")
    return (Residual(mixer, _wide(layer.norm)),)


_family = partial(Family, embedding_factor="embedding_multiplier", logits_divisor="logits_scaling")
FAMILIES = (
    _family("granite", "Granite", _granite),
    _family("granitemoe", "GraniteMoe", _granite_moe),
    _family("granitemoeshared", "GraniteMoeShared", _granite_moe),
    _family("granitemoehybrid", "GraniteMoeHybrid", _granite_hybrid),
    Family("nemotron_h", "NemotronH", _nemotron_h, _wide, kind="Block", embedding="embeddings", last_norm="norm_f"),
)
