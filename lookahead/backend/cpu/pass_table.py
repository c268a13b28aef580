"""A pass over token trees as one kernel call: a table of the jobs' numbers, made once and adjusted for every pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.backend.cpu.layer_jobs import LINEARS, LayerParts, Positions, Space, jobs_after, jobs_before, norm_of
from lookahead.drafting.sizes import DEFAULT_NODES
from lookahead.drafting.tree import TokenTree
from lookahead.kernels import row_attention
from lookahead.kernels.jobs import Job, leader, table_of
from lookahead.kernels.layer_ops import storing
from lookahead.kernels.packed_product import PackedWeight, product
from lookahead.kernels.team import team_of
from lookahead.model.cache import TreeCache
from lookahead.model.kv_origins import Origin, sharing_groups
from lookahead.utils.addresses import KeepsAddresses

MAX_TABLE_NODES = DEFAULT_NODES + 1  # of one tree, its root included
MAX_BATCH_NODES = 256  # of all trees of a pass over several rows


class PassParts(NamedTuple):
    """The modules of a model whose passes run as one call."""

    layers: list[LayerParts]
    norm: Any  # after the last layer
    head: Any  # the output layer; None if it is called as a module


class PassTable(KeepsAddresses):
    """A pass over the trees of some rows as one call, with attention per node.

    The table's numbers are addresses and sizes. Each is affine in the tokens of the pass, the slot of the first token
    and the address of the output, so adjusting them takes few operations. A table is for certain weights, for the
    current buffers of a cache, and for one number of rows. The nodes of all rows are concatenated without padding. A
    single row writes its keys and values into its slots; several rows copy them there. Rows whose first keys and
    values are copies of one text read them once.

    Args:
        parts: The modules.
        weights: The packed weights of the linear layers.
        of_head: The packed weight of the head; empty without a head.
        cache: The cache, which holds the table.
        hidden: Hidden states of any pass, `[1, tokens, size]`.
        dim: Size of a head.
        rows: Rows of the pass.
        keeps: Hidden states that passes keep, as indices in `output_hidden_states`.
    """

    def __init__(
        self,
        parts: PassParts,
        weights: Sequence[PackedWeight],
        of_head: Sequence[PackedWeight],
        cache: TreeCache,
        hidden: Tensor,
        dim: int,
        rows: int,
        keeps: tuple[int, ...] = (),
    ) -> None:
        self._parts, self._weights, self._of_head, self._slots = parts, weights, of_head, cache.slots
        self.query_size = weights[0].outputs  # elements of a node's queries
        self.outputs = of_head[0].outputs if of_head else hidden.shape[2]  # elements of a node's output
        most, size = MAX_TABLE_NODES if rows == 1 else MAX_BATCH_NODES, hidden.shape[2]
        self._hidden = hidden.new_empty(1, most, size)
        # The layer that starts with them reads them here. Place 0 is the input of a pass.
        self._kept = {place: hidden.new_empty(1, most, size) for place in keeps if place}
        self._space = Space.of(hidden, [*weights, *of_head], most)
        self._positions = hidden.new_empty(1, most, dim), hidden.new_empty(1, most, dim)
        shapes = (rows, 2, MAX_TABLE_NODES), (rows, 4), (most,), (rows, 2 + row_attention.MAX_SHARING)
        self._nodes, self._trees, self._places, self._groups = (np.zeros(shape, np.int64) for shape in shapes)
        self._origins: list[Origin] = []  # of the rows when they were grouped
        self._sharing_step = row_attention.sharing_step(hidden.dtype)
        self._written = [hidden.new_empty(1, most, weight.outputs) for weight in weights[1:3]] if rows > 1 else []
        self._threads = torch.get_num_threads()
        for at in range(len(parts.layers)):
            cache.is_ready(at)  # allocates the slots
        self._buffers, self._settings = (cache.slots.capacity, cache.slots.allocations), list(_settings_of(parts))
        written = hidden.new_empty(2)  # two addresses, to see which numbers depend on the output's address
        step = written[1:].data_ptr() - written.data_ptr()
        one, two, later, moved = (
            self._numbers(cache, tokens, slot, written[place:])
            for tokens, slot, place in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1))
        )
        self._by_token, self._by_slot, self._by_address = two - one, later - one, (moved - one) // step
        self._base = one - self._by_token - written.data_ptr() * self._by_address
        self.is_right = bool((self._numbers(cache, 3, 5, written[1:]) == self._of(3, 5, written[1:])).all())

    def serves(self, parts: PassParts, weights: Sequence[PackedWeight], of_head: Sequence[PackedWeight]) -> bool:
        """Whether the table is for these weights and module settings, and nothing has moved since."""
        return (
            (weights is self._weights or _are_same(weights, self._weights))
            and (of_head is self._of_head or _are_same(of_head, self._of_head))
            and self._threads == torch.get_num_threads()
            and self._buffers == (self._slots.capacity, self._slots.allocations)
            and self._settings == list(_settings_of(parts))
        )

    def run(
        self,
        hidden: Tensor,
        positions: Positions,
        trees: Sequence[TokenTree],
        starts: Sequence[int],
        scored: Sequence[int],
        threads: int,
    ) -> Tensor:
        """Run a pass.

        Args:
            hidden: Embedded tokens of all rows, concatenated, `[1, tokens, size]`.
            positions: Cosines and sines, `[1, tokens, dim]`.
            trees: One tree per row, each of at most `MAX_TABLE_NODES` nodes.
            starts: The slots of their roots.
            scored: How many first nodes of each tree are not in the pass.
            threads: Threads that share the jobs, at most torch's number of threads.

        Returns:
            The logits, `[1, tokens, vocab]`; without a head the normed hidden states.
        """
        tokens = hidden.shape[1]
        self._hidden[:, :tokens] = hidden
        for held, each in zip(self._positions, positions, strict=True):
            held[:, :tokens] = each
        if self._slots.origins[: len(starts)] != self._origins:
            self._group(starts)
        first, capacity = 0, self._slots.capacity
        for row, (tree, start, done) in enumerate(zip(trees, starts, scored, strict=True)):
            nodes = len(tree.tokens)
            self._nodes[row, :, :nodes] = tree.parents, tree.depths
            self._trees[row] = start, nodes, done, first
            end, slot = first + nodes - done, row * capacity + start
            self._places[first:end] = range(slot + done, slot + nodes)
            first = end
        written = hidden.new_empty(1, tokens, self.outputs)
        numbers = self._of(tokens, self._slots.start, written)  # alive until the call ends
        leader()(team_of(threads) if threads > 1 else 0, numbers.ctypes.data, threads)
        return written

    def _group(self, starts: Sequence[int]) -> None:
        """Group the rows that share keys and values."""
        origins = self._slots.origins[: len(starts)]
        most = row_attention.MAX_SHARING
        self._groups[:] = sharing_groups(origins, starts, most=most, step=self._sharing_step)
        self._origins = origins

    def kept(self, hidden: Tensor) -> dict[int, Tensor]:
        """The hidden states that the newest pass kept, by place; `hidden`, `[1, tokens, size]`, was its input."""
        return {0: hidden} | {place: each[:, : hidden.shape[1]].clone() for place, each in self._kept.items()}

    def _of(self, tokens: int, slot: int, written: Tensor) -> NDArray[np.int64]:
        """The numbers of a pass of `tokens` tokens whose first goes to `slot`, by the affine formula."""
        of_pass: NDArray[np.int64] = self._base + tokens * self._by_token + slot * self._by_slot
        of_pass += written.data_ptr() * self._by_address
        return of_pass

    def _numbers(self, cache: TreeCache, tokens: int, slot: int, written: Tensor) -> NDArray[np.int64]:
        """The same numbers, read from the jobs."""
        space, own = self._space.first(tokens), self._hidden[:, :tokens]
        kept = {place: each[:, :tokens] for place, each in self._kept.items()}
        cos, sin = (position[:, :tokens] for position in self._positions)
        of_rows = {"nodes": self._nodes, "trees": self._trees, "groups": self._groups}
        trees = {name: torch.from_numpy(each) for name, each in of_rows.items()}
        places = torch.from_numpy(self._places)
        jobs, count = list[Job](), len(LINEARS)
        for at, parts in enumerate(self._parts.layers):
            weights, layer = self._weights[count * at : count * (at + 1)], cache.layers[at]
            if self._written:
                key, value = (each[:, :tokens] for each in self._written)
            else:
                key, value = (each[:1].narrow(1, slot, tokens) for each in (layer.keys, layer.values))
            read = kept.get(at, own)  # input of the layer
            added = {"delta": space.change, "total": read} if at else {}
            first = norm_of(parts.norms[0], space.total if at else read, space.normed, **added)
            jobs += jobs_before(parts, weights, first, space, key, value, (cos, sin))
            query, attended = (each.view(1, tokens, -1, cos.shape[-1]) for each in (space.query, space.attended))
            if self._written:
                jobs.append(storing(key, value, layer.keys, layer.values, places))
            scale = parts.options["scaling"]
            jobs.append(row_attention.attention(query, layer.keys, layer.values, attended, **trees, scale=scale))
            jobs += jobs_after(parts, weights, read, space)
        norm, head, added = self._parts.norm, self._parts.head, {"delta": space.change, "total": own}
        normed = kept.get(len(self._parts.layers), space.normed) if head else written
        jobs.append(norm_of(norm, space.total, normed, **added))
        if head:
            jobs += product(self._of_head, normed, [head._parameters["bias"]], (written,), space.prepared)
        return np.array(table_of(jobs))


def _settings_of(parts: PassParts) -> Iterator[float]:
    """Module settings that users may change: addresses of norms and biases, epsilons, attention scales."""
    for layer in parts.layers:
        for norm in layer.norms:
            yield norm._parameters["weight"].data_ptr()
            yield norm.variance_epsilon
        for linear in layer.linears:
            bias = linear._parameters["bias"]
            yield 0 if bias is None else bias.data_ptr()
        yield layer.options["scaling"]
    yield parts.norm._parameters["weight"].data_ptr()
    yield parts.norm.variance_epsilon
    if parts.head and (bias := parts.head._parameters["bias"]) is not None:
        yield bias.data_ptr()


def _are_same(weights: Sequence[PackedWeight], others: Sequence[PackedWeight]) -> bool:
    return all(each.packed is other.packed for each, other in zip(weights, others, strict=True))
