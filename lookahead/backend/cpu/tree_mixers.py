"""Recurrent modules of known classes, computed by kernels for all nodes of a tree.

These are gated delta nets, Mamba-2 and short convolutions. Their linear layers are called once for all nodes, and one
call of kernels takes the states from parents to children. In bfloat16 every node has the bits of transformers' code for
a single token, which a probe compares (`lookahead.backend.cpu.state_bits`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus

from lookahead.backend.cpu.activations import VECTORS
from lookahead.backend.cpu.cpu_pass import thread
from lookahead.backend.protocol import BitPolicy
from lookahead.drafting.tree import IntArray
from lookahead.kernels import layer_ops
from lookahead.kernels.gated_delta import COLUMNS, MAX_SIZE, Updates, advance, gated_delta
from lookahead.kernels.jobs import Job
from lookahead.kernels.jobs import run as run_jobs
from lookahead.kernels.selective_state import COLUMNS as STATE_COLUMNS
from lookahead.kernels.selective_state import DTYPES as STATE_DTYPES
from lookahead.kernels.selective_state import Inputs, selective_state
from lookahead.kernels.short_conv import convolution, newest
from lookahead.model.cache import TreeCache
from lookahead.model.facts import CACHE, is_offloaded
from lookahead.model.known_code import code_of, global_hooks, is_set_by_user, working_hooks_of
from lookahead.model.state_layers import StateLayer, States
from lookahead.model.state_scope import mixers_of

_CONV, _RECURRENT = ("conv", 0), ("recurrent", 0)
_DTYPES = torch.float32, torch.bfloat16
_SETTINGS = bool, int, float, str  # types of what decides how a module computes
_SERIAL = 1 << 15  # numbers that torch computes on one thread


@dataclass(frozen=True, slots=True)
class TreeMixer:
    """Computes a module with states for all nodes of a pass.

    Attributes:
        module: The module.
        conv: Its convolution.
        at: The index of its cache layer.
        cache: The name under which its code takes the cache.
        inputs: The names of the linear layers of its input.
        mix: What it does between its linear layers.
    """

    module: Any
    conv: Any
    at: int
    cache: str
    inputs: tuple[str, ...]
    mix: Mix

    def __call__(self, hidden: Tensor, cache: TreeCache) -> Tensor | None:
        """The output for all nodes, `[rows, width, size]`; None if the module must run its own code."""
        rows, width, _ = hidden.shape
        before = self.begun(hidden.dtype, rows, width, cache)
        if before is None or cache.levels is None:
            return None
        inputs = [getattr(self.module, name)(hidden) for name in self.inputs]
        out = hidden.new_zeros(rows * width, self.module.out_proj.in_features)
        self.mix(self, inputs, out, [row * width for row in range(rows)], before, cache, run_jobs)
        made: Tensor = self.module.out_proj(out.view(rows, width, -1))
        return made

    def begun(self, dtype: torch.dtype, rows: int, width: int, cache: TreeCache) -> list[States] | None:
        """The states of the rows of a pass of a dtype; None if the module must run its own code."""
        mode, weight = thread.running, self.conv._parameters["weight"]
        is_own = mode is None or not mode.most_elements or dtype != weight.dtype or torch.compiler.is_compiling()
        # Transformers' own pass over a batch has other bits than over each row alone, and `model.generate` runs it.
        is_batch = rows > 1 and width == 1 and dtype == torch.bfloat16
        is_own |= mode is not None and mode.policy is not BitPolicy.SOLO and is_batch
        kinds = {_CONV: dtype} if self.mix is _convolve else {_CONV: dtype, _RECURRENT: torch.float32}
        layer: StateLayer = cache.layers[self.at]
        before = [layer.committed.get(row, {}) for row in range(rows)]
        is_scan = self.mix is _scan  # which takes recurrent states transposed too
        row_kinds = [
            {
                kind: state.dtype
                for kind, state in states.items()
                if state.is_contiguous() or (is_scan and kind != _CONV)
            }
            for states in before
        ]
        return None if is_own or any(row != kinds for row in row_kinds) else before


Run = Callable[..., None]
Mix = Callable[[TreeMixer, Sequence[Tensor], Tensor, Sequence[int], list[States], TreeCache, Run], None]
"""Writes what a module makes of the results of the linear layers of its input, `[..., tokens, size]`, to `[tokens,
size]`, and sets `after` of its cache layer. It takes the first token of each row, the states before, and what runs
jobs."""


def find_mixers(model: Any) -> dict[nn.Module, TreeMixer]:
    """The functions that compute mixers of a model in passes over trees; none if its code is not as shipped."""
    mixers, kinds = dict[nn.Module, TreeMixer](), set[type]()
    for name, layers in mixers_of(model).layers.items():
        module: Any = model.get_submodule(name)
        file, _, folder = type(module).__module__.rpartition(".modeling_")
        inputs, mix = _CLASSES.get(type(module).__name__, ((), None))
        conv = getattr(module, "conv1d", getattr(module, "conv", None))
        is_known = file == f"transformers.models.{folder}" and len(layers) == 1
        if mix is None or not is_known or is_set_by_user(module) or not _is_plain(conv):
            continue
        if mix in _TAKES and not _TAKES[mix](module):
            continue
        kinds |= {type(module), type(conv), type(getattr(module, "norm", conv))}
        cache = CACHE if CACHE in signature(type(module).forward).parameters else "cache_params"
        mixers[module] = TreeMixer(module, conv, layers[0], cache, inputs, mix)
    return {} if not mixers or global_hooks() or code_of(frozenset(kinds)).foreign else mixers


def samples_of(mixers: Iterable[TreeMixer]) -> list[TreeMixer]:
    """The first of every kind: of those with a class, its settings, and the sizes and types of its weights."""
    samples = dict[Any, TreeMixer]()
    for mixer in mixers:
        parts = list(mixer.module.modules())
        settings = (
            sorted(
                (name, value) for name, value in vars(part).items() if type(value) in _SETTINGS and name != "layer_idx"
            )
            for part in parts
        )
        weights = ((weight.shape, weight.dtype) for weight in mixer.module.parameters())
        samples.setdefault(repr((list(map(type, parts)), *settings, *weights)), mixer)
    return list(samples.values())


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


def _takes_scans(module: Any) -> bool:
    """Whether the kernel supports the heads of a Mamba-2 layer."""
    weight, own = module.conv1d.weight, [module._parameters.get(name) for name in ("A_log", "D", "dt_bias")]
    return (
        weight.dtype in STATE_DTYPES
        and module.head_dim % STATE_COLUMNS == 0
        and module.intermediate_size % VECTORS == module.ssm_state_size % 2 == 0
        and module.activation in ("silu", "swish")
        and _is_plain(module.norm)
        and all(type(one) is nn.Parameter and one.dtype == weight.dtype for one in (module.norm.weight, *own))
    )


def _apply_delta_rule(
    mixer: TreeMixer,
    inputs: Sequence[Tensor],
    out: Tensor,
    firsts: Sequence[int],
    before: list[States],
    cache: TreeCache,
    run: Run,
) -> None:
    """A gated delta net."""
    module, norm = mixer.module, mixer.module.norm
    mixed_in, gate, beta, decay = (part.flatten(0, -2).contiguous() for part in _split(module, inputs))
    mixed_in = mixed_in.clone()  # its buffer is overwritten by the next layer, and `after` reads it
    mode = thread.running
    is_alone = out.dtype == torch.bfloat16 and mode is not None and mode.policy is BitPolicy.SOLO
    gates, beta = _by_rows(silu, gate.float(), is_alone), _by_rows(torch.sigmoid, beta, is_alone).float()
    rate = _by_rows(softplus, decay.float() + module.dt_bias, is_alone)
    updates = Updates.empty(
        (-module.A_log.float().exp() * rate).exp(), module.num_k_heads, module.head_k_dim, module.head_v_dim
    )
    weight, mixed, parts = mixer.conv.weight, torch.empty_like(mixed_in), _parts(firsts, cache)
    jobs, layer = list[Job](), cache.layers[mixer.at]
    only = layer.memory_like(_RECURRENT, before[0][_RECURRENT]) if len(out) == 1 else None  # after a single node
    for (part, parents), states in zip(parts, before, strict=True):
        norming = norm.weight, norm.variance_epsilon, gates[part]
        conv, state = states[_CONV], states[_RECURRENT]
        jobs += [
            convolution(mixed_in[part], conv, weight, mixer.conv.bias, parents, mixed[part], has_silu=True),
            gated_delta(mixed[part], beta[part], state, parents, updates.of(part), out[part], norming, only),
        ]
    run(*jobs)

    def after(row: int, path: IntArray) -> States:
        nodes, states, (own, _) = torch.from_numpy(path.astype("int64")), before[row], parts[row]
        made = {_CONV: torch.empty_like(states[_CONV])}
        jobs = [newest(states[_CONV], mixed_in[own], nodes, made[_CONV])]
        if only is None:
            made[_RECURRENT] = layer.memory_like(_RECURRENT, states[_RECURRENT])
            jobs.append(advance(states[_RECURRENT], updates.of(own), nodes, made[_RECURRENT]))
        else:
            made[_RECURRENT] = only
        run_jobs(*jobs)
        return made

    layer.after = after


def _parts(firsts: Sequence[int], cache: TreeCache) -> list[tuple[slice, Tensor]]:
    """The nodes of each row, and their parents."""
    assert cache.levels is not None
    return [
        (slice(first, first + len(parents)), parents)
        for first, parents in zip(firsts, cache.levels.parents, strict=True)
    ]


def _split(module: Any, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The inputs of a gated delta net's convolution, its gates, and the logits of beta and decay."""
    if len(inputs) == 4:
        return inputs
    query, key, value, gate, beta, decay = (part.flatten(2) for part in module.fix_query_key_value_ordering(*inputs))
    return torch.cat((query, key, value), -1), gate, beta, decay


def _by_rows(function: Callable[[Tensor], Tensor], x: Tensor, is_alone: bool) -> Tensor:
    """Apply an operator to `[n, size]`; with `is_alone` every row has the bits that it has alone.

    Torch computes the numbers after the last whole block of vectors one by one, by other code.
    """
    if not is_alone:
        return function(x)
    rows = 1 if x.shape[1] % VECTORS else max(1, _SERIAL // x.shape[1])
    return function(x) if len(x) <= rows else torch.cat([function(part) for part in x.split(rows)])


def _scan(
    mixer: TreeMixer,
    inputs: Sequence[Tensor],
    out: Tensor,
    firsts: Sequence[int],
    before: list[States],
    cache: TreeCache,
    run: Run,
) -> None:
    """A Mamba-2 layer."""
    module, norm, mode, size = mixer.module, mixer.module.norm, thread.running, out.shape[1]
    is_alone = out.dtype == torch.bfloat16 and mode is not None and mode.policy is BitPolicy.SOLO
    gate, mixed_in, steps = inputs[0].flatten(0, -2).split([size, module.conv_dim, module.num_heads], -1)
    mixed_in = mixed_in.clone(memory_format=torch.contiguous_format)  # its buffer is overwritten by the next layer
    steps = (steps + module.dt_bias).flatten()
    # The layer computes every step once for each number of a head, by whole vectors.
    steps = softplus(pad(steps, (0, -len(steps) % VECTORS)))[: len(steps)].float().view(len(out), -1)
    decays = (-module.A_log.float().exp() * steps).exp()
    mixed, gates = torch.empty_like(mixed_in), _by_rows(silu, gate.float(), is_alone)
    results, parts, layer = torch.zeros_like(gates), _parts(firsts, cache), cache.layers[mixer.at]
    own, skips = Inputs(mixed, steps, decays), module.D
    states = [row[_RECURRENT].mT.contiguous() for row in before]
    only = layer.memory_like(_RECURRENT, states[0].mT) if len(out) == 1 else None  # after a single node
    last, jobs = None if only is None else only.mT, list[Job]()
    for (part, parents), row, state in zip(parts, before, states, strict=True):
        conv = row[_CONV], mixer.conv.weight, mixer.conv.bias
        jobs += [
            convolution(mixed_in[part], *conv, parents, mixed[part], has_silu=True),
            selective_state(own.of(part), skips, state, parents, gates[part], results[part], last),
        ]
    groups = results.view(-1, norm.group_size)
    run(*jobs, layer_ops.norm(groups, results.new_ones(norm.group_size), groups, norm.variance_epsilon))
    torch.mul(norm.weight, results.to(out.dtype), out=out)

    def after(row: int, path: IntArray) -> States:
        nodes, former, (part, _) = torch.from_numpy(path.astype("int64")), before[row], parts[row]
        conv, state, count = torch.empty_like(former[_CONV]), only, len(path)
        jobs = [newest(former[_CONV], mixed_in[part], nodes, conv)]
        if state is None:
            state = layer.memory_like(_RECURRENT, states[row].mT)
            unused = gates[:count], results[:count]
            jobs.append(selective_state(own.of(part).of(nodes), skips, states[row], nodes, *unused, state.mT))
        run_jobs(*jobs)
        return {_CONV: conv, _RECURRENT: state}

    layer.after = after


def _convolve(
    mixer: TreeMixer,
    inputs: Sequence[Tensor],
    out: Tensor,
    firsts: Sequence[int],
    before: list[States],
    cache: TreeCache,
    run: Run,
) -> None:
    """A short convolution."""
    gate, gate_after, x = inputs[0].flatten(0, -2).chunk(3, dim=-1)
    gated, parts, layer = torch.empty_like(x), _parts(firsts, cache), cache.layers[mixer.at]
    run(
        *(
            convolution(
                x[part], states[_CONV], mixer.conv.weight, mixer.conv.bias, parents, out[part],
                gates=(gate[part], gate_after[part], gated[part]),
            )
            for (part, parents), states in zip(parts, before, strict=True)
        )
    )  # fmt: skip

    def after(row: int, path: IntArray) -> States:
        nodes, state = torch.from_numpy(path.astype("int64")), before[row][_CONV]
        made = torch.empty_like(state)
        run_jobs(newest(state, gated[parts[row][0]], nodes, made))
        return {_CONV: made}

    layer.after = after


_TAKES: dict[Mix, Callable[[Any], bool]] = {_apply_delta_rule: _takes_heads, _scan: _takes_scans}
_MAMBAS = "GraniteMoeHybridMambaLayer", "BambaMixer", "Mamba2Mixer", "NemotronHMamba2Mixer", "Zamba2MambaMixer"
_DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), _apply_delta_rule
_CLASSES: dict[str, tuple[tuple[str, ...], Mix | None]] = {
    **dict.fromkeys(("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), _DELTA),
    **dict.fromkeys(_MAMBAS, (("in_proj",), _scan)),
    "Qwen3NextGatedDeltaNet": (("in_proj_qkvz", "in_proj_ba"), _apply_delta_rule),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), (("in_proj",), _convolve)),
}
