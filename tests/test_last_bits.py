"""Bits that random numbers seldom show: last bits of sums in bfloat16, and functions of every bfloat16 number.

Sums nearly cancel, so that a result shows how every addition of float32 was rounded.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, silu
from transformers import activations
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as olmo2_rotation
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from lookahead.backend.cpu import fused_layers, layer_checks
from lookahead.kernels import experts, layer_ops
from lookahead.kernels.gated_delta import Updates, gated_delta
from lookahead.kernels.jobs import run
from lookahead.kernels.selective_state import DTYPES, Inputs, selective_state
from lookahead.kernels.short_conv import convolution
from tests.support.declared import MIXTURES, has_kernels, made
from tests.support.small_layers import HALF, on_x86

pytestmark = [on_x86, has_kernels]
ROOT = torch.zeros(1, dtype=torch.int64)


def random(*shape: int, seed: int = 0, octaves: int = 3) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=source) * 2.0 ** torch.randint(-octaves, octaves + 1, shape, generator=source)


def every_number() -> torch.Tensor:
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(HALF)
    return numbers[numbers.isfinite()]


def assert_cancels(sums: torch.Tensor) -> None:
    assert sums.float().abs().median() < 1e-2, "the sums do not cancel"


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("size", [32, 48, 257, 1024])
@pytest.mark.parametrize("chosen", [1, 2, 5, 8, 16, 17, 22, 64])
def test_results_of_experts_are_added_as_torch_adds_them(chosen: int, size: int, is_wide: bool) -> None:
    factors = torch.rand(3, chosen, generator=torch.Generator().manual_seed(chosen))
    factors = factors if is_wide else factors.to(HALF)
    rows = random(3, chosen, size, octaves=4).to(HALF)
    for last in {chosen // 2, chosen - 1} - {0}:
        rows[:, last] = 0
        rows[:, last] = (-(rows * factors[..., None]).double().sum(1) / factors[:, last, None]).to(HALF)
    own = torch.cat(
        [(row * factor[..., None]).sum(1) for row, factor in zip(rows.split(1), factors.split(1), strict=True)]
    )
    out, places = torch.empty(3, size, dtype=HALF), torch.arange(3 * chosen).view(3, chosen)
    run(experts.combine(rows.view(-1, size), factors.float(), places, out, is_wide=is_wide))
    assert torch.equal(out, own.to(HALF))


@pytest.mark.parametrize("name", MIXTURES)
def test_a_router_weighs_rows_together_as_each_alone(name: str) -> None:
    layer = fused_layers.find_fused(made(name)).layers[-1]
    part, source = layer.experts, torch.Generator().manual_seed(0)
    count, dtype = part.sizes[0], torch.float32 if part.has_wide_router else HALF
    uneven = torch.randn(512, count, generator=source) * 4
    ties = torch.randint(-2, 3, (512, count), generator=source)
    for logits in (uneven.to(dtype), ties.to(dtype)):
        factors, indices = zip(*map(part.route, logits.split(1)), strict=True)
        assert all(map(torch.equal, part.route(logits), (torch.cat(factors), torch.cat(indices))))


@pytest.mark.parametrize("width", [48, 64, 100, 512])
def test_an_activation_is_fused_if_every_number_of_a_row_has_torchs_bits(width: int) -> None:
    """Torch computes the last numbers of a row by other code, which rounds the tanh of few numbers otherwise."""
    kinds = activations.GELUTanh, activations.SiLUActivation, activations.GELUActivation
    model = made("Gemma3", intermediate_size=width)
    assert bool(fused_layers.find_fused(model).layers) is (width % 64 == 0)
    for kind in kinds:
        numbers = torch.cat([every_number(), torch.zeros(-len(every_number()) % width, dtype=HALF)]).view(-1, width)
        own, fused = torch.stack([kind()(row) for row in numbers]), numbers.clone()
        run(layer_ops.gating(fused, None, *layer_checks.activation_of(kind(), HALF)))
        is_right = layer_checks.keeps_activation(kind, has_rest=width % 64 > 0)
        assert is_right is torch.equal(own, fused)


@pytest.mark.parametrize("factor", [0.22, 1 / 3, 0.0625, 12.0])
def test_scaled_sums_have_torchs_bits_for_every_number(factor: float) -> None:
    x = every_number()
    x = x[x.float().abs() < 1e30]
    for delta, own_factor, scale in ((x.flip(0), factor, 1.0), (x, factor, 1 / factor)):
        total = torch.empty_like(x)
        run(layer_ops.norm(x, None, None, 0.0, delta=delta, factor=own_factor, scale=scale, total=total))
        assert torch.equal(total, (x + delta * own_factor) * scale)


def test_wide_rotations_round_every_product() -> None:
    angles = torch.rand(1, 100, 32, generator=torch.Generator().manual_seed(0)) * 6
    cos, sin = (torch.cat([of_angles] * 2, -1) for of_angles in (angles.cos(), angles.sin()))
    query, key = random(1, 100, 8, 64).to(HALF), random(1, 100, 2, 64, seed=1).to(HALF)
    for heads in (query, key):
        heads[..., 32:] = heads[..., :32] * (cos / sin)[:, :, None, :32]  # so that first results nearly cancel
    own = olmo2_rotation(query, key, cos, sin, unsqueeze_dim=2)
    run(layer_ops.rotation(query, key, cos, sin))
    assert_cancels(query[..., :32])
    assert torch.equal(query, own[0]) and torch.equal(key, own[1])


def test_the_silu_of_a_convolution_has_torchs_bits_for_every_number() -> None:
    x = every_number()
    out, taps = torch.empty(1, len(x), dtype=HALF), torch.tensor([0.0, 1.0]).to(HALF).repeat(len(x), 1)
    run(convolution(x[None], torch.zeros_like(taps), taps, None, ROOT, out, has_silu=True))
    assert torch.equal(out[0], silu(x))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("channels", "taps"), [(37, 2), (1100, 3), (3072, 4)])
def test_a_convolution_adds_its_taps_as_torch_does(channels: int, taps: int, has_bias: bool) -> None:
    inputs, weight = random(channels, taps, octaves=0).double(), random(channels, taps, seed=1).to(HALF)
    bias = random(channels, seed=2).to(HALF) * has_bias
    for last in torch.randperm(taps, generator=torch.Generator().manual_seed(taps))[-2:]:
        inputs = inputs.to(HALF).double()
        inputs[:, last] = 0
        inputs[:, last] = -((inputs * weight).sum(1) + bias) / weight[:, last]
    inputs, bias = inputs.to(HALF), bias if has_bias else None
    state, out = torch.cat([inputs[:, :1], inputs[:, :-1]], 1), torch.empty(1, channels, dtype=HALF)
    run(convolution(inputs[:, -1:].T.contiguous(), state, weight, bias, ROOT, out))
    assert_cancels(out)
    assert torch.equal(out[0], conv1d(inputs[None], weight[:, None], bias, groups=channels)[0, :, -1])


@pytest.mark.skipif(HALF not in DTYPES, reason="the kernel multiplies pairs of bfloat16")
@pytest.mark.parametrize(("heads", "groups", "size", "rows"), [(8, 1, 64, 128), (6, 2, 32, 128), (3, 3, 80, 64)])
def test_rows_of_selective_states_are_added_as_torch_does(heads: int, groups: int, size: int, rows: int) -> None:
    state, width = random(heads, rows, size).to(HALF).double(), heads * size
    mixed, outputs = torch.zeros(1, width + 2 * groups * rows, dtype=HALF), random(groups, rows, seed=1).to(HALF)
    last = [rows // 5, rows // 3, rows // 2, rows - 1]
    outputs[:, last] = 1.0
    for row in last:
        state[:, row] = 0
        state[:, row] = -torch.einsum("hr,hrc->hc", outputs.double().repeat_interleave(heads // groups, 0), state)
        state = state.to(HALF).double()
    mixed[0, -groups * rows :] = outputs.flatten()
    held, nothing, out = state.float().contiguous(), torch.zeros(heads), torch.empty(1, width)
    inputs = Inputs(mixed, nothing[None], torch.ones(1, heads))
    run(selective_state(inputs, nothing.to(HALF), held, ROOT, torch.ones(1, width), out))
    own = granite.mamba2_selective_state_update(
        held.mT.contiguous()[None], mixed[:, :width].view(1, heads, size), nothing.to(HALF)[None, :, None],
        torch.zeros(heads, size, rows), torch.zeros(1, groups, rows, dtype=HALF), outputs[None], None,
    )  # fmt: skip
    assert_cancels(own)
    assert torch.equal(out[0], own.flatten().float())


@pytest.mark.parametrize(("heads", "key_heads", "key_size", "size"), [(4, 4, 24, 32), (6, 2, 128, 64), (2, 1, 256, 32)])
def test_answers_of_a_delta_net_are_added_as_torch_does(heads: int, key_heads: int, key_size: int, size: int) -> None:
    width, values, nothing = key_heads * key_size, heads * size, torch.zeros(1, heads)
    mixed, gate = random(1, 2 * width + values).to(HALF), random(1, values, seed=1).to(HALF)
    query, key, value = mixed[0].split([width, width, values])
    query, key, value = query.view(1, 1, -1, key_size), key.view(1, 1, -1, key_size), value.view(1, 1, -1, size)
    asked = (qwen.l2norm(query[0, 0].float()) / key_size**0.5).repeat_interleave(heads // key_heads, 0).double()
    state, largest = random(heads, key_size, size, seed=2).double(), asked.abs().topk(3).indices
    for rows in largest.unbind(1):
        for head, row in enumerate(rows):
            state[head, row] = 0
            state[head, row] = (-(asked[head] @ state[head]) / asked[head, row]).float()
    state, norm = state.float(), qwen.Qwen3_5RMSNormGated(size, eps=1e-30).requires_grad_(False).to(HALF)
    updates, out = Updates.empty(nothing.exp(), key_heads, key_size, size), torch.empty(1, values, dtype=HALF)
    norming = norm.weight, norm.variance_epsilon, silu(gate.float())
    run(gated_delta(mixed, nothing, state, ROOT, updates, out, norming))
    own, _ = qwen.torch_recurrent_gated_delta_rule(
        query, key, value, nothing[None], nothing[None], state[None], use_qk_l2norm_in_kernel=True
    )
    assert_cancels(own)
    assert torch.equal(out[0], norm(own.view(-1, size), gate.view(-1, size)).flatten())
