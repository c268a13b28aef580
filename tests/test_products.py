"""Products with packed weights: right, the same for every row in any company, and with the bits of torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import llvmlite.binding as llvm
import pytest
import torch
from llvmlite import ir
from torch import nn
from torch.nn.functional import linear

from lookahead.backend.cpu import product_bits
from lookahead.backend.cpu.exact_attention import MAX_ROWS
from lookahead.backend.cpu.linears import LinearScope
from lookahead.backend.cpu.product_bits import Kind, Layout, best_layout, takes_any_rows
from lookahead.backend.protocol import BitPolicy
from lookahead.kernels import block_tiles, microkernel, packed_product
from lookahead.kernels.block_formats import FORMATS
from lookahead.kernels.block_tiles import Group
from tests.support.products import cancelling_rows, half_model, kept_choice, run

SIZES = 64  # of which the inputs of a weight in bfloat16 are a multiple, whatever the CPU


def takes(dtype: torch.dtype, inputs: int = SIZES) -> bool:
    return packed_product.is_supported(torch.zeros(2, inputs, dtype=dtype))


needs_halves = pytest.mark.skipif(not takes(torch.bfloat16), reason="no kernel for bfloat16 on this CPU")
own_types = pytest.mark.parametrize("dtype", [each for each in (torch.float32, torch.bfloat16) if takes(each)])
forms = pytest.mark.parametrize("form", [packed_product.pack, packed_product.as_stored])


@own_types
@forms
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 1536), (37, 2050), (1, 2), (33, 514)])
@pytest.mark.parametrize("rows", [1, 3, 7, 8, 31, 32, 75])
def test_products_in_blocks_agree_with_those_in_float64(rows, outputs, inputs, form, dtype):
    inputs = inputs if takes(dtype, inputs) else -(-inputs // SIZES) * SIZES
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, inputs), (outputs, inputs), (outputs,)))
    error = 0.005 if dtype == torch.bfloat16 else 4e-6
    for each in (None, bias):
        got = packed_product.multiply(form(weight, 512), x, each)
        expected = linear(x.double(), weight.double(), None if each is None else each.double())
        assert got.shape == (rows, outputs) and got.dtype == dtype
        assert (got - expected).abs().max() <= error * expected.abs().max()
        alone = [packed_product.multiply(form(weight, 512), row, each) for row in x.split(1)]
        assert torch.equal(got, torch.cat(alone)), "a row's bits do not depend on the others"
        moved = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(rows, inputs)
        assert torch.equal(packed_product.multiply(form(weight, 512), moved, each), got)


def bits(x: torch.Tensor) -> torch.Tensor:
    """What tells -0 from 0 too."""
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@own_types
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 1100), (37, 2050), (1, 2), (48, 64), (30, 130), (32, 3136)])
@pytest.mark.parametrize("rows", [1, 4, 9, 17])
def test_a_weight_as_stored_gives_the_bits_of_a_packed_one_without_a_copy(rows, outputs, inputs, dtype):
    inputs = inputs if takes(dtype, inputs) else -(-inputs // SIZES) * SIZES
    whole, x, bias = (torch.randn(*shape).to(dtype) for shape in ((outputs + 3, inputs), (rows, inputs), (outputs,)))
    weight = whole[3:]  # which does not begin where its memory does
    stored = packed_product.as_stored(weight, 512)
    assert stored.packed.data_ptr() == weight.data_ptr()
    for each in (None, bias):
        expected = packed_product.multiply(packed_product.pack(weight, 512), x, each)
        assert torch.equal(bits(packed_product.multiply(stored, x, each)), bits(expected))
        weight.mul_(-0.5)
        halved = packed_product.multiply(packed_product.pack(weight, 512), x, each)
        assert torch.equal(bits(packed_product.multiply(stored, x, each)), bits(halved)), "a change is seen at once"


@own_types
@forms
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 1100), (37, 2050), (1, 2), (33, 514)])
def test_a_row_has_the_same_bits_among_any_number_of_others(outputs, inputs, form, dtype):
    inputs = inputs if takes(dtype, inputs) else -(-inputs // SIZES) * SIZES
    x, weight = torch.randn(70, inputs).to(dtype), form(torch.randn(outputs, inputs).to(dtype), 512)
    alone = torch.cat([packed_product.multiply(weight, row, None) for row in x.split(1)])
    for rows in (*range(1, 21), 70):
        got = packed_product.multiply(weight, x[-rows:], None)
        assert torch.equal(bits(got), bits(alone[-rows:])), rows


@own_types
@forms
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 3.0e38])
@pytest.mark.parametrize("rows", [2, 7, 20])
def test_a_row_that_is_not_finite_changes_no_other(rows, wrong, form, dtype):
    x, weight = torch.randn(rows, 1536).to(dtype), form(torch.randn(70, 1536).to(dtype), 512)
    before, x[rows // 2] = packed_product.multiply(weight, x, None), wrong
    got, others = packed_product.multiply(weight, x, None), torch.arange(rows) != rows // 2
    assert torch.equal(bits(got[others]), bits(before[others]))
    assert not got[rows // 2].isfinite().any()


@needs_halves
def test_a_sum_of_zero_has_the_sign_of_torch_where_its_order_is_kept():
    x, weight = (torch.full((rows, 1536), 2.0**-100, dtype=torch.bfloat16) for rows in (9, 96))
    x[::2] *= -1
    got = packed_product.multiply(packed_product.pack(weight, 512), x, None)
    expected = torch.cat([linear(row, weight) for row in x.split(1)])
    assert torch.equal(got, expected) and not got.any()
    if product_bits.rows_of(
        Kind.of(weight, None), Layout(block=512)
    ).solo:  # else a pass that keeps bits multiplies otherwise
        assert torch.equal(bits(got), bits(expected))


@own_types
@forms
def test_products_on_several_threads_have_the_same_bits(form, dtype):
    before, (x, weight) = torch.get_num_threads(), (torch.randn(n, 1536).to(dtype) for n in (17, 2000))
    products = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        products += [packed_product.multiply(form(weight, 512), x, None) for _ in range(4)]
    torch.set_num_threads(before)
    assert all(torch.equal(each, products[0]) for each in products)


@needs_halves
def test_long_rows_have_the_bits_of_torch_for_one_row():
    layout, most = best_layout(torch.empty(96, 1536).bfloat16(), None, BitPolicy.SOLO, ("packed",))
    if not most:
        pytest.skip("torch sums one row in an order that is not known")
    x, weight = torch.randn(32, 1536).bfloat16(), torch.randn(96, 1536).bfloat16()
    expected = torch.cat([linear(row, weight) for row in x.split(1)])
    assert torch.equal(bits(product_bits.lay_out(weight, layout, most).product(x, None)), bits(expected))


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


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every product that the kernel of this package was given."""
    rows: list[int] = []
    own = packed_product.multiply
    monkeypatch.setattr(
        packed_product, "multiply", lambda *rest: rows.append(rest[1].numel() // rest[1].shape[-1]) or own(*rest)
    )
    return rows


@pytest.fixture
def packs_by_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Layers of any size are packed, by the kernel of this package."""
    monkeypatch.setattr(product_bits, "FEWEST_WEIGHTS", 1)
    with kept_choice(tmp_path, "packed"):
        yield


@own_types
@pytest.mark.parametrize("shape", [(2, 5, 64), (1, 1, 64), (3, 64)])
def test_rows_of_any_shape_go_to_the_kernel_of_this_package(shape, dtype, taken, packs_by_kernel):
    model, x = nn.Sequential(nn.Linear(64, 70)).to(dtype), torch.randn(shape).to(dtype)
    if dtype == torch.bfloat16 and not best_layout(model[0].weight, model[0].bias, BitPolicy.SOLO, ("packed",))[1]:
        pytest.skip("torch sums rows of this layer in an order that is not known")
    scope = LinearScope(model)
    run(scope, model, x)
    taken.clear()  # what was compared with torch
    got = run(scope, model, x)
    assert taken == [x.numel() // 64] and got.shape == (*shape[:-1], 70)
    assert torch.allclose(got, model(x), atol=0.02 if dtype == torch.bfloat16 else 1e-5)


shapes = pytest.mark.parametrize("shape", [(37, 64), (70, 64), (96, 1536), (300, 576)], ids=str)
"""With AVX512-BF16 torch multiplies rows of the second and the fourth alone, and of the others together."""


def multiplied_alone(model: nn.Module) -> bool:
    """Whether a layout has the bits of torch for any number of rows of a layer."""
    weight, bias = model[0].weight, model[0].bias
    layout, _ = best_layout(weight, bias, BitPolicy.BATCH, ("packed",))
    return layout.block > 0 and takes_any_rows(Kind.of(weight, bias), layout)


@needs_halves
@shapes
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_prompt_goes_to_the_kernel_only_if_all_row_counts_have_torchs_bits(shape, has_bias, taken, packs_by_kernel):
    model, x = half_model(shape, bias=has_bias), cancelling_rows(260, shape[1])
    is_alone, scope = multiplied_alone(model), LinearScope(model)
    # Without these instructions torch multiplies each row alone.
    assert is_alone or any(llvm.get_host_cpu_features().get(name) for name in ("avx512f", "avxneconvert"))
    for rows in (*range(1, 14), 32, 33, 90, 260):
        run(scope, model, x[:rows], BitPolicy.BATCH, is_prompt=True)
        taken.clear()  # what was compared with torch
        assert torch.equal(run(scope, model, x[:rows], BitPolicy.BATCH, is_prompt=True), model(x[:rows]))
        assert taken == [rows] * is_alone


@needs_halves
@shapes
def test_copies_of_rows_are_not_multiplied_where_torch_multiplies_each_row_alone(shape, monkeypatch):
    model, x = half_model(shape), cancelling_rows(77, shape[1])
    model.get_output_embeddings = lambda: None
    is_alone = multiplied_alone(model)
    rows, own = [], product_bits.by_torch
    monkeypatch.setattr(product_bits, "by_torch", lambda x, *rest: rows.append(len(x)) or own(x, *rest))
    product_bits._has_bits_of_copies.cache_clear()
    has_bits = product_bits.has_bits_of_copies(model, 77, 3)
    assert max(rows, default=0) == (0 if is_alone else 3 * 77)
    assert has_bits == torch.equal(model(x).repeat(3, 1), model(x.repeat(3, 1)))


@needs_halves
def test_bits_of_many_rows_that_are_not_those_of_torch_are_found(monkeypatch):
    model = half_model((70, 64), bias=False)
    if not multiplied_alone(model):
        pytest.skip("torch multiplies rows of this layer together on this CPU")
    # The product of another CPU, where rows are multiplied together from more than `MAX_ROWS` on.
    monkeypatch.setattr(product_bits, "linear", lambda x, *rest: linear(x, *rest) * (1.01 if len(x) > MAX_ROWS else 1))
    takes_any_rows.cache_clear()
    try:
        assert not multiplied_alone(model)
    finally:
        takes_any_rows.cache_clear()


@pytest.mark.parametrize("outputs", [16, 32, 48, 100])
@pytest.mark.parametrize("has_bias", [True, False])
def test_rows_that_count_as_those_alone_have_these_bits_whatever_is_multiplied(outputs, has_bias):
    source = torch.Generator().manual_seed(1)
    weight, bias = (
        torch.randn(outputs, 32, generator=source).to(torch.bfloat16),
        torch.randn(outputs, generator=source).to(torch.bfloat16),
    )
    added = bias if has_bias else None
    rows = product_bits.rows_of(Kind.of(weight, added), Layout()).solo
    for _ in range(200):
        x = torch.randn(rows, 32, generator=source).to(torch.bfloat16)
        assert torch.equal(linear(x, weight, added), torch.cat([linear(each, weight, added) for each in x.split(1)]))


def assembly_for_arm(kind: str | Group, rows: int, features: str) -> str:
    """What LLVM makes of a tile for 64-bit ARM, with the steps between lines known and the terms not."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    number, word, whole = ir.FloatType(), ir.IntType(32), ir.IntType(64)
    left, right = {"sums": (number, number), "halves": (number, word)}.get(kind, (word, word))
    module, columns = ir.Module(), 2 * microkernel.LANES
    arguments = *(each.as_pointer() for each in (left, right, number)), whole
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), "product")
    x, weight, out, terms = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    row, line = [whole(each) for each in (0, 576, 1)], [whole(each) for each in (0, columns, 512 * columns, 64)]
    to = out, whole(0), whole(columns)
    if isinstance(kind, Group):
        block_tiles._emit_tile(builder, kind, rows, ((x, *row[:2]), (weight, *line), to), terms)
    else:
        microkernel.emit_tile(builder, kind, (rows, 2), ((x, *row), (weight, *line), to, terms))
    builder.ret_void()
    parsed = llvm.parse_assembly(str(module))
    parsed.triple = "aarch64-unknown-linux-gnu"
    machine = llvm.Target.from_triple(parsed.triple).create_target_machine(opt=3, features=features)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed)


@pytest.mark.parametrize("features", ["", "+sve"])
@pytest.mark.parametrize("kind", ["sums", "halves", FORMATS["int8"].group, FORMATS["Q4_1"].group], ids=str)
def test_tiles_compile_for_arm_to_fused_products_and_no_calls(kind, features, monkeypatch):
    monkeypatch.setattr(microkernel, "FEATURES", {})
    for rows in (1, microkernel.ROWS):
        assembly = assembly_for_arm(kind, rows, features)
        assert "fmla" in assembly and "prfm" in assembly
        assert not re.search(r"^\s+(bl|blr)\s", assembly, re.MULTILINE)
