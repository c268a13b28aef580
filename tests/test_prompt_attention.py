"""Attention of prompts on a CPU: with the bits of torch, in models too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lookahead.backend.choice import backend_for
from lookahead.backend.cpu import exact_attention
from lookahead.backend.cpu.attention_inputs import cancelling
from lookahead.backend.cpu.exact_attention import attend_prompts, has_bits_of_prompts
from lookahead.kernels import prompt_attention
from lookahead.kernels.prompt_attention import FEWEST, tokens_alike
from lookahead.model.known_code import arithmetic_flags

has_kernel = pytest.mark.usefixtures("prompt_kernel")


def tensors_of(width: int, slots: int, heads: int, kv_heads: int, dim: int) -> list[Tensor]:
    torch.manual_seed(slots)
    sizes = (width, heads), (slots, kv_heads), (slots, kv_heads)
    return [torch.randn(*size, dim).mul(1.5).bfloat16() for size in sizes]


def by_torch(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """What transformers asks torch for: a causal call for a whole text, and a mask behind earlier tokens."""
    width, slots = len(query), len(keys)
    tensors = [each.transpose(0, 1)[None] for each in (query, keys, values)]
    mask = None if width == slots else torch.ones(width, slots, dtype=torch.bool).tril(slots - width)
    out = scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out[0].transpose(0, 1)


def by_kernel(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    assert prompt_attention.is_supported(query, keys, values)
    return prompt_attention.prompt_attention(query, keys, values, query.shape[2] ** -0.5)


@has_kernel
@pytest.mark.parametrize("width", [192, 193, 259, 383, 514, 767, 768, 769, 771, 772, 779, 897, 1025, 1035, 1036, 1407])
def test_a_prompt_of_any_length_has_the_bits_of_torch(width):
    tensors = tensors_of(width, width, 6, 2, 64)
    assert torch.equal(by_kernel(*tensors), by_torch(*tensors))


@has_kernel
@pytest.mark.parametrize(
    ("size", "other"),
    [(40, 90), (95, 118), (150, 250), (190, 400), (227, 300), (300, 512), (386, 500), (442, 745), (513, 600),
     (589, 600), (604, 784), (703, 1000), (780, 1300)],
)  # fmt: skip
def test_two_texts_that_begin_alike_share_the_bits_that_are_promised(size, other):
    for query, keys, values in cancelling(torch.bfloat16, 2, 2, 64, (other,)):
        tensors = [each[0].transpose(0, 1) for each in (query, keys, values)]
        short, long = by_torch(*(each[:size] for each in tensors)), by_torch(*tensors)
        for shared in {size // 2, size}:
            alike = tokens_alike(shared, size, other)
            assert alike == tokens_alike(shared, other, size) and alike >= min(shared, 96, size - size % 32)
            assert torch.equal(short[:alike], long[:alike])
            rest = [tensors[0][alike:], *tensors[1:]]
            assert prompt_attention.is_supported(*rest, as_whole=True)
            assert torch.equal(prompt_attention.prompt_attention(*rest, 64**-0.5, as_whole=True), long[alike:])


@has_kernel
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (4, 1, 48), (2, 2, 80), (8, 2, 128), (2, 1, 192)])
def test_heads_of_any_served_size_have_the_bits_of_torch(heads, kv_heads, dim):
    tensors = tensors_of(850, 850, heads, kv_heads, dim)
    assert torch.equal(by_kernel(*tensors), by_torch(*tensors))


@has_kernel
@pytest.mark.parametrize(("width", "start"), [(192, 1), (200, 100), (532, 512), (300, 1337), (800, 900)])
def test_a_part_behind_earlier_tokens_has_the_bits_of_torch(width, start):
    tensors = tensors_of(width, start + width, 4, 2, 64)
    assert torch.equal(by_kernel(*tensors), by_torch(*tensors))


@has_kernel
@pytest.mark.parametrize("size", [0.0, 30.0, 3e4])
def test_scores_that_are_equal_or_far_apart_keep_their_bits(size):
    query, keys, values = tensors_of(600, 600, 4, 2, 64)
    assert torch.equal(by_kernel(query, keys * size, values), by_torch(query, keys * size, values))


@has_kernel
def test_several_threads_share_the_work_and_change_no_bit(three_threads):
    tensors = tensors_of(900, 900, 6, 3, 64)
    assert torch.equal(by_kernel(*tensors), by_torch(*tensors))


@has_kernel
@pytest.mark.parametrize(
    ("width", "slots", "dim", "dtype"),
    [
        (FEWEST - 1, FEWEST - 1, 64, torch.bfloat16),  # too few to gain
        (200, 515, 64, torch.bfloat16),  # a last block of three keys
        (257, 600, 64, torch.bfloat16),  # a last block of one query
        (300, 300, 72, torch.bfloat16),  # no whole registers
        (300, 300, 64, torch.float32),
    ],
)
def test_what_torch_adds_in_another_order_is_left_to_torch(width, slots, dim, dtype):
    query, keys, values = (each.to(dtype) for each in tensors_of(width, slots, 4, 2, dim))
    assert not prompt_attention.is_supported(query, keys, values)


@has_kernel
@pytest.mark.parametrize("turned", ["nothing", "keys", "neighbours", "dimensions", "the first token"])
def test_a_kernel_that_sums_in_another_order_is_found(turned, monkeypatch):
    own = prompt_attention.prompt_attention

    def other(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if turned == "dimensions":
            query, keys = query.roll(1, 2), keys.roll(1, 2)
        out, places = own(query, keys, values, scale), torch.arange(len(keys))
        orders = {"keys": places.flip(0), "neighbours": places ^ 1 if len(keys) % 2 == 0 else places.roll(1)}
        if turned in orders:  # only the last query sees the same keys in any order
            order = orders[turned]
            out = torch.cat([out[:-1], own(query, keys[order], values[order], scale)[-1:]])
        if turned == "the first token":
            out = torch.cat([out[1:2], out[1:]])
        return out

    has_bits_of_prompts.cache_clear()
    monkeypatch.setattr(prompt_attention, "prompt_attention", other)
    try:
        assert has_bits_of_prompts(64) is (turned == "nothing")
    finally:
        has_bits_of_prompts.cache_clear()


class Layer(nn.Module):
    num_key_value_groups, is_causal = 2, True


@has_kernel
@pytest.mark.parametrize(
    "options", [{"dropout": 0.5}, {"is_causal": False}, {"position_bias": torch.zeros(2)}, {"softcap": 5.0}]
)
def test_options_that_change_attention_are_left_to_the_model(options):
    tensors = [each.transpose(0, 1)[None] for each in tensors_of(300, 300, 4, 2, 64)]
    assert attend_prompts(Layer(), *tensors, sdpa_attention_forward, {"dropout": 0.0, "scaling": 0.1}) is not None
    assert attend_prompts(Layer(), *tensors, sdpa_attention_forward, options) is None
    assert attend_prompts(Layer(), *tensors, lambda *_: None, {}) is None, "another function"


@has_kernel
@pytest.mark.parametrize("beginning", [0, 40])
def test_a_model_reads_a_prompt_with_its_own_bits(beginning, monkeypatch):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, initializer_range=0.1,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).bfloat16().eval()
    text = np.random.default_rng(1).integers(3, 101, 600).astype(np.int32)
    assert has_bits_of_prompts(16, arithmetic_flags())
    calls, own = [], prompt_attention.prompt_attention

    def counted(query: Tensor, *rest: Any, **options: Any) -> Tensor:
        calls.append(len(query))
        return own(query, *rest, **options)

    monkeypatch.setattr(exact_attention.prompt_attention, "prompt_attention", counted)
    past, tokens = DynamicCache(config=config), torch.from_numpy(text).long()[None]
    with torch.inference_mode():
        for some in (tokens[:, :beginning], tokens[:, beginning:]) if beginning else (tokens,):
            expected = model(some, past_key_values=past, logits_to_keep=1).logits
    backend = backend_for(model, rows=1, capacity=700)
    with backend.serving():
        if beginning:
            backend.read([text[:beginning]])
            backend.cache.commit(0, np.zeros(1, np.int32))
        logits = backend.read([text])
    assert calls == [600 - beginning] * 2, "both layers"
    assert torch.equal(logits, expected)
    for layer, theirs in zip(backend.cache.layers, past.layers, strict=True):
        assert torch.equal(layer.keys[:, :600].transpose(1, 2), theirs.keys)
        assert torch.equal(layer.values[:, :600].transpose(1, 2), theirs.values)
