"""Half-precision products on a CPU, and which have the same bits: of a row alone, or of rows together.

A product's bits depend on the order of its sums, which depends on the number of rows, the layout of the weight and the
CPU. So products of every shape are compared once per machine, with numbers that nearly cancel, which reveals any other
order. The sign of zero is ignored: later sums and scores have the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import Conv1D

from lookahead.backend.cpu.exact_attention import MAX_ROWS
from lookahead.backend.protocol import BitPolicy
from lookahead.kernels import packed_product
from lookahead.kernels.packed_product import PackedWeight
from lookahead.loading.quantized import QuantizedEmbedding, QuantizedLinear
from lookahead.model.facts import modules_of_text
from lookahead.model.foreign_layers import foreign_layers
from lookahead.model.known_code import arithmetic_flags, multiplies_as_shipped
from lookahead.utils.kept_values import Parse, kept, kept_file, truth
from lookahead.utils.machine import machine_fingerprint

T = TypeVar("T")
ROWS = (1, 2, 3, 5, 8, 11, 16, 17, 24, 31, MAX_ROWS)  # of products that are compared with products of one row
FEWEST_WEIGHTS = 1 << 16  # of a layer; below it, a call of oneDNN takes longer than it saves
_OUTPUTS = 4096  # most compared outputs of a layer, plus the remainder
_MANY_ROWS = 100  # of a prompt, compared if torch seems to multiply each row alone
_PACKED_ROWS = 2, 3, 8, 17, 33, 64, 100, 190, 300, 516, 1024  # of products that are compared for prompts in one pass
_LONG_ROWS = 1024, 2500, 6000  # of products that are compared for long prompts
_DIFFERENT = 256  # distinct outputs of the compared weight; the others repeat them
_CANCELLING = 4  # inputs that cancel the remaining sum, one after the other
_SCALES = 8  # different rows of a compared product; the others repeat them
_OCTAVES = 3  # range of compared numbers in powers of two either way, so that sums of a few round too
_BLOCKS = (1024, 512, 256, 2048)  # inputs of a block of sums, as CPUs choose them for one row


class Layout(NamedTuple):
    """The layout of a weight; the default is the weight as it is, for torch's own product."""

    rows: int = 0  # rows for which oneDNN lays it out; it accepts other numbers of rows too
    block: int = 0  # inputs of a block of sums of `kernels.packed_product`
    is_stored: bool = False  # for that kernel, the model's own memory instead of a copy


class Packed(NamedTuple):
    """A packed weight, or one as stored."""

    layout: Layout
    product: Callable[[Tensor, Tensor | None], Tensor]  # of rows `[..., inputs]` and a bias `[outputs]` or None
    most: int = 0  # rows of a product; in half precision the limit up to which bits are right
    own: PackedWeight | None = None  # for the kernel of this package


class Kind(NamedTuple):
    """The key of the bits of a layer's products."""

    dtype: torch.dtype
    shape: torch.Size  # outputs and inputs
    has_bias: bool
    is_transposed: bool
    threads: int
    flags: tuple[Any, ...] = ()  # torch's arithmetic settings

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Kind:
        """The kind of the products with a weight, plus a bias."""
        threads, flags = torch.get_num_threads(), arithmetic_flags()
        return cls(weight.dtype, weight.shape, bias is not None, not weight.is_contiguous(), threads, flags)


class Rows(NamedTuple):
    """Most rows of a half-precision product, up to `MAX_ROWS`, that have certain bits."""

    solo: int  # the bits of each row alone in torch's own product
    batch: int  # the bits of the same rows together in torch's own product

    def keeping(self, policy: BitPolicy) -> int:
        """Most rows with the bits of a policy other than `ROUNDED`."""
        return self.solo if policy is BitPolicy.SOLO else self.batch


def linear_layers(model: nn.Module) -> list[nn.Linear | Conv1D]:
    """The linear layers of a model, without subclasses."""
    return [module for module in model.modules() if type(module) is nn.Linear or type(module) is Conv1D]


def linear_layers_of_text(model: nn.Module) -> list[nn.Linear | Conv1D]:
    """The linear layers that a pass over text calls."""
    called = set(modules_of_text(model))
    return [layer for layer in linear_layers(model) if layer in called]


def matrix_of(layer: nn.Linear | Conv1D) -> Tensor:
    """The weight of a layer, `[outputs, inputs]`; `Conv1D`, the linear layer of GPT-2, stores it transposed."""
    weight: Any = layer._parameters.get("weight")
    weight = layer.weight if weight is None else weight  # pruning computes it from another parameter
    return weight if type(layer) is nn.Linear else weight.T  # type: ignore[no-any-return]


def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of a layer's own forward, given its `matrix_of`; a `Conv1D` always has a bias."""
    if weight.is_contiguous() or bias is None:
        return linear(x, weight, bias)
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.T).view(*x.shape[:-1], len(weight))


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product by oneDNN, with a packed or plain weight."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def lay_out(weight: Tensor, layout: Layout, most: int = 0) -> Packed:
    """Prepare a weight; AttributeError if torch was built without oneDNN, RuntimeError if oneDNN rejects it."""
    weight = weight.contiguous()
    if layout.block:
        own = (packed_product.as_stored if layout.is_stored else packed_product.pack)(weight, layout.block)
        return Packed(layout, partial(packed_product.multiply, own), most, own)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), layout.rows)
    return Packed(layout, lambda x, bias: by_onednn(x, packed, bias), most)


def best_layout(weight: Tensor, bias: Tensor | None, policy: BitPolicy, backends: Sequence[str]) -> tuple[Layout, int]:
    """The layout of a half-precision weight that gives the right bits to most rows, and that number of rows, or 0.

    The backends are "packed", our kernel, and "onednn"; earlier ones are preferred.
    """
    layouts = {"onednn": [Layout(rows=16), Layout(rows=1)]}  # the second keeps the bits of some long rows
    if packed_product.is_supported(weight):
        layouts["packed"] = [Layout(block=block) for block in _BLOCKS]
    best, most = Layout(), 0
    for layout in (layout for backend in backends for layout in layouts.get(backend, ())):
        rows = rows_of(Kind.of(weight, bias), layout).keeping(policy)
        if rows > most:
            best, most = layout, rows
        if most == MAX_ROWS:
            break
    return best, most


def _once(parse: Parse[T]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Save the findings of a function about the products of a kind for later processes, unless weights are small."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        @lru_cache(maxsize=1024)
        @wraps(function)
        def find(kind: Kind, *case: Any) -> T:
            make = torch.inference_mode()(partial(function, kind, *case))
            if kind.shape.numel() < FEWEST_WEIGHTS or not multiplies_as_shipped():
                return make()
            file = kept_file("products", f"{machine_fingerprint()}-bits")
            return kept(file, f"{function.__name__}{(kind, *case)}", parse, make)

        return find

    return decorate


def _rows_from(value: Any) -> Rows:
    solo, batch = value
    if not all(type(number) is int and 0 <= number <= MAX_ROWS for number in (solo, batch)):
        raise ValueError(f"rows must be two numbers up to {MAX_ROWS}, got {value}")
    return Rows(solo, batch)


@_once(truth)
def takes_any_rows(kind: Kind, layout: Layout) -> bool:
    """Whether a layout has torch's bits for any number of rows, because torch multiplies each row alone."""
    if not MAX_ROWS == rows_of(kind, Layout()).solo == rows_of(kind, layout).solo:
        return False
    x, weight, bias = _cancelling(kind, _MANY_ROWS)
    return torch.equal(lay_out(weight, layout).product(x, bias), by_torch(x, weight, bias))


@_once(truth)
def keeps_many_rows(kind: Kind) -> bool:
    """Whether rows of torch's products have the same bits in products of any number of rows, at least two."""
    x, weight, bias = _cancelling(kind, _PACKED_ROWS[-1])
    whole = by_torch(x, weight, bias)
    return all(torch.equal(by_torch(x[-rows:], weight, bias), whole[-rows:]) for rows in _PACKED_ROWS)


@_once(truth)
def keeps_thousands_of_rows(kind: Kind) -> bool:
    """Whether rows of torch's products have the bits of shorter products in those of thousands of rows."""
    x, weight, bias = _cancelling(kind, _LONG_ROWS[-1])
    some, *others = (by_torch(x[:rows], weight, bias)[: _LONG_ROWS[0]] for rows in _LONG_ROWS)
    return all(torch.equal(some, other) for other in others)


@_once(_rows_from)
def rows_of(kind: Kind, layout: Layout) -> Rows:
    """Most rows whose bits stay the same in products with this kind of weight in a layout."""
    trials = range(max(1, _DIFFERENT // kind.shape[0]))  # few outputs seldom show another order
    limits = [_rows_of(kind, layout, trial) for trial in trials]
    return Rows(min(limit.solo for limit in limits), min(limit.batch for limit in limits))


def _rows_of(kind: Kind, layout: Layout, trial: int) -> Rows:
    alone, together = _own_products(kind, trial)
    products: Iterable[Tensor] = together
    if layout != Layout():
        x, weight, bias = _cancelling(kind, MAX_ROWS, trial)
        other = lay_out(weight, layout)
        products = (other.product(x[:rows], bias) for rows in ROWS)
    most = {"solo": 0, "batch": 0}
    for before, rows, own, product in zip((0, *ROWS), ROWS, together, products, strict=False):
        for name, expected in (("solo", alone[:rows]), ("batch", own)):
            if most[name] == before and torch.equal(product, expected):
                most[name] = rows
        if rows not in most.values():
            break
    return Rows(**most)


@lru_cache(maxsize=1)  # the layouts of a kind are compared one after the other
def _own_products(kind: Kind, trial: int) -> tuple[Tensor, list[Tensor]]:
    """Torch's products of `_cancelling` rows: of each row alone, and of the first rows together by `ROWS`."""
    x, weight, bias = _cancelling(kind, MAX_ROWS, trial)
    alone = torch.cat([by_torch(part, weight, bias) for part in x[:_SCALES].split(1)])
    return alone.repeat(MAX_ROWS // _SCALES, 1), [by_torch(x[:rows], weight, bias) for rows in ROWS]


def _cancelling(kind: Kind, rows: int, trial: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows `[rows, inputs]`, a weight and a bias whose sums nearly cancel: the remainder shows the order.

    A bias is one of the numbers of a sum, so rows are not scaled if there is one. Every trial of a weight with few
    outputs has others.
    """
    dtype, (outputs, inputs), has_bias, is_transposed, *_ = kind
    outputs = min(outputs, _OUTPUTS + outputs % _OUTPUTS)
    row, few, added = _drawn(dtype, inputs, has_bias)
    few, added = (part[trial * outputs :][:outputs] for part in (few, added))
    copies = -(-outputs // len(few))
    weight, bias = few.repeat(copies, 1)[:outputs], added.repeat(copies)[:outputs] if has_bias else None
    scales = 2.0 ** (torch.arange(rows, device="cpu") % _SCALES) if not has_bias else torch.ones(rows, device="cpu")
    x = row * scales.to(dtype)[:, None]
    return x, weight.T.contiguous().T if is_transposed else weight, bias


@lru_cache(maxsize=2)  # kinds of products have few numbers of inputs
def _drawn(dtype: torch.dtype, inputs: int, has_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A row `[1, inputs]`, and `_DIFFERENT` outputs of a weight and a bias with which its sums nearly cancel."""
    source = torch.Generator().manual_seed(0)
    few, row = (
        torch.randn(n, inputs, generator=source, dtype=torch.float32, device="cpu")
        * 2.0 ** torch.randint(-_OCTAVES, _OCTAVES + 1, (n, inputs), generator=source, device="cpu")
        for n in (_DIFFERENT, 1)
    )
    few, row = few.to(dtype).double(), row.to(dtype).double()
    added = torch.randn(_DIFFERENT, generator=source, dtype=torch.float32, device="cpu").to(dtype) * has_bias
    for place in {inputs // n for n in range(2, 2 + _CANCELLING)}:
        row[0, place], few[:, place] = 1, 0
        few[:, place] = -(few @ row[0] + added.double()).to(dtype).double()
    return row.to(dtype), few.to(dtype), added


def has_other_products(model: nn.Module, apart: Iterable[nn.Module] = ()) -> bool:
    """Whether passes over text multiply by weights outside of linear layers, such as experts in one tensor.

    The modules in `apart`, and their submodules, do not count.
    """
    kinds = nn.Embedding, QuantizedEmbedding, QuantizedLinear
    ours = {*linear_layers(model), *(part for module in apart for part in module.modules())}
    others = (module for module in modules_of_text(model) if module not in ours and not isinstance(module, kinds))
    return any(weight.dim() > 1 for module in others for weight in module.parameters(recurse=False))


def has_bits_of_copies(model: Any, rows: int, copies: int) -> bool:
    """Whether half-precision rows have the bits that they have in a pass over copies of them, except in the head."""
    head = model.get_output_embeddings()
    if has_other_products(model) or foreign_layers(model):
        return False
    kinds = {Kind.of(matrix_of(layer), layer.bias) for layer in linear_layers_of_text(model) if layer is not head}
    return all(_has_bits_of_copies(kind, rows, copies) for kind in kinds)


@_once(truth)
def _has_bits_of_copies(kind: Kind, rows: int, copies: int) -> bool:
    _, weight, bias = _cancelling(kind, 1)
    layout, most = best_layout(weight, bias, BitPolicy.SOLO, ("packed",))
    if most == MAX_ROWS and takes_any_rows(kind, layout):
        return True  # torch multiplies rows alone; comparing would take seconds
    x, weight, bias = _cancelling(kind, rows)
    return torch.equal(by_torch(x, weight, bias).repeat(copies, 1), by_torch(x.repeat(copies, 1), weight, bias))
