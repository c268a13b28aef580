"""Recurrent modules of known classes, computed by kernels for all nodes of a tree.

These are gated delta nets and short convolutions. Their linear layers are called once for all nodes, and one call of
kernels takes the states from parents to children. In bfloat16 every node has the bits of transformers' code for a
single token, which a probe compares (`lookahead.backend.cpu.state_bits`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from lookahead.backend.cpu.cpu_pass import thread
from lookahead.backend.protocol import BitPolicy
from lookahead.drafting.tree import IntArray
from lookahead.kernels.gated_delta import COLUMNS, MAX_SIZE, Updates, advance, gated_delta
from lookahead.kernels.jobs import Job, run
from lookahead.kernels.short_conv import convolution, newest
from lookahead.model.cache import TreeCache
from lookahead.model.facts import is_offloaded
from lookahead.model.known_code import code_of, global_hooks, is_set_by_user, working_hooks_of
from lookahead.model.level_calls import MixTrees
from lookahead.model.state_layers import StateLayer, States
from lookahead.model.state_scope import mixers_of

_Kind = tuple[str, int]
_CONV, _RECURRENT = ("conv", 0), ("recurrent", 0)
_DTYPES = torch.float32, torch.bfloat16
_VECTORS = 64  # numbers; torch computes them by the same vectors wherever such a block begins
_SERIAL = 1 << 15  # numbers that torch computes on one thread


class _Mixer(NamedTuple):
    """A module with states, its convolution, and the index of its cache layer."""

    module: Any
    conv: Any
    at: int


def find_mixers(model: Any) -> dict[nn.Module, MixTrees]:
    """The functions that compute mixers of a model in passes over trees; none if its code is not as shipped."""
    found, kinds = dict[nn.Module, MixTrees](), set[type]()
    for name, layers in mixers_of(model).layers.items():
        module: Any = model.get_submodule(name)
        file, _, folder = type(module).__module__.rpartition(".modeling_")
        make = _CLASSES.get(type(module).__name__) if file == f"transformers.models.{folder}" else None
        conv = getattr(module, "conv1d", getattr(module, "conv", None))
        if make is None or len(layers) != 1 or is_set_by_user(module) or not _is_plain(conv):
            continue
        kinds |= {type(module), type(conv)}
        if make is _mix_by_delta:
            if not _takes_heads(module):
                continue
            kinds.add(type(module.norm))
        found[module] = partial(make, _Mixer(module, conv, layers[0]))
    return {} if not found or global_hooks() or code_of(frozenset(kinds)).foreign else found


def _is_plain(part: Any) -> bool:
    """Whether a module is only its own weight on the CPU, which kernels read without calling it."""
    weight, bias = (None if part is None else part._parameters.get(name) for name in ("weight", "bias"))
    return (
        type(weight) is nn.Parameter
        and weight.dtype in _DTYPES
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and (bias is None or (type(bias), bias.dtype, bias.is_contiguous()) == (nn.Parameter, weight.dtype, True))
        and not (is_offloaded(part) or is_set_by_user(part) or working_hooks_of(part))
    )


def _takes_heads(module: Any) -> bool:
    """Whether the kernel supports the heads of a gated delta net."""
    return (
        module.head_v_dim % COLUMNS == 0
        and max(module.head_k_dim, module.head_v_dim) <= MAX_SIZE
        and module.activation in ("silu", "swish")
        and _is_plain(module.norm)
        and module.norm.weight.dtype == module.conv1d.weight.dtype
    )


def _begun(mixer: _Mixer, hidden: Tensor, cache: TreeCache, kinds: Mapping[_Kind, torch.dtype]) -> list[States] | None:
    """The states of the rows of a pass, of kinds and dtypes; None if the module must run its own code."""
    mode, weight = thread.running, mixer.conv._parameters["weight"]
    is_own = mode is None or not mode.most_elements or hidden.dtype != weight.dtype or torch.compiler.is_compiling()
    # Transformers' own pass over a batch has other bits than over each row alone, and `model.generate` runs it.
    is_batch = len(hidden) > 1 and hidden.shape[1] == 1 and hidden.dtype == torch.bfloat16
    is_own |= mode is not None and mode.policy is not BitPolicy.SOLO and is_batch
    layer: StateLayer = cache.layers[mixer.at]
    rows = [layer.committed.get(row, {}) for row in range(len(hidden))]
    held = [{kind: each.dtype for kind, each in states.items() if each.is_contiguous()} for states in rows]
    return None if is_own or any(each != kinds for each in held) else rows


def _mix_by_delta(mixer: _Mixer, hidden: Tensor, cache: TreeCache) -> Tensor | None:
    """The output of a gated delta net for all nodes, `[rows, width, size]`, or None."""
    before = _begun(mixer, hidden, cache, {_CONV: hidden.dtype, _RECURRENT: torch.float32})
    if before is None or cache.levels is None:
        return None
    module, norm, width = mixer.module, mixer.module.norm, hidden.shape[1]
    inputs, gate, beta, decay = (each.flatten(0, 1).contiguous() for each in _projections(module, hidden))
    mode = thread.running
    is_alone = hidden.dtype == torch.bfloat16 and mode is not None and mode.policy is BitPolicy.SOLO
    gates, beta = _by_rows(silu, gate.float(), is_alone), _by_rows(torch.sigmoid, beta, is_alone).float()
    rate = _by_rows(softplus, decay.float() + module.dt_bias, is_alone)
    updates = Updates.empty(
        (-module.A_log.float().exp() * rate).exp(), module.num_k_heads, module.head_k_dim, module.head_v_dim
    )
    weight, mixed, out = mixer.conv.weight, torch.empty_like(inputs), torch.zeros_like(gate)
    jobs, layer = list[Job](), cache.layers[mixer.at]
    only = layer.memory_like(_RECURRENT, before[0][_RECURRENT]) if len(out) == 1 else None  # after a single node
    for row, parents in enumerate(cache.levels.parents):
        part, states = slice(row * width, row * width + len(parents)), before[row]
        own = updates.of(part)
        norming = norm.weight, norm.variance_epsilon, gates[part]
        jobs += [
            convolution(inputs[part], states[_CONV], weight, mixer.conv.bias, parents, mixed[part], has_silu=True),
            gated_delta(mixed[part], beta[part], states[_RECURRENT], parents, own, out[part], norming, only),
        ]
    run(*jobs)

    def after(row: int, path: IntArray) -> States:
        nodes, states = torch.from_numpy(path.astype("int64")), before[row]
        own = slice(row * width, (row + 1) * width)
        made = {_CONV: torch.empty_like(states[_CONV])}
        jobs = [newest(states[_CONV], inputs[own], nodes, made[_CONV])]
        if only is None:
            made[_RECURRENT] = layer.memory_like(_RECURRENT, states[_RECURRENT])
            jobs.append(advance(states[_RECURRENT], updates.of(own), nodes, made[_RECURRENT]))
        else:
            made[_RECURRENT] = only
        run(*jobs)
        return made

    layer.after = after
    made: Tensor = module.out_proj(out.view(*hidden.shape[:2], -1))
    return made


def _projections(module: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """The inputs of a gated delta net's convolution, its gates, and the logits of beta and decay."""
    if hasattr(module, "in_proj_qkvz"):
        parts = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden), module.in_proj_ba(hidden))
        query, key, value, gate, beta, decay = (each.flatten(2) for each in parts)
        return torch.cat((query, key, value), -1), gate, beta, decay
    names = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
    return tuple(getattr(module, name)(hidden) for name in names)


def _by_rows(function: Callable[[Tensor], Tensor], x: Tensor, is_alone: bool) -> Tensor:
    """Apply an operator to `[n, size]`; with `is_alone` every row has the bits that it has alone.

    Torch computes the numbers after the last whole block of vectors one by one, by other code.
    """
    if not is_alone:
        return function(x)
    rows = 1 if x.shape[1] % _VECTORS else max(1, _SERIAL // x.shape[1])
    return function(x) if len(x) <= rows else torch.cat([function(part) for part in x.split(rows)])


def _mix_by_convolution(mixer: _Mixer, hidden: Tensor, cache: TreeCache) -> Tensor | None:
    """The output of a short convolution for all nodes, `[rows, width, size]`, or None."""
    before = _begun(mixer, hidden, cache, {_CONV: hidden.dtype})
    if before is None or cache.levels is None:
        return None
    width = hidden.shape[1]
    gate, gate_after, x = mixer.module.in_proj(hidden).flatten(0, 1).chunk(3, dim=-1)
    inputs, out, jobs = torch.empty_like(x), torch.zeros_like(x), list[Job]()
    for row, parents in enumerate(cache.levels.parents):
        part = slice(row * width, row * width + len(parents))
        gates, weight = (gate[part], gate_after[part], inputs[part]), mixer.conv.weight
        state = before[row][_CONV]
        jobs.append(convolution(x[part], state, weight, mixer.conv.bias, parents, out[part], gates=gates))
    run(*jobs)

    def after(row: int, path: IntArray) -> States:
        nodes, state = torch.from_numpy(path.astype("int64")), before[row][_CONV]
        made = torch.empty_like(state)
        run(newest(state, inputs[row * width : (row + 1) * width], nodes, made))
        return {_CONV: made}

    cache.layers[mixer.at].after = after
    made: Tensor = mixer.module.out_proj(out.view(*hidden.shape[:2], -1))
    return made


_CLASSES: dict[str, Callable[[_Mixer, Tensor, TreeCache], Tensor | None]] = {
    **dict.fromkeys(("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen3NextGatedDeltaNet"), _mix_by_delta),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), _mix_by_convolution),
}
