"""Gated delta nets, Mamba-2 and short convolutions by kernels: every node has the states and bits of single tokens."""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import unwrap
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import conv1d, silu
from transformers import DynamicCache
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

import lookahead
from lookahead.backend.choice import backend_for
from lookahead.backend.cpu.cpu_backend import CpuBackend
from lookahead.backend.cpu.state_bits import Mixing, mixing_of
from lookahead.backend.cpu.tree_mixers import TreeMixer, find_mixers, samples_of
from lookahead.backend.probes import own_pass
from lookahead.backend.protocol import BitPolicy
from lookahead.backend.self_check import _TRIALS
from lookahead.backend.support import support_of
from lookahead.drafting.tree import TokenTree
from lookahead.kernels.gated_delta import Updates, advance, gated_delta
from lookahead.kernels.jobs import run
from lookahead.kernels.selective_state import DTYPES, Inputs, selective_state
from lookahead.kernels.short_conv import convolution
from lookahead.model.model_state import plan_of
from lookahead.model.state_layers import KEEPS_STATES, states_in
from lookahead.model.state_scope import probe_text
from tests.support.adversarial_proposers import drafting_by, perfect, random_trees
from tests.support.families import FAMILIES, build
from tests.test_families import FIXED, ONE, RAGGED, generate, texts_of

pytestmark = pytest.mark.skipif(not KEEPS_STATES, reason="states are not in caches of this transformers")
on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch sums in another order")
HALF, SINGLE = torch.bfloat16, torch.float32
ROOT = np.zeros(1, np.int32)
HEADS = {"linear_num_value_heads": 6, "linear_num_key_heads": 2, "linear_key_head_dim": 24, "linear_value_head_dim": 32}
DEEP: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]}
# Torch multiplies bfloat16 matrices of fewer than 4,096 products by other code.
OPTIONS: dict[str, dict[str, Any]] = {
    "Qwen3_5": HEADS, "Qwen3_5Moe": HEADS, "Qwen3Next": HEADS, "Lfm2": {}, "Lfm3": {},
    "GraniteMoeHybrid": {"mamba_d_state": 128}, "Bamba": {"mamba_d_state": 128}, "Zamba2": {"mamba_d_state": 128},
    "Mamba2": {"state_size": 128}, "NemotronH": {"ssm_state_size": 128},
}  # fmt: skip
MAMBAS = "GraniteMoeHybrid", "Bamba", "Zamba2", "Mamba2", "NemotronH"


def built(name: str, dtype: torch.dtype, **more: Any) -> Any:
    """A tiny model whose layers with states the kernels can compute."""
    family = FAMILIES[name]
    return build(replace(family, options={**family.options, **OPTIONS[name], **more})).to(dtype)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = SINGLE) -> torch.Tensor:
    """Numbers of very different size, whose sums depend on their order."""
    source = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=source) * torch.randn(*shape, generator=source).exp()).to(dtype)


def random_parents(nodes: int) -> list[int]:
    rng = np.random.default_rng(nodes)
    return [0, *(int(rng.integers(max(0, node - 4), node)) for node in range(1, nodes))]


def path_to(parents: list[int], node: int) -> list[int]:
    return [*path_to(parents, parents[node]), node] if node else [0]


@on_x86
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_node_has_the_logits_and_states_of_its_path_token_by_token(name: str, dtype: torch.dtype) -> None:
    model, parents, prompt = built(name, dtype), random_parents(20), np.array([5, 9, 31, 77], np.int32)
    tree = TokenTree.from_parents(np.arange(3, 23, dtype=np.int32), parents)
    tolerance = 0 if dtype == HALF else 1e-3
    same = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    backend = backend_for(model, rows=1, capacity=64)
    with backend.serving():
        backend.read([prompt])
        backend.cache.commit(0, ROOT)
        scores = backend.score([tree], BitPolicy.SOLO)[0]
    if dtype in DTYPES or name not in MAMBAS:
        assert ("states by kernels", True) in [(each.path, each.serves) for each in backend.report().paths]
    for node in range(len(tree)):
        past, path = DynamicCache(config=model.config), path_to(parents, node)
        own_pass(model, prompt, past, 0)
        for depth, each in enumerate(path):
            own = own_pass(model, tree.tokens[each : each + 1], past, len(prompt) + depth)
        same(scores[node], own)
        made = backend.cache.states[0].states_after(0, backend.cache.levels, np.array(path, np.int32))
        for key, states in states_in(past.layers[0]).items():
            same(made[key], states[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize("inputs", [ONE, RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("name", OPTIONS)
def test_no_draft_changes_a_token(name: str, dtype: torch.dtype, inputs: dict[str, Any]) -> None:
    model = built(name, dtype if inputs is ONE else SINGLE)
    expected = generate(model, inputs, do_sample=False, max_new_tokens=24)
    for offer in (perfect(texts_of(expected, inputs)), random_trees(101)):
        with drafting_by(offer):
            got = generate(
                model, inputs, do_sample=False, max_new_tokens=24, custom_generate=lookahead.decode,
                lookahead_config=FIXED,
            )  # fmt: skip
        assert torch.equal(got, expected)


@on_x86
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize(("heads", "key_heads", "key_size", "size"), [(4, 4, 16, 32), (6, 2, 40, 64), (2, 1, 256, 128)])
def test_the_delta_rule_has_the_bits_of_transformers(
    heads: int, key_heads: int, key_size: int, size: int, dtype: torch.dtype
) -> None:
    parents, width, values = random_parents(11), key_heads * key_size, heads * size
    mixed, z = random(11, 2 * width + values, dtype=dtype), random(11, values, seed=1, dtype=dtype)
    beta, rate = random(11, heads, seed=2).sigmoid(), -random(11, heads, seed=3).abs()
    before, norm = random(heads, key_size, size, seed=4), qwen.Qwen3_5RMSNormGated(size).requires_grad_(False).to(dtype)
    norm.weight.copy_(random(size, seed=5))
    updates, out = Updates.empty(rate.exp(), key_heads, key_size, size), torch.full((11, values), torch.nan).to(dtype)
    norming = norm.weight, norm.variance_epsilon, torch.stack([silu(row.float()) for row in z])
    run(gated_delta(mixed, beta, before, torch.tensor(parents), updates, out, norming))
    states: list[torch.Tensor] = []
    for node, parent in enumerate(parents):
        parts = mixed[node].split([width, width, values])
        query, key, value = (part.view(1, 1, -1, n) for part, n in zip(parts, (key_size, key_size, size), strict=True))
        held = states[parent] if node else before
        own, state = qwen.torch_recurrent_gated_delta_rule(
            query, key, value, rate[node][None, None], beta[node][None, None], held[None], output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        states.append(state[0])
        after = torch.full_like(before, torch.nan)
        run(advance(before, updates, torch.tensor(path_to(parents, node)), after))
        assert torch.equal(after, state[0])
        assert torch.equal(out[node], norm(own.view(-1, size), z[node].view(-1, size)).flatten())


@on_x86
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "size", "state_size"), [(8, 1, 64, 128), (6, 2, 32, 64), (5, 5, 80, 16)])
def test_selective_states_have_the_bits_of_transformers(
    heads: int, groups: int, size: int, state_size: int, dtype: torch.dtype
) -> None:
    parents, width, step, same = random_parents(11), heads * size, random(11, heads, seed=1, dtype=dtype).abs(), (
        torch.equal if dtype == HALF else partial(torch.allclose, rtol=1e-4, atol=1e-4)
    )  # fmt: skip
    mixed, skips = random(11, width + 2 * groups * state_size, dtype=dtype), random(heads, seed=2, dtype=dtype)
    rate, gates, before = -random(heads, seed=3).abs(), random(11, width, seed=4), random(heads, size, state_size)
    inputs = Inputs(mixed, step.float(), (step.float() * rate).exp())
    out, state = torch.full((11, width), torch.nan), before.mT.contiguous()
    run(selective_state(inputs, skips, state, torch.tensor(parents), gates, out))
    states: list[torch.Tensor] = []
    for node, parent in enumerate(parents):
        x, into, out_of = mixed[node].split([width, groups * state_size, groups * state_size])
        held = (states[parent] if node else before)[None].clone()
        own = granite.mamba2_selective_state_update(
            held, x.view(1, heads, size), step[node][None, :, None].expand(1, heads, size),
            rate[:, None, None].expand(-1, size, state_size), into.view(1, groups, -1), out_of.view(1, groups, -1),
            skips[:, None].expand(-1, size),
        )  # fmt: skip
        states.append(held[0])
        path, after = torch.tensor(path_to(parents, node)), torch.full_like(state, torch.nan)
        unused = gates[: len(path)], torch.empty(len(path), width)
        run(selective_state(inputs.of(path), skips, state, path, *unused, after))
        assert torch.equal(after.mT, held[0])
        assert same(out[node], own.flatten().float() * gates[node])


def test_heads_that_share_a_key_never_see_it_half_made() -> None:
    heads, key_heads, size, nodes = 8, 4, 32, 32
    channels = (2 * key_heads + heads) * size
    x, gates, parents = (
        random(nodes, channels),
        random(nodes, heads * size, seed=1),
        torch.tensor(random_parents(nodes)),
    )
    state, weight = random(channels, 4, seed=6), random(channels, 4, seed=7)
    beta, decays = random(nodes, heads, seed=2).sigmoid(), random(nodes, heads, seed=3).sigmoid()
    before, norming = random(heads, size, size, seed=4), (random(size, seed=5), 1e-6, gates)
    results, threads = list[torch.Tensor](), torch.get_num_threads()
    try:
        for count in (1, *[2] * 200):
            torch.set_num_threads(count)
            mixed, out = torch.empty_like(x), torch.empty(nodes, heads * size)
            updates = Updates.empty(decays, key_heads, size, size)
            convolved = convolution(x, state, weight, None, parents, mixed)  # all threads begin the rule together
            run(convolved, gated_delta(mixed, beta, before, parents, updates, out, norming))
            results.append(out)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(out, results[0]) for out in results)


@on_x86
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("channels", "taps"), [(5, 2), (37, 3), (513, 4), (1100, 4)])
def test_convolutions_have_the_bits_of_torch_along_every_path(
    channels: int, taps: int, has_bias: bool, dtype: torch.dtype
) -> None:
    parents, x = random_parents(13), random(13, 2 * channels, dtype=dtype)[:, :channels]
    state, weight = random(channels, taps, seed=1, dtype=dtype), random(channels, 1, taps, seed=2, dtype=dtype)
    bias = random(channels, seed=3, dtype=dtype) if has_bias else None
    out = torch.full((13, channels), torch.nan, dtype=dtype)
    run(convolution(x, state, weight, bias, torch.tensor(parents), out))
    for node in range(13):
        inputs = torch.cat([state, x[path_to(parents, node)].T], 1)[None, :, -taps - 1 :]
        assert torch.equal(out[node], conv1d(inputs, weight, bias, groups=channels)[0, :, -1])


def test_changed_layers_run_their_own_code() -> None:
    def changed(change: Any, name: str = "Qwen3_5") -> Any:
        model = built(name, SINGLE)
        change(model.model.layers[0])
        return model

    def set_forward(layer: Any) -> None:
        layer.linear_attn.forward = partial(type(layer.linear_attn).forward, layer.linear_attn)

    assert find_mixers(changed(lambda layer: None)) and find_mixers(changed(lambda layer: None, "Lfm2"))
    assert not find_mixers(changed(set_forward))
    assert not find_mixers(changed(lambda layer: layer.linear_attn.norm.register_forward_hook(print)))
    assert not find_mixers(changed(lambda layer: setattr(layer.linear_attn, "activation", "relu")))
    assert not find_mixers(changed(lambda layer: layer.conv.conv.half(), "Lfm2"))
    assert find_mixers(changed(lambda layer: None, "Bamba"))
    assert not find_mixers(changed(lambda layer: layer.mamba.norm.register_forward_hook(print), "Bamba"))
    assert not find_mixers(
        changed(lambda layer: setattr(layer.mamba, "D", nn.Parameter(layer.mamba.D.half())), "Bamba")
    )
    bias = nn.Parameter(torch.ones(32, dtype=HALF))
    assert not find_mixers(changed(lambda layer: setattr(layer.conv.conv, "bias", bias), "Lfm2"))


def test_code_that_replaces_a_function_of_the_layers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("Qwen3_5", SINGLE)
    own = qwen.torch_recurrent_gated_delta_rule
    monkeypatch.setattr(qwen, "torch_recurrent_gated_delta_rule", lambda *args, **kwargs: own(*args, **kwargs))
    assert not find_mixers(model)


def test_code_that_is_replaced_between_passes_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, own, calls = backend_for(built("Qwen3_5", SINGLE), rows=1, capacity=16), qwen.causal_conv1d_update, []
    tree = TokenTree.from_parents([5, 9, 31], [0, 0, 1])
    with backend.serving():
        backend.read([np.array([5, 9, 31], np.int32)])
        backend.cache.commit(0, ROOT)
        assert not backend.has_changed()
        expected = backend.score([tree])
        monkeypatch.setattr(qwen, "causal_conv1d_update", lambda *given: calls.append(given) or own(*given))
        assert backend.has_changed()
        torch.testing.assert_close(backend.score([tree]), expected, rtol=1e-3, atol=1e-3)
    assert len(calls) == 3  # depths


def _mix_of_another(own: TreeMixer, mixer: TreeMixer, *args: Any) -> None:
    """The kernels with the weights of another layer."""
    own.mix(own, *args)


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_kernels_that_differ_from_the_layers_are_not_used(dtype: torch.dtype) -> None:
    model, other = built("Qwen3_5", dtype), built("Qwen3_5", dtype)
    with torch.no_grad():
        other.model.layers[0].linear_attn.norm.weight[0] *= 1.01
    mixers = list(find_mixers(model).values())
    pairs = zip(mixers, find_mixers(other).values(), strict=True)
    wrong = [replace(mixer, mix=partial(_mix_of_another, own)) for mixer, own in pairs]

    def mixing(mixers: list[TreeMixer]) -> Mixing:
        make = partial(CpuBackend, model, packs=False, rows=1, capacity=64)
        return mixing_of(lambda mixing: make(mixing=mixing), mixers, 101, is_half=dtype == HALF)

    assert mixing(mixers) == Mixing(by_kernels=True)
    assert not mixing(wrong).by_kernels


def _calls_of(run: Callable[[], object]) -> Counter[tuple[int, int]]:
    """The calls of a gated delta net's own code, by layer and tokens."""
    calls, own = Counter[tuple[int, int]](), unwrap(qwen.Qwen3_5GatedDeltaNet.forward).__code__

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is own:
            calls[frame.f_locals["self"].layer_idx, frame.f_locals["hidden_states"].shape[1]] += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def test_a_first_call_compares_one_recurrent_layer_of_every_kind() -> None:
    model, made = built("Qwen3_5", HALF, **DEEP), list[CpuBackend]()
    calls = _calls_of(lambda: made.append(CpuBackend(model, rows=1, capacity=16)))
    assert made[0]._mixing.by_kernels
    first, *others = (mixer.at for mixer in find_mixers(model).values())
    assert calls[first, 1] > 1
    assert others and all(calls[at, len(probe_text(model))] == 1 and not calls[at, 1] for at in others)


def test_a_comparison_of_bits_continues_from_what_found_the_states() -> None:
    model = built("Qwen3_5", HALF, **DEEP)
    calls = _calls_of(lambda: support_of(model, shortest=3, max_length=40, is_alone=True))
    last = list(find_mixers(model).values())[-1].at
    assert calls[last, len(probe_text(model))] == 2 * _TRIALS  # of a small model: each by its own code and by ours
    assert plan_of(model).own_read is None


def test_recurrent_layers_of_other_settings_are_of_another_kind() -> None:
    mixers = list(find_mixers(built("Qwen3_5", HALF, **DEEP)).values())
    first, *_, last = mixers
    assert samples_of(mixers) == [first]
    last.module.norm.variance_epsilon = 1e-3
    assert samples_of(mixers) == [first, last]


@pytest.mark.parametrize("name", ["Qwen3_5", "Lfm2"])
def test_hooks_on_products_see_all_nodes_once(name: str) -> None:
    model, calls = built(name, SINGLE), list[tuple[int, ...]]()
    mixer = next(iter(find_mixers(model)))
    linears = [each for each in mixer.children() if isinstance(each, nn.Linear)]
    handles = [each.register_forward_hook(lambda module, args, out: calls.append(out.shape[:2])) for each in linears]
    backend = backend_for(model, rows=1, capacity=16)
    with backend.serving():
        backend.read([np.array([5, 9, 31], np.int32)])
        backend.cache.commit(0, ROOT)
        calls.clear()
        backend.score([TokenTree.from_parents([5, 9, 31, 77, 2], [0, 0, 1, 2, 3])])
    for handle in handles:
        handle.remove()
    assert calls == [(1, 5)] * len(linears)


def test_a_copy_of_a_row_keeps_its_states_while_the_row_goes_on() -> None:
    backend = backend_for(built("Qwen3_5", SINGLE), rows=1, capacity=64)
    with backend.serving():
        backend.read([np.array([5, 9, 31], np.int32)])
        backend.cache.commit(0, ROOT)
        copies = []
        for token in (7, 8, 9, 10):
            backend.score([TokenTree.root(token)])
            backend.cache.commit(0, ROOT)
            copy = backend.cache.extract_row(0).states[0]
            copies.append((copy, {key: each.clone() for key, each in copy.items()}))
    for copy, before in copies:
        assert all(torch.equal(copy[key], before[key]) for key in before)
    assert not torch.equal(copies[0][0]["recurrent", 0], copies[2][0]["recurrent", 0])
