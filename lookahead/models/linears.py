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

from lookahead.models.exact_attention import MAX_ROWS
from lookahead.models.model_state import state_of

_PACKED_FOR = 16  # rows that oneDNN chooses the layout for; it serves other numbers of rows too
_SHARE_OF_MEMORY = 0.25  # most of the machine's memory that the packed weights of a model may take
_UNPACKED_ROWS = 32  # rows of float32 from which on oneDNN is faster even without packing
_FEWEST_WEIGHTS = 1 << 18  # of a layer; below, the call of oneDNN takes longer than it saves
_TRIED = (2048, 2048)  # inputs and outputs of the measured product: more than a cache holds, as in a model
_TRIALS = 5
_GAIN = 0.95  # most time relative to torch to count as faster

_thread = local()
_guard = Lock()


class PackedLinear:
    """The packed weight of one linear layer. Where its model is copied, the copy begins empty.

    Attributes:
        uses: Open `serving` blocks of the model.
    """

    def __init__(self) -> None:
        self.uses = 0
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

    def weight(self, own: Tensor) -> Tensor | None:
        """The packed form of a layer's weight, made anew where that has changed; None where there is none."""
        if self._own is not own or self._version != own._version:
            self._packed = _pack(own)
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
    is_half = own.dtype != torch.float32
    # A prompt in half precision is read by torch, as `model.generate` reads it. A single row of float32 is too: it
    # waits for the weight, which the BLAS of torch reads faster.
    if mode is None or x.dtype != own.dtype or rows == 0 or (rows > MAX_ROWS and not mode[0] if is_half else rows == 1):
        return linear(x, own, bias)
    _, packs = mode
    if is_half and rows > MAX_ROWS:
        parts = x.reshape(rows, -1).split(MAX_ROWS)
        return torch.cat([_forward(layer, packed, part) for part in parts]).view(*x.shape[:-1], -1)
    weight = packed.weight(own) if packs else None
    if weight is None and (is_half or rows < _UNPACKED_ROWS):
        return linear(x, own, bias)
    return _multiply(x, own if weight is None else weight, bias)


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


@torch.inference_mode()
def _pack(weight: Tensor) -> Tensor | None:
    """A weight as oneDNN lays it out.

    None where that gains nothing, where oneDNN cannot, or where rows of half precision get other bits by it.
    """
    if weight.numel() < _FEWEST_WEIGHTS:
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR)
        if weight.dtype != torch.float32:
            x = torch.randn(MAX_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
            for bias in (None, x[0, :1].expand(len(weight)).contiguous()):
                alone = torch.cat([linear(row, weight, bias) for row in x.split(1)])
                for rows in (1, 2, 5, 8, 16, MAX_ROWS):
                    if not torch.equal(_multiply(x[:rows], packed, bias), alone[:rows]):
                        return None
    except (AttributeError, RuntimeError):
        return None
    return packed


@cache
def is_faster(dtype: torch.dtype, threads: int) -> bool:
    """Whether packed products are right, and faster than torch's on so many threads; measured once."""
    inputs, outputs = _TRIED
    ours, theirs = [], []
    with torch.inference_mode():
        x, own = (torch.linspace(-1, 1, n * inputs).view(n, inputs).sin() for n in (_PACKED_FOR, outputs))
        x, own = x.to(dtype), (own / inputs).to(dtype)
        packed = _pack(own)
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
