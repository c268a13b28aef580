"""Declared families: passes as one call, with the tokens of `model.generate`, and in bfloat16 with its bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import lookahead
from lookahead.backend import support
from lookahead.backend.cpu import fused_layers, routing
from lookahead.kernels import experts
from lookahead.model import families
from lookahead.model.model_state import plan_of
from tests.support.declared import FAMILIES, MIXTURES, both, has_kernels, made, prompt
from tests.support.small_layers import HALF, SINGLE, on_x86

pytestmark = [on_x86, has_kernels]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_passes_are_one_call_with_the_bits_of_generate(name, calls):
    model = made(name)
    own, ours = both(model, prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences)
    assert all(map(torch.equal, own.logits, ours.logits))
    assert calls, lookahead.backend_report(model)
    assert len(fused_layers.find_fused(model).layers) == model.config.num_hidden_layers


@pytest.mark.parametrize("name", FAMILIES)
def test_in_float32_passes_are_one_call_with_the_tokens_of_generate(name, calls):
    own, ours = both(made(name, SINGLE), prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences)
    for expected, logits in zip(own.logits, ours.logits, strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=2e-3)
    assert calls


@pytest.mark.parametrize(
    "name",
    [
        *("Gemma3", "Gemma4", "GPTNeoX", "Olmo3", "Granite", "Qwen2Moe", "Qwen3Moe", "Glm4", "Lfm2", "Qwen3_5"),
        *(
            "GraniteMoeHybrid-Mamba",
            "DeepseekV3",
            "Glm4Moe",
            "Phi",
            "Lfm2Moe",
            "HunYuanMoEV1",
            "Ministral3",
            "NemotronH",
            "GPT2",
            "Lfm3",
        ),
    ],
)
def test_sampled_tokens_are_those_of_generate(name):
    own, ours = both(made(name), prompt(), do_sample=True, temperature=1.3)
    assert torch.equal(own.sequences, ours.sequences)


@pytest.mark.parametrize(
    "name",
    [
        "Gemma2",
        "Gemma3",
        "Gemma4",
        "Phi3",
        "SmolLM3",
        "Mixtral",
        "Ernie4_5",
        "Exaone4",
        "Qwen2Moe",
        "Lfm2",
        "Qwen3Next",
        *("GraniteMoeHybrid-Mamba", "DeepseekV3", "Glm4Moe", "StableLm-parallel", "Lfm2Moe", "Ministral3"),
        *("NemotronH", "GPT2", "OPT", "Lfm3"),
    ],
)
def test_rows_of_other_lengths_get_the_tokens_of_generate(name, calls):
    model, ids = made(name, SINGLE), prompt(rows=3)
    mask = torch.ones_like(ids)
    for row, length in enumerate((0, 7, 20)):
        ids[row, :length], mask[row, :length] = 0, 0
    options = {"output_logits": False, "return_dict_in_generate": False}  # states of rows are not returned
    own, ours = both(model, ids, attention_mask=mask, do_sample=False, **options)
    assert torch.equal(own, ours) and (calls or name == "DeepseekV3")  # whose mixer takes one row


@pytest.mark.parametrize("name", ["Gemma3", "Gemma4", "Starcoder2", "Mistral", "Ministral", "Olmo3", "Exaone4", "Lfm3"])
def test_windows_are_passed_and_left_with_the_bits_of_generate(name, calls):
    model = made(name)
    for length in (6, 12, 15, 18, 60):  # before the window of 16, at its end, and behind it
        own, ours = both(model, prompt(length), do_sample=False, max_new_tokens=20)
        assert all(map(torch.equal, own.logits, ours.logits)), length
    assert calls


def test_behind_a_window_heads_that_share_keys_attend_as_generate_lets_them(calls):
    # With a mask transformers multiplies them together, with other bits than each alone.
    for heads in (4, 8):
        model = made("Mistral", num_key_value_heads=heads)
        for start in range(17, 27):
            own, ours = both(model, prompt(3 * start), do_sample=False, max_new_tokens=40)
            assert all(map(torch.equal, own.logits, ours.logits)), (heads, start)
    assert calls


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_has_the_bits_of_single_rows_packed_or_not(name):
    model = made(name)
    layer = fused_layers.find_fused(model).layers[-1]  # the first of some models has an MLP
    part, x = layer.experts, torch.randn(1, 40, 256, generator=torch.Generator().manual_seed(2)).to(HALF)
    with torch.inference_mode():
        own = torch.cat([routing.called(part, row) for row in x.split(1, 1)], 1)
        for packs in (False, True):
            weights = routing.weights_of(part, layer.known, packs=packs)
            assert (weights.inner[0].layout == experts.PACKED) is packs
            jobs = fused_layers.LayerJobs(
                lambda name, size: x.new_empty(1, 40, size),
                *({}, None, {}, None, lambda part: routing.Routing(part, 40, HALF)),
            )
            jobs.mixture = weights
            mixed = jobs.mixed(part, x)
            jobs.run()
            assert torch.equal(mixed, own)


def test_a_router_that_is_kept_in_float32_chooses_the_experts_of_generate(calls):
    model = made("Ernie4_5_Moe")
    for layer in model.base_model.layers[1:]:
        layer.mlp.gate.float()
    own, ours = both(model, prompt(), do_sample=False)
    assert all(map(torch.equal, own.logits, ours.logits)) and calls


def test_experts_whose_results_are_added_in_another_order_keep_the_bits_of_generate():
    model = made("Qwen3Moe")
    for implementation in ("grouped_mm", "eager"):  # as they were chosen, and by their numbers
        model.set_experts_implementation(implementation)
        own, ours = both(model, prompt(), do_sample=False)
        assert all(map(torch.equal, own.logits, ours.logits)), implementation


def test_trees_are_verified_where_rounding_changes_the_experts_of_every_probe(monkeypatch):
    monkeypatch.setattr(support, "_mismatch_of", lambda *arguments, **options: "other experts")
    assert support.support_of(made("GptOss"), shortest=8, max_length=64).shape == "trees"
    assert support.support_of(made("GptOss", SINGLE), shortest=8, max_length=64).shape == "none"


def test_changed_weights_of_experts_are_heeded_by_the_next_pass():
    model = made("Qwen3Moe", SINGLE)
    first, _ = both(model, prompt(), do_sample=False)
    with torch.no_grad():
        for layer in model.base_model.layers:
            layer.mlp.experts.down_proj.neg_()
    own, ours = both(model, prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences) and not torch.equal(own.sequences, first.sequences)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_that_does_not_match_its_declaration_stays_as_it_is(name):
    model = made(name)
    layers = [module for module in model.modules() if families.family_of(module)]
    layers.pop(1).extra = nn.Linear(2, 2)
    found = fused_layers.find_fused(model)
    assert [layer.module for layer in found.layers] == layers
    assert found.reason == "layer 1: extra is not declared"


def test_a_class_whose_code_another_package_replaced_is_not_served(monkeypatch):
    from transformers.models.gemma3 import modeling_gemma3

    own = modeling_gemma3.Gemma3RMSNorm.forward
    monkeypatch.setattr(modeling_gemma3.Gemma3RMSNorm, "forward", lambda self, x: 2 * own(self, x))
    model = made("Gemma3", SINGLE)
    expected, ours = both(model, prompt(), do_sample=False)
    assert torch.equal(expected.sequences, ours.sequences)
    assert not fused_layers.find_fused(model).layers


def test_a_declaration_that_is_wrong_is_found_by_comparison(monkeypatch):
    from lookahead.model.families import gemma

    family = next(family for family in gemma.FAMILIES if family.name == "Gemma3")
    wrong = family._replace(layer=lambda layer: tuple(part._replace(factor=0.5) for part in family.layer(layer)))
    monkeypatch.setattr(families, "_BY_LAYER", {(family.file, "Gemma3DecoderLayer"): wrong})
    model = made("Gemma3", SINGLE)
    found = fused_layers.find_fused(model)
    assert not found.layers and "compute differently from their declaration" in found.reason


@pytest.mark.parametrize("change", [{"embedding_factor": ""}, {"logits_divisor": ""}])
@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_a_wrong_declaration_around_the_layers_is_found_by_whole_passes(change, dtype, calls, monkeypatch):
    family = next(family for family in families.FAMILIES if family.name == "Granite")
    monkeypatch.setattr(families, "_BY_LAYER", {(family.file, "GraniteDecoderLayer"): family._replace(**change)})
    model = made("Granite", dtype)
    own, ours = both(model, prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences)
    calls.clear()
    both(model, prompt(seed=5), do_sample=False)
    assert not calls


def test_an_activation_that_rounds_every_step_has_no_kernel():
    both(made("Gemma3"), prompt(), do_sample=False)  # the same class, by torch at once
    model = made("Gemma3", hidden_activation="gelu_python_tanh")
    own, ours = both(model, prompt(), do_sample=False)
    assert all(map(torch.equal, own.logits, ours.logits))
    assert "its activation has no kernel" in fused_layers.find_fused(model).reason


def test_rows_of_an_expert_do_not_depend_on_those_of_others():
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 96, 128, generator=source).to(HALF)
    x = torch.randn(7, 128, generator=source).to(HALF)
    for packs in (False, True):
        held = experts.weight_of(weight, 512, packs=packs)
        alone = torch.empty(7, 96, dtype=HALF)
        for row, expert in enumerate((0, 0, 2, 2, 2, 4, 4)):
            one = torch.tensor([[expert, row, 1], [0, 0, 0]])
            fused_layers.run(experts.products(x, held, None, alone, one, 1))
        together = torch.empty(7, 96, dtype=HALF)
        groups = torch.tensor([[0, 0, 2], [2, 2, 3], [4, 5, 2], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
        fused_layers.run(experts.products(x, held, None, together, groups, 7))
        assert torch.equal(together, alone)


def test_routing_groups_the_rows_of_each_expert():
    model = made("Mixtral", SINGLE)
    part = fused_layers.find_fused(model).layers[0].experts
    table = routing.Routing(part, 9, SINGLE)
    table.logits.copy_(torch.randn(9, 8, generator=torch.Generator().manual_seed(0)))
    for tokens in (1, 9, 4):
        table.fill(part, routing.weights_of(part, {}), tokens)
        factors, indices = part.route(table.logits[:tokens])
        rows, chosen = tokens * 2, table.chosen.numpy()
        count = int((chosen[:, 2] > 0).sum())
        assert chosen[:count, 2].sum() == rows and not chosen[count:].any()
        for token in range(tokens):
            for choice in range(2):
                row = int(table.places[token, choice])
                assert int(table.sources[row]) == token
                group = next(each for each in chosen[:count] if each[1] <= row < each[1] + each[2])
                assert group[0] == int(indices[token, choice])
        assert torch.equal(table.factors[:tokens], factors)
        assert np.array_equal(np.sort(table.places[:tokens].flatten().numpy()), np.arange(rows))


def test_kept_tables_follow_the_plan_of_the_model():
    model = made("Granite", SINGLE)
    both(model, prompt(), do_sample=False)
    plan = plan_of(model)
    with torch.no_grad():
        model.base_model.layers[0].input_layernorm.weight.mul_(-1)
    own, ours = both(model, prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences) and plan_of(model) is not plan


def test_a_window_of_one_token_gives_the_tokens_of_generate():
    model = made("Mistral", SINGLE, sliding_window=1)
    for length in (3, 36):
        own, ours = both(model, prompt(length), do_sample=False)
        assert torch.equal(own.sequences, ours.sequences)


def test_a_hybrid_without_recurrent_layers_is_a_model_of_attention():
    sizes = {"shared_intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 3}
    model = made("GraniteMoeHybrid", SINGLE, **sizes, intermediate_size=128, position_embedding_type="nope")
    own, ours = both(model, prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences)
    assert len(fused_layers.find_fused(model).layers) == 3


def test_a_layer_of_a_kind_that_no_operation_describes_is_named():
    model = made("Olmoe", SINGLE, clip_qkv=1.0)
    assert fused_layers.find_fused(model).reason.startswith("layer 0: queries, keys and values are clipped; layer 1:")
    own, ours = both(model, prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences)
