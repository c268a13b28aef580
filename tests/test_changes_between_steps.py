"""A model that a user changes between two steps, or before: passes as one call compute what it is then."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from lookahead.backend.choice import backend_for
from lookahead.backend.cpu import cpu_backend, cpu_pass, fused_layers
from lookahead.backend.probes import own_logits
from lookahead.backend.protocol import BitPolicy
from lookahead.drafting.tree import TokenTree
from lookahead.loading.quantized import quantize_linears
from tests.support.small_layers import (
    HALF,
    SINGLE,
    WIDE,
    attends,
    calls,
    fused,
    logits_of,
    made,
    on_x86,
    own_code,
    tables,
    trees_of,
)

__all__ = ["calls", "fused", "own_code", "tables"]  # fixtures


def replace_norm(model: Any) -> None:
    norm = model.model.norm = copy.deepcopy(model.model.norm)
    norm.weight.data = norm.weight.data * 2


def replace_inner_norm(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm = copy.deepcopy(model.model.layers[1].input_layernorm)
    norm.weight.data = norm.weight.data * 2


def replace_head(model: Any) -> None:
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Tanh())


def swap_layers(model: Any) -> None:
    layers = model.model.layers
    layers[1], layers[2] = layers[2], layers[1]
    layers[1].self_attn.layer_idx, layers[2].self_attn.layer_idx = 1, 2


def enlarge_epsilon(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 3.0


def enlarge_last_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 3.0


def scale_attention(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 3


def around_a_change(model: Any, change: Any, *, is_one_block: bool) -> list[torch.Tensor]:
    """Logits of a tree before and after a change of the model, behind one prompt, in one block of service or two."""
    target = backend_for(model, rows=1, capacity=64)
    with target.serving():
        target.read([np.arange(3, 14, dtype=np.int32)])
        outputs = [target.score(trees_of(1, 5, 0), BitPolicy.SOLO)]
        if is_one_block:
            change(model)
            return [*outputs, target.score(trees_of(1, 5, 0), BitPolicy.SOLO)]
    change(model)
    with target.serving():
        return [*outputs, target.score(trees_of(1, 5, 0), BitPolicy.SOLO)]


OUTSIDE = [replace_norm, replace_head, swap_layers]  # of the layers: heard within a call too
INSIDE = [replace_inner_norm, enlarge_epsilon, enlarge_last_epsilon, scale_attention]


@on_x86
@pytest.mark.parametrize("is_one_block, change", [*product((True, False), OUTSIDE), *product((False,), INSIDE)])
def test_a_change_of_the_modules_between_two_steps_is_heard(is_one_block, change, fused, calls, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cpu_backend, "find_fused", lambda model: fused_layers.FusedLayers([], [], []))
        expected = around_a_change(made("qwen3", **WIDE), change, is_one_block=is_one_block)
    got = around_a_change(made("qwen3", **WIDE), change, is_one_block=is_one_block)
    assert all(map(torch.equal, got, expected)) and not torch.equal(*got)


@on_x86
@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward"])
@pytest.mark.parametrize("name", ["", "model", "model.layers.1", "model.norm", "lm_head"])
def test_what_a_user_sets_around_a_module_during_a_call_is_called_by_the_next_pass(name, how, fused, calls):
    seen = list[str]()

    def surround(model: Any) -> None:
        module = model.get_submodule(name)
        own = module.forward
        if how == "forward":
            module.forward = lambda *args, **options: (seen.append(how), own(*args, **options))[1]
        else:
            register = module.register_forward_hook if how == "hook" else module.register_forward_pre_hook
            register(lambda *_: seen.append(how))

    assert torch.equal(*around_a_change(made(**WIDE), surround, is_one_block=True))
    assert seen == [how]


@on_x86
@pytest.mark.parametrize("name", ["model.embed_tokens", "model.rotary_emb", "lm_head"])
def test_a_hook_runs_once_in_every_pass_whichever_kernels_serve_it(name, fused, calls, monkeypatch):
    model, seen, passes = made("mistral with a window", sliding_window=20, **WIDE), list[str](), 0
    model.get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
    for most in (1 << 17, 800):  # numbers that layers at once take
        monkeypatch.setattr(cpu_pass, "_MAX_FUSED_ELEMENTS", most)
        target = backend_for(model, rows=1, capacity=64)
        with target.serving():
            target.read([np.arange(3, 14, dtype=np.int32)])
            for nodes in (1, 5, 5, 30):  # the last ones behind the window
                target.score(trees_of(1, nodes, 0), BitPolicy.SOLO)
                target.cache.commit(0, np.arange(min(nodes, 4), dtype=np.int32))
            passes += 5
    assert len(seen) == passes


@on_x86
@pytest.mark.parametrize("policy", [BitPolicy.SOLO, BitPolicy.ROUNDED])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_norm_and_a_head_of_another_type_than_the_layers_compute_by_their_own_code(attention, policy, fused, calls):
    model = made(attn_implementation=attention, **WIDE)
    model.model.norm.float()
    model.lm_head.float()
    target, tree = backend_for(model, rows=1, capacity=64), TokenTree.from_parents([3, 4, 5], [0, 0, 1])
    with target.serving():
        target.read([np.arange(3, 14, dtype=np.int32)])
        logits = target.score([tree], policy)[0]
    own = own_logits(model, [[*range(3, 13), 3, 4, 5]], [])[0, -3:]
    assert logits.dtype == own.dtype == torch.float32
    assert float((logits - own).norm()) <= 0.05 * float(own.norm())


@on_x86
@pytest.mark.parametrize("name", ["lm_head", "model.layers.1.mlp", "model.layers.2.self_attn.q_proj", ""])
def test_weights_that_were_made_in_inference_mode_are_multiplied_as_they_are(name, fused, calls):
    def renew(model: Any) -> None:
        with torch.inference_mode():
            for module in model.get_submodule(name).modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight = torch.nn.Parameter(module.weight.clone(), requires_grad=False)

    assert torch.equal(*around_a_change(made(**WIDE), renew, is_one_block=False))
    renew(model := made(**WIDE))
    assert all(map(torch.equal, logits_of(model, 1, 5), logits_of(made(**WIDE), 1, 5)))


@on_x86
@pytest.mark.parametrize("dtypes", [(SINGLE, HALF), (HALF, SINGLE)])
def test_keys_and_values_of_another_type_than_the_model_has_now_are_an_error(dtypes, fused, calls):
    before, after = dtypes
    with pytest.raises(RuntimeError, match="dtype"):
        around_a_change(made(dtype=before, **WIDE), lambda model: model.to(after), is_one_block=False)


@on_x86
@pytest.mark.parametrize("of_layers, of_head", [("int8", ""), ("Q4_1", ""), ("", "int8"), ("Q4_1", "int8")])
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_a_head_with_weights_of_another_form_than_the_layers_is_in_the_call(
    dtype, of_layers, of_head, fused, calls, tables, own_code
):
    def mixed() -> Any:
        model = made("qwen3", dtype, **WIDE)
        quantize_linears(model, lambda layer: of_head if layer is model.lm_head else of_layers)
        return model

    for ours, own in zip(logits_of(mixed(), 1, 5), own_code(mixed(), 1, 5), strict=True):
        # in float32 sums have another order, and inputs near the middle of two steps are rounded otherwise
        error = 0.0 if dtype == HALF else 0.02 * float(own.abs().max())
        torch.testing.assert_close(ours, own, rtol=0, atol=error)
    assert len(tables) == 2 * attends(dtype)
