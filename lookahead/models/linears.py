"""Linear layers whose weights are packed for the passes of drafting, for one model and within a block.

For a few rows of float32 the BLAS of torch needs up to twice the time that oneDNN needs with a weight that it laid out
once for the CPU at hand. In half precision torch calls oneDNN already, which lays the weight out at every call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from threading import Lock, local
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.functional import linear

from lookahead.models import product_bits
from lookahead.models.exact_attention import MAX_ROWS
from lookahead.models.model_state import state_of
from lookahead.models.product_bits import Layout, Packed, best_layout, by_onednn, lay_out, rows_of

_PACKED_FOR = Layout(rows=16)  # of float32
_SHARE_OF_MEMORY = 0.25  # most of the machine's memory that the packed weights of a model may take
_UNPACKED_ROWS = 32  # rows of float32 from which on oneDNN is faster even without packing
_FEWEST_WEIGHTS = 1 << 18  # of a layer in float32; below, the call of oneDNN takes longer than it saves
_TRIED = (2048, 2048)  # inputs and outputs of the measured product: more than a cache holds, as in a model
_TRIALS = 5
_GAIN = 0.95  # most time relative to torch to count as faster

_thread = local()
_guard = Lock()


class PackedLinear:
    """The packed weights of one linear layer. Where its model is copied, the copy begins empty.

    Attributes:
        uses: Open `serving` blocks of the model.
    """

    def __init__(self) -> None:
        self.uses = 0
        self._own: Tensor | None = None
        self._version = 0
        self._digest = 0
        self._packed: dict[bool, Packed | None] = {}  # by whether rows have the bits they have alone

    def __reduce__(self) -> Any:
        return PackedLinear, ()

    def check(self) -> None:
        """Forget packed weights if the layer's own has other bytes: writes through `.data` count no version up."""
        if self._own is not None and any(self._packed.values()) and _digest(self._own) != self._digest:
            self._own = None

    def weight(self, own: Tensor, bias: Tensor | None, *, is_exact: bool = False) -> Packed | None:
        """A packed form of a layer's weight, made anew where that has changed; None where there is none.

        Args:
            own: The layer's weight.
            bias: The layer's bias.
            is_exact: Whether a row of half precision must have the bits that it has alone.
        """
        if self._own is not own or self._version != own._version:
            self._packed.clear()
            self._own, self._version = own, own._version
        if is_exact not in self._packed:
            packed, other = _pack(own, bias, is_exact=is_exact), self._packed.get(not is_exact)
            if packed is not None and other is not None and packed.layout == other.layout:
                packed = other._replace(most=packed.most)
            if packed is not None and not any(self._packed.values()):
                self._digest = _digest(own)
            self._packed[is_exact] = packed
            _thread.has_packed = True
        return self._packed[is_exact]


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
    found = packed.weight(own, bias) if packs else None
    if found is None:
        return linear(x, own, bias) if rows < _UNPACKED_ROWS else by_onednn(x, own, bias)
    return found.product(x, bias)


def _half_product(
    packed: PackedLinear, x: Tensor, own: Tensor, bias: Tensor | None, rows: int, *, is_exact: bool, packs: bool
) -> Tensor:
    """A product of half precision, with the bits of every row alone or of torch's own product."""
    if not is_exact and rows > MAX_ROWS:  # a prompt, which `model.generate` reads so
        return linear(x, own, bias)
    packs = packs and own.numel() >= product_bits.FEWEST_WEIGHTS
    found = packed.weight(own, bias, is_exact=is_exact) if packs else None
    if not is_exact:
        return linear(x, own, bias) if found is None or rows > found.most else found.product(x, bias)
    most = max(1, rows_of(own, bias, Layout()).alone) if found is None else found.most
    flat = x.reshape(rows, -1)
    parts = (flat,) if rows <= most else flat.split(most)  # a split takes as long as a small product
    products = [linear(part, own, bias) if found is None else found.product(part, bias) for part in parts]
    return (torch.cat(products) if len(products) > 1 else products[0]).view(*x.shape[:-1], -1)


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


def _pack(weight: Tensor, bias: Tensor | None, *, is_exact: bool) -> Packed | None:
    """A packed weight; None where oneDNN cannot, or bits change."""
    with torch.inference_mode():
        try:
            if weight.dtype == torch.float32:
                return lay_out(weight, _PACKED_FOR)
            layout, most = best_layout(weight, bias, is_alone=is_exact)
            return lay_out(weight, layout, most) if most else None
        except (AttributeError, RuntimeError):
            return None


def keeps_bits(model: nn.Module) -> bool:
    """Whether rows of the linear layers in half precision can have the bits they have alone, without many products."""
    return product_bits.keeps_bits(each for each in model.modules() if type(each) is nn.Linear and _is_plain(each))


@cache
def is_faster(dtype: torch.dtype, threads: int) -> bool:
    """Whether packed products are right, and faster than torch's on so many threads; measured once."""
    inputs, outputs = _TRIED
    ours, theirs = [], []
    with torch.inference_mode():
        x, own = (torch.linspace(-1, 1, n * inputs).view(n, inputs).sin() for n in (_PACKED_FOR.rows, outputs))
        x, own = x.to(dtype), (own / inputs).to(dtype)
        packed = _pack(own, None, is_exact=False)
        if packed is None:
            return False
        try:
            product = packed.product(x, None)
        except (AttributeError, RuntimeError):  # torch was built without oneDNN
            return False
        for _ in range(_TRIALS):
            begin = time.perf_counter()
            packed.product(x, None)
            middle = time.perf_counter()
            linear(x, own)
            ours.append(middle - begin)
            theirs.append(time.perf_counter() - middle)
        is_right = torch.allclose(product, linear(x, own), rtol=0.02, atol=1e-3)
    return is_right and min(ours) < _GAIN * min(theirs)
