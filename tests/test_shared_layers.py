"""Gemma 4: layers that share keys and values, have a second input and a scale, in passes as one call."""

from __future__ import annotations

import pytest
import torch

from lookahead.backend.cpu import fused_layers
from tests.support.declared import both, has_kernels, made, prompt
from tests.support.small_layers import HALF, SINGLE, on_x86

pytestmark = [on_x86, has_kernels]


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_keys_may_be_values_and_layers_may_go_without_a_second_input(dtype, calls):
    sizes = {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0}
    own, ours = both(made("Gemma4", dtype, **sizes, num_kv_shared_layers=0), prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences) and calls


def test_a_changed_scale_of_a_layer_is_heeded_by_the_next_pass():
    model = made("Gemma4", SINGLE)
    first, _ = both(model, prompt(), do_sample=False)
    model.model.layers[2].layer_scalar.neg_()
    own, ours = both(model, prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences) and not torch.equal(own.sequences, first.sequences)


def test_experts_beside_an_mlp_are_named():
    sizes = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}
    found = fused_layers.find_fused(made("Gemma4", SINGLE, **sizes))
    assert found.reason.startswith("layer 0: it has experts beside its MLP") and not found.layers
