"""Whether fused layers compute what the layers themselves do, compared once for each class, code and sizes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lookahead.backend.cpu.activations import VECTORS, activation_of
from lookahead.backend.cpu.layer_jobs import DeclaredLayer, LayerJobs
from lookahead.backend.cpu.routing import Routing, called
from lookahead.errors import with_place
from lookahead.kernels import experts, layer_ops, norm_rows
from lookahead.kernels.jobs import run
from lookahead.model.facts import experts_name
from lookahead.model.families.operations import ClampedGlu, Experts, Mlp, Product, sizes_of
from lookahead.model.known_code import arithmetic_flags

Fused = Callable[..., Tensor]
"""The fused form of a declared layer, for its hidden states and its cosines and sines."""

_ROWS, _ROUNDINGS = 32, 8  # rows whose sums, and whose results are compared
_TOLERANCE = 1e-4  # in float32, relative to the largest output
_OCTAVES = 4  # range of added results of experts in powers of two either way

_log = logging.getLogger(__name__)
_probed: dict[Any, bool] = {}


def is_right(layer: DeclaredLayer, code: int, fused: Fused) -> bool:
    """Whether a fused layer computes the same as the layer itself; compared once per class, code and sizes."""
    rope, attention = layer.rope, layer.attention
    kind = (
        type(layer.module), code, arithmetic_flags(), layer.norms[0].weight.dtype, torch.get_num_threads(),
        attention and (attention.dim, *attention.heads, attention.norms_last, attention.has_gate, attention.has_keys),
        attention and (len(attention.inputs), len(attention.gates)),
        rope and rope[1:],
        *((norm.weight.shape, norm.eps, norm.kind) for norm in layer.norms),
        *((part.factor, part.scaled is None, part.is_parallel, part.is_last) for part in layer.residuals),
        *(
            (type(linear), type(weight), weight.dtype, weight.shape, getattr(parameters.get("bias"), "dtype", None))
            for linear in layer.linears
            for parameters in (linear._parameters,)
            for weight in (parameters["weight"],)
        ),
        *map(type, layer.activations),
        layer.called and (type(layer.called.module), layer.called.angles),
        *_kind_of(layer.experts),
    )  # fmt: skip
    if kind not in _probed:
        _probed[kind] = _computes_the_same(layer, fused) and all(
            keeps_means(norm.weight.dtype, len(norm.weight), norm.kind) for norm in layer.norms
        )
    return _probed[kind]


def _kind_of(part: Experts | None) -> Iterator[Any]:
    """What decides in which order a mixture adds, and of how many numbers."""
    if part is not None:
        yield from (part.chosen, part.is_wide, len(part.gates), *(tensor.shape for tensor in part.tensors))
        yield getattr(part.experts, "kinds", None)  # formats may have blocks of one size
        yield part.activation if isinstance(part.activation, ClampedGlu) else None
        # It may be set between two calls: one adds by the numbers of the experts, others as they were chosen.
        yield experts_name(getattr(part.experts, "config", None))


class _RowsAlone(LayerJobs):
    """Jobs whose linear layers multiply each row alone."""

    def products(self, products: Sequence[Product], x: Tensor, outs: Sequence[Tensor]) -> Sequence[Tensor]:
        parts = [super(_RowsAlone, self).products(products, row, ()) for row in x.split(1, 1)]
        return [torch.cat(rows, 1) for rows in zip(*parts, strict=True)]


def _random(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=source, dtype=torch.float32, device="cpu")


def _computes_the_same(layer: DeclaredLayer, fused: Fused) -> bool:
    """Compare a layer, its norms and its rotation with their fused forms on two rows of three tokens."""
    rope, called = layer.rope, layer.called
    dim = called.angles if called else 2 if layer.attention is None else layer.attention.dim
    dtype, source = layer.norms[0].weight.dtype, torch.Generator().manual_seed(0)
    size = len(layer.norms[0].weight) if called else sizes_of(layer.residuals[0].mixer.products[0].module)[0]
    x = _random(source, 2, 3, size).to(dtype)
    angles = _random(source, 2, 3, dim if rope is None else rope.angles)
    query, key = (_random(source, 2, 3, heads, dim).to(dtype) for heads in (2, 1))
    of_angles = torch.float32 if rope is not None and rope.is_wide else dtype
    places = angles.cos().to(of_angles), angles.sin().to(of_angles)
    try:
        pairs = _mixed(layer, source) if layer.experts else []
        # By its own code a mixture has other bits for several rows than for one.
        first = (slice(1), slice(1)) if layer.experts else (slice(2), slice(3))
        some, cos, sin = (tensor[first].contiguous() for tensor in (x, *places))
        more = _more_inputs(layer, source, some)
        positions: Any = None if _needs_no_positions(layer) else (cos, sin)
        if called and called.is_complex:
            positions = torch.complex(cos.float(), sin.float())
        own = type(layer.module).forward(layer.module, some, position_embeddings=positions, **more())
        if not isinstance(own, Tensor):
            raise TypeError(f"it returns a {type(own).__name__}, not hidden states")
        pairs.append((own, fused(layer, some, positions, **more())))
        if rope is not None:
            rotate = vars(sys.modules[layer.family.file])["apply_rotary_pos_emb"]
            is_single = "x" in signature(rotate).parameters  # it rotates queries, and then keys
            turned = [heads[..., : rope.size] for heads in (query, key)]  # some layers pass on only these
            rotated = (
                [rotate(heads, *places, unsqueeze_dim=2) for heads in turned]
                if is_single
                else rotate(*turned, *places, unsqueeze_dim=2)
            )
            run(layer_ops.rotation(query, key, *places, dim, rope.size, are_neighbours=rope.are_neighbours))
            pairs += zip(rotated, turned, strict=True)
        for norm in layer.norms:
            states = _random(source, 6, len(norm.weight)).to(dtype)
            normed = torch.empty_like(states)
            run(layer_ops.norm(states, norm.weight, normed, norm.eps, kind=norm.kind, bias=norm.bias))
            pairs.append((type(norm.module).forward(norm.module, states), normed))
    except (RuntimeError, TypeError, ValueError) as error:  # e.g. an unknown transformers version or an unusual weight
        _log.warning("layers of %s are not fused: %s", type(layer.module).__name__, with_place(error))
        return False
    if dtype == torch.bfloat16:
        kinds: set[Any] = {type(activation) for activation in layer.activations if isinstance(activation, nn.Module)}
        has_rest, part = any(width % VECTORS for width in _widths_of(layer)), layer.experts
        return (
            all(torch.equal(*pair) for pair in pairs)
            and all(keeps_activation(kind, has_rest=has_rest) for kind in kinds)
            and (part is None or keeps_sums(part.chosen, part.sizes[2], is_wide=part.is_wide))
        )
    return all(bool((own - ours).abs().max() <= _TOLERANCE * own.abs().max()) for own, ours in pairs)


def _widths_of(layer: DeclaredLayer) -> Iterator[int]:
    """How many numbers of a token are activated at once."""
    mixers = [part.mixer for part in layer.residuals]
    if layer.experts is not None:
        yield layer.experts.sizes[1]
        mixers += [layer.experts.shared] if layer.experts.shared else []
    yield from (mixer.gate.outputs for mixer in mixers if isinstance(mixer, Mlp))


def _needs_no_positions(layer: DeclaredLayer) -> bool:
    """Whether a layer without a rotary embedding rotates if it gets positions, which its model does not give."""
    part = layer.attention
    if part is None or part.rope is not None:
        return False
    positions = signature(type(part.module).forward).parameters.get("position_embeddings")
    return positions is None or positions.default is None


def _more_inputs(layer: DeclaredLayer, source: torch.Generator, x: Tensor) -> Callable[[], dict[str, Any]]:
    """What a layer takes besides hidden states and positions: keys and values of others, and a second input."""
    part, more, shared = layer.attention, dict[str, Any](), dict[str, tuple[Tensor, ...]]()
    rows, tokens = x.shape[:2]
    if part is not None and part.shared:
        shape = rows, part.heads[1], tokens, part.dim
        shared[part.shared] = tuple(_random(source, *shape).to(x.dtype) for _ in range(2))
    if layer.reach is not None:
        more["position_ids"] = torch.zeros(rows, tokens, dtype=torch.int64, device="cpu")
    sizes = [one.mixer.gate.outputs for one in layer.residuals if isinstance(one.mixer, Mlp) and one.mixer.is_beside]
    if sizes:
        more[layer.family.beside] = _random(source, rows, tokens, *sizes).to(x.dtype)
    return lambda: {**more, **({"shared_kv_states": dict(shared)} if shared else {})}


def _mixed(layer: DeclaredLayer, source: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """The results of a mixture for some rows, each alone by its own code, and all of them by the kernels."""
    part = layer.experts
    assert part is not None
    x = _random(source, 1, _ROWS, part.sizes[2]).to(part.router._parameters["weight"].dtype)
    own = torch.cat([called(part, row) for row in x.split(1, 1)], 1)
    nothing: Any = None  # a mixture does not attend
    jobs = _RowsAlone(
        lambda name, size: x.new_empty(1, _ROWS, size), {}, None, {}, nothing,
        lambda part: Routing(part, _ROWS, x.dtype),
    )  # fmt: skip
    jobs.mixture = layer.mixture()
    fused = jobs.mixed(part, x)
    jobs.run()
    return [(own, fused)]


@lru_cache(maxsize=64)
@torch.inference_mode()
def keeps_means(dtype: torch.dtype, size: int, kind: int) -> bool:
    """Whether the kernel sums in torch's order, which the bits of a bfloat16 norm seldom show."""
    if dtype != torch.bfloat16:
        return True
    source = torch.Generator().manual_seed(0)
    x = _random(source, _ROWS, size).to(dtype)
    if kind == norm_rows.LAYER:
        return _keeps_moments(x, source)
    means = torch.empty(_ROWS, dtype=torch.float32, device="cpu")
    run(layer_ops.norm(x, x[0], torch.empty_like(x), 0.0, means=means))
    return torch.equal(means, x.float().pow(2).mean(-1))


def _keeps_moments(x: Tensor, source: torch.Generator) -> bool:
    """Whether the kernel has the moments of torch's layer norm of bfloat16 rows, and rounds as it does."""
    size, eps = x.shape[1], 1e-5
    ones, moments = x.new_ones(size), torch.empty(2, len(x), dtype=torch.float32, device="cpu")
    run(layer_ops.norm(x, ones, torch.empty_like(x), eps, kind=norm_rows.LAYER, means=moments))
    _, *of_torch = torch.native_layer_norm(x, [size], ones.float(), None, eps)
    pairs = [(one[:, 0], own) for one, own in zip(of_torch, moments, strict=True)]
    for row in x[:_ROUNDINGS]:
        weight, normed = _random(source, size).to(x.dtype), torch.empty_like(row)
        bias = -nn.functional.layer_norm(row, [size], weight, None, eps)  # what is left shows every rounding
        run(layer_ops.norm(row, weight, normed, eps, kind=norm_rows.LAYER, bias=bias))
        pairs.append((nn.functional.layer_norm(row, [size], weight, bias, eps), normed))
    return all(torch.equal(*pair) for pair in pairs)


@lru_cache(maxsize=8)
@torch.inference_mode()
def keeps_activation(kind: Any, *, has_rest: bool = False) -> bool:
    """Whether the kernel has torch's bits for every bfloat16 value.

    `has_rest` says that rows have numbers after whole blocks of vectors, which torch computes one by one.
    """
    x = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)
    module = kind()
    fused, own = x.clone(), [module(x)]
    if has_rest:
        own.append(torch.cat([module(part) for part in x.split(VECTORS // 2 - 1)]))
    run(layer_ops.gating(fused, torch.ones_like(x), *activation_of(module, x.dtype)))
    return all(
        torch.equal(result.isnan(), fused.isnan()) and torch.equal(result.nan_to_num(0), fused.nan_to_num(0))
        for result in own
    )


@lru_cache(maxsize=64)
@torch.inference_mode()
def keeps_sums(chosen: int, size: int, *, is_wide: bool) -> bool:
    """Whether the kernel adds results of experts in torch's order, which sums that nearly cancel show."""
    source = torch.Generator().manual_seed(0)
    octaves = torch.randint(-_OCTAVES, _OCTAVES + 1, (chosen, size), generator=source, device="cpu")
    results = (_random(source, chosen, size) * 2.0**octaves).bfloat16()
    factors = torch.rand(chosen, generator=source, dtype=torch.float32, device="cpu")
    factors = factors if is_wide else factors.bfloat16()
    for last in {chosen // 2, chosen - 1} - {0}:
        results[last] = 0
        results[last] = (-(results * factors[:, None]).double().sum(0) / factors[last]).bfloat16()
    out, places = torch.empty_like(results[:1]), torch.arange(chosen, device="cpu")[None]
    run(experts.combine(results, factors.float()[None], places, out, is_wide=is_wide))
    own = (results * factors[:, None]).view(1, chosen, size).sum(1).bfloat16()
    return torch.equal(own, out)
