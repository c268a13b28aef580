"""Selective state spaces over the nodes of a token tree, in one job: every node continues from its parent's state.

The state of a head, `[size of a state, size of a head]` in memory, decays and gets the outer product of a node's input
weights, scaled by its step, and its inputs; the node's output weights sum the rows. Columns of a state do not depend on
one another, so a few columns of all nodes stay in the CPU's cache. The states of nodes are not stored: the few
operations for the path that is accepted are repeated.

Every operator rounds in the order of transformers' own code for single tokens, and sums of bfloat16 are those of the
CPU's instruction for pairs, which torch's products are built from. So the states, and in bfloat16 the results, have the
bits of token-by-token decoding.

Source: Dao and Gu 2024, "Transformers are SSMs", §2 (the recurrence of Mamba-2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import overload
from torch import Tensor

from lookahead.kernels.jobs import Job, by_parts
from lookahead.kernels.microkernel import (
    LANES,
    PAIRS,
    VECTOR,
    WHOLE,
    emit_loop,
    emit_product,
    matrices_of,
    spread,
    vector_at,
)
from lookahead.kernels.packed_product import HAS_DOT
from lookahead.kernels.scalars import jit_part, narrow, numbers_at, to_intrinsic, widen
from lookahead.utils.addresses import array_at

DTYPES = (torch.float32, torch.bfloat16) if HAS_DOT else (torch.float32,)
COLUMNS = LANES  # of a state, for all nodes at a time
_SIXTEEN = ir.Constant(PAIRS, [16] * LANES)


class Inputs(NamedTuple):
    """What the nodes of a tree add to the states of a layer.

    Attributes:
        mixed: `[nodes, channels]`, bfloat16 or float32, contiguous: of every node the inputs of all heads, then the
            input weights and the output weights of all groups.
        steps: float32 `[nodes, heads]`, of a bfloat16 layer rounded to bfloat16, contiguous.
        decays: float32 `[nodes, heads]`, factors of the parent's state, contiguous.
    """

    mixed: Tensor
    steps: Tensor
    decays: Tensor

    def of(self, nodes: slice | Tensor) -> Inputs:
        """Those of some nodes."""
        return Inputs(*(tensor[nodes] for tensor in self))

    def sizes(self, state: Tensor) -> tuple[int, ...]:
        """Heads, groups, and the sizes of a state and of a head, for a state as in `selective_state`."""
        heads, state_size, size = state.shape
        return heads, (self.mixed.shape[1] - heads * size) // (2 * state_size), state_size, size


def selective_state(
    inputs: Inputs,
    skips: Tensor,
    state: Tensor,
    parents: Tensor,
    gates: Tensor,
    out: Tensor,
    after: Tensor | None = None,
) -> Job:
    """A job that writes the gated results of the nodes of a tree.

    Args:
        inputs: Of the nodes.
        skips: `[heads]`, factors of the inputs in the results; of the dtype of the inputs.
        state: float32 `[heads, size of a state, size of a head]` before the root, contiguous. The size of a state is
            even, that of a head a multiple of 16.
        parents: int64 `[nodes]`, ascending; that of the root is ignored.
        gates: float32 `[nodes, heads * size of a head]`, factors of the rounded results, contiguous.
        out: Like `gates`.
        after: Like `state`; the nodes are a path then, and the state after the last one is written to it.
    """
    tensors = *inputs, skips, state, parents, gates, out, state if after is None else after
    numbers = *(tensor.data_ptr() for tensor in tensors), len(out), *inputs.sizes(state), int(after is not None)
    return _ENTRIES[inputs.mixed.dtype], len(state), numbers, tensors


def _rounded(builder: Any, numbers: Any) -> Any:
    """The bits of float32 rounded to the nearest bfloat16, ties to even."""
    bits = builder.bitcast(numbers, PAIRS)
    odd = builder.and_(builder.lshr(bits, _SIXTEEN), ir.Constant(PAIRS, [1] * LANES))
    nearest = builder.add(builder.add(bits, ir.Constant(PAIRS, [0x7FFF] * LANES)), odd)
    return builder.and_(nearest, ir.Constant(PAIRS, [-65536] * LANES))


def _paired(builder: Any, first: Any, second: Any) -> Any:
    """Pairs of rounded float32, those of the first vector in the lower halves."""
    return builder.or_(builder.lshr(_rounded(builder, first), _SIXTEEN), _rounded(builder, second))


def _rows_of_state(is_half: bool) -> Any:
    """An intrinsic that advances `COLUMNS` columns of a state by a node, row by row in pairs, and sums them.

    It takes the parent's state and the node's, each with the index of its first row and the step between rows; the
    scaled input weights, and the output weights in pairs, as int32 if they are bfloat16; the inputs of the columns, and
    where to write the sums, each with an index; the decay; and the number of pairs of rows.
    """

    @to_intrinsic
    def step(
        context: Any, old: Any, new: Any, weights: Any, of_out: Any, x: Any, sums: Any, decay: Any, pairs: Any
    ) -> Any:
        def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
            *matrices, decay, pairs = values
            (
                (parent, before, apart),
                (state, after, apart_after),
                (weights, first),
                (of_out, start_of_out),
                (x, at),
                (sums, to),
            ) = matrices_of(target, builder, signature, matrices)
            decay, starts = spread(builder, decay), [WHOLE(i) for i in range(0, COLUMNS, LANES)]
            inputs = [builder.load(vector_at(builder, x, builder.add(at, start)), align=4) for start in starts]

            def add_row(row: Any) -> list[Any]:
                begin = builder.add(before, builder.mul(row, apart))
                end, grown = builder.add(after, builder.mul(row, apart_after)), []
                weight = spread(builder, builder.load(builder.gep(weights, [builder.add(first, row)])))
                for column, start in zip(inputs, starts, strict=True):
                    added = builder.fmul(weight, column)
                    added = builder.bitcast(_rounded(builder, added), VECTOR) if is_half else added
                    former = builder.load(vector_at(builder, parent, builder.add(begin, start)), align=4)
                    grown.append(builder.fadd(builder.fmul(former, decay), added))
                    builder.store(grown[-1], vector_at(builder, state, builder.add(end, start)), align=4)
                return grown

            def add_pair(pair: Any, totals: list[Any]) -> list[Any]:
                row = builder.mul(pair, WHOLE(2))
                terms = [row, builder.add(row, WHOLE(1))]
                rows = [add_row(row) for row in terms]
                if is_half:
                    terms, rows = [pair], [[_paired(builder, *both) for both in zip(*rows, strict=True)]]
                for term, columns in zip(terms, rows, strict=True):
                    factor = spread(builder, builder.load(builder.gep(of_out, [builder.add(start_of_out, term)])))
                    totals = [emit_product(builder, *terms, factor) for terms in zip(totals, columns, strict=True)]
                return totals

            totals = emit_loop(builder, pairs, [ir.Constant(VECTOR, None)] * len(starts), add_pair)
            for total, start in zip(totals, starts, strict=True):
                builder.store(total, vector_at(builder, sums, builder.add(to, start)), align=4)
            return target.get_dummy_value()

        return types.void(old, new, weights, of_out, x, sums, decay, pairs), emit

    return step


_step_halves, _step_floats = _rows_of_state(True), _rows_of_state(False)


def _add_columns(*arguments: Any) -> None:
    """`_step` of a type of numbers."""


@overload(_add_columns, strict=False)
def _add_columns_as(old: Any, new: Any, weights: Any, of_out: Any, x: Any, sums: Any, decay: Any, pairs: Any) -> Any:
    step = _step_halves if of_out[0].dtype == types.int32 else _step_floats

    def add(old: Any, new: Any, weights: Any, of_out: Any, x: Any, sums: Any, decay: Any, pairs: Any) -> None:
        step(old, new, weights, of_out, x, sums, decay, pairs)

    return add


def _terms_at(address: Any, size: Any, kind: Any) -> Any:
    """The array at an address: pairs of bfloat16 as int32 if `kind` is an integer, else float32."""


@overload(_terms_at, strict=False)
def _typed_terms_at(address: Any, size: Any, kind: Any) -> Any:
    if isinstance(kind, types.Integer):
        return lambda address, size, kind: array_at(address, (size // 2,), np.int32)
    return lambda address, size, kind: array_at(address, (size,), np.float32)


@jit_part
def _head(address, head, kind):
    """Compute one head of all nodes, a few columns of its state at a time."""
    numbers = array_at(address, (15,), np.int64)
    mixed_at, steps_at, decays_at, skips_at, state_at, parents_at, gates_at, out_at, after_at = numbers[:9]
    nodes, heads, groups, rows, size, keeps_state = numbers[9:]
    channels, whole, width = heads * size + 2 * groups * rows, rows * size, rows * COLUMNS
    mixed, terms = numbers_at(mixed_at, nodes * channels, kind), _terms_at(mixed_at, nodes * channels, kind)
    steps, decays = array_at(steps_at, (nodes, heads), np.float32), array_at(decays_at, (nodes, heads), np.float32)
    state = array_at(state_at, (heads, whole), np.float32)[head]
    only = array_at(after_at, (heads, whole), np.float32)[head]
    parents, skip = array_at(parents_at, (nodes,), np.int64), widen(numbers_at(skips_at, heads, kind)[head])
    gates, out = (
        array_at(gates_at, (nodes, heads * size), np.float32),
        array_at(out_at, (nodes, heads * size), np.float32),
    )
    states, weights = np.empty(0 if keeps_state else nodes * width, np.float32), np.empty(nodes * rows, np.float32)
    x, sums = np.empty(COLUMNS, np.float32), np.empty(COLUMNS, np.float32)
    of_group = heads * size + head // (heads // groups) * rows
    for node in range(nodes):
        source = mixed[node * channels + of_group : node * channels + of_group + rows]
        for i in range(rows):
            weights[node * rows + i] = widen(narrow(steps[node, head] * widen(source[i]), source[i]))
    for first in range(0, size, COLUMNS):
        for node in range(nodes):
            line = mixed[node * channels + head * size + first : node * channels + head * size + first + COLUMNS]
            for i in range(COLUMNS):
                x[i] = widen(line[i])
            old = (states, parents[node] * width, COLUMNS) if node else (state, first, size)
            if keeps_state:
                old = (only, first, size) if node else (state, first, size)
            new = (only, first, size) if keeps_state else (states, node * width, COLUMNS)
            of_out = (node * channels + of_group + groups * rows) * len(terms) // len(mixed)
            _add_columns(
                old, new, (weights, node * rows), (terms, of_out), (x, 0), (sums, 0), decays[node, head], rows // 2
            )
            place = head * size + first
            for i in range(COLUMNS):
                kept = widen(narrow(sums[i], line[i])) + widen(narrow(x[i] * skip, line[i]))
                out[node, place + i] = widen(narrow(kept, line[i])) * gates[node, place + i]


_ENTRIES = by_parts(_head)
