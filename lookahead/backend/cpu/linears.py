"""Linear layers with weights packed for drafted passes, for one model within a block.

A pass over few rows is bound by reading the weights, which torch's products read at half the memory bandwidth or less.
A weight that is laid out once for the CPU is read faster: by a kernel of this package, or by oneDNN.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Conv1D

from lookahead.backend.cpu import product_bits
from lookahead.backend.cpu.cpu_pass import CpuPass, thread
from lookahead.backend.cpu.exact_attention import MAX_ROWS
from lookahead.backend.cpu.product_bits import (
    Kind,
    Layout,
    Packed,
    best_layout,
    by_torch,
    lay_out,
    matrix_of,
    rows_of,
    takes_any_rows,
)
from lookahead.backend.cpu.product_choice import LAYOUTS, measured_backends
from lookahead.backend.protocol import BitPolicy
from lookahead.kernels.packed_product import PackedWeight
from lookahead.loading.quantized import QuantizedLinear
from lookahead.model.known_code import multiplies_as_shipped
from lookahead.model.model_state import state_of
from lookahead.utils.machine import memory_bytes

_SHARE_OF_MEMORY = 0.25  # limit of a model's packed weights, as a share of the machine's memory
_UNPACKED_ROWS = 32  # float32 rows from which oneDNN is faster than torch's BLAS even without packing
_MAX_PACKED_ROWS = 128  # float32 rows that are multiplied by packed weights; no weight is packed for more
_MANY_ROWS = (64,)
_FEWEST_ROWS = 8  # of one product in a larger layer
_WHOLE_LAYERS = 1.15  # time relative to torch up to which our kernel does one row, or weights as stored: it saves calls


class PackedLinear:
    """The packed weights of one linear layer. A copy of the model starts without them.

    Attributes:
        copies: Whether weights are packed; else our kernel multiplies by the model's own memory.
        found: By pass, threads and rows, the weight with its version and what `_find` found for them.
    """

    def __init__(self) -> None:
        self.copies = True
        self._own: Tensor | None = None
        self._version = 0
        self._digest: int | None = None  # of the weight, by the model's stamp
        self._packed: dict[BitPolicy, Packed | None] = {}
        self.found: dict[tuple[CpuPass, int, int], tuple[Tensor, int, Packed | None]] = {}

    def __reduce__(self) -> Any:
        return PackedLinear, ()

    @property
    def nbytes(self) -> int:
        """Bytes of the packed copies. oneDNN does not report a size; its copy counts as much as the weight."""
        values = [value for value in self._packed.values() if value is not None and not value.layout.is_stored]
        copies = {id(value.product): value.own for value in values}
        weight = 0 if self._own is None else self._own.nbytes
        return sum(weight if own is None else own.packed.nbytes for own in copies.values())

    @property
    def product(self) -> str:
        """The product in use: "kernel" or "onednn" for packed weights, "stored" without a copy, or "torch"."""
        packed = next((value for value in self._packed.values() if value is not None), None)
        if packed is None or packed.own is None:
            return "torch" if packed is None else "onednn"
        return "stored" if packed.layout.is_stored else "kernel"

    def check(self, digest: int | None, *, copies: bool) -> None:
        """Drop packed weights if the weight has another digest: writes through `.data` do not increment its version."""
        self.found.clear()  # torch's settings may have changed too
        if digest != self._digest or copies != self.copies:
            self._own, self._digest, self.copies = None, digest, copies

    def weight(self, layer: nn.Linear | Conv1D, policy: BitPolicy = BitPolicy.ROUNDED) -> Packed | None:
        """A packed weight with the bits of `policy`, repacked if the weight has changed; None if torch is used."""
        own = layer._parameters["weight"]
        assert own is not None
        if own.is_inference():  # inference tensors have no version, and may change unnoticed
            return None
        if self._own is not own or self._version != own._version:
            self._packed.clear()
            self._own, self._version = own, own._version
        if policy not in self._packed:
            others = [value for value in self._packed.values() if value is not None]
            self._packed[policy] = _pack(matrix_of(layer), layer.bias, policy, others, copies=self.copies)
            thread.is_cold = True
        return self._packed[policy]


class PackedLookup(NamedTuple):
    """The packed weights of some layers, keyed by weights and versions, and the numbers of rows they accept."""

    owns: list[Tensor]
    versions: list[int]
    dtype: torch.dtype
    weights: Sequence[PackedWeight]
    rows: range


class LinearScope:
    """Lets a model's linear layers use packed weights, only on threads that run one of our passes.

    The first pass that needs a packed weight makes it; it is kept until the model goes or the weight changes. Layers
    that are quantized, sharded, offloaded, adapted or not on the CPU stay as they are. If packed copies would take too
    much memory, our kernel multiplies by the weights as stored. If weights must not be packed, float32 products of many
    rows still use oneDNN.

    Attributes:
        packs: Whether weights may be packed, or multiplied as stored.
        copies: Whether there is room for packed copies.
        packs_experts: Whether those of mixtures may be, too.
        fewest: float32 rows from which packed weights are faster.
        reason: Why no weight is packed; empty if weights are packed.
    """

    def __init__(self, model: nn.Module, *, packs: bool = True) -> None:
        self.packs, self.fewest, self.reason, self._layers = False, 1, "", frozenset[Any]()
        self.packs_experts = self.copies = False
        self._forwards: list[tuple[nn.Module, None, Callable[[Tensor], Tensor]]] = []
        all_layers = product_bits.linear_layers(model)
        layers = [layer for layer in all_layers if _is_plain(layer)]
        self.counts = len(layers), len(all_layers)
        if "forward" in model.__dict__ or not layers or not multiplies_as_shipped():
            self.reason = "torch's products, or calls of the model, are changed" if layers else "no layer is plain"
            return
        dtype, memory = layers[0].weight.dtype, memory_bytes()
        size = sum({id(layer.weight): layer.weight.nbytes for layer in layers}.values())
        self.copies = size <= _SHARE_OF_MEMORY * memory
        backends = _backends(dtype, copies=self.copies)
        if not measured_backends(dtype):
            self.reason = f"no product of {dtype} is faster than torch's"
            if dtype == torch.float32:
                return
        if not packs:
            self.reason = "an option turns it off"
        elif not self.copies:
            self.reason = f"they would take {size >> 20} MiB of {memory >> 20}"
        self.packs = packs and bool(backends)
        mixtures = sum(weight.nbytes for weight in model.parameters() if weight.dim() == 3)
        self.packs_experts = self.packs and size + mixtures <= _SHARE_OF_MEMORY * memory
        own = "packed" if self.copies else "stored"
        if dtype == torch.float32:
            is_fast = backends[:1] == (own,) and own in measured_backends(dtype, (1,), _WHOLE_LAYERS)
            self.fewest = 1 if is_fast else 2
        linears, plan = state_of(model).linears, state_of(model).plan
        for layer in layers:
            packed = linears.setdefault(layer, PackedLinear())
            packed.check(None if plan is None else plan.stamp.contents.get(id(layer.weight)), copies=self.copies)
            self._forwards.append((layer, None, partial(_forward, layer, packed)))
        self._layers = frozenset(layers if own in backends else ())

    def may_pack(self, layer: Any) -> bool:
        """Whether a layer is quantized, or its weight may be packed for the kernel of this package."""
        if isinstance(layer, QuantizedLinear):
            return True
        return self.packs and layer.weight.numel() >= product_bits.FEWEST_WEIGHTS and layer in self._layers

    def forwards(self) -> list[tuple[nn.Module, None, Callable[[Tensor], Tensor]]]:
        """The layers and the replacements of their `forward`, for `patched_attribute`."""
        return self._forwards if multiplies_as_shipped() else []


def packed_weights(layers: Sequence[Any], x: Tensor, cache: dict[Any, PackedLookup]) -> Sequence[PackedWeight]:
    """The weights by which our kernel multiplies rows in the running pass; empty unless it handles all layers.

    Results are kept in `cache` until a weight changes.
    """
    mode, rows = thread.running, x.numel() // x.shape[-1]
    if mode is None:
        return ()
    owns = [layer._parameters["weight"] for layer in layers]
    versions = [0 if own.is_inference() else own._version for own in owns]
    entry = cache.get(mode)
    if entry is None or entry.dtype != x.dtype or entry.versions != versions or any(map(is_not, entry.owns, owns)):
        entry = cache[mode] = PackedLookup(owns, versions, x.dtype, *_find_all(layers, x.dtype, mode))
    return entry.weights if rows in entry.rows else ()


def _find_all(layers: Sequence[Any], dtype: torch.dtype, mode: CpuPass) -> tuple[Sequence[PackedWeight], range]:
    """The packed weights of some layers, and the numbers of rows they accept; empty if the layers must multiply."""
    weights, fewest, most = list[PackedWeight](), mode.fewest if dtype == torch.float32 else 1, sys.maxsize
    if all(isinstance(layer, QuantizedLinear) and layer.multiplies(dtype) for layer in layers):
        return [layer.packed() for layer in layers], range(1, sys.maxsize)
    for layer in layers:
        forward: Any = layer.__dict__.get("forward")
        is_packed = getattr(forward, "func", None) is _forward and layer._parameters["weight"].dtype == dtype
        packed = _find(layer, forward.args[1], fewest, mode) if is_packed else None
        if packed is None or packed.own is None:
            return (), range(0)
        weights.append(packed.own)
        most = min(most, packed.most)
    # Products with equally many inputs may run together, in blocks of one size.
    if len({(weight.terms, weight.block) for weight in weights}) > len({weight.terms for weight in weights}):
        return (), range(0)
    return weights, range(fewest, most + 1)


def _forward(layer: nn.Linear | Conv1D, packed: PackedLinear, x: Tensor) -> Tensor:
    """The forward of a linear layer, by packed weights on a thread that runs a pass."""
    mode, rows = thread.running, x.numel() // x.shape[-1]
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    assert weight is not None
    own = weight if type(layer) is nn.Linear else weight.T
    if mode is None or x.dtype != own.dtype or rows == 0:
        return by_torch(x, own, bias)
    is_last = rows == mode.last_rows
    mode = mode._replace(last_rows=0) if mode.last_rows else mode
    # What `_find` asks about the number of rows.
    alike = 0 if mode.is_prompt else min(rows, _MAX_PACKED_ROWS + 1)
    if own.dtype == torch.float32:
        alike = mode.fewest <= rows <= _MAX_PACKED_ROWS
    key, version = (mode, torch.get_num_threads(), alike), -1
    if not weight.is_inference():
        version = weight._version
    entry = packed.found.get(key)
    if entry is None or version < 0 or entry[0] is not weight or entry[1] != version:
        entry = packed.found[key] = weight, version, _find(layer, packed, rows, mode)
    packed_weight = entry[2]
    if packed_weight is not None and rows <= packed_weight.most:
        return packed_weight.product(x, bias)
    if own.dtype == torch.float32:
        return by_torch(x, own, bias) if rows < _UNPACKED_ROWS else product_bits.by_onednn(x, own, bias)
    if not is_last and (mode.policy is not BitPolicy.SOLO or mode.is_prompt):
        return by_torch(x, own, bias)
    # Splitting takes as long as a small product.
    most = max(1, rows_of(Kind.of(own, bias), Layout()).solo) if packed_weight is None else packed_weight.most
    parts = [x] if rows <= most else x.reshape(rows, -1).split(most)
    outs = [by_torch(part, own, bias) if packed_weight is None else packed_weight.product(part, bias) for part in parts]
    return outs[0] if rows <= most else torch.cat(outs).view(*x.shape[:-1], -1)


def _find(layer: nn.Linear | Conv1D, packed: PackedLinear, rows: int, mode: CpuPass) -> Packed | None:
    """The packed weight for `rows` rows, or for fewer at a time; None if torch multiplies."""
    weight, policy = layer._parameters["weight"], mode.policy
    assert weight is not None
    if weight.dtype == torch.float32:  # for fewer rows torch reads the weight faster
        return packed.weight(layer) if mode.packs and mode.fewest <= rows <= _MAX_PACKED_ROWS else None
    if not mode.packs or weight.numel() < product_bits.FEWEST_WEIGHTS:
        return None
    if mode.is_prompt or (policy is not BitPolicy.SOLO and rows > MAX_ROWS):
        own = matrix_of(layer)
        layout, _ = best_layout(own, layer.bias, BitPolicy.BATCH, ("packed",))
        return packed.weight(layer, BitPolicy.BATCH) if _is_for_prompts(own, layer.bias, layout) else None
    if policy is not BitPolicy.ROUNDED:
        return packed.weight(layer, policy)
    solo = packed.weight(layer, BitPolicy.SOLO)
    return packed.weight(layer, BitPolicy.BATCH) if solo is None or rows > solo.most else solo


def _is_for_prompts(weight: Tensor, bias: Tensor | None, layout: Layout) -> bool:
    """Whether our kernel multiplies any number of half-precision rows with torch's bits, and faster."""
    return (
        layout.block > 0
        and takes_any_rows(Kind.of(weight, bias), layout)
        and "packed" in measured_backends(weight.dtype, _MANY_ROWS)
    )


def _is_plain(layer: nn.Linear | Conv1D) -> bool:
    """Whether a layer only multiplies by its weight, on the CPU, and can gain from packing."""
    weight, bias, forward = layer.weight, layer.bias, layer.__dict__.get("forward")
    return (
        (forward is None or getattr(forward, "func", None) is _forward)
        and type(weight) is nn.Parameter
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and weight.device.type == "cpu"
        and weight.numel() >= (product_bits.FEWEST_WEIGHTS if weight.dtype == torch.float32 else 1)
        and weight.is_contiguous()
        and (bias is None or (bias.dtype == weight.dtype and bias.is_contiguous()))
        and not weight.is_inference()
        and (type(layer) is nn.Linear or min(weight.shape) > 1)  # a single row does not show transposition
    )


def _backends(dtype: torch.dtype, *, copies: bool) -> tuple[str, ...]:
    """The backends that are faster than torch, best first: those with packed copies of weights, or the one without."""
    if copies:
        return tuple(name for name in measured_backends(dtype) if name != "stored")
    return ("stored",) if "stored" in measured_backends(dtype, gain=_WHOLE_LAYERS) else ()


def _pack(
    weight: Tensor, bias: Tensor | None, policy: BitPolicy, others: Sequence[Packed], *, copies: bool
) -> Packed | None:
    """A packed weight; None if nothing is faster or bits change. An equal layout in `others` is reused.

    Without copies it is the weight as stored, whose products have the bits of a packed one.
    """
    backends = _backends(weight.dtype, copies=copies)
    if not (copies or (backends and weight.is_contiguous())):
        return None
    with torch.inference_mode():
        try:
            if weight.dtype == torch.float32:
                return lay_out(weight, LAYOUTS[backends[0]], _MAX_PACKED_ROWS)
            layout, most = best_layout(weight, bias, policy, backends if copies else ("packed",))
            if not most:
                return None
            if _is_for_prompts(weight, bias, layout):
                most = sys.maxsize
            layout = layout._replace(is_stored=not copies)
            for other in others:
                if other.layout == layout:
                    return other._replace(most=most)
            return lay_out(weight, layout, most)
        except (AttributeError, RuntimeError):
            return None


def keeps_bits(model: nn.Module, apart: Collection[nn.Module] = ()) -> bool:
    """Whether half-precision rows keep the bits they have alone in the layers for text, without many small products.

    The layers in `apart` do not count.
    """
    with suppress(AttributeError, RuntimeError):  # torch was built without oneDNN
        layers = product_bits.linear_layers_of_text(model)
        return all(_keeps_bits_of_rows(layer) for layer in layers if layer not in apart)
    return False


def keeps_bits_packed(model: Any) -> bool:
    """Whether half-precision rows of packed prompts have the bits of each prompt alone in the layers for text."""
    head = model.get_output_embeddings()
    return type(head) is nn.Linear and _is_plain(head) and all(map(product_bits.keeps_many_rows, _kinds_of_text(model)))


def keeps_bits_of_long_texts(model: Any) -> bool:
    """Whether half-precision rows of prompts of thousands of tokens have the bits that they have in shorter ones."""
    return all(map(product_bits.keeps_thousands_of_rows, _kinds_of_text(model)))


def _kinds_of_text(model: Any) -> set[Kind]:
    """The kinds of products of every token of a prompt."""
    head = model.get_output_embeddings()
    layers = product_bits.linear_layers_of_text(model)
    return {Kind.of(matrix_of(layer), layer.bias) for layer in layers if layer is not head}


def _keeps_bits_of_rows(layer: nn.Linear | Conv1D) -> bool:
    weight = matrix_of(layer)
    alone = rows_of(Kind.of(weight, layer.bias), Layout()).solo
    if not _is_plain(layer):  # it multiplies all rows of a pass at once
        return alone == MAX_ROWS
    if weight.numel() < product_bits.FEWEST_WEIGHTS or alone >= _FEWEST_ROWS:
        return True
    return best_layout(weight, layer.bias, BitPolicy.SOLO, ("packed", "onednn"))[1] >= _FEWEST_ROWS
