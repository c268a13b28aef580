"""Decoder layers as jobs of the kernels: what stands before and after attention, and all layers of a pass at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.backend.cpu.exact_attention import PerNodeAttention
from lookahead.drafting.sizes import DEFAULT_NODES
from lookahead.hf.cache import TreeCache
from lookahead.kernels import layer_ops, row_attention
from lookahead.kernels.jobs import Job, run_table, table_of
from lookahead.kernels.packed_product import PackedWeight, prepared_rows, product
from lookahead.utils.addresses import KeepsAddresses

LINEARS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
MAX_TABLE_NODES = DEFAULT_NODES + 1  # of the tree of a pass that a table is made for, its root included
FEWEST_SLOTS = 16  # of a cache, to see how numbers change with the slot

Positions = tuple[Tensor, Tensor]
"""The cosines and sines of a pass, `[rows, tokens, dim]`, contiguous."""


class LayerParts(NamedTuple):
    """The parts of a decoder layer that is computed by jobs."""

    layer: Any
    attention: Any
    linears: tuple[Any, ...]  # as `LINEARS` names them
    norms: tuple[Any, ...]  # in front of attention, in front of the MLP, and of the heads of queries and keys
    eager: Callable[..., Any]
    options: dict[str, Any]  # of the attention function
    known: dict[Any, Any]  # of `packed_weights`

    @property
    def reimplemented(self) -> tuple[Any, ...]:
        """The modules whose code the jobs stand for; linear layers are those of `lookahead.backend.cpu.linears`."""
        mlp = self.layer.mlp
        return (self.layer, self.attention, mlp, mlp.act_fn, *self.norms)

    @property
    def biases(self) -> list[Tensor | None]:
        """Those of the linear layers."""
        return [each._parameters["bias"] for each in self.linears]


class Space(NamedTuple):
    """What the jobs of a layer write, `[rows, tokens, size]`."""

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
        """For so many tokens a row."""
        outputs = [each.outputs for each in weights]
        query, size, inner = outputs[0], outputs[3], outputs[4]
        sizes = size, query, query, size, size, inner, inner, size
        tensors = [hidden.new_empty(len(hidden), tokens, each) for each in sizes]
        return cls._make([*tensors, prepared_rows(weights, len(hidden) * tokens)])

    def first(self, tokens: int) -> Space:
        """The part of the first tokens, of a single row."""
        return Space._make([*(each[:, :tokens] for each in self[:-1]), self.prepared])


def norm_of(module: Any, x: Tensor, out: Tensor, **added: Tensor) -> Job:
    """The job of an RMSNorm."""
    return layer_ops.norm(x, module._parameters["weight"], out, module.variance_epsilon, **added)


def jobs_of_heads(parts: LayerParts, query: Tensor, key: Tensor, positions: Positions) -> list[Job]:
    """Norms of heads, where the layer has some, and rotation."""
    jobs = list[Job]()
    for each, norm in zip((query, key), parts.norms[2:], strict=False):
        heads = each.view(*each.shape[:2], -1, positions[0].shape[-1])
        jobs.append(norm_of(norm, heads, heads))
    return [*jobs, layer_ops.rotation(query, key, *positions)]


def jobs_before(
    parts: LayerParts,
    weights: Sequence[PackedWeight],
    first: Job,
    space: Space,
    key: Tensor,
    value: Tensor,
    positions: Positions,
) -> list[Job]:
    """From the first norm of a layer to rotated queries and keys; keys and values go where they are told."""
    outs = space.query, key, value
    products = product(weights[:3], space.normed, parts.biases[:3], outs, space.prepared)
    return [first, *products, *jobs_of_heads(parts, space.query, key, positions)]


def jobs_after(parts: LayerParts, weights: Sequence[PackedWeight], hidden: Tensor, space: Space) -> list[Job]:
    """From attention to `space.total` and `space.change`, whose sum is the layer's result."""
    biases, (normed, _, attended, delta, total, gate, up, change, prepared) = parts.biases, space
    return [
        *product(weights[3:4], attended, biases[3:4], (delta,), prepared),
        norm_of(parts.norms[1], hidden, normed, delta=delta, total=total),
        *product(weights[4:6], normed, biases[4:6], (gate, up), prepared),
        layer_ops.gating(gate, up),
        *product(weights[6:], gate, biases[6:], (change,), prepared),
    ]


def _packed(weights: Sequence[PackedWeight]) -> Iterator[Tensor]:
    return (each.packed for each in weights)


class LayerTable(KeepsAddresses):
    """All layers of a pass over one row whose nodes attend alone, as one call.

    Its numbers are addresses and sizes. Each is affine in the tokens of the pass and the slot of the first, so that
    those of a pass take three operations. They are for certain weights, and for the buffers that a cache has now.
    """

    def __init__(
        self, layers: Sequence[LayerParts], weights: Sequence[PackedWeight], cache: TreeCache, hidden: Tensor, dim: int
    ) -> None:
        self._layers, self._weights, self._slots = layers, weights, cache.slots  # the cache holds the table
        most, size = MAX_TABLE_NODES, hidden.shape[2]
        self._hidden, self._space = hidden.new_empty(1, most, size), Space.of(hidden, weights[:7], most)
        self._positions = hidden.new_empty(1, most, dim), hidden.new_empty(1, most, dim)
        self._nodes, self._tree = (np.zeros(shape, np.int64) for shape in ((1, 2, most), (1, 3)))
        self._threads = torch.get_num_threads()
        for at in range(len(layers)):
            cache.places(at)  # which allocates what the slots of a pass need
        self._buffers, self._addresses = self._newest_buffers(), self._newest_addresses()
        one, two, later = (self._numbers(cache, *each) for each in ((1, 0), (2, 0), (1, 1)))
        self._by_token, self._by_slot = two - one, later - one
        self._base = one - self._by_token
        self.is_right = bool((self._numbers(cache, 3, 5) == self._of(3, 5)).all())

    def serves(self, weights: Sequence[PackedWeight]) -> bool:
        """Whether the table is for these weights, and nothing has moved since."""
        return (
            (weights is self._weights or all(map(is_, _packed(weights), _packed(self._weights))))
            and self._threads == torch.get_num_threads()
            and self._buffers == self._newest_buffers()
            and self._addresses == self._newest_addresses()
        )

    def run(self, hidden: Tensor, positions: Positions, per_node: PerNodeAttention) -> Tensor:
        """The result of the last layer for hidden states `[1, tokens, size]`; at most `MAX_TABLE_NODES` of them."""
        tokens, tree = hidden.shape[1], per_node.trees[0]
        self._hidden[:, :tokens] = hidden
        for held, each in zip(self._positions, positions, strict=True):
            held[:, :tokens] = each
        self._nodes[0, :, : len(tree)] = tree.parents, tree.depths
        self._tree[0] = per_node.starts[0], len(tree), per_node.scored[0]
        numbers = self._of(tokens, self._slots.start)
        run_table(numbers.ctypes.data, self._threads)
        return self._space.total[:, :tokens] + self._space.change[:, :tokens]

    def _newest_buffers(self) -> tuple[int, int]:
        return self._slots.capacity, self._slots.allocations

    def _newest_addresses(self) -> list[int]:
        """Where the norms and biases are, which may be replaced."""
        norms = [norm._parameters["weight"] for parts in self._layers for norm in parts.norms]
        biases = [bias for parts in self._layers for bias in parts.biases if bias is not None]
        return [each.data_ptr() for each in (*norms, *biases)]

    def _of(self, tokens: int, slot: int) -> NDArray[np.int64]:
        """The numbers of a pass of some tokens, the first of which goes to a slot."""
        numbers: NDArray[np.int64] = self._base + tokens * self._by_token + slot * self._by_slot
        return numbers

    def _numbers(self, cache: TreeCache, tokens: int, slot: int) -> NDArray[np.int64]:
        """Those numbers, read off the jobs."""
        space, own = self._space.first(tokens), self._hidden[:, :tokens]
        cos, sin = (each[:, :tokens] for each in self._positions)
        tree = {"nodes": torch.from_numpy(self._nodes), "trees": torch.from_numpy(self._tree)}
        jobs = list[Job]()
        for at, parts in enumerate(self._layers):
            weights, layer = self._weights[7 * at : 7 * at + 7], cache.layers[at]
            key, value = (each.narrow(1, slot, tokens) for each in (layer.keys, layer.values))
            added = {"delta": space.change, "total": own} if at else {}
            first = norm_of(parts.norms[0], space.total if at else own, space.normed, **added)
            jobs += jobs_before(parts, weights, first, space, key, value, (cos, sin))
            query, attended = (each.view(1, tokens, -1, cos.shape[-1]) for each in (space.query, space.attended))
            scale = parts.options["scaling"]
            jobs.append(row_attention.attention(query, layer.keys, layer.values, attended, **tree, scale=scale))
            jobs += jobs_after(parts, weights, own, space)
        return np.array(table_of(jobs, self._threads))
