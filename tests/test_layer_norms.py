"""Layer norms, plain MLPs and parallel residuals in passes as one call, and the moments of torch's layer norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import activations

from lookahead.backend.cpu import fused_layers, layer_checks
from lookahead.kernels import layer_ops, norm_rows
from lookahead.kernels.jobs import run
from tests.support.declared import both, has_kernels, made, prompt
from tests.support.small_layers import HALF, SINGLE, on_x86

pytestmark = [on_x86, has_kernels]


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("size", [16, 48, 256, 272, 576, 2048, 4096, 5008])
def test_moments_and_results_have_the_bits_of_torch(dtype, size):
    source = torch.Generator().manual_seed(size)
    x = (torch.randn(16, size, generator=source) * 3 + 1).to(dtype)
    weight, bias = (torch.randn(size, generator=source).to(dtype) for _ in range(2))
    out, moments = torch.empty_like(x), torch.empty(2, 16)
    run(layer_ops.norm(x, weight, out, 1e-5, kind=norm_rows.LAYER, bias=bias, means=moments))
    _, mean, scale = torch.native_layer_norm(x, [size], torch.ones(size), None, 1e-5)
    assert torch.equal(out, nn.functional.layer_norm(x, [size], weight, bias, 1e-5))
    assert torch.equal(moments, torch.stack([mean[:, 0], scale[:, 0]]))
    assert layer_checks.keeps_means(dtype, size, norm_rows.LAYER)


def test_moments_in_another_order_are_found_by_comparison(monkeypatch):
    own = layer_ops.norm

    def norm(x, weight, out, eps, **options):
        return own(x, weight, out, eps * (1 + 2e-7 / eps if options.get("means") is not None else 1), **options)

    monkeypatch.setattr(layer_checks.layer_ops, "norm", norm)
    assert not layer_checks.keeps_means.__wrapped__(HALF, 512, norm_rows.LAYER)


def test_the_error_function_is_within_a_millionth():
    x = torch.linspace(-12, 12, 4801)
    out = x.clone()
    run(layer_ops.gating(out, None, layer_ops.GELU))
    torch.testing.assert_close(out, activations.GELUActivation()(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("formula", "module"),
    [(layer_ops.RELU, nn.ReLU()), (layer_ops.RELU_SQUARED, activations.ReLUSquaredActivation())],
)
def test_a_relu_has_the_bits_of_torch(formula, module):
    x = torch.cat([torch.linspace(-3, 3, 1001), torch.tensor([torch.inf, -torch.inf, -0.0, torch.nan])])
    out = x.clone()
    run(layer_ops.gating(out, None, formula))
    assert torch.equal(out.view(torch.int32), module(x).view(torch.int32))


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_residuals_one_after_the_other_have_the_tokens_of_generate(dtype, calls):
    own, ours = both(made("GPTNeoX", dtype, use_parallel_residual=False), prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences) and calls


def test_norms_of_other_sizes_than_whole_vectors_are_named():
    model = made("Starcoder2", SINGLE, hidden_size=264)
    found = fused_layers.find_fused(model)
    assert "a norm is hooked, or of an unsupported type or size" in found.reason and not found.layers
    own, ours = both(model, prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences)


def test_a_layer_whose_angles_have_another_size_runs_its_own_code():
    model = made("GPTNeoX", SINGLE, head_dim=64)  # by which its rotary embedding goes, and its heads do not
    own, ours = both(model, prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences)
