"""GPT-2, StarCoder 1 and OPT: learned positions, layer norms and plain MLPs."""

from __future__ import annotations

from math import frexp
from typing import Any

import torch
from torch import Tensor

from lookahead.model.families.family import Family
from lookahead.model.families.layer_norms import layer_norm
from lookahead.model.families.modules import attention, split, whole
from lookahead.model.families.operations import Mlp, Product, Residual, SelfAttention, UndeclaredError


def _block(layer: Any, attended: SelfAttention) -> tuple[Residual, ...]:
    mlp = layer.mlp
    feeding = Mlp(mlp, whole(mlp.c_fc), None, whole(mlp.c_proj), mlp.act)
    return Residual(attended, layer_norm(layer.ln_1)), Residual(feeding, layer_norm(layer.ln_2))


def _attention(module: Any, query: Product, key: Product | None = None, value: Product | None = None) -> SelfAttention:
    options = {"dropout": 0.0, "scaling": module.scaling}
    return SelfAttention(module, query, key, value, whole(module.c_proj), options, None)


def _gpt2(layer: Any) -> tuple[Residual, ...]:
    module = layer.attn
    if module.reorder_and_upcast_attn:
        raise UndeclaredError("its attention multiplies in float32")
    return _block(layer, _attention(module, *split(module.c_attn, *[module.embed_dim] * 3)))


def _gpt_bigcode(layer: Any) -> tuple[Residual, ...]:
    module = layer.attn
    if module.multi_query:
        return _block(layer, _attention(module, *split(module.c_attn, module.embed_dim, *[module.kv_dim] * 2)))
    return _block(layer, _attention(module, whole(module.c_attn))._replace(has_keys=True))


def _opt(layer: Any) -> tuple[Residual, ...]:
    module = layer.self_attn
    if not layer.do_layer_norm_before:
        raise UndeclaredError("its norms come after the sums")
    # It scales queries and rounds them, which a power of two does not show.
    if module.q_proj.weight.dtype != torch.float32 and frexp(module.scaling)[0] != 0.5:
        raise UndeclaredError("its scaled queries are rounded")
    attended = attention(module, output="out_proj")._replace(rope=None)
    feeding = Mlp(layer, whole(layer.fc1), None, whole(layer.fc2), layer.activation_fn)
    return Residual(attended, layer_norm(layer.self_attn_layer_norm)), Residual(
        feeding, layer_norm(layer.final_layer_norm)
    )


def _placed(decoder: Any, hidden: Tensor, positions: Tensor) -> Tensor:
    placed: Tensor = decoder.drop(hidden + decoder.wpe(positions))
    return placed


def _placed_in_opt(decoder: Any, hidden: Tensor, positions: Tensor) -> Tensor:
    hidden = hidden if decoder.project_in is None else decoder.project_in(hidden)
    placed: Tensor = hidden + decoder.embed_positions(None, position_ids=positions)
    return placed


_OF_GPT: dict[str, Any] = {
    "norm": layer_norm, "kind": "Block", "decoder": "transformer", "embedding": "wte", "layers": "h",
    "last_norm": "ln_f", "placed": _placed,
}  # fmt: skip
FAMILIES = (
    Family("gpt2", "GPT2", _gpt2, causal="LMHeadModel", **_OF_GPT),
    Family("gpt_bigcode", "GPTBigCode", _gpt_bigcode, cache="layer_past", **_OF_GPT),
    Family(
        "opt", "OPT", _opt, layer_norm, text="Model.Decoder", decoder="model.decoder", last_norm="final_layer_norm",
        placed=_placed_in_opt,
    ),
)  # fmt: skip
