"""Products with packed weights: right, the same for every row in any company, and with the bits of torch."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from lookahead.backend.cpu import linears, product_bits
from lookahead.backend.cpu.linears import LinearScope
from lookahead.backend.cpu.product_bits import Kind, Layout
from lookahead.kernels import packed_product

SIZES = 64  # of which the inputs of a weight in bfloat16 are a multiple, whatever the CPU


def takes(dtype: torch.dtype, inputs: int = SIZES) -> bool:
    return packed_product.is_supported(torch.zeros(2, inputs, dtype=dtype))


needs_halves = pytest.mark.skipif(not takes(torch.bfloat16), reason="no kernel for bfloat16 on this CPU")
own_types = pytest.mark.parametrize("dtype", [each for each in (torch.float32, torch.bfloat16) if takes(each)])


@own_types
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 1536), (37, 2050), (1, 2), (33, 514)])
@pytest.mark.parametrize("rows", [1, 3, 7, 8, 31, 32, 75])
def test_products_in_blocks_agree_with_those_in_float64(rows, outputs, inputs, dtype):
    inputs = inputs if takes(dtype, inputs) else -(-inputs // SIZES) * SIZES
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, inputs), (outputs, inputs), (outputs,)))
    error = 0.005 if dtype == torch.bfloat16 else 4e-6
    for each in (None, bias):
        got = packed_product.multiply(packed_product.pack(weight, 512), x, each)
        expected = linear(x.double(), weight.double(), None if each is None else each.double())
        assert got.shape == (rows, outputs) and got.dtype == dtype
        assert (got - expected).abs().max() <= error * expected.abs().max()
        alone = [packed_product.multiply(packed_product.pack(weight, 512), row, each) for row in x.split(1)]
        assert torch.equal(got, torch.cat(alone)), "a row's bits do not depend on the others"
        moved = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(rows, inputs)
        assert torch.equal(packed_product.multiply(packed_product.pack(weight, 512), moved, each), got)


@own_types
def test_products_on_several_threads_have_the_same_bits(dtype):
    before, (x, weight) = torch.get_num_threads(), (torch.randn(n, 1536).to(dtype) for n in (17, 2000))
    products = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        products += [packed_product.multiply(packed_product.pack(weight, 512), x, None) for _ in range(4)]
    torch.set_num_threads(before)
    assert all(torch.equal(each, products[0]) for each in products)


@needs_halves
def test_long_rows_have_the_bits_of_torch_for_one_row():
    layout, most = product_bits.best_layout(torch.empty(96, 1536).bfloat16(), None, "alone", ("packed",))
    if not most:
        pytest.skip("torch sums one row in an order that is not known")
    x, weight = torch.randn(32, 1536).bfloat16(), torch.randn(96, 1536).bfloat16()
    expected = torch.cat([linear(row, weight) for row in x.split(1)])
    assert torch.equal(product_bits.lay_out(weight, layout, most).product(x, None), expected)


@own_types
def test_rounded_sums_are_those_of_torch(dtype):
    inputs = torch.tensor([1.0, -1.0, 2.0**-120, 3.0e38, torch.inf, -torch.inf, torch.nan, 0.0])
    weight = torch.cat([torch.eye(8), torch.tensor([[1 / 256, 0, 0, 0, 0, 0, 0, 1]]), torch.full((1, 8), 3.0)])
    x, weight = torch.diag(inputs).nan_to_num(0.0, torch.inf, -torch.inf).to(dtype), weight.to(dtype)
    x[6, 6] = torch.nan
    x, weight = (nn.functional.pad(each, (0, SIZES - 8)) for each in (x, weight))
    got = packed_product.multiply(packed_product.pack(weight, 512), x, None)
    expected = (x.double() @ weight.double().t()).to(dtype)
    assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.nan_to_num(5.0), expected.nan_to_num(5.0))


@own_types
@pytest.mark.parametrize("shape", [(2, 5, 64), (1, 1, 64), (3, 64)])
def test_rows_of_any_shape_go_to_the_kernel_of_this_package(shape, dtype, monkeypatch):
    monkeypatch.setattr(product_bits, "FEWEST_WEIGHTS", 1)
    model, x = nn.Sequential(nn.Linear(64, 70)).to(dtype), torch.randn(shape).to(dtype)
    taken: list[int] = []
    own = packed_product.multiply
    monkeypatch.setattr(packed_product, "multiply", lambda *rest: taken.append(rest[1].numel() // 64) or own(*rest))
    monkeypatch.setattr(linears, "measured_backends", lambda *kind: ("packed",))
    monkeypatch.setattr(linears, "best_layout", lambda *layer: (Layout(block=512), 32))
    scope = LinearScope(model)
    with torch.inference_mode(), scope.serving(), scope.running("any"):
        got = model(x)
    assert taken[-1] == x.numel() // 64 and got.shape == (*shape[:-1], 70)
    assert torch.allclose(got, model(x), atol=0.02 if dtype == torch.bfloat16 else 1e-5)


@needs_halves
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(37, 64), (96, 1536), (300, 576)])
def test_where_torch_multiplies_each_row_alone_any_number_of_rows_has_its_bits(outputs, inputs, has_bias):
    weight, x = torch.randn(outputs, inputs).bfloat16(), torch.randn(260, inputs).bfloat16()
    bias = torch.randn(outputs).bfloat16() if has_bias else None
    layout, _ = product_bits.best_layout(weight, bias, "together", ("packed",))
    if any(llvm.get_host_cpu_features().get(name) for name in ("avx512f", "avxneconvert")):
        pytest.skip("torch multiplies rows together on this CPU")
    assert product_bits.takes_any_rows(Kind.of(weight, bias), layout)
    product = product_bits.lay_out(weight, layout).product
    for rows in (*range(1, 14), 32, 33, 260):
        assert torch.equal(product(x[:rows], bias), linear(x[:rows], weight, bias))


@needs_halves
def test_a_prompt_goes_to_the_kernel_only_if_any_number_of_rows_has_the_bits_of_torch(monkeypatch):
    monkeypatch.setattr(product_bits, "FEWEST_WEIGHTS", 1)
    monkeypatch.setattr(linears, "measured_backends", lambda *kind: ("packed",))
    taken: list[int] = []
    own = packed_product.multiply
    monkeypatch.setattr(packed_product, "multiply", lambda *rest: taken.append(len(rest[1])) or own(*rest))
    for is_any in (True, False):
        monkeypatch.setattr(linears, "takes_any_rows", lambda *layer, is_any=is_any: is_any)
        monkeypatch.setattr(linears, "best_layout", lambda *layer: (Layout(block=512), 32))
        model, x = nn.Sequential(nn.Linear(64, 70)).bfloat16(), torch.randn(90, 64).bfloat16()
        scope = LinearScope(model)
        with torch.inference_mode(), scope.serving(), scope.running("torch"):
            taken.clear()
            assert torch.allclose(model(x), linear(x, model[0].weight, model[0].bias), atol=0.02)
        assert taken == [90] * is_any


def test_copies_of_rows_are_not_multiplied_where_torch_multiplies_each_row_alone(monkeypatch):
    model = nn.Sequential(nn.Linear(64, 70)).bfloat16()
    model.get_output_embeddings = lambda: None
    monkeypatch.setattr(product_bits, "best_layout", lambda *layer: (Layout(block=512), 32))
    rows, own = [], product_bits.by_torch
    monkeypatch.setattr(product_bits, "by_torch", lambda x, *rest: rows.append(len(x)) or own(x, *rest))
    for is_any, most in ((True, 0), (False, 3 * 77)):
        monkeypatch.setattr(product_bits, "takes_any_rows", lambda *layer, is_any=is_any: is_any)
        product_bits._has_bits_of_copies.cache_clear()
        assert product_bits.has_bits_of_copies(model, 77, 3) or not is_any
        assert max(rows, default=0) == most
    product_bits._has_bits_of_copies.cache_clear()


@needs_halves
def test_bits_of_many_rows_that_are_not_those_of_torch_are_found(monkeypatch):
    weight = torch.randn(64, 64).bfloat16()
    product_bits.takes_any_rows.cache_clear()
    monkeypatch.setattr(product_bits, "rows_of", lambda *layer: product_bits.Rows(32, 32))
    monkeypatch.setattr(product_bits, "linear", lambda *operands: linear(*operands) * 1.01)
    try:
        assert not product_bits.takes_any_rows(Kind.of(weight, None), Layout(block=512))
    finally:
        product_bits.takes_any_rows.cache_clear()


@pytest.mark.parametrize("outputs", [16, 32, 48, 100])
@pytest.mark.parametrize("has_bias", [True, False])
def test_rows_that_count_as_those_alone_have_these_bits_whatever_is_multiplied(outputs, has_bias):
    source = torch.Generator().manual_seed(1)
    weight, bias = (
        torch.randn(outputs, 32, generator=source).to(torch.bfloat16),
        torch.randn(outputs, generator=source).to(torch.bfloat16),
    )
    added = bias if has_bias else None
    rows = product_bits.rows_of(Kind.of(weight, added), Layout()).alone
    for _ in range(200):
        x = torch.randn(rows, 32, generator=source).to(torch.bfloat16)
        assert torch.equal(linear(x, weight, added), torch.cat([linear(each, weight, added) for each in x.split(1)]))
