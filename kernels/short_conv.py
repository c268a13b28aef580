"""Causal convolutions of a few taps per channel, over the nodes of a token tree, in one job.

A node's taps are its last ancestors, and before the root the inputs that a layer keeps in its state. In bfloat16 the
results have the bits of torch's convolution over each path alone: products are added in float32 from the oldest tap on,
and every operator rounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lookahead.kernels.jobs import Job, claim_part
from lookahead.kernels.scalars import exp, fma, jit_part, narrow, numbers_at, widen
from lookahead.utils.addresses import array_at

_CHANNELS = 512  # of a part
_F = np.float32
_MAX_EXP_INPUT = _F(80.0)  # from here on SiLU returns its input


def convolution(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parents: Tensor,
    out: Tensor,
    *,
    gates: tuple[Tensor, Tensor, Tensor] | None = None,
    has_silu: bool = False,
) -> Job:
    """A job that convolves the inputs of the nodes of a tree along their paths.

    All tensors are of one dtype, bfloat16 or float32, except `parents`, and contiguous, except for the rows of `x` and
    of the first two gates.

    Args:
        x: `[nodes, channels]`, rows of any stride.
        state: `[channels, taps]`, the newest inputs before the root.
        weight: `[channels, taps]`, or with further sizes of 1.
        bias: `[channels]`, or None.
        parents: int64 `[nodes]`, ascending; that of the root is ignored.
        out: `[nodes, channels]`.
        gates: Two factors `[nodes, channels]`, of the inputs and of the results, rows of one stride, and a tensor
            `[nodes, channels]` that receives the inputs of the convolution.
        has_silu: Whether SiLU is applied to the results.
    """
    nodes, channels = x.shape
    before, after, inputs = gates or (None, None, None)
    tensors = x, state, weight, bias, parents, out, before, after, inputs
    places = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    steps = x.stride(0), 0 if before is None else before.stride(0)
    parts = -(-channels // _CHANNELS)
    numbers = (*places, nodes, channels, state.shape[1], *steps, int(has_silu))
    return _ENTRIES[x.dtype], parts, numbers, tensors


def newest(state: Tensor, inputs: Tensor, path: Tensor, out: Tensor) -> Job:
    """A job that writes the newest inputs of a convolution after a path of nodes.

    Args:
        state: `[channels, taps]`, those before the root; bfloat16 or float32, contiguous.
        inputs: `[nodes, channels]` of the same dtype, contiguous.
        path: int64 `[n]`, the nodes from the root on.
        out: Like `state`.
    """
    tensors = state, inputs, path, out
    return _SHIFTS[state.dtype], 1, (*(tensor.data_ptr() for tensor in tensors), *state.shape, len(path)), tensors


@jit_part
def _shift(address, kind):
    """Write the newest inputs, of all channels."""
    if claim_part(address) > 0:
        return
    state_at, inputs_at, path_at, out_at, channels, taps, steps = array_at(address + 16, (7,), np.int64)
    path, nodes = array_at(path_at, (steps,), np.int64), 0
    for step in range(steps):
        nodes = max(nodes, path[step] + 1)
    state, out = numbers_at(state_at, channels * taps, kind), numbers_at(out_at, channels * taps, kind)
    inputs = numbers_at(inputs_at, nodes * channels, kind)
    for tap in range(taps):
        at = steps - taps + tap
        if at < 0:
            for i in range(channels):
                out[i * taps + tap] = state[i * taps + taps + at]
        else:
            line = inputs[path[at] * channels : (path[at] + 1) * channels]
            for i in range(channels):
                out[i * taps + tap] = line[i]


@jit_part
def _activate(line):
    """Replace numbers by their SiLU."""
    for i in range(len(line)):
        x = widen(line[i])
        power = exp(-x if x < _MAX_EXP_INPUT else -_MAX_EXP_INPUT)
        line[i] = narrow(x / (_F(1.0) + power), line[i])


@jit_part
def _convolve(address, first, width, kind):
    """Convolve `width` channels from `first` on."""
    numbers = array_at(address, (15,), np.int64)
    x_at, state_at, weight_at, bias_at, parents_at, out_at, before_at, after_at, inputs_at = numbers[:9]
    nodes, channels, taps, step, gate_step, has_silu = numbers[9:]
    parents = array_at(parents_at, (nodes,), np.int64)
    state = numbers_at(state_at, channels * taps, kind)[first * taps : (first + width) * taps]
    weight = numbers_at(weight_at, channels * taps, kind)[first * taps : (first + width) * taps]
    x, gates_before = numbers_at(x_at, nodes * step, kind), numbers_at(before_at, nodes * gate_step, kind)
    gates_after, inputs = numbers_at(after_at, nodes * gate_step, kind), numbers_at(inputs_at, nodes * channels, kind)
    out = numbers_at(out_at, nodes * channels, kind)
    # The lines of inputs: first those of the state, from the oldest on, then those of the nodes.
    lines, weights = np.empty((taps + nodes, width), np.float32), np.empty((taps, width), np.float32)
    for tap in range(taps):
        for i in range(width):
            lines[tap, i] = widen(state[i * taps + tap])
            weights[tap, i] = widen(weight[i * taps + tap])
    begin = np.zeros(width, np.float32)
    if bias_at:
        bias = numbers_at(bias_at, channels, kind)[first : first + width]
        for i in range(width):
            begin[i] = widen(bias[i])
    path = np.empty(taps, np.int64)
    sums = np.empty(width, np.float32)
    for node in range(nodes):
        line = lines[taps + node]
        source = x[node * step + first : node * step + first + width]
        made = out[node * channels + first : node * channels + first + width]
        if before_at:
            gate = gates_before[node * gate_step + first : node * gate_step + first + width]
            kept = inputs[node * channels + first : node * channels + first + width]
            for i in range(width):
                kept[i] = narrow(widen(gate[i]) * widen(source[i]), kept[i])
                line[i] = widen(kept[i])
        else:
            for i in range(width):
                line[i] = widen(source[i])
        at = taps + node
        for tap in range(taps - 1, -1, -1):
            path[tap] = at
            at = taps - 1 if at == taps else at - 1 if at < taps else taps + parents[at - taps]
        sums[:] = begin
        for tap in range(taps):
            inner, factors = lines[path[tap]], weights[tap]
            for i in range(width):
                sums[i] = fma(inner[i], factors[i], sums[i])
        if before_at:
            gate = gates_after[node * gate_step + first : node * gate_step + first + width]
            for i in range(width):
                made[i] = narrow(widen(gate[i]) * widen(narrow(sums[i], made[i])), made[i])
        else:
            for i in range(width):
                made[i] = narrow(sums[i], made[i])
        if has_silu:
            _activate(made)


@jit_part
def _work(address, kind):
    """Do parts until there are none."""
    parts, channels = array_at(address, (2,), np.int64)[1], array_at(address + 16, (15,), np.int64)[10]
    part = claim_part(address)
    while part < parts:
        first = part * _CHANNELS
        _convolve(address + 16, first, min(_CHANNELS, channels - first), kind)
        part = claim_part(address)


def _work_on_halves(address: Any) -> None:
    _work(address, 0)


def _work_on_floats(address: Any) -> None:
    _work(address, 0.0)


def _shift_halves(address: Any) -> None:
    _shift(address, 0)


def _shift_floats(address: Any) -> None:
    _shift(address, 0.0)


_SHIFTS = {torch.bfloat16: _shift_halves, torch.float32: _shift_floats}
_ENTRIES = {torch.bfloat16: _work_on_halves, torch.float32: _work_on_floats}
