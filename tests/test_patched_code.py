"""Functions, classes and flags that a user replaced: what they do in `generate` is what is emitted."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sliding_window_overlay
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaRotaryEmbedding

import lookahead
from lookahead import LookaheadConfig, UnsupportedModelError
from lookahead.model.facts import CACHE
from tests.support.adversarial_proposers import drafting_by, perfect
from tests.support.changed_code import patched
from tests.support.small_layers import HALF, PACKED, SINGLE, made

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9]])
NEW = 20


def plain(model: Any, **options: Any) -> list[list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may be decoded plainly
        found: list[list[int]] = model.generate(
            **{"input_ids": IDS, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
        ).tolist()
    return found


def drafted(model: Any, answers: list[list[int]], **options: Any) -> list[list[int]]:
    """By drafts that are right, so that every pass is wide."""
    options["custom_generate"] = lookahead.decode
    with drafting_by(perfect(answers)):
        try:
            return plain(model, lookahead_config=LookaheadConfig(draft="fixed"), **options)
        except UnsupportedModelError:
            return plain(model, **options)


def same(model: Any, **options: Any) -> bool:
    answers = plain(model, **options)
    return drafted(model, answers, **options) == answers


def along(x: Tensor, strength: float) -> Tensor:
    return strength * torch.linspace(-1, 1, x.shape[-1], dtype=torch.float32).to(x.dtype)


def _hook(model: Any, edit: Any) -> AbstractContextManager[Any]:
    def hook(module: Any, args: Any, out: Tensor) -> Tensor:
        out = out.clone()
        edit(out)
        return out

    handle = model.model.layers[1].register_forward_hook(hook)

    @contextmanager
    def hooked() -> Iterator[None]:
        yield
        handle.remove()

    return hooked()


def weak_edit_of_the_end(out: Tensor) -> None:
    out[:, -1] += along(out, 1.0)


def edit_of_one_position(out: Tensor) -> None:
    if out.shape[1] > 7:
        out[:, 7] += along(out, 40.0)


def edit_of_some_ends(out: Tensor) -> None:
    end = out[:, -1]
    out[:, -1] += along(out, 40.0) * ((end @ along(out, 1.0)) > 0)[:, None]


class Ablated(nn.Linear):
    """Its outputs are zeros without memory of their own."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(1).expand(*x.shape[:-1], self.out_features)


class Steered(LlamaDecoderLayer):
    """A layer with a switch."""

    is_on = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if self.is_on:
            out[:, -1] += along(out, 40.0)
        return out


@contextmanager
def as_class(module: Any, kind: type) -> Iterator[None]:
    own, module.__class__ = type(module), kind
    try:
        yield
    finally:
        module.__class__ = own


def few_keys(own: Any) -> Any:
    """Attention that forgets most of a longer text, but only for single tokens."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = own(self, hidden_states, *args, **kwargs)
        past = kwargs.get(CACHE)
        if hidden_states.shape[1] == 1 and past is not None and past.get_seq_length() > 14:
            return (out[0] * 0.5, *out[1:])
        return out

    return forward


def stretched(own: Any) -> Any:
    """Positions that are pressed together once a text is long."""

    def forward(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        most = int(position_ids.max()) + 1
        return own(self, x, position_ids if most <= 16 else position_ids * 16 / most)

    return forward


def dynamic_embeddings() -> LlamaRotaryEmbedding:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=16, rope_parameters=rope)
    )


WAYS: dict[str, Any] = {
    "a weak edit of the last position": lambda model: _hook(model, weak_edit_of_the_end),
    "an edit of one position": lambda model: _hook(model, edit_of_one_position),
    "an edit of some last positions": lambda model: _hook(model, edit_of_some_ends),
    "an ablated product": lambda model: as_class(model.model.layers[1].mlp.gate_proj, Ablated),
    "an ablated query": lambda model: as_class(model.model.layers[1].self_attn.q_proj, Ablated),
    "a steered layer": lambda model: as_class(model.model.layers[1], Steered),
    "attention of few keys": lambda model: patched(LlamaAttention, "forward", few_keys),
    "stretched positions": lambda model: patched(LlamaRotaryEmbedding, "forward", stretched),
    "embeddings of another kind": lambda model: patched(model.model, "rotary_emb", lambda own: dynamic_embeddings()),
    "a partial mask": lambda model: patched(
        modeling_llama,
        "create_causal_mask",
        lambda own: functools.partial(own, and_mask_function=sliding_window_overlay(12)),
    ),
    "a window that no mask has": lambda model: patched(
        model.model.layers[1].self_attn, "sliding_window", lambda own: 12
    ),
    "a call of its own": lambda model: patched(
        model.model.layers[1].mlp, "_call_impl", lambda own: lambda *args, **kwargs: own(*args, **kwargs) * 1.5
    ),
    "a part of a method": lambda model: patched(
        DynamicLayer,
        "update",
        lambda own: functools.partialmethod(lambda self, by, keys, values, *args: own(self, keys, values * by), 1.5),
    ),
    "autocast around the layers": lambda model: patched(
        model.model, "forward", lambda own: torch.autocast("cpu", HALF)(own)
    ),
    "autocast in every product": lambda model: patched(
        nn.Linear, "forward", lambda own: torch.autocast("cpu", HALF)(own)
    ),
}


@contextmanager
def opened(way: str, model: Any) -> Iterator[None]:
    if way == "a window that no mask has":
        model.model.layers[1].self_attn.sliding_window = None
    with WAYS[way](model):
        yield


@pytest.mark.parametrize("is_used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.covering(1)
def test_what_tells_one_token_from_several_is_decoded_as_generate_does(way, dtype, is_used):
    model = made("llama", dtype, **PACKED)
    assert not is_used or same(model)
    with opened(way, model):
        assert same(model)


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_a_verdict_on_one_strength_is_none_on_a_stronger_one(dtype):
    model = made("llama", dtype, **PACKED)
    for strength in (1e-4, 1.0, 40.0):

        def edit(out: Tensor, strength: float = strength) -> None:
            out[:, -1] += along(out, strength)

        with _hook(model, edit):
            assert same(model)


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_a_switch_of_a_users_layer_is_seen(dtype, monkeypatch):
    model = made("llama", dtype, **PACKED)
    with as_class(model.model.layers[1], Steered):
        monkeypatch.setattr(Steered, "is_on", False)
        assert same(model)
        monkeypatch.setattr(Steered, "is_on", True)
        assert same(model)
        model.model.layers[1].is_on = False
        assert same(model)


@pytest.mark.parametrize("change", [{"sliding_window": 14}, {"layer_types": ["full_attention"] * 3}], ids=str)
def test_a_configuration_that_layers_were_not_made_by_is_what_masks_follow(change):
    model = made("qwen2 with some windows", SINGLE)
    for name, value in change.items():
        setattr(model.config, name, value)
    assert same(model)


def test_a_hook_that_may_edit_masks_leaves_padded_prompts_to_transformers():
    def knock_out(module: Any, args: Any, kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None:
            mask = mask.clone()
            mask[..., 5:8] = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return args, {**kwargs, "attention_mask": mask}

    model = made("llama", SINGLE)
    model.model.layers[1].register_forward_pre_hook(knock_out, with_kwargs=True)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), IDS[:, 3:]], 1)
    assert same(model, input_ids=padded, attention_mask=(padded != 0).long())
    assert same(model)
