"""Products by oneDNN against products in float64, where they take over from torch's own, and where they must not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import lookahead
from lookahead.kernels import dispatch as choice
from lookahead.kernels import linear as products
from lookahead.kernels.linear import FEWEST, STEP, DnnLinear

CPU = torch.device("cpu")

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture
def multiplied(monkeypatch):
    """How often oneDNN was given so many tokens."""
    counts: Counter[int] = Counter()
    run = torch.ops.mkldnn._linear_pointwise

    def counted(x: Any, *arguments: Any) -> Any:
        counts[x.numel() // x.shape[-1]] += 1
        return run(x, *arguments)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    return counts


@needs_onednn
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(32,), (80,), (81,), (1, 95), (3, 37), (2, 5, 9)])
def test_products_agree_with_those_in_float64_whatever_their_shape(shape, has_bias, multiplied):
    torch.manual_seed(0)
    x, weight = torch.randn(*shape, 24), torch.randn(19, 24) / 24
    bias = torch.randn(19) if has_bias else None
    with torch.inference_mode(), DnnLinear():
        got = linear(x, weight, bias)
    want = linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype == torch.float32 and got.shape == want.shape and got.is_contiguous()
    assert (got - want).abs().max() < 1e-5
    assert sum(multiplied.values()) == 1 and all(tokens % STEP == 0 for tokens in multiplied)


@needs_onednn
def test_activations_that_are_not_contiguous_are_read_as_they_stand():
    x, weight = torch.randn(24, 3, 40).transpose(0, 2), torch.randn(8, 24)
    with torch.inference_mode(), DnnLinear():
        assert torch.allclose(linear(x, weight), linear(x.contiguous(), weight), atol=1e-5)


class Other(torch.Tensor):
    """A tensor with ways of its own, as quantized weights have."""


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.randn(FEWEST - 1, 8), torch.randn(4, 8)),
        (torch.randn(100, 8).bfloat16(), torch.randn(4, 8).bfloat16()),
        (torch.randn(100, 8).double(), torch.randn(4, 8).double()),
        (torch.randn(100, 8), torch.randn(4, 8).as_subclass(Other)),
        (torch.randn(0, 8), torch.randn(4, 8)),
        (torch.randn(100, 0), torch.randn(4, 0)),
    ],
    ids=["few", "half precision", "float64", "a subclass", "nothing", "no inputs"],
)
def test_what_it_is_not_for_is_left_to_torch(x, weight, multiplied):
    with torch.inference_mode(), DnnLinear():
        assert torch.equal(linear(x, weight), linear(x, weight))
    assert not multiplied


def test_weights_of_another_type_are_refused_as_torch_refuses_them():
    with DnnLinear(), pytest.raises(RuntimeError, match="dtype"):
        linear(torch.randn(100, 8), torch.randn(4, 8).bfloat16())


@needs_onednn
def test_it_is_chosen_for_long_passes_and_only_where_it_is_faster(monkeypatch):
    chosen = {}
    for is_faster in (True, False):
        monkeypatch.setattr(products, "_is_faster", lambda threads, is_faster=is_faster: is_faster)
        chosen[is_faster] = [
            isinstance(choice.products_for(tokens, CPU, dtype), DnnLinear)
            for dtype in (torch.float32, torch.bfloat16, torch.float64)
            for tokens in (31, 32, 80)
        ]
    assert chosen[True] == [False, True, True, *[False] * 6]
    assert not any(chosen[False])
    assert not isinstance(choice.products_for(80, torch.device("meta"), torch.float32), DnnLinear)


def test_where_torch_was_built_without_it_torch_multiplies(monkeypatch):
    def missing(*arguments: Any) -> Any:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", missing)
    products._is_faster.cache_clear()
    try:
        assert not products.pays(500, torch.float32)
    finally:
        products._is_faster.cache_clear()


@needs_onednn
def test_a_model_decodes_through_it_to_the_tokens_of_generate_and_is_itself_afterwards(
    tiny_llama, multiplied, monkeypatch
):
    monkeypatch.setattr(products, "_is_faster", lambda threads: True)
    torch.manual_seed(1)
    ids = torch.randint(5, 90, (3, 45))
    ids[0, :20] = 0
    mask = (ids != 0).long()
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False}
    expected = tiny_llama.generate(ids, **options)
    assert not multiplied
    config = lookahead.LookaheadConfig(draft="fixed")
    got = tiny_llama.generate(ids, **options, custom_generate=lookahead.decode, lookahead_config=config)
    assert torch.equal(got, expected)
    assert any(tokens > 100 for tokens in multiplied), "the prompts"
    seen = sum(multiplied.values())
    tiny_llama(ids)
    assert sum(multiplied.values()) == seen
    assert isinstance(next(tiny_llama.parameters()), nn.Parameter)
