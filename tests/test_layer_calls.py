"""Decoder layers whose weights are packed: what the model's own layers compute, by one or two calls a layer."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from lookahead import LookaheadConfig
from lookahead.backend.choice import backend_for
from lookahead.backend.cpu import cpu_backend, exact_attention, fused_layers
from lookahead.backend.cpu.exact_attention import takes_rows
from lookahead.backend.cpu.pass_table import PassTable
from lookahead.backend.protocol import BitPolicy
from lookahead.errors import UnsupportedModelError
from lookahead.kernels.jobs import torch_on_threads
from lookahead.model.model_state import recognise, state_of
from tests.support.small_layers import (
    HALF,
    MODELS,
    SINGLE,
    WIDE,
    attends,
    calls,
    fused,
    logits_of,
    made,
    on_x86,
    own_code,
    serving,
    tables,
    trees_of,
)

__all__ = ["calls", "fused", "own_code", "tables"]  # fixtures


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
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("rows", [2, 5])
def test_the_last_row_of_a_batch_is_read_and_written_in_its_own_slots(rows, name, dtype, fused, own_code, calls):
    expected = own_code(made(name, dtype, **WIDE), rows, 9, retired=rows - 1)
    got = logits_of(made(name, dtype, **WIDE), rows, 9, retired=rows - 1)
    for ours, own in zip(got, expected, strict=True):  # of one mask or none: sums have another order
        torch.testing.assert_close(ours, own, rtol=0, atol=(0.05 if dtype == HALF else 1e-4) * float(own.abs().max()))


@on_x86
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_a_pass_is_one_call_but_for_several_rows_of_half_precision_without_bits(dtype, threads, fused, calls, tables):
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
                    is_one = dtype == SINGLE or (rows == 1 and attends(dtype))
                    has_calls = bool([count for count in calls if count > 1])
                    assert has_calls is not is_one or not attends(dtype)
                    assert len(tables) == is_one and target.is_ragged == is_one
                assert target.report().summary.endswith("passes as one call") == (rows == 1 or dtype == SINGLE)
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
@pytest.mark.parametrize("is_head_hooked", [False, True])
@pytest.mark.parametrize("layers", [(-1,), (0, 1, 3), (2, -3, 1, -1, 0, -4)], ids=str)
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("name", ["llama", "llama with biases, eager", "qwen3"])
def test_a_pass_that_is_one_call_keeps_the_hidden_states_of_the_models_own_layers(
    name, dtype, layers, is_head_hooked, fused, own_code, calls, tables
):
    models = [made(name, dtype, **WIDE) for _ in range(2)]
    if dtype == HALF and not takes_rows(models[0].config):
        pytest.skip("torch's attention has other bits on this CPU")
    for model in models if is_head_hooked else ():
        model.lm_head.register_forward_hook(lambda module, args, out: 2 * out)
    expected = own_code(models[0], 1, 9, hidden_layers=layers)
    tables.clear()
    got = logits_of(models[1], 1, 9, hidden_layers=layers)
    assert tables == [9, 9] and len(got) == len(expected) == 1 + 2 * (1 + len(layers))
    for ours, own in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, own, rtol=0, atol=0.0 if dtype == HALF else 1e-4 * float(own.abs().max()))


@on_x86
def test_hidden_states_of_a_pass_stay_when_the_next_one_is_done(fused, calls, tables):
    target = backend_for(made(dtype=SINGLE, **WIDE), rows=1, capacity=64, hidden_layers=(0, 2, -1))
    with target.serving():
        target.read([np.arange(3, 14, dtype=np.int32)])
        target.score(trees_of(1, 9, 0), BitPolicy.ROUNDED)
        before = dict(target.hidden)
        copied = {layer: states.clone() for layer, states in before.items()}
        target.score(trees_of(1, 9, 1), BitPolicy.ROUNDED)
        assert all(torch.equal(before[layer], copied[layer]) for layer in copied)
        assert not any(torch.equal(before[layer], target.hidden[layer]) for layer in copied)
        target.keeps_hidden = False
        target.score(trees_of(1, 9, 1), BitPolicy.ROUNDED)
        assert not target.hidden and len(tables) == 3


@on_x86
@pytest.mark.parametrize("layer", [4, -5])
def test_hidden_states_that_a_model_lacks_are_refused_by_a_whole_pass(layer, fused, calls):
    target = backend_for(made(dtype=SINGLE, **WIDE), rows=1, capacity=64, hidden_layers=(layer,))
    target.keeps_hidden = False
    with target.serving():
        target.read([np.arange(3, 14, dtype=np.int32)])
        target.keeps_hidden = True
        with pytest.raises(UnsupportedModelError, match=f"hidden states {layer}, and the model has 4"):
            target.score(trees_of(1, 9, 0), BitPolicy.ROUNDED)


@on_x86
def test_where_masked_attention_takes_less_time_float32_attends_by_it(fused, calls, tables, monkeypatch):
    target = backend_for(made(dtype=SINGLE, **WIDE), rows=1, capacity=64)
    with target.serving():
        target.read([np.arange(3, 14, dtype=np.int32)])
        expected = target.score(trees_of(1, 9, 0), BitPolicy.SOLO)
        assert len(tables) == 1
        monkeypatch.setattr(exact_attention, "MAX_KERNEL_PRODUCTS", 6 * 32 * 8 * 11 - 1)
        torch.testing.assert_close(target.score(trees_of(1, 9, 0), BitPolicy.SOLO), expected, rtol=1e-4, atol=1e-4)
        assert len(tables) == 1
        monkeypatch.setattr(exact_attention, "MAX_KERNEL_PRODUCTS", 0)
        target.score(trees_of(1, 1, 0), BitPolicy.SOLO)
    assert len(tables) == 2, "a root alone attends by the kernel at any length"


def logits_behind(model: Any, first: int = 3) -> torch.Tensor:
    """Logits of a tree behind a prompt, by a target of its own."""
    target = backend_for(model, rows=1, capacity=64)
    with target.serving():
        target.read([np.arange(first, 14, dtype=np.int32)])
        return target.score(trees_of(1, 5, 0), BitPolicy.SOLO)


@on_x86
def test_cosines_that_lie_otherwise_in_memory_are_read_in_their_order(fused, calls, tables, monkeypatch):
    expected, run = logits_behind(made(**WIDE)), PassTable.run

    def run_turned(self: PassTable, hidden: Any, positions: Any, *rest: Any) -> Any:
        pairs = {kind: [one.mT.contiguous().mT for one in pair] for kind, pair in positions.items()}
        return run(self, hidden, pairs, *rest)

    monkeypatch.setattr(PassTable, "run", run_turned)
    assert torch.equal(logits_behind(made(**WIDE)), expected)
    assert tables or not attends(HALF)


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
def test_a_change_without_a_version_is_seen_by_the_next_call_while_one_is_open(fused, calls):
    before = logits_behind(model := made(**WIDE))
    with serving(model):
        assert torch.equal(logits_behind(model), before)
        model.model.layers[1].mlp.down_proj.weight.data.mul_(2)
        recognise(model)
        assert torch.equal(logits_behind(model), logits_behind(copy.deepcopy(model)))


@on_x86
@pytest.mark.skipif(not attends(SINGLE), reason="without an attention kernel no pass is one call")
def test_passes_stay_one_call_after_another_thread_has_served_the_model(fused, calls, three_threads):
    recognise(model := made(dtype=SINGLE, **WIDE))

    def is_one_call(*, beside: bool) -> bool:
        """Whether a pass over a tree is one call, also while a thread with fewer threads serves the model."""
        target, entered, ended = backend_for(model, rows=1, capacity=64), Event(), Event()

        def serve() -> None:
            with torch_on_threads(1), backend_for(model, rows=1, capacity=64).serving():
                entered.set()
                ended.wait(60)

        with target.serving(), ThreadPoolExecutor() as pool:
            target.read([np.arange(3, 14, dtype=np.int32)])
            if beside:
                pool.submit(serve)
                assert entered.wait(60)
            target.score(trees_of(1, 5, 0), BitPolicy.SOLO)
            ended.set()
        return target.is_ragged

    assert is_one_call(beside=True)
    assert is_one_call(beside=False)


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


@on_x86
def test_the_first_pass_that_several_threads_may_share_counts_for_no_other(fused, calls, tables):
    model = made(dtype=SINGLE, **WIDE)
    target, before = backend_for(model, rows=1, capacity=64), torch.get_num_threads()

    def scored() -> torch.Tensor:
        tables.clear()
        return target.score(trees_of(1, 9, 0), BitPolicy.ROUNDED)

    with target.serving():
        target.read([np.arange(3, 14, dtype=np.int32)])
        expected = scored()  # it packs the weights
        scored()
        assert not target.is_cold and len(tables) == 1
        torch.set_num_threads(3)
        try:
            assert torch.equal(scored(), expected)
            assert target.is_cold and len(tables) > 2
            assert torch.equal(scored(), expected)
            assert not target.is_cold and len(tables) == 1
        finally:
            torch.set_num_threads(before)
    assert 3 in state_of(model).threads
