"""Fused decoder layers: whole passes with the bits of the model's own layers, nowhere else than in our passes."""

from __future__ import annotations

import copy
import pickle
import platform
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune
from transformers import (
    CohereConfig,
    CohereForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

import lookahead
from lookahead.backend.cpu import cpu_pass, fused_layers, layer_checks
from lookahead.kernels import layer_ops
from tests.support.small_layers import HALF, MODELS, SINGLE, SIZES, fused, logits_of, made, own_code, running, serving

__all__ = ["fused", "own_code"]  # fixtures

on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch sums in another order")


def served(model: Any) -> Any:
    """The modules of a model that are served."""
    with serving(model):
        return [each for each in model.modules() if "forward" in each.__dict__]


@on_x86
@pytest.mark.parametrize("hidden_layers", [(), (0, 2, -1)])
@pytest.mark.parametrize(("rows", "nodes"), [(1, 1), (1, 17), (3, 1), (3, 6)])
@pytest.mark.parametrize("name", MODELS)
def test_whole_passes_in_bfloat16_have_the_bits_of_the_models_own_layers(
    name, rows, nodes, hidden_layers, fused, own_code
):
    model = made(name)
    expected = own_code(model, rows, nodes, hidden_layers=hidden_layers)
    assert not fused
    got = logits_of(model, rows, nodes, hidden_layers=hidden_layers)
    assert len(fused) >= 3 * 2
    assert len(got) == len(expected) and all(map(torch.equal, got, expected))


@pytest.mark.parametrize("name", MODELS)
def test_whole_passes_in_float32_are_near_those_of_the_models_own_layers(name, fused, own_code):
    model = made(name, SINGLE)
    expected = own_code(model, 2, 6)
    for got, own in zip(logits_of(model, 2, 6), expected, strict=True):
        torch.testing.assert_close(got, own, rtol=1e-4, atol=1e-4)
    assert fused


@on_x86
def test_a_layer_that_is_fused_and_its_last_norm_are_served_and_nothing_else():
    model = made("qwen3")
    assert served(model) == [*model.model.layers, model.model.norm]
    assert not any("forward" in each.__dict__ for each in model.modules())


class Doubled(LlamaMLP):
    """An MLP that is more than its class says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Adapter(nn.Module):
    """A linear layer and something beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.added = base, copy.deepcopy(base)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.added(x)


def change(model: Any, how: str) -> None:
    """Do to the second layer what a fused layer would not heed."""
    layer = model.model.layers[1]
    if how == "hook":
        layer.mlp.register_forward_hook(lambda module, args, out: 2 * out)
    elif how == "pre-hook":
        layer.input_layernorm.register_forward_pre_hook(lambda module, args: (2 * args[0] + 1,))
    elif how == "adapter":
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
    elif how == "other class":
        layer.mlp.__class__ = Doubled
    elif how == "own forward":
        layer.mlp.forward = lambda x: 2 * x
    elif how == "other activation":
        layer.mlp.act_fn = nn.GELU()
    elif how == "more modules":
        layer.extra = nn.Identity()
    elif how == "pruned":
        prune.random_unstructured(layer.mlp.up_proj, "weight", 0.5)
    elif how == "weight norm":
        parametrizations.weight_norm(layer.mlp.up_proj).parametrizations.weight.original0.data *= 2


WAYS = (
    *("hook", "pre-hook", "adapter", "other class", "own forward", "other activation", "more modules"),
    *("pruned", "weight norm"),
)


@on_x86
@pytest.mark.parametrize("how", WAYS)
def test_a_layer_that_is_more_than_its_class_says_stays_as_it_is(how, fused, own_code):
    model = made()
    plain = own_code(model, 1, 5)
    change(model, how)
    expected = own_code(model, 1, 5)
    assert how == "more modules" or not torch.equal(plain[-1], expected[-1])
    got = logits_of(model, 1, 5)
    assert all(map(torch.equal, got, expected))
    assert model.model.layers[1] not in served(model)
    assert model.model.layers[0] in served(model) and fused


def test_a_hook_for_all_modules_is_heeded(own_code, fused):
    model, seen = made(), []
    handle = register_module_forward_hook(lambda module, args, out: seen.append(type(module)))
    try:
        logits_of(model, 1, 5)
    finally:
        handle.remove()
    assert LlamaMLP in seen and not fused


def test_layers_of_another_class_or_type_of_numbers_stay_as_they_are():
    cohere = CohereForCausalLM(CohereConfig(**SIZES)).to(HALF).eval()
    for model in (cohere, made(dtype=torch.float16), made(dtype=torch.float64)):
        assert not served(model)


@pytest.mark.parametrize("result", ["norm", "rotation", "gating", "means"])
def test_a_kernel_with_another_bit_serves_no_layer(result, monkeypatch):
    monkeypatch.setattr(layer_checks, "_probed", {})
    results: list[torch.Tensor] = []
    name, run = "norm" if result == "means" else result, layer_checks.run
    own = getattr(layer_ops, name)

    def noted(*tensors: Any, **others: Any) -> Any:
        place = {"norm": tensors[2:3], "means": [others["means"]] if "means" in others else []}
        results.extend(tensor for tensor in place.get(result, tensors[:1]) if tensor is not None)
        return own(*tensors, **others)

    def wrong(*jobs: Any) -> None:
        run(*jobs)
        while results:
            changed = results.pop()
            changed.view(torch.int16 if changed.dtype == HALF else torch.int32).flatten()[1] += 1

    monkeypatch.setattr(layer_ops, name, noted)
    monkeypatch.setattr(layer_checks, "run", wrong)
    for each in (layer_checks.keeps_means, layer_checks.keeps_activation):
        each.cache_clear()
    try:
        assert not any(type(each) is LlamaDecoderLayer for each in served(made()))
    finally:
        for each in (layer_checks.keeps_means, layer_checks.keeps_activation):
            each.cache_clear()


@on_x86
def test_other_threads_and_calls_outside_of_passes_get_the_models_own_layers(fused):
    model, ids = made(), torch.arange(3, 9)[None]
    with torch.inference_mode(), serving(model):
        expected = model(ids).logits
        assert not fused
        with running():
            outputs: list[torch.Tensor] = []
            other = threading.Thread(target=lambda: outputs.append(model(ids).logits))
            other.start()
            other.join()
            assert torch.equal(outputs[0], expected) and not fused
            assert torch.equal(model(ids).logits, expected)
    assert fused == 3 * [threading.get_ident()]


@pytest.mark.parametrize("block", [torch.enable_grad, lambda: torch.autocast("cpu", HALF)])
def test_gradients_and_autocast_are_left_to_the_model(block, fused):
    model = made(dtype=SINGLE)
    with serving(model):
        fused.clear()  # the comparison with the model's own code
        with block(), running():
            model(torch.arange(3, 9)[None])
    assert not fused


def test_under_autocast_layers_are_not_even_compared(fused, monkeypatch):
    # Products have another type than the buffers of the kernels, which would write beyond them.
    monkeypatch.setattr(layer_checks, "_probed", {})
    model = made(dtype=SINGLE)
    with torch.autocast("cpu", HALF):
        assert not served(model) and not fused
    assert served(model)


def test_prompts_of_many_tokens_are_left_to_the_model(fused, monkeypatch):
    monkeypatch.setattr(cpu_pass, "_MAX_FUSED_ELEMENTS", 72 * 5)
    model = made()
    with torch.inference_mode(), serving(model), running():
        model(torch.arange(3, 9)[None])
        assert not fused
        model(torch.arange(3, 8)[None])
        assert len(fused) == 3


@on_x86
def test_a_layer_that_is_given_its_cache_by_another_name_is_left_to_the_model(fused, own_code, monkeypatch):
    model = made("llama")
    expected = own_code(model, 1, 5)
    monkeypatch.setattr(fused_layers, "CACHE", "the name in another release")
    got = logits_of(model, 1, 5)
    assert not fused and all(map(torch.equal, got, expected))


@on_x86
def test_blocks_of_several_targets_end_in_any_order(fused):
    model = made()
    blocks = [serving(model) for _ in range(2)]
    for block in blocks:
        block.__enter__()
    blocks[0].__exit__(None, None, None)
    with torch.inference_mode(), running():
        model(torch.tensor([[5, 6]]))
    assert len(fused) == 3
    blocks[1].__exit__(None, None, None)
    assert not any("forward" in each.__dict__ for each in model.modules())


@on_x86
def test_a_model_that_is_copied_or_pickled_while_it_is_served_is_a_model_of_its_own(fused):
    model, ids = made(), torch.tensor([[5, 6, 7]])
    with serving(model):
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        for weight in twin.parameters():
            weight.data.zero_()
        with torch.inference_mode(), serving(twin), running():
            assert not twin(ids).logits.any()
    assert len(fused) == 2 * 3


@on_x86
def test_drafts_with_fused_layers_give_the_bits_of_generate(fused):
    model, ids = made(), torch.tensor([[1, 5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9]])
    options = {"max_new_tokens": 30, "output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    expected = model.generate(ids, **options)
    assert not fused
    got = model.generate(ids, **options, custom_generate=lookahead.decode)
    assert fused and torch.equal(got.sequences, expected.sequences)
    assert all(map(torch.equal, got.logits, expected.logits))


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "gate_proj"])
def test_products_that_a_hook_keeps_are_not_overwritten(name):
    model, ids = made(dtype=SINGLE), torch.arange(5, 25)[None]
    layer = model.model.layers[1]
    product = getattr(layer.mlp if name == "gate_proj" else layer.self_attn, name)
    kept: list[Tensor] = []
    copies: list[Tensor] = []

    def keep(module: Any, args: Any, out: Tensor) -> None:
        kept.append(out)
        copies.append(out.clone())

    product.register_forward_hook(keep)
    model.generate(ids, max_new_tokens=6, do_sample=False, custom_generate=lookahead.decode)
    assert kept and all(torch.equal(*pair) for pair in zip(kept, copies, strict=True))


@on_x86
def test_a_layer_with_biases_is_compared_although_one_of_its_sizes_was_without(fused):
    for options in ({}, {"attention_bias": True}, {"mlp_bias": True}):
        before = len(layer_checks._probed)
        assert served(made("llama", **options))
        assert len(layer_checks._probed) == before + bool(options)


class ReturnsMore(LlamaDecoderLayer):
    """A layer of another release, which returns its attention weights too."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs), None


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
def test_a_layer_that_returns_more_than_hidden_states_runs_its_own_code(dtype: torch.dtype) -> None:
    layer = fused_layers.find_fused(made(dtype=dtype)).layers[0]
    assert layer_checks.is_right(layer, 0, fused_layers._fused)
    layer.module.__class__ = ReturnsMore
    assert not layer_checks.is_right(layer, 0, fused_layers._fused)
