"""Products of half precision on a CPU, and which of them have the same bits: of a row alone, or of rows together.

A product's bits depend on the order of its sums, and that on the number of rows, on the layout of the weight and on the
CPU. So products of every shape are compared once, with numbers that nearly cancel: any other order shows there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lookahead.kernels import packed_product
from lookahead.models.exact_attention import MAX_ROWS
from lookahead.models.quantized import QuantizedLinear

FEWEST_WEIGHTS = 1 << 16  # of a layer; below, the call of oneDNN takes longer than it saves
_OUTPUTS = 4096  # most outputs of a layer that are compared, but for what is left over
_DIFFERENT = 256  # outputs of the compared weight that differ; the others repeat them
_ROWS = (1, 2, 3, 5, 8, 11, 16, 17, 24, 31, MAX_ROWS)
_CANCELLING = 4  # inputs that take back the sum of the others, each what the last one left
_BLOCKS = (1024, 512, 256, 2048)  # inputs of a block of sums, as CPUs take them for one row

Bits = Literal["alone", "together", "any", "torch"]
"""The bits of a row of half precision: those it has alone in torch's product, those it has there together with the
other rows, any, or "torch": torch's product itself, as for a prompt, for which no weight is packed."""


class Layout(NamedTuple):
    """How a weight is laid out; torch's own product takes it as it is."""

    rows: int = 0  # that oneDNN lays it out for; it serves other numbers of rows too
    block: int = 0  # inputs of a block of sums of `kernels.packed_product`


class Packed(NamedTuple):
    """A weight that is laid out."""

    layout: Layout
    product: Callable[[Tensor, Tensor | None], Tensor]  # of rows `[..., inputs]` and a bias `[outputs]` or None
    most: int = 0  # rows of a product up to which bits are right, in half precision


class Rows(NamedTuple):
    """Most rows of a product of half precision, up to `MAX_ROWS`, that have certain bits."""

    alone: int  # those that each row has alone in torch's own product
    together: int  # those that the same rows have in torch's own product


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product by oneDNN, with a weight that it laid out or another."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def lay_out(weight: Tensor, layout: Layout, most: int = 0) -> Packed:
    """Lay a weight out.

    Raises:
        AttributeError: torch was built without oneDNN.
        RuntimeError: oneDNN does not take the weight.
    """
    if layout.block:
        packed = packed_product.pack(weight)
        return Packed(layout, partial(packed_product.multiply, packed, len(weight), layout.block), most)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), layout.rows)
    return Packed(layout, lambda x, bias: by_onednn(x, packed, bias), most)


def best_layout(weight: Tensor, bias: Tensor | None, bits: Bits, ways: Sequence[str]) -> tuple[Layout, int]:
    """The layout of a weight of half precision that gives the right bits to most rows.

    Args:
        weight: `[outputs, inputs]`.
        bias: `[outputs]` or None.
        bits: Those that rows shall have.
        ways: "own", the kernel of this package, and "onednn": what may multiply. The first serves where both do.

    Returns:
        The layout and the most rows of a product; 0 rows where none is right.
    """
    layouts = {"onednn": [Layout(rows=16), Layout(rows=1)]}  # the second keeps the bits of some long rows
    if packed_product.is_supported(weight):
        layouts["own"] = [Layout(block=block) for block in _BLOCKS]
    best, most = Layout(), 0
    for layout in (layout for way in ways for layout in layouts.get(way, ())):
        rows = rows_of(weight, bias, layout)._asdict()[bits]
        if rows > most:
            best, most = layout, rows
        if most == MAX_ROWS:
            break
    return best, most


def rows_of(weight: Tensor, bias: Tensor | None, layout: Layout) -> Rows:
    """Most rows whose bits do not change in a product with a weight of this shape; compared once per shape.

    Args:
        weight: `[outputs, inputs]`, half precision.
        bias: `[outputs]` or None.
        layout: How the weight is laid out; `Layout()` for torch's own product.
    """
    return _compare_rows(weight.dtype, weight.shape, bias is None, layout, torch.get_num_threads())


@lru_cache(maxsize=1024)
@torch.inference_mode()
def _compare_rows(dtype: torch.dtype, shape: torch.Size, is_bare: bool, layout: Layout, threads: int) -> Rows:
    """Compare the bits of rows that are multiplied alone, together, and with a weight that is laid out."""
    x, weight, bias = _cancelling(dtype, shape, is_bare, MAX_ROWS)
    alone = torch.cat([linear(each, weight, bias) for each in x.split(1)])
    other = None if layout == Layout() else lay_out(weight, layout)
    most = {"alone": 0, "together": 0}
    for rows in _ROWS:
        together = linear(x[:rows], weight, bias)
        product = together if other is None else other.product(x[:rows], bias)
        before = _ROWS[_ROWS.index(rows) - 1] if rows > _ROWS[0] else 0
        for name, expected in (("alone", alone[:rows]), ("together", together)):
            if most[name] == before and torch.equal(product, expected):
                most[name] = rows
    return Rows(**most)


def _cancelling(
    dtype: torch.dtype, shape: torch.Size, is_bare: bool, rows: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows `[rows, inputs]`, a weight and a bias whose sums nearly cancel: the rest shows the order."""
    source = torch.Generator().manual_seed(0)
    outputs, inputs = shape
    outputs = min(outputs, _OUTPUTS + outputs % _OUTPUTS)
    few, row = (torch.randn(n, inputs, generator=source).to(dtype) for n in (min(outputs, _DIFFERENT), 1))
    for place in {inputs // n for n in range(2, 2 + _CANCELLING)}:
        row[0, place], few[:, place] = 1, 0
        few[:, place] = -(few.double() @ row[0].double()).to(dtype)
    weight = few.repeat(-(-outputs // len(few)), 1)[:outputs]
    x = row * (2.0 ** (torch.arange(rows) % 8)).to(dtype)[:, None]
    return x, weight, None if is_bare else linear(row, weight)[0]


def has_other_products(model: nn.Module) -> bool:
    """Whether a model multiplies by weights that are not those of linear layers, as GPT-2 does."""
    known = nn.Embedding, QuantizedLinear
    others = (each for each in model.modules() if type(each) is not nn.Linear and not isinstance(each, known))
    return any(weight.dim() > 1 for each in others for weight in each.parameters(recurse=False))


def has_bits_of_copies(model: Any, rows: int, copies: int) -> bool:
    """Whether rows in half precision have the bits that they have in a pass over several copies of them.

    Args:
        model: The model; its products must be those of linear layers. Its head is left out.
        rows: Rows of the pass.
        copies: How many copies the larger pass has.
    """
    head, threads = model.get_output_embeddings(), torch.get_num_threads()
    layers = [each for each in model.modules() if type(each) is nn.Linear and each is not head]
    shapes = {(each.weight.dtype, each.weight.shape, each.bias is None) for each in layers}
    return not has_other_products(model) and all(_compare_copies(*shape, rows, copies, threads) for shape in shapes)


@lru_cache(maxsize=1024)
@torch.inference_mode()
def _compare_copies(dtype: torch.dtype, shape: torch.Size, is_bare: bool, rows: int, copies: int, threads: int) -> bool:
    """Compare rows in a product with a weight of such a shape, and copies of them."""
    x, weight, bias = _cancelling(dtype, shape, is_bare, rows)
    return torch.equal(linear(x, weight, bias).repeat(copies, 1), linear(x.repeat(copies, 1), weight, bias))


def keeps_bits_beside_others(model: nn.Module) -> bool:
    """Whether rows in half precision have the same bits in a pass over any number of rows, from 2 to `MAX_ROWS`."""
    if has_other_products(model) or any("experts" in name for name, _ in model.named_modules()):
        return False  # an expert multiplies the rows that chose it
    shapes = {
        (each.weight.dtype, each.weight.shape, each.bias is None) for each in model.modules() if type(each) is nn.Linear
    }
    return all(_keeps_bits_beside_others(*shape, torch.get_num_threads()) for shape in shapes)


@lru_cache(maxsize=1024)
@torch.inference_mode()
def _keeps_bits_beside_others(dtype: torch.dtype, shape: torch.Size, is_bare: bool, threads: int) -> bool:
    """Compare rows in products with a weight of such a shape over all numbers of rows."""
    x, weight, bias = _cancelling(dtype, shape, is_bare, MAX_ROWS)
    whole = linear(x, weight, bias)
    return all(
        torch.equal(linear(x[first : first + rows], weight, bias), whole[first : first + rows])
        for rows in _ROWS[1:]
        for first in {0, MAX_ROWS - rows}
    )
