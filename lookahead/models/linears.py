"""Linear layers whose weights are packed for the passes of drafting, for one model and within a block.

For a few rows of float32 the BLAS of torch needs up to twice the time that oneDNN needs with a weight that it laid out
once for the CPU at hand. In half precision torch calls oneDNN already, which lays the weight out at every call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from threading import Lock, local
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.functional import linear

from lookahead.models.exact_attention import MAX_ROWS
from lookahead.models.model_state import state_of

_PACKED_FOR = 16  # rows that oneDNN chooses the layout for; it serves other numbers of rows too
_SHARE_OF_MEMORY = 0.25  # most of the machine's memory that the packed weights of a model may take
_UNPACKED_ROWS = 32  # rows of float32 from which on oneDNN is faster even without packing
_FEWEST_WEIGHTS = 1 << 18  # of a layer in float32; below, the call of oneDNN takes longer than it saves
_FEWEST_HALF_WEIGHTS = 1 << 16  # likewise in half precision; below, exact rows are multiplied one by one
_FEWEST_ROWS = 8  # of one product in a larger layer
_COMPARED = 1 << 18  # elements that show whether bits depend on the rows: some CPUs change 3 in 100,000 of them
_CLEAR = 16  # of them that differ for so many rows, before fewer rows without a difference count as right
_OUTPUTS = 4096  # most outputs of a layer that are compared
_ROWS = (1, 2, 3, 5, 8, 11, 16, 17, 24, 31, MAX_ROWS)
_TRIED = (2048, 2048)  # inputs and outputs of the measured product: more than a cache holds, as in a model
_TRIALS = 5
_GAIN = 0.95  # most time relative to torch to count as faster

_thread = local()
_guard = Lock()
_rows_of: dict[Any, Rows] = {}


class Rows(NamedTuple):
    """Most rows of a product of half precision, up to `MAX_ROWS`, that have certain bits.

    Attributes:
        alone: Those that each row has alone in torch's own product.
        together: Those that the same rows have in torch's own product.
    """

    alone: int
    together: int


class PackedLinear:
    """The packed weight of one linear layer. Where its model is copied, the copy begins empty.

    Attributes:
        uses: Open `serving` blocks of the model.
        rows: What the packed weight is right for, in half precision.
    """

    def __init__(self) -> None:
        self.uses = 0
        self.rows = Rows(0, 0)
        self._own: Tensor | None = None
        self._version = 0
        self._digest = 0
        self._packed: Tensor | None = None

    def __reduce__(self) -> Any:
        return PackedLinear, ()

    def check(self) -> None:
        """Forget the packed weight if the layer's own has other bytes: writes through `.data` count no version up."""
        if self._packed is not None and self._own is not None and _digest(self._own) != self._digest:
            self._own = None

    def weight(self, own: Tensor, bias: Tensor | None) -> Tensor | None:
        """The packed form of a layer's weight, made anew where that has changed; None where there is none."""
        if self._own is not own or self._version != own._version:
            self._packed, self.rows = _pack(own, bias)
            self._digest = 0 if self._packed is None else _digest(own)
            self._own, self._version = own, own._version
            _thread.has_packed = True
        return self._packed


class LinearScope:
    """Lets a model's linear layers use packed weights on the threads that run a pass of ours, and on no other.

    Packed weights are made by the first pass that needs them, and kept until the model goes or its weights change.
    Layers that are quantized, sharded, offloaded, adapted or not on the CPU stay as they are.

    Args:
        model: The model.
        packs: Whether weights may be packed. Without, products of many rows in float32 still go to oneDNN.
    """

    def __init__(self, model: nn.Module, *, packs: bool = True) -> None:
        self._layers: list[tuple[nn.Linear, PackedLinear, Callable[[Tensor], Tensor]]] = []
        layers = [each for each in model.modules() if type(each) is nn.Linear and _is_plain(each)]
        if "forward" in model.__dict__ or not layers:
            return
        dtype = layers[0].weight.dtype
        pays = is_faster(dtype, torch.get_num_threads())
        if dtype == torch.float32 and not pays:
            return
        size = sum({id(each.weight): each.weight.nbytes for each in layers}.values())
        self._packs = packs and pays and size <= _SHARE_OF_MEMORY * _memory()
        known = state_of(model).linears
        for layer in layers:
            packed = known.setdefault(layer, PackedLinear())
            packed.check()
            self._layers.append((layer, packed, partial(_forward, layer, packed)))

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Let the layers look for packed weights until the last open block of any thread ends."""
        with _guard:
            for layer, packed, forward in self._layers:
                packed.uses += 1
                layer.__dict__["forward"] = forward
        try:
            yield
        finally:
            with _guard:
                for layer, packed, _ in self._layers:
                    packed.uses -= 1
                    if not packed.uses:
                        layer.__dict__.pop("forward", None)

    @contextmanager
    def running(self, *, is_exact: bool) -> Iterator[None]:
        """Within `serving`, multiply by packed weights on this thread until the block ends.

        Args:
            is_exact: Whether a row of half precision must have the bits that it has alone.
        """
        outer = getattr(_thread, "mode", None)
        _thread.mode = is_exact, bool(self._layers) and self._packs
        try:
            yield
        finally:
            _thread.mode = outer


def _memory() -> int:
    """Bytes of the machine's memory; 0 where the system does not tell, as on Windows."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def take_has_packed() -> bool:
    """Whether this thread packed a weight since it last asked."""
    has_packed: bool = getattr(_thread, "has_packed", False)
    _thread.has_packed = False
    return has_packed


def _forward(layer: nn.Linear, packed: PackedLinear, x: Tensor) -> Tensor:
    """`nn.Linear.forward`, by packed weights on a thread that runs a pass."""
    mode = getattr(_thread, "mode", None)
    own, bias = layer.weight, layer.bias
    rows = x.numel() // x.shape[-1]
    if mode is None or x.dtype != own.dtype or rows == 0:
        return linear(x, own, bias)
    is_exact, packs = mode
    if own.dtype != torch.float32:
        return _half_product(packed, x, own, bias, rows, is_exact=is_exact, packs=packs)
    if rows == 1:  # it waits for the weight, which the BLAS of torch reads faster
        return linear(x, own, bias)
    weight = packed.weight(own, bias) if packs else None
    if weight is None and rows < _UNPACKED_ROWS:
        return linear(x, own, bias)
    return _multiply(x, own if weight is None else weight, bias)


def _half_product(
    packed: PackedLinear, x: Tensor, own: Tensor, bias: Tensor | None, rows: int, *, is_exact: bool, packs: bool
) -> Tensor:
    """A product of half precision, with the bits of every row alone or of torch's own product."""
    if not is_exact and rows > MAX_ROWS:  # a prompt, which `model.generate` reads so
        return linear(x, own, bias)
    is_small = own.numel() < _FEWEST_HALF_WEIGHTS
    weight = packed.weight(own, bias) if packs and not is_small else None
    if not is_exact:
        return linear(x, own, bias) if weight is None or rows > packed.rows.together else _multiply(x, weight, bias)
    most = 0 if weight is None else packed.rows.alone
    if not most:
        weight, most = None, 1 if is_small else max(1, rows_of(own, bias, 0).alone)
    flat = x.reshape(rows, -1)
    parts = (flat,) if rows <= most else flat.split(most)  # a split takes as long as a small product
    products = [linear(part, own, bias) if weight is None else _multiply(part, weight, bias) for part in parts]
    return (torch.cat(products) if len(products) > 1 else products[0]).view(*x.shape[:-1], -1)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product by oneDNN, with a packed weight or another."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _digest(weight: Tensor) -> int:
    """The hash of a contiguous weight's bytes."""
    return int(xxhash.xxh3_64_intdigest(weight.detach().view(torch.uint8).numpy().data))


def _is_plain(layer: nn.Linear) -> bool:
    """Whether a layer is nothing but a product with its weight, on the CPU, and has something to gain."""
    weight, forward = layer.weight, layer.__dict__.get("forward")
    return (
        (forward is None or getattr(forward, "func", None) is _forward)
        and type(weight) is nn.Parameter
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and weight.device.type == "cpu"
        and weight.numel() >= (_FEWEST_WEIGHTS if weight.dtype == torch.float32 else 1)
        and weight.is_contiguous()
        and not weight.is_inference()
    )


def _pack(weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, Rows]:
    """A weight as oneDNN lays it out, and the rows it is right for; None where oneDNN cannot, or bits change."""
    with torch.inference_mode():
        try:
            if weight.dtype == torch.float32:
                return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR), Rows(0, 0)
            packed_for, rows = _layout_of(weight, bias)
            if not all(rows):
                return None, Rows(0, 0)
            packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), packed_for)
            return packed, rows
        except (AttributeError, RuntimeError):
            return None, Rows(0, 0)


def keeps_bits(model: nn.Module) -> bool:
    """Whether rows of the linear layers in half precision can have the bits they have alone, without many products."""
    layers = [each for each in model.modules() if type(each) is nn.Linear and _is_plain(each)]
    try:
        return all(
            each.weight.numel() < _FEWEST_HALF_WEIGHTS
            or rows_of(each.weight, each.bias, 0).alone >= _FEWEST_ROWS
            or _layout_of(each.weight, each.bias)[1].alone >= _FEWEST_ROWS
            for each in layers
        )
    except (AttributeError, RuntimeError):  # torch was built without oneDNN
        return False


def has_bits_of_copies(model: Any, rows: int, copies: int) -> bool:
    """Whether rows in half precision have the bits that they have in a pass over several copies of them.

    Args:
        model: The model; its products must be those of linear layers. Its head is left out.
        rows: Rows of the pass.
        copies: How many copies the larger pass has.
    """
    others = (each for each in model.modules() if type(each) is not nn.Linear and not isinstance(each, nn.Embedding))
    if any(weight.dim() > 1 for each in others for weight in each.parameters(recurse=False)):
        return False
    head, threads = model.get_output_embeddings(), torch.get_num_threads()
    layers = [each for each in model.modules() if type(each) is nn.Linear and each is not head]
    shapes = {(each.weight.dtype, each.weight.shape, each.bias is None) for each in layers}
    return all(_compare_copies(*shape, rows, copies, threads) for shape in shapes)


@lru_cache(maxsize=1024)
def _compare_copies(dtype: torch.dtype, shape: torch.Size, is_bare: bool, rows: int, copies: int, threads: int) -> bool:
    """Compare random rows in a product with a weight of such a shape, and copies of them."""
    source = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, shape[1], generator=source).to(dtype) for n in (shape[0], rows))
    bias = None if is_bare else weight[:, 0].clone()
    with torch.inference_mode():
        return torch.equal(linear(x, weight, bias).repeat(copies, 1), linear(x.repeat(copies, 1), weight, bias))


def _layout_of(weight: Tensor, bias: Tensor | None) -> tuple[int, Rows]:
    """The rows to lay a weight out for, and the rows it is right for then."""
    found = {_PACKED_FOR: rows_of(weight, bias, _PACKED_FOR)}
    if found[_PACKED_FOR] != (MAX_ROWS, MAX_ROWS):  # laid out for one row, long rows may keep their bits
        found[1] = rows_of(weight, bias, 1)
    best = max(found, key=found.__getitem__)
    return best, found[best]


def rows_of(weight: Tensor, bias: Tensor | None, packed_for: int) -> Rows:
    """Most rows whose bits do not change in a product with a weight of this shape; compared once per shape.

    Args:
        weight: `[outputs, inputs]`, half precision.
        bias: `[outputs]` or None.
        packed_for: Rows that oneDNN lays the weight out for; 0 for torch's own product.
    """
    key = weight.dtype, weight.shape, bias is None, packed_for, torch.get_num_threads()
    if key not in _rows_of:
        _rows_of[key] = _compare_rows(weight.detach(), bias, packed_for)
    return _rows_of[key]


@torch.inference_mode()
def _compare_rows(weight: Tensor, bias: Tensor | None, packed_for: int) -> Rows:
    """Compare the bits of random rows, alone and together."""
    own = weight[-(_OUTPUTS + len(weight) % _OUTPUTS) :]
    bias = None if bias is None else bias.detach()[-len(own) :]
    other = torch.ops.mkldnn._reorder_linear_weight(own, packed_for) if packed_for else None
    source = torch.Generator().manual_seed(0)
    wrong = {rows: [0, 0] for rows in _ROWS}
    for _ in range(max(1, _COMPARED // (MAX_ROWS * len(own)))):
        x = torch.randn(MAX_ROWS, own.shape[1], generator=source).to(own.dtype)
        alone = torch.cat([linear(row, own, bias) for row in x.split(1)])
        for rows in _ROWS:
            part = x if rows == 1 else x[:rows]
            together = alone if rows == 1 else linear(part, own, bias)
            if other is None:
                product = together
            else:
                product = torch.cat([_multiply(each, other, bias) for each in part.split(rows)])
            for i, expected in enumerate((alone[: len(part)], together)):
                wrong[rows][i] += int((product != expected).sum())
    return Rows(*(_most_rows([each[i] for each in wrong.values()]) for i in range(2)))


def _most_rows(wrong: list[int]) -> int:
    """The most of `_ROWS` without a wrong element.

    A few wrong ones for more rows say that fewer rows may have been right by chance: then one row is the most.
    """
    first = next((i for i, count in enumerate(wrong) if count), len(_ROWS))
    if first in (0, len(_ROWS)):
        return MAX_ROWS if first else 0
    return _ROWS[first - 1] if wrong[first] >= _CLEAR else 1


@cache
def is_faster(dtype: torch.dtype, threads: int) -> bool:
    """Whether packed products are right, and faster than torch's on so many threads; measured once."""
    inputs, outputs = _TRIED
    ours, theirs = [], []
    with torch.inference_mode():
        x, own = (torch.linspace(-1, 1, n * inputs).view(n, inputs).sin() for n in (_PACKED_FOR, outputs))
        x, own = x.to(dtype), (own / inputs).to(dtype)
        packed, _ = _pack(own, None)
        if packed is None:
            return False
        try:
            product = _multiply(x, packed, None)
        except (AttributeError, RuntimeError):  # torch was built without oneDNN
            return False
        for _ in range(_TRIALS):
            begin = time.perf_counter()
            _multiply(x, packed, None)
            middle = time.perf_counter()
            linear(x, own)
            ours.append(middle - begin)
            theirs.append(time.perf_counter() - middle)
        is_right = torch.allclose(product, linear(x, own), rtol=0.02, atol=1e-3)
    return is_right and min(ours) < _GAIN * min(theirs)
