"""Decoder layers as jobs of the kernels: the parts before and after attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from lookahead.kernels import layer_ops
from lookahead.kernels.jobs import Job
from lookahead.kernels.packed_product import PackedWeight, prepared_rows, product

LINEARS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"

Positions = tuple[Tensor, Tensor]
"""The cosines and sines of a pass, `[rows, tokens, dim]`, contiguous."""


class LayerParts(NamedTuple):
    """The parts of a decoder layer that jobs compute."""

    layer: Any
    attention: Any
    linears: tuple[Any, ...]  # in the order of `LINEARS`
    norms: tuple[Any, ...]  # before attention, before the MLP, and of the heads of queries and keys
    eager: Callable[..., Any]
    options: dict[str, Any]  # of the attention function
    known: dict[Any, Any]  # cache of `packed_weights`

    @property
    def reimplemented(self) -> tuple[Any, ...]:
        """The modules that the jobs reimplement; `lookahead.backend.cpu.linears` handles linear layers."""
        mlp = self.layer.mlp
        return (self.layer, self.attention, mlp, mlp.act_fn, *self.norms)

    @property
    def biases(self) -> list[Tensor | None]:
        """The biases of the linear layers."""
        return [linear._parameters["bias"] for linear in self.linears]


class Space(NamedTuple):
    """Output buffers of the jobs of a layer, `[rows, tokens, size]`."""

    normed: Tensor
    query: Tensor
    attended: Tensor
    delta: Tensor
    total: Tensor
    gate: Tensor
    up: Tensor
    change: Tensor
    prepared: Tensor | None  # of `packed_product.prepared_rows`

    @classmethod
    def of(cls, hidden: Tensor, weights: Sequence[PackedWeight], tokens: int) -> Space:
        """Buffers for `tokens` tokens per row; `weights` are of layers of one size, and others that use `prepared`."""
        outputs = [weight.outputs for weight in weights[: len(LINEARS)]]
        query, size, inner = outputs[0], outputs[3], outputs[4]
        sizes = size, query, query, size, size, inner, inner, size
        tensors = [hidden.new_empty(len(hidden), tokens, size) for size in sizes]
        return cls._make([*tensors, prepared_rows(weights, len(hidden) * tokens)])

    def first(self, tokens: int) -> Space:
        """The buffers of the first tokens of a single row."""
        return Space._make([*(each[:, :tokens] for each in self[:-1]), self.prepared])


def norm_of(module: Any, x: Tensor, out: Tensor, **added: Tensor) -> Job:
    """The job of an RMSNorm."""
    return layer_ops.norm(x, module._parameters["weight"], out, module.variance_epsilon, **added)


def jobs_of_heads(parts: LayerParts, query: Tensor, key: Tensor, positions: Positions) -> list[Job]:
    """Norms of heads, if the layer has some, and rotation."""
    jobs = list[Job]()
    for each, norm in zip((query, key), parts.norms[2:], strict=False):
        heads = each.view(*each.shape[:2], -1, positions[0].shape[-1])
        jobs.append(norm_of(norm, heads, heads))
    return [*jobs, layer_ops.rotation(query, key, *positions)]


def _products(
    weights: Sequence[PackedWeight],
    x: Tensor,
    biases: Sequence[Tensor | None],
    outs: Sequence[Tensor],
    prepared: Tensor | None,
) -> list[Job]:
    """Jobs that multiply rows by several weights; consecutive weights of one type share a job."""
    kinds = [(weight.packed.dtype, weight.kernel) for weight in weights]
    ends = [at for at in range(1, len(kinds)) if kinds[at] != kinds[at - 1]]
    parts = [slice(*pair) for pair in pairwise((0, *ends, len(kinds)))]
    return [job for part in parts for job in product(weights[part], x, biases[part], outs[part], prepared)]


def jobs_before(
    parts: LayerParts,
    weights: Sequence[PackedWeight],
    first: Job,
    space: Space,
    key: Tensor,
    value: Tensor,
    positions: Positions,
) -> list[Job]:
    """From the first norm of a layer to rotated queries and keys.

    Args:
        parts: The layer.
        weights: Its packed weights, in the order of `LINEARS`.
        first: The job of its first norm.
        space: Output buffers of the jobs.
        key: Output for the keys, `[rows, tokens, kv_heads * dim]`.
        value: Output for the values, of the same shape.
        positions: Cosines and sines.
    """
    outs = space.query, key, value
    products = _products(weights[:3], space.normed, parts.biases[:3], outs, space.prepared)
    return [first, *products, *jobs_of_heads(parts, space.query, key, positions)]


def jobs_after(parts: LayerParts, weights: Sequence[PackedWeight], hidden: Tensor, space: Space) -> list[Job]:
    """The jobs from attention to `space.total` and `space.change`, whose sum is the layer's result."""
    biases, (normed, _, attended, delta, total, gate, up, change, prepared) = parts.biases, space
    return [
        *_products(weights[3:4], attended, biases[3:4], (delta,), prepared),
        norm_of(parts.norms[1], hidden, normed, delta=delta, total=total),
        *_products(weights[4:6], normed, biases[4:6], (gate, up), prepared),
        layer_ops.gating(gate, up),
        *_products(weights[6:], gate, biases[6:], (change,), prepared),
    ]
