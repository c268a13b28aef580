"""Decoder layers whose weights are packed: what the model's own layers compute, by one or two calls a layer."""

from __future__ import annotations

import copy
import gc
import platform
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from lookahead import LookaheadConfig
from lookahead.backend.choice import backend_for
from lookahead.backend.cpu import cpu_backend, cpu_pass, exact_attention, fused_layers, linears, product_bits
from lookahead.backend.cpu.exact_attention import takes_rows
from lookahead.backend.cpu.whole_pass import PassTable
from lookahead.backend.protocol import BitPolicy
from lookahead.backend.support import own_logits
from lookahead.drafting.tree import TokenTree
from lookahead.kernels import packed_product
from tests.support.small_layers import HALF, MODELS, SINGLE, fused, logits_of, made, own_code, serving, trees_of

__all__ = ["fused", "own_code"]  # fixtures
on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch sums in another order")
WIDE = {"head_dim": 32}  # torch sums products with fewer outputs in another order
if not packed_product.is_supported(torch.zeros(2, 2, dtype=HALF)):  # which takes multiples of 64 inputs on this CPU
    WIDE |= {"hidden_size": 192, "intermediate_size": 256}


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """How many jobs each call of the kernels did, where small weights are packed for those of this package too."""
    if not all(packed_product.is_supported(torch.zeros(2, 64, dtype=dtype)) for dtype in (HALF, SINGLE)):
        pytest.skip("there is no kernel for products on this CPU")
    jobs: list[int] = []
    own = fused_layers.run

    def counted(*each: Any) -> None:
        jobs.extend([len(each)] * bool(each))
        own(*each)

    monkeypatch.setattr(fused_layers, "run", counted)
    monkeypatch.setattr(product_bits, "FEWEST_WEIGHTS", 1)
    monkeypatch.setattr(linears, "measured_backends", lambda *kind: ("packed",))
    return jobs


@pytest.fixture
def tables(monkeypatch) -> list[int]:
    """The tokens of passes whose layers were one call."""
    tokens: list[int] = []
    own = PassTable.run

    def counted(self: PassTable, hidden: Any, *rest: Any) -> Any:
        tokens.append(hidden.shape[1])
        return own(self, hidden, *rest)

    monkeypatch.setattr(PassTable, "run", counted)
    return tokens


@on_x86
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize(("rows", "nodes"), [(1, 1), (1, 17), (1, 70), (3, 6)])
@pytest.mark.parametrize("name", MODELS)
def test_layers_whose_weights_are_packed_compute_what_the_models_own_layers_do(
    name, rows, nodes, dtype, fused, own_code, calls
):
    expected = own_code(made(name, dtype, **WIDE), rows, nodes)
    calls.clear()
    got = logits_of(made(name, dtype, **WIDE), rows, nodes)
    for ours, own in zip(got, expected, strict=True):
        error = 0.0 if dtype == HALF else 1e-4 * float(own.abs().max())  # sums have another order in float32
        torch.testing.assert_close(ours, own, rtol=0, atol=error)
    assert fused and calls


@on_x86
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_all_layers_are_one_call_for_one_prompt_and_two_each_for_several(dtype, threads, fused, calls, tables):
    before, model = torch.get_num_threads(), made(dtype=dtype, **WIDE)
    torch.set_num_threads(threads)
    try:
        for rows, policy in ((1, BitPolicy.SOLO), (1, BitPolicy.ROUNDED), (2, BitPolicy.ROUNDED)):
            if not takes_rows(model.config) and dtype == HALF and policy is BitPolicy.SOLO:
                continue
            target = backend_for(model, rows=rows, capacity=64)
            with target.serving():
                target.read([np.arange(3, 14, dtype=np.int32)] * rows)
                expected = target.score(trees_of(rows, 9, 0), policy)
                for _ in range(20):
                    calls.clear()
                    tables.clear()
                    assert torch.equal(target.score(trees_of(rows, 9, 0), policy), expected)
                    assert len([count for count in calls if count > 1]) == (0 if rows == 1 else 6)
                    assert len(tables) == (1 if rows == 1 else 0)
    finally:
        torch.set_num_threads(before)


@on_x86
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_the_largest_tree_of_the_default_options_is_one_call(dtype, fused, calls, tables, own_code):
    model, most = made(dtype=dtype, **WIDE), LookaheadConfig().node_budget + 1
    if dtype == HALF and not takes_rows(model.config):
        pytest.skip("torch's attention has other bits on this CPU")
    for nodes in (most - 1, most, most + 1):
        expected = own_code(made(dtype=dtype, **WIDE), 1, nodes)
        tables.clear()
        got = logits_of(model, 1, nodes)
        assert tables == ([nodes] * 2 if nodes <= most else [])
        for ours, own in zip(got, expected, strict=True):
            error = 0.0 if dtype == HALF else 1e-4 * float(own.abs().max())
            torch.testing.assert_close(ours, own, rtol=0, atol=error)


@on_x86
def test_where_masked_attention_takes_less_time_float32_attends_by_it(fused, calls, tables, monkeypatch):
    target = backend_for(made(dtype=SINGLE, **WIDE), rows=1, capacity=64)
    with target.serving():
        target.read([np.arange(3, 14, dtype=np.int32)])
        expected = target.score(trees_of(1, 9, 0), BitPolicy.SOLO)
        assert len(tables) == 1
        monkeypatch.setattr(exact_attention, "MAX_KERNEL_PRODUCTS", 6 * 32 * 9 * 11 - 1)
        torch.testing.assert_close(target.score(trees_of(1, 9, 0), BitPolicy.SOLO), expected, rtol=1e-4, atol=1e-4)
    assert len(tables) == 1


def logits_behind(model: Any, first: int = 3) -> torch.Tensor:
    """Logits of a tree behind a prompt, by a target of its own."""
    target = backend_for(model, rows=1, capacity=64)
    with target.serving():
        target.read([np.arange(first, 14, dtype=np.int32)])
        return target.score(trees_of(1, 5, 0), BitPolicy.SOLO)


@on_x86
def test_weights_that_change_between_passes_are_packed_anew(fused, calls):
    target = backend_for(model := made(**WIDE), rows=1, capacity=64)
    with target.serving():
        target.read([np.arange(3, 14, dtype=np.int32)])
        before = target.score(trees_of(1, 5, 0), BitPolicy.SOLO)
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(2)
        after = target.score(trees_of(1, 5, 0), BitPolicy.SOLO)
    with target.serving():
        assert torch.equal(target.score(trees_of(1, 5, 0), BitPolicy.SOLO), after)
    assert not torch.equal(before, after)


@on_x86
def test_a_change_that_counts_no_version_up_is_seen_by_the_next_call_while_another_is_open(fused, calls):
    before = logits_behind(model := made(**WIDE))
    with serving(model):
        assert torch.equal(logits_behind(model), before)
        model.model.layers[1].mlp.down_proj.weight.data.mul_(2)
        assert torch.equal(logits_behind(model), logits_behind(copy.deepcopy(model)))


@on_x86
@pytest.mark.parametrize("name", ["llama", "qwen2 with some windows"])
def test_norms_and_biases_that_are_replaced_between_passes_are_read_anew(name, fused, calls):
    target = backend_for(model := made(name, **WIDE), rows=1, capacity=64)
    with target.serving():
        target.read([np.arange(3, 14, dtype=np.int32)])
        before = target.score(trees_of(1, 5, 0), BitPolicy.SOLO)
        for weight in model.model.layers[1].parameters():
            if weight.dim() == 1:
                weight.data = weight.data * 2
        after = target.score(trees_of(1, 5, 0), BitPolicy.SOLO)
    with target.serving():
        assert torch.equal(target.score(trees_of(1, 5, 0), BitPolicy.SOLO), after)
        target.cache.tables.clear()
        assert torch.equal(target.score(trees_of(1, 5, 0), BitPolicy.SOLO), after)
    assert not torch.equal(before, after)


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
                target.commit(0, np.arange(min(nodes, 4), dtype=np.int32))
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
def test_a_head_that_was_made_in_inference_mode_is_called_as_it_is(fused, calls):
    model, same = made(**WIDE), made(**WIDE)
    with torch.inference_mode():
        model.lm_head = copy.deepcopy(model.lm_head)
        model.lm_head.weight = torch.nn.Parameter(same.lm_head.weight.clone(), requires_grad=False)
    assert model.lm_head.weight.is_inference()
    assert torch.equal(logits_behind(model), logits_behind(same))


@on_x86
def test_a_cache_that_moves_between_passes_is_read_where_it_is(fused, calls, tables):
    model = made(**WIDE)
    for capacity in (20, 200):
        target = backend_for(model, rows=1, capacity=capacity)
        with target.serving():
            outputs = [target.read([np.arange(3, 14, dtype=np.int32)])]
            for seed in range(4):
                outputs.append(target.score(trees_of(1, 9, seed), BitPolicy.SOLO))
                target.cache.commit(0, np.array([0, *range(1, 6)], np.int32))
        if capacity == 20:
            grown = outputs
    assert all(map(torch.equal, grown, outputs))
    assert not takes_rows(model.config) or len(tables) == 8


@on_x86
def test_a_model_that_is_told_to_run_fewer_layers_runs_fewer(fused, calls):
    short = made(**WIDE)
    short.model.layers = short.model.layers[:2]
    model, outputs = made(**WIDE), []
    for each in (model, short):
        target = backend_for(each, rows=1, capacity=64)
        with target.serving():
            target.read([np.arange(3, 14, dtype=np.int32)])
            each.config.num_hidden_layers = 2
            outputs.append(target.score(trees_of(1, 5, 0), BitPolicy.SOLO))
    assert torch.equal(*outputs)


@on_x86
def test_hidden_states_of_every_layer_are_its_own(fused, calls, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cpu_backend, "find_fused", lambda model: fused_layers.FusedLayers([], [], []))
        expected = hidden_states(made(**WIDE))
    assert all(map(torch.equal, hidden_states(made(**WIDE)), expected))


def hidden_states(model: Any) -> list[torch.Tensor]:
    """Those of the nodes of a tree, behind the layers."""
    target = backend_for(model, rows=1, capacity=64, hidden_layers=(1, 2, 3))
    target.keeps_hidden = True
    with target.serving():
        target.read([np.arange(3, 14, dtype=np.int32)])
        target.score(trees_of(1, 9, 0), BitPolicy.SOLO)
    return [target.hidden[layer] for layer in (1, 2, 3)]


@on_x86
def test_a_cache_goes_with_its_last_user_and_waits_for_no_collection(fused, calls, tables):
    target = backend_for(model := made(**WIDE), rows=1, capacity=64)
    with target.serving():
        target.read([np.arange(3, 14, dtype=np.int32)])
        target.score(trees_of(1, 5, 0), BitPolicy.SOLO)
    cache = weakref.ref(target.cache)
    gc.disable()
    try:
        del target
        assert cache() is None and (tables or not takes_rows(model.config))
    finally:
        gc.enable()


@on_x86
def test_two_threads_decode_with_one_model_and_caches_of_their_own(fused, calls, tables):
    model = made(**WIDE)
    expected = [logits_behind(model, first) for first in range(3, 7)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            got = pool.map(partial(logits_behind, model), range(3, 7))
            assert all(map(torch.equal, got, expected))


@on_x86
def test_the_call_of_a_cache_is_prepared_once_whatever_blocks_its_passes_run_in(fused, calls, tables):
    target, prepared = backend_for(made(**WIDE), rows=1, capacity=64), list[object]()
    with target.serving():
        target.read([np.arange(3, 14, dtype=np.int32)])
    for nodes in (1, 5, 9, 1):
        with target.serving():
            target.score(trees_of(1, nodes, 0), BitPolicy.SOLO)
        prepared.append(next(iter(target.cache.tables.values()), None))
    assert all(table is prepared[0] for table in prepared)
    assert tables == [1, 5, 9, 1] or not takes_rows(target._model.config)
