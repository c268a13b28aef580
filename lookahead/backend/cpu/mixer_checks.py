"""Whether the kernels of recurrent layers have torch's bits where random inputs seldom show others.

A result in bfloat16 shows the last bit of a sum in float32 once in thousands of times. So sums nearly cancel here, and
a function is compared for every number.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from lookahead.backend.cpu.layer_checks import keeps_means
from lookahead.backend.cpu.tree_mixers import TreeMixer
from lookahead.kernels.jobs import run
from lookahead.kernels.norm_rows import ROUNDED
from lookahead.kernels.selective_state import Inputs, selective_state
from lookahead.kernels.short_conv import convolution
from lookahead.model.known_code import arithmetic_flags

_CANCELLING = 4  # rows that cancel the remaining sum, one after the other
_HALF: Any = {"dtype": torch.bfloat16, "device": "cpu"}
_SINGLE: Any = {"dtype": torch.float32, "device": "cpu"}


def keeps_last_bits(mixer: TreeMixer) -> bool:
    """Whether the kernels of a bfloat16 mixer add as torch does, and activate every number as it does."""
    module, weight, flags = mixer.module, mixer.conv.weight, arithmetic_flags()
    if not keeps_taps(*weight.flatten(1).shape, mixer.conv.bias is not None, flags):
        return False
    if not hasattr(module, "norm"):
        return True  # a convolution that is not activated
    if not keeps_silu():
        return False
    if not hasattr(module, "ssm_state_size"):
        return True  # a delta net, whose sums are in its states too
    sizes = module.num_heads, module.n_groups, module.head_dim, module.ssm_state_size
    return keeps_outputs(*sizes, flags) and keeps_means(torch.bfloat16, module.norm.group_size, ROUNDED)


def _random(source: torch.Generator, *shape: int) -> Tensor:
    """Numbers of different sizes."""
    octaves = torch.randint(-3, 4, shape, generator=source, device="cpu")
    return torch.randn(*shape, generator=source, **_SINGLE) * 2.0**octaves


def _root() -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device="cpu")


@lru_cache(maxsize=1)
@torch.inference_mode()
def keeps_silu() -> bool:
    """Whether the kernel of a convolution activates every bfloat16 number as torch does."""
    x = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    out, taps = torch.empty(1, len(x), **_HALF), torch.tensor([[0.0, 1.0]], **_HALF).repeat(len(x), 1)
    run(convolution(x[None], torch.zeros_like(taps), taps, None, _root(), out, has_silu=True))
    return torch.equal(out[0], silu(x))


@lru_cache(maxsize=64)
@torch.inference_mode()
def keeps_taps(channels: int, taps: int, has_bias: bool, flags: tuple[Any, ...] = ()) -> bool:
    """Whether the kernel adds the taps of a convolution in the order in which torch does."""
    source = torch.Generator().manual_seed(0)
    inputs, weight = (_random(source, channels, taps).bfloat16() for _ in range(2))
    bias = _random(source, channels).bfloat16() * has_bias
    for last in torch.randperm(taps, generator=source, device="cpu")[-2:]:
        inputs[:, last] = 0
        total = (inputs.double() * weight).sum(1) + bias
        inputs[:, last] = (-total / weight[:, last]).bfloat16()
    state, out = torch.cat([inputs[:, :1], inputs[:, :-1]], 1), torch.empty(1, channels, **_HALF)
    added = bias if has_bias else None
    run(convolution(inputs[:, -1:].T.contiguous(), state, weight, added, _root(), out))
    return torch.equal(out[0], conv1d(inputs[None], weight[:, None], added, groups=channels)[0, :, -1])


@lru_cache(maxsize=64)
@torch.inference_mode()
def keeps_outputs(heads: int, groups: int, size: int, rows: int, flags: tuple[Any, ...] = ()) -> bool:
    """Whether the kernel of a Mamba-2 layer adds the rows of a state in the order of torch's product.

    All heads are alike. Nothing is added to their states.

    Args:
        heads: Heads of the layer.
        groups: Groups of heads that share output weights.
        size: Numbers of a head.
        rows: Numbers of a state for each of them.
        flags: Torch's settings, which choose its kernel.
    """
    source, width = torch.Generator().manual_seed(0), heads * size
    state, weights = _random(source, rows, size).bfloat16(), _random(source, rows).bfloat16()
    for last in {rows // n for n in range(2, 2 + _CANCELLING)}:
        weights[last], state[last] = 1, 0
    for last in {rows // n for n in range(2, 2 + _CANCELLING)}:
        state[last] = -(weights.double() @ state.double()).bfloat16()
    mixed, out = torch.zeros(1, width + 2 * groups * rows, **_HALF), torch.empty(1, width, **_SINGLE)
    mixed[0, -groups * rows :] = weights.repeat(groups)
    nothing, states = torch.zeros(1, heads, **_SINGLE), state.expand(heads, rows, size)
    inputs = Inputs(mixed, nothing, torch.ones(1, heads, **_SINGLE))
    run(selective_state(inputs, nothing[0].bfloat16(), states.float(), _root(), torch.ones_like(out), out))
    own = torch.bmm(states.mT.contiguous(), weights[:, None].expand(heads, rows, 1).contiguous())
    return torch.equal(out, own.view(1, width).float())
