"""Models without room for packed copies of their weights: products of the weights as stored, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.cpu import linears, product_bits
from lookahead.backend.cpu.linears import LinearScope
from lookahead.backend.protocol import BitPolicy
from lookahead.decoding.path_report import backend_report
from lookahead.kernels import experts
from lookahead.kernels.jobs import run as run_jobs
from lookahead.model.model_state import state_of
from tests.support.declared import both, has_kernels, made, prompt
from tests.support.products import cancelling_rows, half_model, kept_choice, run

pytestmark = has_kernels
types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def has_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No packed copy fits into the memory."""
    monkeypatch.setattr(linears, "_SHARE_OF_MEMORY", 1e-12)
    with kept_choice(tmp_path / "cache", "packed", "stored", "onednn"):
        yield


def copies_of(model: Any) -> int:
    """Bytes of packed copies of a model's weights."""
    return sum(layer.nbytes for layer in state_of(model).linears.values())


@types
@pytest.mark.parametrize("name", ["Ministral", "Phi3", "Starcoder2", "Lfm2"])
def test_whole_passes_have_the_tokens_of_generate_without_a_copy_of_a_weight(name, dtype):
    model = made(name, dtype)
    expected, got = both(model, prompt(), do_sample=False)
    assert torch.equal(got.sequences, expected.sequences) and copies_of(model) == 0
    if dtype == torch.bfloat16:
        assert all(map(torch.equal, got.logits, expected.logits))
    report = backend_report(model)
    paths = {each.path: each for each in report.paths}
    assert paths["passes as one call"].serves and not paths["packed weights"].serves
    assert "MiB of" in paths["packed weights"].reason
    products = {layer.product for layer in state_of(model).linears.values()}
    assert "stored" in products and not products & {"kernel", "onednn"}


@pytest.mark.parametrize("rows", [1, 5, 32])
@pytest.mark.parametrize("shape", [(70, 64), (300, 576), (96, 1536)], ids=str)
def test_rows_have_the_bits_that_they_have_alone(shape, rows, monkeypatch):
    monkeypatch.setattr(product_bits, "FEWEST_WEIGHTS", 1)
    model, x = half_model(shape), cancelling_rows(rows, shape[1])
    alone = torch.cat([model(row) for row in x.split(1)])
    assert torch.equal(run(LinearScope(model), model, x, BitPolicy.SOLO), alone)
    assert copies_of(model) == 0


@types
@pytest.mark.parametrize("way", ["in place", "through .data", "other memory", "another parameter"])
def test_the_next_call_sees_a_weight_that_changed_in_any_way(way, dtype):
    model = made("Ministral", dtype)
    options = {"max_new_tokens": 12, "do_sample": False, "lookahead_config": LookaheadConfig(draft="fixed")}
    model.generate(prompt(), custom_generate=lookahead.decode, **options)
    layer = model.model.layers[1].mlp.down_proj
    with torch.no_grad():
        if way == "in place":
            layer.weight.mul_(-1.5)
        elif way == "through .data":
            layer.weight.data[::2] *= -1.5
        elif way == "other memory":
            layer.weight.data = layer.weight.data * -1.5
        else:
            layer.weight = nn.Parameter(layer.weight * -1.5, requires_grad=False)
    expected, got = both(model, prompt(), do_sample=False)
    assert torch.equal(got.sequences, expected.sequences)


@types
def test_a_transposed_weight_is_multiplied_by_torch(dtype, monkeypatch):
    monkeypatch.setattr(product_bits, "FEWEST_WEIGHTS", 1)
    model = nn.Sequential(Conv1D(96, 64)).to(dtype)
    x = torch.randn(4, 64).to(dtype)
    assert torch.equal(run(LinearScope(model), model, x, BitPolicy.BATCH), model(x))
    assert copies_of(model) == 0
    assert {layer.product for layer in state_of(model).linears.values()} <= {"torch"}


@types
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_experts_as_stored_have_the_bits_of_packed_ones(rows, dtype):
    weights, x = torch.randn(3, 48, 1120).to(dtype), torch.randn(2 * rows, 1120).to(dtype)
    chosen, outs = torch.tensor([[2, 0, rows], [0, rows, rows], [0, 0, 0]]), list[torch.Tensor]()
    for packs in (True, False):
        own = experts.weight_of(weights, 512, packs=packs)
        outs.append(x.new_empty(2 * rows, 48))
        run_jobs(experts.products(x, own, None, outs[-1], chosen, 3))
    assert torch.equal(*outs)
    expected = torch.cat([x[:rows].double() @ weights[2].double().T, x[rows:].double() @ weights[0].double().T])
    assert torch.allclose(outs[1].double(), expected, rtol=0.02, atol=0.5 if dtype == torch.bfloat16 else 1e-3)


def test_where_torch_is_faster_than_products_of_weights_as_stored_it_multiplies(tmp_path):
    model, x = nn.Sequential(nn.Linear(512, 512)), torch.randn(4, 512)
    with kept_choice(tmp_path / "slow", "packed", "onednn"):
        scope = LinearScope(model)
        assert not scope.packs and "MiB of" in scope.reason
        assert torch.equal(run(scope, model, x), model(x))
