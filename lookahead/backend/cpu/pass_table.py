"""A pass over token trees as one kernel call: a table of the jobs' numbers, made once and adjusted for every pass.

With mixtures of experts or recurrent layers it is a call per layer: between two of them experts are chosen, or states
go from parents to children. Nor does the kernel attend everywhere: then queries attend between two calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.backend.cpu import latents
from lookahead.backend.cpu.layer_jobs import DeclaredLayer, HiddenSum, LayerJobs, Positions
from lookahead.backend.cpu.pass_parts import PassContext, PassParts, Watched, are_same, settings_of
from lookahead.backend.cpu.routing import Routing
from lookahead.drafting.sizes import DEFAULT_NODES
from lookahead.drafting.tree import TokenTree
from lookahead.kernels import row_attention
from lookahead.kernels.attention_rows import MAX_SHARING
from lookahead.kernels.jobs import Job, lay_out, lead_jobs, leader, table_of
from lookahead.kernels.layer_ops import storing
from lookahead.kernels.packed_product import PackedWeight, prepared_rows, product
from lookahead.kernels.team import team_of
from lookahead.model.attention import registered_attention
from lookahead.model.cache import TreeCache
from lookahead.model.facts import CACHE
from lookahead.model.families.operations import Called, Experts, Recurrence, SelfAttention
from lookahead.model.slots import Origin, sharing_groups
from lookahead.utils.addresses import KeepsAddresses
from lookahead.utils.jit import njit

MAX_TABLE_NODES = DEFAULT_NODES + 1  # of one tree, its root included
MAX_BATCH_NODES = 256  # of all trees of a pass over several rows


class PassTable(KeepsAddresses):
    """A pass over the trees of some rows as one call, with attention per node.

    The table's numbers are addresses and sizes. Each is affine in the tokens of the pass, the slot of the first token
    and the address of the output, so adjusting them takes few operations. A table is for certain weights, for the
    current buffers of a cache, and for one number of rows. The nodes of all rows are concatenated without padding. A
    single row writes its keys and values into its slots; several rows copy them there. Rows whose first keys and
    values are copies of one text read them once.

    Args:
        parts: The modules.
        weights: The packed weights of `parts.linears`.
        of_head: The packed weight of the head; empty without a head.
        cache: The cache, which holds the table.
        hidden: Hidden states of any pass, `[1, tokens, size]`.
        rows: Rows of the pass.
        keeps: Hidden states that passes keep, as indices in `output_hidden_states`.
        slopes: How the numbers of another table of this kind grow, which may have become wrong.
        packs_experts: Whether mixtures may keep packed copies of their weights.
        is_called: Whether queries attend by the model's own function, between two calls; then there is one row.
    """

    def __init__(
        self,
        parts: PassParts,
        weights: Sequence[PackedWeight],
        of_head: Sequence[PackedWeight],
        cache: TreeCache,
        hidden: Tensor,
        rows: int,
        keeps: tuple[int, ...] = (),
        slopes: NDArray[np.int64] | None = None,
        *,
        packs_experts: bool = False,
        is_called: bool = False,
    ) -> None:
        self._packs_experts, self.is_called = packs_experts, is_called
        self._watched = Watched.of(parts)
        self.parts, self._weights, self._of_head, self._slots = parts, weights, of_head, cache.slots
        self.outputs = of_head[0].outputs if of_head else hidden.shape[2]  # elements of a node's output
        self.most, size = MAX_TABLE_NODES if rows == 1 else MAX_BATCH_NODES, hidden.shape[2]
        self._by_linear = dict(zip(map(id, parts.linears), weights, strict=True))
        self._buffers: dict[tuple[str, int], Tensor] = {}  # by name and size
        self._routings: dict[tuple[int, ...], Routing] = {}  # of mixtures, by their sizes
        self._starts: list[int] = []  # bytes before each of the calls
        self._between: list[Callable[[int], None]] = []  # what runs after each call but the last one
        self._hidden = hidden.new_empty(1, self.most, size)
        # The layer that starts with them reads them here. Place 0 is the input of a pass.
        self._kept = {place: hidden.new_empty(1, self.most, size) for place in keeps if place}
        self._prepared = prepared_rows([*weights, *of_head], self.most)
        ropes = {rope.kind: rope for layer in parts.layers if (rope := layer.rope)}
        self._positions = dict[str, tuple[Tensor, ...]]()
        for rope in ropes.values():
            dtype = torch.float32 if rope.is_wide else hidden.dtype
            angles = (hidden.new_empty(1, self.most, rope.angles, dtype=dtype) for _ in range(2))
            self._positions[rope.kind] = tuple(angles)
        shapes = (rows, 2, MAX_TABLE_NODES), (rows, 4), (self.most,), (rows, 2 + MAX_SHARING)
        self._nodes, self._trees, self._places, self._groups = (np.zeros(shape, np.int64) for shape in shapes)
        self._origins: list[Origin] = []  # of the rows when they were grouped
        self._sharers: NDArray[np.int64] = np.ones(1, np.int64)  # threads of the pass
        tables = {"nodes": self._nodes, "trees": self._trees, "groups": self._groups, "threads": self._sharers}
        self.of_trees = {name: torch.from_numpy(table) for name, table in tables.items()}  # what the attention reads
        self.rows, self.places = rows, torch.from_numpy(self._places)  # slots, numbered over all rows
        self._sharing_step = row_attention.sharing_step(hidden.dtype)
        self._threads = torch.get_num_threads()
        self._context: PassContext | None = None  # of the running pass
        for at in parts.slotted:
            cache.is_ready(at)  # allocates the slots
        self._beside = hidden.new_empty(len(parts.layers), self.most, parts.beside)
        self.reads_beside, self.tokens = self._beside.shape[2] > 0, range(0)
        self._allocated, self._settings = (cache.slots.capacity, cache.slots.allocations), settings_of(self._watched)
        written = hidden.new_empty(2)  # two addresses, to see which numbers depend on the output's address
        # Reading the jobs takes most of the time. With slopes they are read twice, and then compared.
        first, other = self._numbers(cache, 1, 0, written), self._numbers(cache, 3, 5, written[1:])
        self._of_pass: NDArray[np.int64] = np.empty_like(first)  # the numbers of the newest pass
        inputs = self._hidden, *(one for pair in self._positions.values() for one in pair)
        self._inputs, self._address = [one.data_ptr() for one in inputs], self._of_pass.ctypes.data
        self.is_right = slopes is not None and self._grows(slopes, first, other, written)
        if slopes is None or not self.is_right:
            step = written[1:].data_ptr() - written.data_ptr()
            two, later, moved = (
                self._numbers(cache, tokens, slot, written[place:])
                for tokens, slot, place in ((2, 0, 0), (1, 1, 0), (1, 0, 1))
            )
            slopes = np.stack([two - first, later - first, (moved - first) // step])
            self.is_right = self._grows(slopes, first, other, written)
        self.slopes = slopes  # by a token, by a slot, and by a byte of the output's address

    def _grows(
        self, slopes: NDArray[np.int64], first: NDArray[np.int64], other: NDArray[np.int64], written: Tensor
    ) -> bool:
        """Use slopes from the numbers of a `first` pass; returns whether they give those of another."""
        if slopes.shape[1] != first.size:
            return False
        base = first - slopes[0] - written.data_ptr() * slopes[2]
        self._affine = np.stack([base, *slopes])
        lay_out(self._affine, 3, 5, written[1:].data_ptr(), self._of_pass)
        return bool((other == self._of_pass).all())

    def serves(self, parts: PassParts, weights: Sequence[PackedWeight], of_head: Sequence[PackedWeight]) -> bool:
        """Whether the table is for these weights and module settings, and nothing has moved since."""
        return (
            (weights is self._weights or are_same(weights, self._weights))
            and (of_head is self._of_head or are_same(of_head, self._of_head))
            and parts.layers is self.parts.layers
            and parts.norm is self.parts.norm
            and parts.head is self.parts.head
            and self._threads == torch.get_num_threads()
            and self._allocated == (self._slots.capacity, self._slots.allocations)
            and self._settings == settings_of(self._watched)
        )

    def is_for(self, tokens: int) -> bool:
        """Whether the table serves a number of tokens, if the model is as it was, and the buffers have not moved."""
        slots = self._slots
        return tokens in self.tokens and self._allocated == (slots.capacity, slots.allocations)

    def takes(self, hidden: Tensor, positions: Mapping[str, Positions], beside: Tensor | None) -> bool:
        """Whether inputs of `run` have the declared types, and cosines and sines the declared sizes."""
        return {hidden.dtype, hidden.dtype if beside is None else beside.dtype} == {self._hidden.dtype} and all(
            own.dtype == angles.dtype and angles.shape == (1, hidden.shape[1], own.shape[2])
            for kind, own_pair in self._positions.items()
            for own, angles in zip(own_pair, positions[kind], strict=True)
        )

    def run(
        self,
        hidden: Tensor,
        positions: Mapping[str, Positions],
        trees: Sequence[TokenTree],
        starts: Sequence[int],
        scored: Sequence[int],
        context: PassContext,
        beside: Tensor | None,
        threads: int,
    ) -> Tensor:
        """Run a pass.

        Args:
            hidden: Embedded tokens of all rows, concatenated, `[1, tokens, size]`.
            positions: Cosines and sines, `[1, tokens, dim]`, by the kind of rope.
            trees: One tree per row, each of at most `MAX_TABLE_NODES` nodes.
            starts: The slots of their roots.
            scored: How many first nodes of each tree are not in the pass.
            context: What runs between calls.
            beside: The second inputs of the layers, `[1, tokens, layers, size]`, if they have any.
            threads: Threads that share the jobs, at most torch's number of threads.

        Returns:
            The logits, `[1, tokens, vocab]`; without a head the normed hidden states.
        """
        tokens = hidden.shape[1]
        if beside is not None:
            self._beside[:, :tokens] = beside[0].transpose(0, 1)
        angles = [one for kind in self._positions for one in positions[kind]]
        inputs = [numbers.contiguous() for numbers in (hidden, *angles)]  # kept alive until they are copied
        for address, numbers in zip(self._inputs, inputs, strict=True):
            ctypes.memmove(address, numbers.data_ptr(), numbers.nbytes)
        if self._slots.origins[: len(starts)] != self._origins:
            self._group(starts)
        first, capacity, self._sharers[0] = 0, self._slots.capacity, threads
        for row, (tree, start, done) in enumerate(zip(trees, starts, scored, strict=True)):
            spans = row, start, done, first, capacity
            first = _place(tree.parents, tree.depths, spans, self._nodes, self._trees, self._places)
        self._context = context
        written = hidden.new_empty(1, tokens, self.outputs)
        lay_out(self._affine, tokens, self._slots.start, written.data_ptr(), self._of_pass)
        team = team_of(threads) if threads > 1 else 0
        first_call, *calls = (self._address + start for start in self._starts)
        leader()(team, first_call, threads)
        for then, call in zip(self._between, calls, strict=True):
            then(tokens)
            leader()(team, call, threads)
        self._context = None  # a cache that holds its table would not be freed at once
        return written

    def recur(self, part: Recurrence, tokens: int) -> None:
        """Compute a recurrent module for the first tokens between its products."""
        assert self._context is not None
        cache, firsts, before, *_ = self._context
        mixer, threads = self.parts.mixers[part.module], int(self._sharers[0])
        x = self.take("normed", self._hidden.shape[2])[:, :tokens]
        inputs = [self.take(f"input {at}", one.outputs)[:, :tokens] for at, one in enumerate(part.inputs)]
        out = self.take("recurred", part.output.module.in_features)[0, :tokens]
        inputs += [gate(x) for gate in part.gates]
        mixer.mix(mixer, inputs, out, firsts, before[part.module], cache, lambda *jobs: lead_jobs(jobs, threads))

    def attend(self, layer: DeclaredLayer, part: SelfAttention, tokens: int) -> None:
        """Let the first tokens attend by the model's own function."""
        assert self._context is not None
        own, config = (
            self._context.cache.layers[layer.index if part.source is None else part.source],
            part.module.config,
        )
        name = "queries" if part.has_gate or part.has_keys else "query"
        query = self.take(name, part.width)[:, :tokens].view(1, tokens, -1, part.dim)
        pair = (slots[:1, : self._slots.kv_length].transpose(1, 2) for slots in (own.keys, own.values))
        function = registered_attention(config, layer.eager)
        attended = function(part.module, query.transpose(1, 2), *pair, None, **part.options)[0]
        self.take("attended", part.width)[:, :tokens] = attended.view(1, tokens, -1)

    def open_gates(self, part: SelfAttention, tokens: int) -> None:
        """Run the gates of an attention for the first tokens."""
        x = self.take("normed", self._hidden.shape[2])[:, :tokens]
        for at, gate in enumerate(part.gates):
            self.take(f"gate {at}", part.heads[0])[:, :tokens] = gate(x)

    def call(self, layer: DeclaredLayer, part: Called, tokens: int, *, is_projected: bool = False) -> None:
        """Run a mixer's own code for the first tokens, or latent attention: from its projections to its output."""
        assert self._context is not None
        (cache, *_, positions, per_node), size = self._context, self._hidden.shape[2]
        x = self.take("normed", size)[:, :tokens]
        if part.rotate is None or self.rows > 1:
            out = part.module(x, position_embeddings=positions, **{CACHE: cache, "attention_mask": None})[0]
            self.take("change", size)[:, :tokens] = out
            return
        rows = latents.projected(part, self.take, tokens) if is_projected else latents.project(part, x)
        function = registered_attention(part.module.config, layer.eager)
        attended = latents.attend(part, rows, positions, cache, function, per_node)
        if is_projected:
            self.take("attended", attended.shape[2])[:, :tokens] = attended
        else:
            self.take("change", size)[:, :tokens] = part.module.o_proj(attended)

    def take(self, name: str, size: int) -> Tensor:
        """The buffer of a name for `size` numbers per token, `[1, most, size]`."""
        if (name, size) not in self._buffers:
            self._buffers[name, size] = self._hidden.new_empty(1, self.most, size)
        return self._buffers[name, size]

    def _group(self, starts: Sequence[int]) -> None:
        """Group the rows that share keys and values."""
        origins = self._slots.origins[: len(starts)]
        self._groups[:] = sharing_groups(origins, starts, most=MAX_SHARING, step=self._sharing_step)
        self._origins = origins

    def kept(self, hidden: Tensor) -> dict[int, Tensor]:
        """The hidden states that the newest pass kept, by place; `hidden`, `[1, tokens, size]`, was its input."""
        tokens = hidden.shape[1]
        return {0: hidden} | {place: states[:, :tokens].clone() for place, states in self._kept.items()}

    def _numbers(self, cache: TreeCache, tokens: int, slot: int, written: Tensor) -> NDArray[np.int64]:
        """The numbers of a pass of `tokens` tokens whose first goes to `slot`, read from the jobs."""
        kept = {place: states[:, :tokens] for place, states in self._kept.items()}
        positions = {kind: (cos[:, :tokens], sin[:, :tokens]) for kind, (cos, sin) in self._positions.items()}
        attend = _TableAttention(self, cache, tokens, slot)
        jobs = _TableJobs(
            lambda name, size: self.take(name, size)[:, :tokens],
            *(self._by_linear, self._prepared, positions, attend, self._routing),
        )
        stream = HiddenSum(self._hidden[:, :tokens])
        for at, layer in enumerate(self.parts.layers):
            attend.at, attend.layer, jobs.mixture = at, layer, layer.mixture(packs=self._packs_experts)
            jobs.beside = self._beside[at : at + 1, :tokens]
            stream = jobs.layer(layer.residuals, stream, kept.get(at))
        normed: Tensor | str = kept.get(len(self.parts.layers), "normed") if self._of_head else written
        _, last = jobs.normed(self.parts.norm, stream, normed)
        if self._of_head:
            biases = [self.parts.head._parameters["bias"]]
            jobs.jobs += product(self._of_head, last, biases, (written,), self._prepared)
        tables = [table_of(some) for some in (*jobs.calls, jobs.jobs)]
        self._starts = [8 * sum(map(len, tables[:at])) for at in range(len(tables))]
        self._between = jobs.between
        return np.array([number for table in tables for number in table])

    def _routing(self, part: Experts) -> Routing:
        key = part.chosen, *part.sizes
        if key not in self._routings:
            self._routings[key] = Routing(part, self.most, self._hidden.dtype)
        return self._routings[key]


class _TableJobs(LayerJobs):
    """Jobs of several calls, with functions to run between them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls, self.between = list[list[Job]](), list[Callable[[int], None]]()

    def pause(self, then: Callable[[int], None], tokens: int) -> None:
        self.calls.append(self.jobs)
        self.between.append(then)
        self.jobs = []


class _TableAttention:
    """Attention as a job, over the slots of a cache.

    Attributes:
        at: The running layer.
        layer: Its declaration.
    """

    layer: DeclaredLayer

    def __init__(self, table: PassTable, cache: TreeCache, tokens: int, slot: int) -> None:
        self._table, self._cache, self._tokens, self._slot, self.at = table, cache, tokens, slot, 0

    def outputs(self, part: SelfAttention, jobs: LayerJobs) -> tuple[Tensor, Tensor]:
        if self._table.rows > 1:
            width = part.heads[1] * part.dim
            return jobs.take("key", width), jobs.take("value", width)
        layer = self._cache.layers[self.at]
        key, value = (slots[:1].narrow(1, self._slot, self._tokens) for slots in (layer.keys, layer.values))
        return key.flatten(2), value.flatten(2)

    def attend(
        self, part: SelfAttention, jobs: LayerJobs, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> Tensor:
        layer = self._cache.layers[self.at if part.source is None else part.source]
        attended = jobs.take("attended", part.width)
        if self._table.rows > 1 and key is not None and value is not None:
            jobs.jobs.append(storing(key, value, layer.keys, layer.values, self._table.places))
        if self._table.is_called:
            jobs.pause(partial(self._table.attend, self.layer, part), self._tokens)
            return attended
        shape, limits = (1, self._tokens, -1, part.dim), self._table.parts.limits[self.at]
        tensors = query.view(shape), layer.keys, layer.values, attended.view(shape)
        scale = part.options["scaling"]
        jobs.jobs.append(row_attention.attention(*tensors, **self._table.of_trees, scale=scale, limits=limits))
        return attended

    def gates(self, part: SelfAttention, jobs: LayerJobs, x: Tensor) -> list[Tensor]:
        jobs.pause(partial(self._table.open_gates, part), self._tokens)
        return [jobs.take(f"gate {at}", part.heads[0]) for at in range(len(part.gates))]

    def call(self, part: Recurrence | Called, jobs: LayerJobs, x: Tensor) -> Tensor:
        if isinstance(part, Called):
            is_projected = bool(self._table.parts.latent) and self._table.rows == 1
            if is_projected:
                latents.add_projections(part, jobs, x)
            jobs.pause(partial(self._table.call, self.layer, part, is_projected=is_projected), self._tokens)
            change = jobs.take("change", x.shape[-1])
            return latents.add_output(part, jobs, change) if is_projected else change
        jobs.products(part.inputs, x, [jobs.take(f"input {at}", one.outputs) for at, one in enumerate(part.inputs)])
        jobs.pause(partial(self._table.recur, part), self._tokens)
        recurred, out = (
            jobs.take(name, size)
            for name, size in (("recurred", part.output.module.in_features), ("change", part.output.outputs))
        )
        return jobs.products([part.output], recurred, [out])[0]


@njit()
def _place(parents, depths, spans, nodes, trees, places):
    """Write the tree of a row for the attention, and the slots of its nodes; returns the first token after them."""
    row, start, done, first, capacity = spans
    count = len(parents)
    trees[row, 0], trees[row, 1], trees[row, 2], trees[row, 3] = start, count, done, first
    for node in range(count):
        nodes[row, 0, node], nodes[row, 1, node] = parents[node], depths[node]
        if node >= done:
            places[first + node - done] = row * capacity + start + node
    return first + count - done
