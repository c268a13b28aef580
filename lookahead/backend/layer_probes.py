"""Probes of third-party layers, run alone: does a row's output depend on other rows, and does it keep its bits?

Drafts may share a pass with a text only if it does not. Layers with one scale per row of activations meet this, layers
with one per tensor do not, and no name distinguishes them. In float32 a layer that rounds its inputs turns the last
bits, which attention over several tokens changes, into whole steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lookahead.backend.cpu.exact_attention import MAX_ROWS
from lookahead.backend.cpu.product_bits import ROWS
from lookahead.backend.probes import PROBES, TOLERANCE, own_logits
from lookahead.errors import is_out_of_memory, named
from lookahead.loading.quantized import QuantizedLinear
from lookahead.model.facts import decoder_vocabulary, input_device
from lookahead.model.foreign_layers import arithmetic_of, foreign_layers, weight_kinds

_QUIET, _LOUD = 2.0**-7, 1000.0  # factors of the compared row, and of the rows next to it
_MIXING = 1e-5  # change of its output, relative to the norm, beyond the noise of a random order of sums
_SUMS_FP32, _SUMS_HALF = 1e-3, 0.02  # change, relative to the norm, beyond the noise of another order of sums
_NEAR = 1e-3  # distance of the compared inputs, relative to their norm
_STEPS = 2e-4  # distance of their outputs from a line, relative to the norm; rounding to bfloat16 gives 2e-3
_MANY_ROWS = 100  # of a tried product
_ROWS = (*ROWS, 48, 64, _MANY_ROWS)  # of products whose bits are compared; a layer gets all rows of a pass
_OUTPUTS = 256  # numbers of a row that are enough to show another order of sums


_SCALES = "scale activations by all tokens of a pass, so drafts would change them"
_DIFFERS = "compute several tokens differently from one"
_ROUNDS = "round their inputs, which enlarges other rounding; load it with dtype='bf16'"
_BITS = "round several tokens differently from one"


class _NoRows(Exception):
    """A layer cannot be called alone, or has no output for every row. Passes of the whole model judge it instead."""


class _LayerCall(NamedTuple):
    """A call of a layer with rows, `[..., width]`, and all layers of its kind."""

    layer: Any
    rows: Tensor
    alike: list[nn.Module]

    def output(self, rows: Tensor) -> Tensor:
        """The output, `[rows, outputs]`, for rows `[rows, width]`; raises _NoRows if it has another shape."""
        shape = (*(1 for _ in self.rows.shape[:-2]), *rows.shape)
        try:
            out = self.layer.forward(rows.view(shape))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise _NoRows from error
        if not isinstance(out, Tensor) or out.shape[:-1] != shape[:-1]:
            raise _NoRows
        return out.reshape(len(rows), -1)

    def like(self, count: int, seed: int = 0) -> Tensor:
        """Random rows, `[count, width]`, scaled as the call's rows."""
        source = torch.Generator().manual_seed(seed)
        numbers = torch.randn(count, self.rows.shape[-1], generator=source, dtype=torch.float32, device="cpu")
        return numbers.to(self.rows) * self.rows.std().clamp_min(_NEAR)


@torch.inference_mode()
def unfit_reason(model: PreTrainedModel, module: nn.Module) -> str:
    """Why third-party layers in a model rule out drafts, or an empty string.

    Args:
        model: The model.
        module: The model, or its decoder: an encoder reads its text in one pass with and without drafts.

    Raises:
        RuntimeError: Out of memory.
    """
    is_single = model.dtype == torch.float32
    own = [part for part in module.modules() if isinstance(part, QuantizedLinear)] if is_single else []
    if not (layers := [*foreign_layers(module), *own]):
        return ""
    try:
        calls = _calls_in_pass(model, layers)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"its layers do not run in torch.inference_mode, as passes over drafts do ({named(error)})"
    keeps_bits = model.dtype in TOLERANCE and input_device(model).type == "cpu"
    faults = defaultdict[str, set[str]](set)
    for call in calls:
        with suppress(_NoRows):
            if fault := _fault_of(call, is_single=is_single, keeps_bits=keeps_bits):
                kinds = ", ".join(sorted({kind.__name__ for kind in weight_kinds(call.layer)} - {"Parameter"}))
                faults[fault].add(type(call.layer).__name__ + (f" ({kinds})" if kinds else ""))
    first = next((fault for fault in (_SCALES, _DIFFERS, _ROUNDS, _BITS) if fault in faults), None)
    return "" if first is None else f"its {' and '.join(sorted(faults[first]))} layers {first}"


@torch.inference_mode()
def layers_with_solo_bits(model: PreTrainedModel) -> set[nn.Module] | None:
    """The third-party layers whose rows keep the bits that they have alone in products of many rows.

    None if one layer does not keep them. Layers that are not called for text, or cannot be tried, are left out.
    """
    layers, kept = foreign_layers(model), set[nn.Module]()
    for call in _calls_in_pass(model, layers) if layers else ():
        with suppress(_NoRows):
            if not _keeps_bits(call):
                return None
            kept.update(call.alike)
    return kept


def _calls_in_pass(model: PreTrainedModel, layers: Sequence[nn.Module]) -> list[_LayerCall]:
    """A call for every kind of layer with a single tensor as its argument, recorded in a pass of the model."""
    calls = dict[Any, _LayerCall]()

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)]
        if len(tensors) == 1 and args and args[0].dim() > 1 and args[0].is_floating_point():
            kind = arithmetic_of(layer), args[0].shape, args[0].dtype
            calls.setdefault(kind, _LayerCall(layer, args[0], [])).alike.append(layer)

    tokens = [token * decoder_vocabulary(model) // 9 for token in PROBES[0]]
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(record, with_kwargs=True).remove)
        own_logits(model, [tokens], tokens)
    return list(calls.values())


def _fault_of(call: _LayerCall, *, is_single: bool, keeps_bits: bool) -> str:
    """What of a layer changes a row beside others, or an empty string."""
    quiet = call.like(len(PROBES[0]))
    quiet[0] *= _QUIET
    loud = quiet.clone()
    loud[1:] *= _LOUD
    # All products have the same number of rows, so bits are equal unless a kernel adds in a random order.
    first, again, other = (call.output(rows)[0].float() for rows in (quiet, quiet, loud))
    if (other - first).norm() > 4 * (again - first).norm() + _MIXING * first.norm():
        return _SCALES
    rows = call.like(_MANY_ROWS)
    most, alone = _SUMS_FP32 if is_single else _SUMS_HALF, call.output(rows[:1])[0].float()
    try:
        together = [call.output(rows[:count])[0].float() for count in (len(PROBES[0]), _MANY_ROWS)]
    except _NoRows:  # it takes one row
        return _DIFFERS
    if any(bool((row - alone).norm() > most * alone.norm()) for row in together):
        return _DIFFERS
    if is_single and _rounds(call):
        return _ROUNDS
    return _BITS if keeps_bits and not _keeps_bits(call) else ""


def _rounds(call: _LayerCall) -> bool:
    """Whether outputs move in steps when inputs change by less."""
    x = call.like(2 * MAX_ROWS)
    step = call.like(2 * MAX_ROWS, seed=1) * _NEAR
    before, middle, after = (call.output(rows) for rows in (x - step, x, x + step))
    return bool((before + after - 2 * middle).norm() > _STEPS * middle.norm())


def _keeps_bits(call: _LayerCall) -> bool:
    """Whether rows keep the bits they have alone, in products of every number of rows of a pass."""
    outputs = call.output(call.like(1)).shape[-1]
    for seed in range(max(1, _OUTPUTS // outputs)):
        x = call.like(_ROWS[-1], seed)
        alone = torch.cat([call.output(row) for row in x.split(1)])
        if not all(torch.equal(call.output(x[:rows]), alone[:rows]) for rows in _ROWS):
            return False
    return True
