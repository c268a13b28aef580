"""RMSNorm, rotary embedding and gated SiLU in one call each: the bits of torch's operators."""

from __future__ import annotations

import platform

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as gpt_oss_rotation
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as olmo2_rotation
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as phi3_rotation

from lookahead.backend.cpu.activations import activation_of
from lookahead.kernels import layer_ops, norm_rows
from lookahead.kernels.jobs import run

on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch sums in another order")
HALF, SINGLE = torch.bfloat16, torch.float32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    out = torch.empty_like(x)
    run(layer_ops.norm(x, weight, out, eps))
    return out


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total, out = torch.empty_like(x), torch.empty_like(x)
    run(layer_ops.norm(x, weight, out, 1e-5, delta=delta, total=total))
    return total, out


def gated_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    run(layer_ops.gating(gate, up))
    return gate


def random(*shape: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    """Numbers of very different size, whose sums depend on their order."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=source) * (torch.randn(*shape, generator=source) * spread).exp()


@on_x86
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
@pytest.mark.parametrize("size", [8, 64, 65, 100, 128, 511, 576, 896, 960, 1536, 2048, 2051, 4096, 8192, 16384, 20000])
def test_mean_squares_have_the_bits_of_torchs_mean(size, rows, dtype):
    x = random(rows, size, seed=size).to(dtype)
    means = torch.empty(rows)
    run(layer_ops.norm(x, x[0], torch.empty_like(x), 0.0, means=means))
    assert torch.equal(means, x.float().pow(2).mean(-1))


@on_x86
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("shape", [(1, 1, 576), (1, 7, 100), (3, 5, 960), (2, 3, 4, 64), (1, 33, 2048)])
def test_norms_have_the_bits_of_the_module(shape, dtype):
    norm = LlamaRMSNorm(shape[-1], eps=1e-5).requires_grad_(False)
    norm.weight.copy_(random(shape[-1], seed=2, spread=0.3))
    norm, x, delta = norm.to(dtype), random(*shape).to(dtype), random(*shape, seed=1).to(dtype)
    assert torch.equal(rms_norm(x, norm.weight), norm(x))
    total, normed = add_rms_norm(x, delta, norm.weight)
    assert torch.equal(total, x + delta) and torch.equal(normed, norm(x + delta))


def test_norms_of_float32_are_those_in_float64():
    x, weight = random(9, 577), random(577, seed=1)
    exact = weight.double() * x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(rms_norm(x, weight), exact.float())


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "kv_heads", "dim"), [(1, 1, 9, 3, 64), (2, 8, 4, 4, 10), (3, 5, 2, 1, 128)]
)
def test_rotated_heads_have_the_bits_of_the_models_function(rows, tokens, heads, kv_heads, dim, dtype):
    query, key, cos, sin = (
        random(rows, tokens, n * dim, seed=n).to(dtype).view(rows, tokens, n, dim) for n in (heads, kv_heads, 1, 1)
    )
    cos, sin = cos[:, :, 0], sin[:, :, 0].flip(-1).contiguous()
    expected = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    run(layer_ops.rotation(query, key, cos, sin))
    for got, own in zip((query, key), expected, strict=True):
        assert torch.equal(got.transpose(1, 2), own)


def test_silu_has_the_bits_of_torch_for_every_bfloat16():
    gate = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(HALF)
    up = random(1 << 16).to(HALF)
    expected = nn.functional.silu(gate) * up
    got = gated_silu(gate.clone(), up)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~got.isnan()].view(torch.int16), expected[~got.isnan()].view(torch.int16))


def test_silu_of_float32_is_near_torchs():
    gate, up = random(10_001), random(10_001, seed=1)
    torch.testing.assert_close(gated_silu(gate.clone(), up), nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3e38, 1e-38, 0.0, -0.0])
def test_numbers_at_the_limits_go_through_as_in_torch(value, dtype):
    x = random(3, 64).to(dtype)
    x[1, 5] = value
    norm = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    other = random(3, 64, seed=1).to(dtype)
    pairs = [
        (rms_norm(x, norm.weight), norm(x)),
        (add_rms_norm(x, x, norm.weight)[0], x + x),
        (add_rms_norm(x, x, norm.weight)[1], norm(x + x)),
        (gated_silu(x.clone(), other), nn.functional.silu(x) * other),
        (gated_silu(other.clone(), x), nn.functional.silu(other) * x),
    ]
    own = [each[:, 0] for each in apply_rotary_pos_emb(x[None, None], x[None, None], other[None], other[None])]
    query, key = x.clone(), x.clone()
    run(layer_ops.rotation(query, key, other, other))
    for got, expected in [*pairs, (query, own[0][0]), (key, own[1][0])]:
        torch.testing.assert_close(got, expected, equal_nan=True)


@on_x86
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize(("kind", "name"), [(norm_rows.WIDE, Olmo2RMSNorm), (norm_rows.PLUS_ONE, Gemma3RMSNorm)])
def test_other_norms_have_the_bits_of_their_modules(kind, name, dtype):
    norm = name(576, 1e-5).requires_grad_(False)
    norm.weight.copy_(random(576, seed=2, spread=0.3))
    norm, x, delta = norm.to(dtype), random(7, 576).to(dtype), random(7, 576, seed=1).to(dtype)
    for factor in (1.0, 0.22):
        total, out = torch.empty_like(x), torch.empty_like(x)
        run(layer_ops.norm(x, norm.weight, out, 1e-5, kind=kind, delta=delta, factor=factor, total=total))
        assert torch.equal(total, x + delta * factor) and torch.equal(out, norm(total))
        run(layer_ops.norm(x, None, None, 0.0, delta=delta, factor=factor, total=out))
        assert torch.equal(out, total)


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_partly_rotated_heads_pairs_with_one_cosine_and_wide_cosines_keep_their_bits(dtype):
    query, key = (random(1, 5, heads * 64, seed=heads).to(dtype).view(1, 5, heads, 64) for heads in (4, 2))
    angles = random(1, 5, 48, seed=3, spread=0.1)
    cases = (
        (phi3_rotation, angles.cos().to(dtype), angles.sin().to(dtype), 48),
        (phi3_rotation, angles[..., :32].cos().to(dtype), angles[..., :32].sin().to(dtype), 32),  # half a head
        (gpt_oss_rotation, angles[..., :32].cos().to(dtype), angles[..., :32].sin().to(dtype), 64),
        (olmo2_rotation, torch.cat([angles, angles], -1)[..., :64].cos(), angles.repeat(1, 1, 2)[..., :64].sin(), 64),
    )
    for rotate, cos, sin, turned in cases:
        expected = rotate(query, key, cos, sin, unsqueeze_dim=2)
        got = query.clone(), key.clone()
        run(layer_ops.rotation(*got, cos.contiguous(), sin.contiguous(), 64, turned))
        for ours, own in zip(got, expected, strict=True):
            assert torch.equal(ours, own) if dtype == HALF else torch.allclose(ours, own, rtol=1e-5, atol=1e-5)


def test_gates_of_rows_that_are_apart_have_the_values_of_torch():
    both = random(5, 96, spread=0.5)
    for kind, own in ((layer_ops.SILU, nn.functional.silu), (layer_ops.GELU_TANH, nn.GELU(approximate="tanh"))):
        out = torch.empty(5, 48)
        run(layer_ops.gating(both[:, :48], both[:, 48:], kind, None, out))
        torch.testing.assert_close(out, own(both[:, :48]) * both[:, 48:], rtol=1e-5, atol=1e-6)
        alone = both[:, :48].contiguous()
        run(layer_ops.gating(alone, None, kind))
        torch.testing.assert_close(alone, own(both[:, :48]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("dim", [1, 7, 64, 640])
def test_one_gate_for_a_head_multiplies_its_numbers_in_place(dtype, dim):
    gates, heads = random(15, 1).to(dtype), random(15, dim).to(dtype)
    expected = heads * torch.sigmoid(gates)
    formula = activation_of(nn.Sigmoid(), dtype)
    run(layer_ops.gating(gates.expand(-1, dim), heads, *formula, out=heads))
    torch.testing.assert_close(heads, expected, rtol=1e-6 if dtype == SINGLE else 0, atol=0)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("apart", [1, 2])
def test_threads_that_share_gates_write_every_product_once(threads, apart):
    before = torch.get_num_threads()
    both = random(5, 2, 1500 * apart, spread=0.5).to(HALF)
    gate, up = both[:, 0, ::apart], both[:, 1, ::apart]
    out = torch.full((5, 1500), torch.nan, dtype=HALF)
    try:
        torch.set_num_threads(threads)
        run(layer_ops.gating(gate, up, out=out))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, nn.functional.silu(gate) * up)
