"""Attention with the bits of transformers' eager functions, of soft caps and sinks: every node as if it were alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.choice import backend_for
from lookahead.backend.cpu.attention_inputs import cancelling
from lookahead.backend.cpu.attention_limits import has_bits_of_eager
from lookahead.backend.cpu.exact_attention import PerNodeAttention
from lookahead.backend.cpu.pass_table import PassTable
from lookahead.backend.protocol import BitPolicy
from lookahead.drafting.tree import TokenTree
from lookahead.kernels import eager_attention
from lookahead.kernels.eager_attention import CHUNK
from lookahead.kernels.jobs import torch_on_threads
from lookahead.kernels.row_attention import AttentionLimits, row_attention
from tests.support.declared import both, made, prompt
from tests.support.small_layers import HALF, calls, tables, trees_of
from tests.test_attention_limits import path_slots
from tests.test_row_attention import tree_of

__all__ = ["calls", "tables"]  # fixtures

pytestmark = pytest.mark.skipif(
    not eager_attention.is_supported(*(torch.zeros(1, 64, dtype=HALF) for _ in range(3))),
    reason="the kernel is for CPUs that multiply pairs of bfloat16",
)
KINDS = {"Gemma2": (gemma2, 50.0, False), "GptOss": (gpt_oss, 0.0, True), "Llama": (llama, 0.0, False)}
NODES, SCALE = 17, 0.125
TENSORS = tuple[Tensor, Tensor, Tensor]


def limits_of(name: str, heads: int, window: int) -> AttentionLimits:
    sinks = torch.linspace(-2, 3, heads).to(HALF) if KINDS[name][2] else None
    return AttentionLimits(window, KINDS[name][1], sinks, is_eager=True)


def trees_and_tensors(start: int, heads: int, kv_heads: int, dim: int) -> list[tuple[TokenTree, TENSORS]]:
    """Random trees, and queries, keys and values whose scores or weighted values nearly cancel, as slots."""
    return [
        (tree_of(NODES, start + at), (query[0].transpose(0, 1)[-NODES:], *(each[0].transpose(0, 1) for each in pair)))
        for at, (query, *pair) in enumerate(cancelling(HALF, heads, kv_heads, dim, (start + NODES,)))
    ]


def alone(name: str, tensors: TENSORS, slots: list[int], node: int, limits: AttentionLimits) -> Tensor:
    """The attention of a node over some slots by the model's own function, `[heads, dim]`."""
    query, keys, values = tensors
    module: Any = nn.Module().eval()
    module.num_key_value_groups, module.sinks = query.shape[1] // keys.shape[1], limits.sinks
    seen = (each[slots].transpose(0, 1)[None].contiguous() for each in (keys, values))
    options = {"softcap": limits.softcap} if limits.softcap else {}
    own: Any = KINDS[name][0].eager_attention_forward
    attended: Tensor = own(module, query[node][None, :, None], *seen, None, scaling=SCALE, **options)[0]
    return attended[0, 0]


def attended(
    tensors: list[TENSORS], trees: list[TokenTree], starts: list[int], limits: AttentionLimits, scored: int = 0
) -> Tensor:
    query, keys, values = (torch.stack(some).contiguous() for some in zip(*tensors, strict=True))
    per_node = PerNodeAttention(trees, starts, [scored] * len(trees))
    return row_attention(query[:, scored:], keys, values, **per_node.tensors, scale=SCALE, limits=limits)


@pytest.mark.parametrize("window", [0, 38, CHUNK + 1])
@pytest.mark.parametrize("start", [20, 101, CHUNK - 7, 2 * CHUNK + 3])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 4, 64), (6, 2, 128), (12, 1, 32), (5, 5, 256)])
@pytest.mark.parametrize("name", KINDS)
def test_every_node_has_the_bits_of_the_models_function_over_its_path(name, heads, kv_heads, dim, start, window):
    limits = limits_of(name, heads, window)
    for tree, tensors in trees_and_tensors(start, heads, kv_heads, dim):
        got = attended([tensors], [tree], [start], limits)[0]
        for node in range(NODES):
            slots = path_slots(tree, node, start, window)
            assert torch.equal(got[node], alone(name, tensors, slots, node, limits)), node


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_rows_and_threads_keep_the_bits_of_nodes_that_were_not_scored_before(name, threads):
    starts, limits, scored = [40, 33, 51], limits_of(name, 8, 43), 3
    pairs = trees_and_tensors(60, 8, 2, 64)
    trees, tensors = [tree for tree, _ in pairs], [some for _, some in pairs]
    with torch_on_threads(threads):
        got = attended(tensors, trees, starts, limits, scored)
        for row, (tree, start) in enumerate(zip(trees, starts, strict=True)):
            for node in range(scored, NODES):
                slots = path_slots(tree, node, start, 43)
                assert torch.equal(got[row, node - scored], alone(name, tensors[row], slots, node, limits)), (row, node)


@pytest.mark.parametrize(("heads", "dim"), [((8, 4), 256), ((64, 8), 64), ((2, 2), 32), ((16, 16), 128)])
@pytest.mark.parametrize("name", KINDS)
def test_weights_next_to_the_middle_of_two_numbers_are_those_of_the_models_function(name, heads, dim):
    file, softcap, has_sinks = KINDS[name]
    assert has_bits_of_eager(file.eager_attention_forward, heads, dim, dim**-0.5, softcap, has_sinks)


def other_function(change: str) -> Any:
    """Gemma 2's eager function, but for one change that a user or another release may make."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **options: Any
    ) -> Any:
        key, value = (gemma2.repeat_kv(each, module.num_key_value_groups) for each in (key, value))
        order = torch.arange(key.shape[2])
        if change == "keys in another order":
            order = order.roll(1)
        key, value = key[:, :, order], value[:, :, order]
        if change == "dimensions in another order":
            query, key = query.flip(-1), key.flip(-1)
        scores = torch.matmul(query, key.transpose(2, 3))
        if change == "a wide soft cap":
            scores = scores.float()
        scores = torch.tanh(scores * scaling / options["softcap"]) * options["softcap"]
        if change == "a softmax in bfloat16":
            weights = torch.softmax(scores, -1)
        else:
            weights = torch.softmax(scores, -1, dtype=torch.float32)
        if change == "wide weights":
            return torch.matmul(weights, value.float()).to(query.dtype).transpose(1, 2), None
        return torch.matmul(weights.to(query.dtype), value).transpose(1, 2), None

    return attend


@pytest.mark.parametrize(
    "change",
    [
        "keys in another order", "dimensions in another order", "a wide soft cap", "a softmax in bfloat16",
        "wide weights", "",
    ],
)  # fmt: skip
def test_a_function_that_rounds_otherwise_is_not_replaced(change):
    assert has_bits_of_eager(other_function(change), (8, 4), 64, SCALE, 50.0, False) is not bool(change)


@pytest.mark.parametrize("name", ["Gemma2", "GptOss"])
def test_passes_of_soft_caps_and_sinks_are_one_call_with_the_bits_of_generate(name, calls, tables, monkeypatch):
    called, own = [], PassTable.attend
    monkeypatch.setattr(PassTable, "attend", lambda *some: called.append(1) or own(*some))
    model = made(name)
    for length in (3, 9, 15, 18, 60):  # fewer keys than oneDNN multiplies, and before and behind the window
        called.clear()
        expected, ours = both(model, prompt(length), do_sample=False, max_new_tokens=20)
        assert all(map(torch.equal, expected.logits, ours.logits)), length
        assert bool(called) is (length < 9)
    assert tables


@pytest.mark.parametrize("name", ["Gemma2", "GptOss"])
def test_rows_of_soft_caps_and_sinks_are_one_call_and_each_is_as_if_alone(name, calls, tables):
    model, prompts = made(name), [np.arange(3, 3 + length, dtype=np.int32) for length in (30, 11, 14)]
    together = backend_for(model, rows=3, capacity=64)
    apart = [backend_for(model, rows=1, capacity=64) for _ in prompts]
    together.cache.slots.active = 0
    with together.serving():
        for row, ids in enumerate(prompts):
            together.cache.slots.active += 1
            together.read([ids], row)
    for target, ids in zip(apart, prompts, strict=True):
        with target.serving():
            target.read([ids])
    for step in range(2):
        trees = [trees_of(1, 9 - 2 * row, step + 10 * row)[0] for row in range(3)]
        tables.clear()
        with together.serving():
            got = together.score(trees, BitPolicy.SOLO)
        assert len(tables) == 1 and together.is_ragged
        for row, target in enumerate(apart):
            with target.serving():
                expected = target.score([trees[row]], BitPolicy.SOLO)[0]
            assert torch.equal(got[row, : len(expected)], expected)
            for cache, at in ((together.cache, row), (target.cache, 0)):
                cache.commit(at, np.arange(2, dtype=np.int32))


def test_a_users_eager_function_is_run_by_layers_only_and_never_replaced(calls, monkeypatch):
    ran, own = [], gemma2.eager_attention_forward

    def users(*some: Any, **options: Any) -> Any:
        ran.append(type(some[0]))
        return own(*some, **options)

    monkeypatch.setattr(gemma2, "eager_attention_forward", users)
    model, ids = made("Gemma2"), prompt(30)
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, **options)
    ran.clear()
    config = LookaheadConfig(trust_user_code=True)
    got = model.generate(ids, **options, custom_generate=lookahead.decode, lookahead_config=config)
    assert torch.equal(got, expected) and set(ran) == {gemma2.Gemma2Attention}
    assert len(ran) > 2 * len(model.model.layers)
