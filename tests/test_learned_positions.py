"""Declared families with learned positions: GPT-2, StarCoder 1 and OPT."""

from __future__ import annotations

import pytest
import torch

import lookahead
from lookahead.backend.cpu.fused_layers import find_fused
from tests.support.declared import both, has_kernels, made, prompt
from tests.support.small_layers import HALF, SINGLE, on_x86

pytestmark = [on_x86, has_kernels]


@pytest.mark.parametrize("name", ["GPT2", "GPTBigCode", "OPT"])
def test_the_first_and_the_last_position_have_the_bits_of_generate(name, calls):
    model = made(name, max_position_embeddings=64, n_positions=64)
    for length in (3, 36):  # the outputs end with the context
        own, ours = both(model, prompt(length), do_sample=False, max_new_tokens=64 - length)
        assert all(map(torch.equal, own.logits, ours.logits)), length
    assert calls


@pytest.mark.parametrize("place", ["wpe", "drop"])
def test_a_trusted_hook_on_learned_positions_changes_them_in_every_pass(place, calls):
    model, outputs = made("GPT2"), []
    options = {"max_new_tokens": 24, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    outputs.append(model.generate(prompt(), **options))
    getattr(model.transformer, place).register_forward_hook(lambda _, inputs, output: -output)
    trusted = {"lookahead_config": lookahead.LookaheadConfig(trust_user_code=True)}
    for ours in ({}, {"custom_generate": lookahead.decode, **trusted}):
        outputs.append(model.generate(prompt(), **options, **ours))
    unhooked, own, ours = outputs
    assert calls and all(map(torch.equal, own.logits, ours.logits))
    assert not any(map(torch.equal, own.logits, unhooked.logits))


def test_a_hook_anywhere_leaves_models_without_rotary_embeddings_as_they_are(calls):
    model = made("GPT2")
    own, ours = both(model, prompt(), do_sample=False)
    torch.nn.Linear(1, 1).register_forward_hook(lambda *_: None)
    again = model.generate(prompt(), max_new_tokens=24, do_sample=False, custom_generate=lookahead.decode)
    assert torch.equal(own.sequences, again) and torch.equal(own.sequences, ours.sequences) and calls


@pytest.mark.parametrize("options", [{"do_layer_norm_before": False}, {"num_attention_heads": 2}])
def test_an_opt_that_computes_otherwise_is_named_and_runs_its_own_layers(options):
    model = made("OPT", **options)
    found = find_fused(model)
    assert not found.layers and ("its norms come after" in found.reason or "queries are rounded" in found.reason)
    own, ours = both(model, prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences)


def test_scaled_queries_are_not_rounded_in_float32(calls):
    own, ours = both(made("OPT", SINGLE, num_attention_heads=2), prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences) and calls


def test_an_opt_with_projected_embeddings_has_the_bits_of_generate():
    own, ours = both(made("OPT", HALF, word_embed_proj_dim=64), prompt(), do_sample=False)
    assert all(map(torch.equal, own.logits, ours.logits))


def test_attention_that_multiplies_in_float32_is_left_to_the_model():
    model = made("GPT2", reorder_and_upcast_attn=True)
    assert "multiplies in float32" in find_fused(model).reason
    own, ours = both(model, prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences)
