"""Linear layers with packed weights: right products, nowhere else than in our passes, and gone with the model."""

from __future__ import annotations

import copy
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.cpu import cpu_pass, linears, product_bits, product_choice
from lookahead.backend.cpu.linears import LinearScope, keeps_bits
from lookahead.backend.cpu.product_bits import Kind, Layout, Packed, Rows, best_layout, by_torch, rows_of
from lookahead.backend.protocol import BitPolicy
from lookahead.backend.self_check import keeps_solo_bits
from lookahead.model.model_state import patched_attribute
from tests.support.products import cancelling_rows, half_model, kept_choice, multiplying, run

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")

SHAPES = [(16, 16), (19, 24), (32, 32), (64, 48), (70, 64), (300, 576), (96, 1536)]
"""Layers whose products in bfloat16 have different orders. With AVX512-BF16 torch gives 16, 8, 3, 1, 32, 32 and 1 of
their rows the bits of single ones, no layout has the bits of the first four, and the last needs a layout per policy."""


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every product that oneDNN was given."""
    rows: list[int] = []
    own = torch.ops.mkldnn._linear_pointwise

    def recorded(x: Any, *arguments: Any) -> Any:
        rows.append(x.numel() // x.shape[-1])
        return own(x, *arguments)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", recorded)
    return rows


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Layout]]:
    """The id of every weight that is packed, and its layout."""
    packed: list[tuple[int, Layout]] = []
    own = linears.lay_out

    def recorded(weight: torch.Tensor, layout: Layout, most: int) -> Packed:
        packed.append((id(weight), layout))
        return own(weight, layout, most)

    monkeypatch.setattr(linears, "lay_out", recorded)
    return packed


@pytest.fixture
def rows_of_torch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every product of torch's own."""
    rows: list[int] = []
    monkeypatch.setattr(
        linears, "by_torch", lambda x, *rest: rows.append(x.numel() // x.shape[-1]) or by_torch(x, *rest)
    )
    return rows


@pytest.fixture(autouse=True)
def packs_small_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Layers of any size are packed, by oneDNN."""
    monkeypatch.setattr(product_bits, "FEWEST_WEIGHTS", 1)
    with kept_choice(tmp_path / "cache", "onednn"):
        yield


@pytest.fixture
def packs_by_both(packs_small_layers: None, tmp_path: Path) -> Iterator[None]:
    """They are packed by the kernel of this package, or by oneDNN where that alone has the right bits."""
    with kept_choice(tmp_path / "other cache", "packed", "onednn"):
        yield


def model_of(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 19, **options))


@pytest.mark.parametrize("kind", ["bare", "bias", "transposed"])
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("shape", [(2,), (16,), (1, 7), (3, 37), (2, 5, 9)])
def test_products_agree_with_those_in_float64_whatever_their_shape(shape, packs, kind, multiplied):
    x = torch.randn(*shape, 24)
    model = nn.Sequential(Conv1D(19, 24)) if kind == "transposed" else model_of(bias=kind == "bias")
    _ = [nn.init.normal_(each) for each in model.parameters()]
    got = run(LinearScope(model, packs=packs), model, x)
    assert got.dtype == torch.float32 and got.shape == (*shape, 19)
    assert (got - copy.deepcopy(model).double()(x.double())).abs().max() < 3e-5
    assert len(multiplied) == (packs or x.numel() // 24 >= 32)


@pytest.mark.parametrize("backends", [(), ("onednn",), ("packed", "onednn")], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_half_precision_have_the_bits_that_the_policy_of_the_pass_names(shape, has_bias, backends, tmp_path):
    torch.manual_seed(0)
    model, x = half_model(shape, bias=has_bias), cancelling_rows(75, shape[1])
    alone = torch.cat([model(row) for row in x.split(1)])
    with kept_choice(tmp_path, *backends):
        scope = LinearScope(model)
        for rows in (1, 2, 5, 20, 32, 75):
            part, together = x[None, :rows], model(x[None, :rows])
            assert torch.equal(run(scope, model, part, BitPolicy.SOLO)[0], alone[:rows])
            assert torch.equal(run(scope, model, part, BitPolicy.BATCH), together)
            assert torch.equal(run(scope, model, part, BitPolicy.BATCH, is_prompt=True), together)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_multiplies_as_many_rows_as_keep_their_bits_and_a_prompt_at_once(shape, rows_of_torch):
    model, x = half_model(shape), cancelling_rows(75, shape[1])
    most = max(1, rows_of(Kind.of(model[0].weight, model[0].bias), Layout()).solo)
    run(LinearScope(model, packs=False), model, x[None], BitPolicy.SOLO)
    assert rows_of_torch == [most] * (75 // most) + [75 % most] * bool(75 % most)
    rows_of_torch.clear()
    run(LinearScope(model, packs=False), model, x[None], BitPolicy.BATCH, is_prompt=True)
    assert rows_of_torch == [75]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_is_packed_once_in_each_layout_that_keeps_the_bits_of_a_policy(shape, laid_out, packs_by_both):
    model, x = half_model(shape), cancelling_rows(20, shape[1])
    best = [
        best_layout(model[0].weight, model[0].bias, policy, ("packed", "onednn"))
        for policy in (BitPolicy.SOLO, BitPolicy.BATCH)
    ]
    for policy in (BitPolicy.SOLO, BitPolicy.ROUNDED):
        run(LinearScope(model), model, x, policy)
    assert len(laid_out) <= 1, "where no bits are named, what is packed for others serves"
    for policy in (*BitPolicy, *BitPolicy):
        run(LinearScope(model), model, x, policy)
    assert sorted(layout for _, layout in laid_out) == sorted({layout for layout, most in best if most})


def test_one_prompt_is_checked_read_and_decoded_with_one_packed_copy_of_a_weight(
    tiny_llama, laid_out, packs_by_both, monkeypatch
):
    monkeypatch.setattr(product_bits, "FEWEST_WEIGHTS", 1 << 16)
    # The bits of a row alone and of rows together need two layouts of a weight with so many inputs.
    config = LlamaConfig(**{**tiny_llama.config.to_dict(), "intermediate_size": 2048})
    model = LlamaForCausalLM(config).bfloat16().eval()
    ids = torch.tensor([[5, 9, 31, 77, 5, 9]])
    model.generate(ids, max_new_tokens=12, do_sample=False, custom_generate=lookahead.decode)
    packed = [weight for weight, _ in laid_out]
    assert len(packed) == len(set(packed)) > 0


def test_a_single_row_of_float32_has_the_bits_of_the_model(multiplied):
    model, x = model_of(), torch.randn(1, 1, 24)
    assert torch.equal(run(LinearScope(model), model, x), model(x))
    assert not multiplied


def test_without_packing_only_many_rows_go_to_onednn(multiplied):
    model = model_of()
    for rows in (2, 31, 32, 80):
        run(LinearScope(model, packs=False), model, torch.randn(rows, 24))
    assert multiplied == [32, 80]


@pytest.mark.parametrize("is_told", [False, True])
def test_weights_that_take_too_much_of_a_memory_or_an_unknown_one_are_not_packed(is_told, multiplied, monkeypatch):
    if is_told:
        monkeypatch.setattr(linears, "_SHARE_OF_MEMORY", 1e-12)
    else:  # as on Windows
        monkeypatch.delattr(os, "sysconf")
    model = model_of()
    run(LinearScope(model), model, torch.randn(5, 24))
    assert not multiplied


class Other(torch.Tensor):
    """A tensor with behaviour of its own, as quantized weights have."""


@pytest.mark.parametrize("kind", ["float64", "subclass", "quantized layer", "own forward", "inference tensor"])
def test_layers_that_are_more_than_a_product_stay_as_they_are(kind, multiplied):
    model: Any = model_of()
    layer, x = model[0], torch.randn(5, 24)
    if kind == "float64":
        model, x = model.double(), x.double()
    elif kind == "subclass":
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Other))
    elif kind == "quantized layer":
        layer.__class__ = type("Quantized", (nn.Linear,), {})
    elif kind == "own forward":
        layer.forward = lambda x: linear(x, layer.weight)
    else:
        with torch.inference_mode():
            layer.weight = nn.Parameter(torch.randn(19, 24), requires_grad=False)
    before = dict(layer.__dict__)
    run(LinearScope(model), model, x)
    assert not multiplied and dict(layer.__dict__) == before


def test_a_weight_that_changes_is_packed_anew():
    model, x = model_of(), torch.randn(5, 24)
    scope = LinearScope(model)
    run(scope, model, x)
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    assert torch.allclose(run(scope, model, x), model(x), atol=1e-5)
    model[0].weight = nn.Parameter(torch.randn(19, 24))
    assert torch.allclose(run(scope, model, x), model(x), atol=1e-5)


def test_a_weight_is_packed_once_for_all_calls(laid_out):
    model, cold = model_of(), []
    for _ in range(3):
        run(LinearScope(model), model, torch.randn(5, 24))
        cold.append(cpu_pass.thread.is_cold)
    assert cold == [True, False, False] and len(laid_out) == 1


def test_other_threads_and_calls_outside_use_the_models_own_products(multiplied):
    model, x = model_of(), torch.randn(5, 24)
    with torch.inference_mode(), multiplying(LinearScope(model)):
        outputs: list[torch.Tensor] = []
        other = threading.Thread(target=lambda: outputs.append(model(x)))
        other.start()
        other.join()
        assert len(outputs) == 1 and not multiplied
        model(x)
        assert multiplied == [5]
    model(x)
    assert multiplied == [5] and "forward" not in model[0].__dict__


@pytest.mark.parametrize("way", ["copied", "pickled"])
def test_a_copy_made_while_a_model_is_in_service_has_its_own_weights(way):
    model, x = model_of(), torch.randn(5, 24)
    scope = LinearScope(model)
    with patched_attribute("forward", scope.forwards()):
        run(scope, model, x)
        if way == "copied":
            twin = copy.deepcopy(model)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.zero_()
    assert not twin(x).any() and model(x).any()
    assert not run(LinearScope(twin), twin, x).any()


@pytest.fixture
def forgets_products(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What was compared before is forgotten, and what a test compares too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    product_bits.rows_of.cache_clear()
    product_bits._own_products.cache_clear()
    yield
    product_bits.rows_of.cache_clear()
    product_bits._own_products.cache_clear()


def in_blocks(x: Any, weight: Any, bias: Any = None, block: int = 16) -> Any:
    """A product whose sums of blocks of inputs are added."""
    parts = zip(x.float().split(block, 1), weight.float().split(block, 1), strict=True)
    total = sum(part @ other.t() for part, other in parts)
    return (total if bias is None else total + bias).to(x.dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("most", [1, 16, 32])
def test_bits_that_change_with_the_rows_are_found(most, has_bias, forgets_products, monkeypatch):
    def by_rows(x: Any, *rest: Any) -> Any:
        # Products of torch for several rows at once would differ from those of one by themselves.
        return torch.cat([in_blocks(row, *rest, block=16 if len(x) <= most else 32) for row in x.split(1)])

    # The product of another CPU: on none do rows of one shape change their bits at each of these numbers.
    monkeypatch.setattr(product_bits, "linear", by_rows)
    weight = torch.randn(512, 512).bfloat16()
    got = product_bits.rows_of(Kind.of(weight, weight[:, 0] if has_bias else None), Layout())
    assert got == Rows(most, 32), "a row has its own bits, and rows together theirs"


def test_a_model_whose_rows_change_their_bits_is_said_to_round(tiny_llama, monkeypatch):
    model = copy.deepcopy(tiny_llama).bfloat16()
    head = model.lm_head.weight
    kept = best_layout(head, None, BitPolicy.SOLO, ("packed", "onednn"))[1], rows_of(Kind.of(head, None), Layout()).solo
    if max(kept) >= 8:
        pytest.skip("rows of a layer so small keep their bits on this CPU")
    monkeypatch.setattr(product_bits, "FEWEST_WEIGHTS", 1 << 16)
    assert keeps_bits(model), "its rows are multiplied one by one"
    monkeypatch.setattr(product_bits, "FEWEST_WEIGHTS", 1)
    assert not keeps_bits(model) and not keeps_solo_bits(model)


@pytest.mark.parametrize("name", ["_linear_pointwise", "_reorder_linear_weight"])
def test_where_torch_was_built_without_it_torch_multiplies(name, monkeypatch):
    def missing(*arguments: Any) -> Any:  # as in another build of torch
        raise AttributeError(f"'_OpNamespace' 'mkldnn' object has no attribute '{name}'")

    monkeypatch.setattr(product_choice, "_TRIED", (64, 64))
    monkeypatch.setattr(torch.ops.mkldnn, name, missing)
    assert "onednn" not in product_choice.measure(torch.float32)


def test_a_model_decodes_by_packed_weights_to_the_tokens_of_generate(tiny_llama, multiplied):
    model = copy.deepcopy(tiny_llama)
    torch.manual_seed(1)
    ids = torch.randint(5, 90, (3, 45))
    ids[0, :20] = 0
    options = {"attention_mask": (ids != 0).long(), "max_new_tokens": 24, "do_sample": False}
    expected = model.generate(ids, **options)
    assert not multiplied
    config = LookaheadConfig(draft="fixed")
    got = model.generate(ids, **options, custom_generate=lookahead.decode, lookahead_config=config)
    assert torch.equal(got, expected)
    assert any(rows < 32 for rows in multiplied)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_activations_and_a_bias_that_are_not_contiguous_are_read_as_they_stand(packs_by_both):
    model, x = model_of(), torch.randn(24, 3, 40).transpose(0, 2)
    model[0].bias = nn.Parameter(torch.randn(19, 3)[:, 1])
    assert torch.allclose(run(LinearScope(model), model, x), model(x.contiguous()), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_copies_know_their_bytes_and_a_shared_one_counts_once(shape, dtype, laid_out):
    layer, packed = nn.Linear(*shape[::-1], dtype=dtype), linears.PackedLinear()
    assert packed.nbytes == 0
    for policy in BitPolicy:
        packed.weight(layer, policy)
        assert packed.nbytes == len(laid_out) * layer.weight.nbytes


def test_copies_for_the_kernel_of_this_package_count_with_their_padding(packs_by_both):
    layer, packed = nn.Linear(24, 19), linears.PackedLinear()
    assert (packed.weight(layer) or Packed(Layout(), by_torch)).own is not None
    assert 19 * 24 * 4 < packed.nbytes < 64 * 24 * 4
