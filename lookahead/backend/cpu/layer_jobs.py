"""Declared decoder layers as jobs of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from lookahead.backend.cpu.activations import activation_of
from lookahead.backend.cpu.cpu_pass import CpuPass
from lookahead.backend.cpu.product_parts import part_of
from lookahead.backend.cpu.routing import UNPACKED_PASSES, MixtureWeights, Routing, called, weights_of
from lookahead.kernels import experts, layer_ops
from lookahead.kernels.experts import ExpertWeight
from lookahead.kernels.jobs import Job, run
from lookahead.kernels.packed_product import PackedWeight, product
from lookahead.model.families.family import Family
from lookahead.model.families.operations import (
    Called,
    ClampedGlu,
    Experts,
    Mixer,
    Mlp,
    Norm,
    Product,
    Recurrence,
    Residual,
    Rope,
    SelfAttention,
)

Positions = tuple[Tensor, Tensor]
"""The cosines and sines of a pass, `[rows, tokens, size]`, contiguous."""

_SIGMOID = nn.Sigmoid()
_INTERLEAVED = slice(None, None, 2), slice(1, None, 2)


class DeclaredLayer:
    """A decoder layer whose operations are declared.

    Args:
        module: The layer.
        family: Its family.
        residuals: Its operations.
        eager: The eager attention function of its file.

    Attributes:
        attention: Its attention, or None.
        recurrence: Its mixer with states, if it has one.
        called: Its mixer that runs its own code, if it has one.
        experts: Its mixture of experts, if it has one.
        angles: Cosines of a token in its rotary embedding; 0 for none.
        reach: The first position at which it runs its own code, or None.
        linears: Its linear layers, each once.
        norms: Its norms.
        known: What is kept about its weights.
    """

    def __init__(self, module: Any, family: Family, residuals: tuple[Residual, ...], eager: Callable[..., Any]) -> None:
        self.module, self.family, self.residuals, self.eager = module, family, residuals, eager
        mixers = [part.mixer for part in residuals]
        self.attention = next((mixer for mixer in mixers if isinstance(mixer, SelfAttention)), None)
        self.recurrence = next((mixer for mixer in mixers if isinstance(mixer, Recurrence)), None)
        self.called = next((mixer for mixer in mixers if isinstance(mixer, Called)), None)
        self.experts = next((mixer for mixer in mixers if isinstance(mixer, Experts)), None)
        self.angles, self.reach = self.rope.angles if self.rope else 0, self.attention and self.attention.reach
        self.linears: list[Any] = list(dict.fromkeys(part.module for mixer in mixers for part in mixer.products))
        self.norms = [norm for part in residuals for norm in part.norms]
        self.known: dict[Any, Any] = {}
        self._passes = 0  # over its mixture

    def packs_experts(self, mode: CpuPass | None) -> bool:
        """Whether packed copies of its experts are worth while in a pass, the last of those that it counts."""
        self._passes += 1
        return mode is not None and mode.packs_experts and self._passes > UNPACKED_PASSES

    def mixture(self, *, packs: bool = False) -> MixtureWeights | None:
        """The weights of its mixture; `packs` makes packed copies."""
        return None if self.experts is None else weights_of(self.experts, self.known, packs=packs)

    @property
    def activations(self) -> list[Any]:
        """The modules of its activations."""
        mixers: list[Any] = [part.mixer for part in self.residuals if isinstance(part.mixer, Mlp | Experts)]
        if self.experts is not None and self.experts.shared is not None:
            mixers.append(self.experts.shared)
        return [mixer.activation for mixer in mixers]

    @property
    def parts(self) -> list[Any]:
        """The modules that the jobs reimplement; `lookahead.backend.cpu.linears` handles linear layers."""
        inner = [module for part in self.residuals for module in part.mixer.parts]
        return [self.module, *inner, *(norm.module for norm in self.norms)]

    @property
    def gates(self) -> list[Any]:
        """Linear layers of few outputs, by which torch multiplies."""
        return [
            gate for part in (self.experts, self.recurrence, self.attention) if part is not None for gate in part.gates
        ]

    @property
    def rope(self) -> Rope | None:
        """Its rotary embedding."""
        return None if self.attention is None else self.attention.rope

    @property
    def index(self) -> int:
        """Its number, and that of its cache layer."""
        part = self.attention or self.recurrence or self.called
        return int((part or self).module.layer_idx)


class Attend(Protocol):
    """Where the keys and values of an attention go, and how its queries attend."""

    def outputs(self, part: SelfAttention, jobs: LayerJobs) -> tuple[Tensor, Tensor]:
        """Tensors for keys and values, `[rows, tokens, kv_heads * dim]`; `jobs` makes the buffers of `part`."""

    def attend(
        self, part: SelfAttention, jobs: LayerJobs, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> Tensor:
        """What queries attend to.

        Args:
            part: The attention.
            jobs: The jobs, to which it may add.
            query: `[rows, tokens, heads * dim]`.
            key: `[rows, tokens, kv_heads * dim]`; None if another layer has it.
            value: Like `key`.

        Returns:
            A tensor of the shape of `query`.
        """

    def gates(self, part: SelfAttention, jobs: LayerJobs, x: Tensor) -> list[Tensor]:
        """The results of its gates for rows `[rows, tokens, size]`, each `[rows, tokens, heads]`, contiguous."""

    def call(self, part: Recurrence | Called, jobs: LayerJobs, x: Tensor) -> Tensor:
        """What a mixer with states, or with code of its own, makes of rows `[rows, tokens, size]`."""


class HiddenSum(NamedTuple):
    """The hidden states between two operations: `scale * (total + factor * delta)`."""

    total: Tensor
    delta: Tensor | None = None
    factor: float = 1.0
    scale: float = 1.0


class LayerJobs:
    """Makes the jobs of declared layers for some tokens.

    Args:
        take: Makes the buffer of a name for `size` numbers per token, `[rows, tokens, size]`.
        weights: Packed weights by the id of their linear layer. Others are multiplied by calling the layer, which runs
            the jobs before it.
        prepared: The result of `packed_product.prepared_rows`.
        positions: Cosines and sines, by the kind of rope.
        attend: Keys, values and attention.
        routing: Makes, or finds, the routing of a mixture.
    """

    def __init__(
        self,
        take: Callable[[str, int], Tensor],
        weights: Mapping[int, PackedWeight],
        prepared: Tensor | None,
        positions: Mapping[str, Positions],
        attend: Attend,
        routing: Callable[[Experts], Routing] | None = None,
    ) -> None:
        self.take, self.jobs = take, list[Job]()
        self._weights, self._prepared, self._positions, self._attend = weights, prepared, positions, attend
        self._routing = routing
        self.mixture: MixtureWeights | None = None  # of the layer; None calls its mixture as a module
        self.beside: Tensor | None = None  # the second input of the layer, contiguous
        self._turn = 0  # sums are written to two buffers in turn

    def pause(self, then: Callable[[int], None], tokens: int) -> None:
        """Run the jobs so far, and call a function with the number of tokens."""
        self.run()
        then(tokens)

    def run(self) -> None:
        """Run the jobs so far."""
        if self.jobs:
            run(*self.jobs)
        self.jobs = []

    def layer(self, residuals: Sequence[Residual], stream: HiddenSum, into: Tensor | None = None) -> HiddenSum:
        """Add the jobs of a layer. Its input is written to `into`, if that is not already its buffer."""
        for part in residuals:
            if part.is_parallel:
                stream = self._add_parallel(part, stream)
                continue
            total, x = self.normed(part.before, stream, "normed", into)
            out, into = self.mixed(part.mixer, x), None
            if part.after:
                normed = self.take("after", out.shape[-1])
                self.norm(part.after, out, normed)
                out = normed
            stream = HiddenSum(total, out, part.factor, part.scale)
        return stream

    def _add_parallel(self, part: Residual, stream: HiddenSum) -> HiddenSum:
        """Add what a parallel MLP makes of the total of a stream, to its delta or to its sum."""
        assert isinstance(part.mixer, Mlp) and stream.delta is not None
        x = stream.total
        if part.before is not None:
            x = self.take("normed", x.shape[-1])
            self.norm(part.before, stream.total, x)
        out = self._fed(part.mixer, x, "parallel")
        if part.is_last:
            return HiddenSum(self.normed(None, stream, "")[0], out)
        self.norm(None, out, None, delta=stream.delta, total=stream.delta)
        return stream

    def normed(
        self, norm: Norm | None, stream: HiddenSum, out: str | Tensor, into: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The sum of a stream, and its norm in the buffer `out`; without a norm the sum twice."""
        total, delta, factor, scale = stream
        target = None
        if norm is not None:
            target = out if isinstance(out, Tensor) else self.take(out, total.shape[-1])
        if delta is None:
            if norm is not None and target is not None:
                self.norm(norm, total, target)
            return total, total if target is None else target
        self._turn = 1 - self._turn
        added = self.take(f"total {self._turn}", total.shape[-1]) if into is None else into
        self.norm(norm, total, target, delta=delta, factor=factor, scale=scale, total=added)
        return added, added if target is None else target

    def norm(self, norm: Norm | None, x: Tensor, out: Tensor | None, **added: Any) -> None:
        """Add a job of `layer_ops.norm`."""
        weight, eps, kind, bias = (
            (None, 0.0, 0, None) if norm is None else (norm.weight, norm.eps, norm.kind, norm.bias)
        )
        self.jobs.append(layer_ops.norm(x, weight, out, eps, kind=kind, bias=bias, **added))

    def mixed(self, part: Mixer, x: Tensor) -> Tensor:
        """What a mixer makes of rows, `[rows, tokens, size]`."""
        if isinstance(part, Experts):
            return self._routed(part, x)
        if isinstance(part, Recurrence | Called):
            return self._attend.call(part, self, x)
        return self._attended(part, x) if isinstance(part, SelfAttention) else self._fed(part, x)

    def _routed(self, part: Experts, x: Tensor) -> Tensor:
        if self.mixture is None or self._routing is None:
            self.run()
            return called(part, x)
        (router, gates, down, _), routing, size = self.mixture, self._routing(part), x.shape[-1]
        tokens, biases = x.numel() // size, [part.router._parameters.get("bias")]
        flat = x.reshape(tokens, size)
        shared = None if part.shared is None else self._fed(part.shared, x, "shared").reshape(tokens, size)
        if router is None or part.gates:
            self.jobs.append(experts.gather(flat, routing.rows[:tokens], routing.numbers[:tokens]))
        if router is not None:
            self.jobs += product([router], x, biases, [routing.logits[:tokens]], self._prepared)
        self.pause(partial(routing.fill, part, self.mixture), tokens)
        rows, (_, inner, _) = tokens * part.chosen, part.sizes
        routed, both, gate, results = (
            self.take(name, part.chosen * width).view(rows, width)
            for name, width in (("routed", size), ("both", 2 * inner), ("gate", inner), ("results", size))
        )
        halves = _INTERLEAVED if part.is_transposed else (slice(inner), slice(inner, None))
        first, second = both.view(2, rows, inner) if part.is_quantized else [both[:, some] for some in halves]
        kind, table = activation_of(part.activation, x.dtype)
        bounds = part.activation._asdict() if isinstance(part.activation, ClampedGlu) else {}
        out, (of_both, *_, of_results) = self.take("change", size), part.biases
        self.jobs += [
            experts.gather(flat, routed, routing.sources[:rows]),
            *_by_experts(gates, routed, of_both, (first, second) if part.is_quantized else [both], routing),
            layer_ops.gating(first, second, kind, table, gate, **bounds),
            *_by_experts([down], gate, of_results, [results], routing),
            experts.combine(
                results, routing.factors[:tokens], routing.places[:tokens], out.view(tokens, size),
                is_wide=part.is_wide, shared=shared, shares=routing.shares[:tokens] if part.gates else None,
            ),
        ]  # fmt: skip
        return out

    def _attended(self, part: SelfAttention, x: Tensor) -> Tensor:
        query, key, value = self._projected(part, x)
        gate = None
        if part.has_gate:
            both = query
            query, gate = self.take("queries", part.width), self.take("gates", part.width)
            self._part(both, part.dim, query, gate)
        if not part.norms_last:
            self._norm_heads(part, query, key, value)
        if part.rope is not None:
            cos, sin, dim, turned = *self._positions[part.rope.kind], part.dim, part.rope.size
            pairs, keys = {"are_neighbours": part.rope.are_neighbours}, query[..., :0] if key is None else key
            self.jobs.append(layer_ops.rotation(query, keys, cos, sin, dim, turned, **pairs))
        if part.norms_last:
            self._norm_heads(part, query, key, value)
        attended = self._attend.attend(part, self, query, key, value)
        if gate is not None:
            self.jobs.append(layer_ops.gating(gate, attended, *activation_of(_SIGMOID, gate.dtype)))
            attended = gate
        for gate in self._attend.gates(part, self, x) if part.gates else ():
            of_heads, kind = attended.view(-1, part.dim), activation_of(_SIGMOID, gate.dtype)
            factors = gate.view(-1, 1).expand(-1, part.dim)
            self.jobs.append(layer_ops.gating(factors, of_heads, *kind, out=of_heads))
        (out,) = self.products([part.output], attended, [self.take("change", part.output.outputs)])
        return out

    def _projected(self, part: SelfAttention, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries, and keys and values if it has its own."""
        query = self.take("query", part.query.outputs)
        if part.has_keys:
            (whole,) = self.products(part.inputs, x, [query])
            parts = self.take("queries", part.width), *self._attend.outputs(part, self)
            self._part(whole, part.dim, *parts)
            return parts
        if part.key is None:
            return self.products(part.inputs, x, [query])[0], None, None
        key, value = self._attend.outputs(part, self)
        if part.value is not None:
            query, key, value = self.products(part.inputs, x, (query, key, value))
            return query, key, value
        query, key = self.products(part.inputs, x, (query, key))
        self.jobs.append(layer_ops.copying(key.view(-1, key.shape[-1]), value))
        return query, key, value

    def _part(self, whole: Tensor, dim: int, *parts: Tensor) -> None:
        """Copy the parts of every head, each of `dim` numbers, to tensors of their own."""
        heads = whole.view(-1, len(parts) * dim)
        for at, part in enumerate(parts):
            self.jobs.append(layer_ops.copying(heads[:, at * dim : (at + 1) * dim], part))

    def _norm_heads(self, part: SelfAttention, *all_heads: Tensor | None) -> None:
        for heads, norm in zip(all_heads, part.norms, strict=False):
            if heads is not None:
                self.norm(norm, heads, heads)

    def _fed(self, part: Mlp, x: Tensor, into: str = "change") -> Tensor:
        inner = [inner for inner in (part.gate, part.up) if inner is not None]
        gate, *up = self.products(
            inner, x, [self.take(f"inner {at}", product.outputs) for at, product in enumerate(inner)]
        )
        kind, table = activation_of(part.activation, gate.dtype)
        self.jobs.append(layer_ops.gating(gate, up[0] if up else self.beside if part.is_beside else None, kind, table))
        (out,) = self.products([part.down], gate, [self.take(into, part.down.outputs)])
        return out

    def products(self, products: Sequence[Product], x: Tensor, outs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Multiply rows; returns the results, which are in `outs` if weights are packed."""
        if not all(id(part.module) in self._weights for part in products):
            self.run()
            called = {id(part.module): part.module for part in products}
            whole = {key: linear(x) for key, linear in called.items()}
            return [
                whole[id(part.module)][..., part.first : part.first + part.outputs].contiguous() for part in products
            ]
        weights, biases = list[PackedWeight](), list[Tensor | None]()
        for part in products:
            weight, bias = self._weights[id(part.module)], part.module._parameters["bias"]
            is_whole = part.outputs == weight.outputs
            weights.append(weight if is_whole else part_of(weight, part))
            biases.append(bias if is_whole or bias is None else bias[part.first : part.first + part.outputs])
        self.jobs += _products_of(weights, x, biases, outs, self._prepared)
        return outs


def _by_experts(
    weights: Sequence[Any], x: Tensor, bias: Tensor | None, outs: Sequence[Tensor], routing: Routing
) -> list[Job]:
    """Jobs that multiply routed rows by weights of experts: by some in blocks, or by one, which may have a bias."""
    if isinstance(weights[0], ExpertWeight):
        return [experts.products(x, weights[0], bias, outs[0], routing.chosen, len(x))]
    return _products_of(weights, x, [None] * len(weights), outs, routing.prepared, routing.chosen)


def _products_of(
    weights: Sequence[PackedWeight],
    x: Tensor,
    biases: Sequence[Tensor | None],
    outs: Sequence[Tensor],
    prepared: Tensor | None,
    chosen: Tensor | None = None,
) -> list[Job]:
    """Jobs of `packed_product.product`, where consecutive weights of one type share a job."""
    kinds = [(weight.packed.dtype, weight.is_stored, weight.kernel) for weight in weights]
    ends = [at for at in range(1, len(kinds)) if kinds[at] != kinds[at - 1]]
    jobs = list[Job]()
    for pair in pairwise((0, *ends, len(kinds))):
        some = slice(*pair)
        jobs += product(weights[some], x, biases[some], outs[some], prepared, chosen)
    return jobs
