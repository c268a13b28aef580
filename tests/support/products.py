"""Products of linear layers: their choice, a pass that uses them, and numbers that reveal the order of summation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from lookahead.backend.cpu import cpu_pass, linears, product_choice
from lookahead.backend.cpu.linears import LinearScope
from lookahead.backend.cpu.product_choice import measured_backends
from lookahead.backend.protocol import BitPolicy
from lookahead.model.model_state import patched_attribute
from lookahead.utils.kept_values import kept_file
from lookahead.utils.machine import machine_fingerprint

ASKED = [
    (product_choice._FEW_ROWS, product_choice._GAIN),
    ((1,), linears._WHOLE_LAYERS),
    (product_choice._FEW_ROWS, linears._WHOLE_LAYERS),
    (linears._MANY_ROWS, product_choice._GAIN),
]
"""Every comparison of products that linear layers request."""


@contextmanager
def kept_choice(folder: Path, *backends: str) -> Iterator[None]:
    """Put the choice of these backends into the cache folder, as an earlier process would have.

    Nothing is measured, so that a test does not depend on the faster product on this machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        path = kept_file("products", machine_fingerprint())
        path.parent.mkdir(parents=True, exist_ok=True)
        cases = [
            f"{dtype}, rows {rows}, gain {gain}"
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
            for rows, gain in ASKED
        ]
        kept = json.dumps({"values": dict.fromkeys(cases, backends)})
        path.write_text(kept)
        measured_backends.cache_clear()
        try:
            yield
            assert path.read_text() == kept, "something else was measured"
        finally:
            measured_backends.cache_clear()


@contextmanager
def multiplying(
    scope: LinearScope, policy: BitPolicy = BitPolicy.ROUNDED, *, is_prompt: bool = False
) -> Iterator[None]:
    """A pass on this thread in which the linear layers of a scope may use packed weights."""
    mode = cpu_pass.CpuPass(policy, is_prompt, scope.packs, fewest=scope.fewest)
    with patched_attribute("forward", scope.forwards()), cpu_pass.running(mode, fuses=False):
        yield


def run(
    scope: LinearScope,
    model: nn.Module,
    x: torch.Tensor,
    policy: BitPolicy = BitPolicy.ROUNDED,
    *,
    is_prompt: bool = False,
) -> torch.Tensor:
    """The output of a model of linear layers in a `multiplying` pass."""
    with torch.inference_mode(), multiplying(scope, policy, is_prompt=is_prompt):
        output: torch.Tensor = model(x)
        return output


def half_model(shape: Sequence[int], *, bias: bool = True) -> nn.Module:
    """A bfloat16 layer of a shape `[outputs, inputs]` whose sums nearly cancel for `cancelling_rows`.

    The remainder reveals the order of a sum. The orders of a layer's products depend on its shape and on the CPU.
    """
    outputs, inputs = shape
    layer = nn.Linear(inputs, outputs, bias=bias).bfloat16()
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    with torch.no_grad():
        half = torch.randn(outputs, inputs // 2)
        layer.weight.copy_(torch.cat([half, -half], 1)[:, order])
        if bias:
            layer.bias.normal_(0, 1e-6)
    return nn.Sequential(layer)


def cancelling_rows(rows: int, inputs: int) -> torch.Tensor:
    """Rows `[rows, inputs]` in bfloat16 for a `half_model`."""
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    half = torch.randn(rows, inputs // 2).bfloat16()
    return torch.cat([half, half], 1)[:, order]
