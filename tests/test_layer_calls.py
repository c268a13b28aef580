"""Decoder layers whose weights are packed: what the model's own layers compute, by one or two calls a layer."""

from __future__ import annotations

import copy
import platform
from typing import Any

import numpy as np
import pytest
import torch

from lookahead.kernels import packed_product
from lookahead.models import fused_layers, linears, product_bits
from lookahead.models.exact_attention import takes_rows
from lookahead.models.target import Target
from tests.support.small_layers import HALF, MODELS, SINGLE, fused, logits_of, made, own_code, trees_of

__all__ = ["fused", "own_code"]  # fixtures
on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch sums in another order")
WIDE = {"head_dim": 32}  # torch sums products with fewer outputs in another order


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """How many jobs each call of the kernels did, where small weights are packed for those of this package too."""
    if not all(packed_product.is_supported(torch.zeros(2, 2, dtype=dtype)) for dtype in (HALF, SINGLE)):
        pytest.skip("this CPU has no dot products of bfloat16")
    jobs: list[int] = []
    own = fused_layers.run

    def counted(*each: Any) -> None:
        jobs.extend([len(each)] * bool(each))
        own(*each)

    monkeypatch.setattr(fused_layers, "run", counted)
    monkeypatch.setattr(product_bits, "FEWEST_WEIGHTS", 1)
    monkeypatch.setattr(linears, "faster_ways", lambda *kind: ("own",))
    return jobs


@on_x86
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize(("rows", "nodes"), [(1, 1), (1, 17), (1, 40), (3, 6)])
@pytest.mark.parametrize("name", MODELS)
def test_layers_whose_weights_are_packed_compute_what_the_models_own_layers_do(
    name, rows, nodes, dtype, fused, own_code, calls
):
    expected = own_code(made(name, dtype, **WIDE), rows, nodes)
    calls.clear()
    got = logits_of(made(name, dtype, **WIDE), rows, nodes)
    for ours, own in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, own, rtol=0 if dtype == HALF else 1e-4, atol=0 if dtype == HALF else 1e-4)
    assert fused and calls


@on_x86
@pytest.mark.parametrize("threads", [1, 3])
def test_a_layer_is_one_call_where_nodes_attend_alone_and_two_elsewhere(threads, fused, calls):
    before, model = torch.get_num_threads(), made(**WIDE)
    exact, masked = (Target(model, rows=1, capacity=64, is_bitwise=way) for way in (True, False))
    torch.set_num_threads(threads)
    try:
        for target, jobs in ((exact, [9] * 3), (masked, [3, 5] * 3)):
            if not takes_rows(model.config) and target is exact:
                continue
            with target.serving():
                target.prefill([np.arange(3, 14, dtype=np.int32)])
                expected = target.score(trees_of(1, 9, 0))
                for _ in range(20):
                    calls.clear()
                    assert torch.equal(target.score(trees_of(1, 9, 0)), expected)
                    assert [count for count in calls if count > 1] == jobs
    finally:
        torch.set_num_threads(before)


def logits_behind(model: Any) -> torch.Tensor:
    """Logits of a tree behind a prompt, by a target of its own."""
    target = Target(model, rows=1, capacity=64, is_bitwise=True)
    with target.serving():
        target.prefill([np.arange(3, 14, dtype=np.int32)])
        return target.score(trees_of(1, 5, 0))


@on_x86
def test_weights_that_change_between_passes_are_packed_anew(fused, calls):
    target = Target(model := made(**WIDE), rows=1, capacity=64, is_bitwise=True)
    with target.serving():
        target.prefill([np.arange(3, 14, dtype=np.int32)])
        before = target.score(trees_of(1, 5, 0))
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(2)
        after = target.score(trees_of(1, 5, 0))
    with target.serving():
        assert torch.equal(target.score(trees_of(1, 5, 0)), after)
    assert not torch.equal(before, after)


@on_x86
def test_a_change_that_counts_no_version_up_is_seen_by_the_next_call_while_another_is_open(fused, calls):
    before = logits_behind(model := made(**WIDE))
    with fused_layers.serving(model):
        assert torch.equal(logits_behind(model), before)
        model.model.layers[1].mlp.down_proj.weight.data.mul_(2)
        assert torch.equal(logits_behind(model), logits_behind(copy.deepcopy(model)))
