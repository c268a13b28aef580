"""The gated delta rule over the nodes of a token tree, in one job: every node continues from its parent's state.

A state is a matrix per head: it decays, gets an outer product of a key and what its value differs from the state's own
answer, and answers a query. Columns of a state do not depend on one another, so a few columns of all nodes stay in the
CPU's cache. The states of nodes are not stored: `advance` repeats the few operations for the path that is accepted.

Every operator rounds in the order of transformers' own code for single tokens, and sums have torch's order, so the
states, and in bfloat16 the results, have the bits of token-by-token decoding.

Source: Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule", §3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import unpack_tuple
from torch import Tensor

from lookahead.kernels.jobs import Job, by_parts, claim_part
from lookahead.kernels.microkernel import LANES, VECTOR, WHOLE, emit_loop, spread, vector_at
from lookahead.kernels.scalars import bits_of, jit_part, narrow, numbers_at, to_intrinsic, widen
from lookahead.utils.addresses import array_at

MAX_SIZE = 256  # of keys and values of a head, up to which sums have one level of blocks
BLOCK = 16  # rows of a state whose products are added before they are added to the sum
COLUMNS = 32  # of a state, for all nodes at a time
_LANES, _PARTIALS = 8, 32  # numbers that torch adds as one vector, and its partial sums
_KEY_EPS = np.float32(1e-6)  # added to squared lengths of queries and keys
_F = np.float32


class Updates(NamedTuple):
    """What the nodes of a tree change in a state, all float32 and contiguous; a row of a larger tensor is too."""

    keys: Tensor  # `[nodes, heads of keys, size of keys]`, of length 1
    deltas: Tensor  # `[nodes, heads, size of values]`, what is added to the state by the key
    decays: Tensor  # `[nodes, heads]`, factors of the parent's state

    @classmethod
    def empty(cls, decays: Tensor, key_heads: int, key_size: int, value_size: int) -> Updates:
        """Space for the updates of nodes with known decays."""
        return cls(
            decays.new_empty(len(decays), key_heads, key_size), decays.new_empty(*decays.shape, value_size), decays
        )

    def of(self, nodes: slice) -> Updates:
        """The updates of some nodes."""
        return Updates(*(values[nodes] for values in self))


def gated_delta(
    mixed: Tensor,
    beta: Tensor,
    state: Tensor,
    parents: Tensor,
    updates: Updates,
    out: Tensor,
    norm: Sequence[Any],
    after: Tensor | None = None,
) -> Job:
    """A job that applies the rule to the nodes of a tree, and norms and gates the results of every head.

    Args:
        mixed: `[nodes, channels]`, queries, keys and values of every node; bfloat16 or float32, contiguous.
        beta: float32 `[nodes, heads]`, the shares of what is new.
        state: float32 `[heads, size of keys, size of values]` before the root, contiguous.
        parents: int64 `[nodes]`, ascending; that of the root is ignored.
        updates: The decays, and where to write the other updates.
        out: Like values, `[nodes, heads * size of values]`.
        norm: The weight `[size of values]` of the norm, its epsilon, and the gates, float32 `[nodes, heads, size of
            values]`.
        after: Like `state`; the state after a single node is written to it.
    """
    weight, eps, gates = norm
    nodes, key_heads, _ = updates.keys.shape
    tensors = mixed, beta, state, parents, *updates, out, weight, gates, state if after is None else after
    sizes = nodes, len(state), key_heads, *state.shape[1:], bits_of(eps), int(after is not None)
    return _ENTRIES[mixed.dtype], len(state), (*(tensor.data_ptr() for tensor in tensors), *sizes), tensors


def advance(state: Tensor, updates: Updates, path: Tensor, out: Tensor) -> Job:
    """A job that writes the state after a path of nodes.

    Args:
        state: float32 `[heads, size of keys, size of values]` before the root, contiguous.
        updates: Of all nodes, by `gated_delta`.
        path: int64 `[n]`, the nodes from the root on.
        out: Like `state`, the state after the last of them.
    """
    tensors = state, *updates, path, out
    sizes = len(path), len(state), updates.keys.shape[1], *state.shape[1:]
    return _advance_heads, len(state), (*(tensor.data_ptr() for tensor in tensors), *sizes), tensors


@jit_part
def _sum_of_squares(line):
    """The sum of squares in the order of torch's `sum` for at most 512 numbers.

    Every fourth vector goes to the same partial sum; then the remaining vectors, the partial sums, the remaining
    numbers, and the lanes are added.
    """
    size, sums, rest = len(line), np.zeros(_PARTIALS, np.float32), _F(0.0)
    whole, vectors = size // _PARTIALS * _PARTIALS, size // _LANES * _LANES
    for begin in range(0, whole, _PARTIALS):
        for i in range(_PARTIALS):
            sums[i] += line[begin + i] * line[begin + i]
    for i in range(whole, vectors):
        sums[i % _LANES] += line[i] * line[i]
    for i in range(_LANES, _PARTIALS):
        sums[i % _LANES] += sums[i]
    for i in range(vectors, size):
        rest += line[i] * line[i]
    for lane in range(_LANES):
        rest += sums[lane]
    return rest


@jit_part
def _unit(source, line):
    """Write the numbers of a tensor, scaled to length 1."""
    for i in range(len(line)):
        line[i] = widen(source[i])
    scale = _F(1.0) / np.sqrt(_sum_of_squares(line) + _KEY_EPS)
    for i in range(len(line)):
        line[i] *= scale


def _rows_of_state(answers: bool) -> Any:
    """An intrinsic that adds products of rows of a state to sums: of the decayed state with the key, or the answers.

    It takes the parent's state and, for answers, the node's, each with the index of its first row and the step between
    rows; the key and the query with the index of their first number;
    what to add to the columns; the sums; the decay; and the number of rows. For answers, a row decays, gets its part of
    the outer product, is stored, and is multiplied by the query. Rows have `COLUMNS` numbers. Compiled from loops,
    sums of so few numbers are not kept in registers.
    """

    @to_intrinsic
    def add(context: Any, old: Any, new: Any, factors: Any, sums: Any, decay: Any, rows: Any) -> Any:
        def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
            *arrays, decay, rows = values
            (parent, before, step), (state, after, step_after), (key, query, first), (delta, sums) = _addresses_of(
                target, builder, signature, arrays
            )
            starts, decay = [WHOLE(i) for i in range(0, COLUMNS, LANES)], spread(builder, decay)
            changes = [builder.load(vector_at(builder, delta, start), align=4) for start in starts] if answers else []

            def add_row(row: Any, partial: list[Any]) -> list[Any]:
                own, begin = builder.add(first, row), builder.add(before, builder.mul(row, step))
                to = builder.add(after, builder.mul(row, step_after))
                factor, asked = (spread(builder, builder.load(builder.gep(address, [own]))) for address in (key, query))
                grown = []
                for i, start in enumerate(starts):
                    old = builder.load(vector_at(builder, parent, builder.add(begin, start)), align=4)
                    new = builder.fmul(old, decay)
                    if answers:
                        new = builder.fadd(new, builder.fmul(factor, changes[i]))
                        builder.store(new, vector_at(builder, state, builder.add(to, start)), align=4)
                    grown.append(builder.fadd(partial[i], builder.fmul(new, asked if answers else factor)))
                return grown

            partial = emit_loop(builder, rows, [ir.Constant(VECTOR, None)] * len(starts), add_row)
            for total, start in zip(partial, starts, strict=True):
                place = vector_at(builder, sums, start)
                builder.store(builder.fadd(builder.load(place, align=4), total), place, align=4)
            return target.get_dummy_value()

        return types.void(old, new, factors, sums, decay, rows), emit

    return add


_recall_rows, _answer_rows = _rows_of_state(False), _rows_of_state(True)


def _addresses_of(target: Any, builder: Any, signature: Any, values: Any) -> list[list[Any]]:
    """Unpack tuples of arrays and indices; arrays are replaced by their addresses."""
    unpacked = []
    for kind, value in zip(signature.args, values, strict=False):
        parts = zip(kind, unpack_tuple(builder, value), strict=True)
        unpacked.append(
            [
                target.make_array(kind)(target, builder, part).data if isinstance(kind, types.Array) else part
                for kind, part in parts
            ]
        )
    return unpacked


@jit_part
def _head(address, head, kind):
    """Apply the rule to one head of all nodes."""
    numbers = array_at(address, (18,), np.int64)
    mixed_at, beta_at, state_at, parents_at, keys_at, deltas_at, decays_at, out_at, weight_at, gates_at = numbers[:10]
    after_at, nodes, heads, key_heads, key_size, value_size, eps_bits, keeps_state = numbers[10:]
    channels, values = 2 * key_heads * key_size + heads * value_size, heads * value_size
    own, eps = head // (heads // key_heads), np.int32(eps_bits).view(np.float32)
    mixed, out = numbers_at(mixed_at, nodes * channels, kind), numbers_at(out_at, nodes * values, kind)
    size = key_size * value_size
    state = array_at(state_at, (heads, size), np.float32)[head]
    only = array_at(after_at, (heads, size), np.float32)[head, : size * keeps_state]
    keys = array_at(keys_at, (nodes, key_heads, key_size), np.float32)
    deltas = array_at(deltas_at, (nodes, heads, value_size), np.float32)
    decays, betas = array_at(decays_at, (nodes, heads), np.float32), array_at(beta_at, (nodes, heads), np.float32)
    parents, gates = array_at(parents_at, (nodes,), np.int64), array_at(gates_at, (nodes * values,), np.float32)
    queries, results = np.empty((nodes, key_size), np.float32), np.empty((nodes, value_size), np.float32)
    line = np.empty(key_size, np.float32)
    root = np.sqrt(_F(key_size))
    for node in range(nodes):
        begin = node * channels + own * key_size
        _unit(mixed[begin : begin + key_size], queries[node])
        begin += key_heads * key_size
        _unit(mixed[begin : begin + key_size], line)
        # Threads with other heads of this key write the same numbers, and must not see others in between.
        for k in range(key_size):
            keys[node, own, k] = line[k]
            queries[node, k] /= root
    _columns(
        state, only, parents, queries, keys[:, own], decays[:, head], betas[:, head], deltas[:, head], results, mixed,
        channels, 2 * key_heads * key_size + head * value_size,
    )  # fmt: skip
    weight, line = numbers_at(weight_at, value_size, kind), np.empty(value_size, np.float32)
    for node in range(nodes):
        begin = node * values + head * value_size
        made, gate = out[begin : begin + value_size], gates[begin : begin + value_size]
        for i in range(value_size):
            line[i] = widen(narrow(results[node, i], made[i]))
        scale = _F(1.0) / np.sqrt(_sum_of_squares(line) / _F(value_size) + eps)
        for i in range(value_size):
            scaled = widen(narrow(line[i] * scale, made[i]))
            made[i] = narrow(widen(narrow(widen(weight[i]) * scaled, made[i])) * gate[i], made[i])


@jit_part
def _columns(state, only, parents, queries, keys, decays, betas, deltas, results, mixed, channels, first_value):
    """Apply the rule to the columns of a head's state, a few at a time; writes deltas, results, and maybe a state."""
    nodes, key_size, value_size = len(parents), queries.shape[1], results.shape[1]
    size = key_size * COLUMNS
    states = np.empty(nodes * size, np.float32)
    sums, delta = np.empty(COLUMNS, np.float32), np.empty(COLUMNS, np.float32)
    for first in range(0, value_size, COLUMNS):
        for node in range(nodes):
            key, query, decay = keys[node], queries[node], decays[node]
            parent, before, step = (states, parents[node] * size, COLUMNS) if node else (state, first, value_size)
            own, after, step_after = (only, first, value_size) if len(only) else (states, node * size, COLUMNS)
            sums[:] = _F(0.0)
            for begin in range(0, key_size, BLOCK):
                old, new = (parent, before + begin * step, step), (own, after + begin * step_after, step_after)
                _recall_rows(old, new, (key, query, begin), (delta, sums), decay, min(BLOCK, key_size - begin))
            place = node * channels + first_value + first
            for i in range(COLUMNS):
                delta[i] = (widen(mixed[place + i]) - sums[i]) * betas[node]
                deltas[node, first + i] = delta[i]
            sums[:] = _F(0.0)
            for begin in range(0, key_size, BLOCK):
                old, new = (parent, before + begin * step, step), (own, after + begin * step_after, step_after)
                _answer_rows(old, new, (key, query, begin), (delta, sums), decay, min(BLOCK, key_size - begin))
            for i in range(COLUMNS):
                results[node, first + i] = sums[i]


_ENTRIES = by_parts(_head)


def _advance_heads(address: Any) -> None:
    """Advance the states of heads until there are none."""
    numbers = array_at(address + 16, (11,), np.int64)
    state_at, keys_at, deltas_at, decays_at, path_at, out_at, steps, heads, key_heads, key_size, value_size = numbers
    size = (heads, key_size, value_size)
    states, outs, path = (
        array_at(state_at, size, np.float32),
        array_at(out_at, size, np.float32),
        array_at(path_at, (steps,), np.int64),
    )
    nodes = path[steps - 1] + 1
    keys = array_at(keys_at, (nodes, key_heads, key_size), np.float32)
    deltas = array_at(deltas_at, (nodes, heads, value_size), np.float32)
    decays = array_at(decays_at, (nodes, heads), np.float32)
    head = claim_part(address)
    while head < heads:
        own = head // (heads // key_heads)
        for k in range(key_size):
            old, new = states[head, k], outs[head, k]
            for step in range(steps):
                node = path[step]
                factor, decay, delta = keys[node, own, k], decays[node, head], deltas[node, head]
                if step:
                    for i in range(value_size):
                        new[i] = new[i] * decay + factor * delta[i]
                else:
                    for i in range(value_size):
                        new[i] = old[i] * decay + factor * delta[i]
        head = claim_part(address)
