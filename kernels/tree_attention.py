"""Attention of token trees over a slot cache: split-KV, GQA-packed, the tree mask as bits."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from lookahead.kernels.attend import attend, merge
from lookahead.kernels.checks import check_positive, check_sinks, check_tree, require, shortcoming

Precision = Literal["tf32x3", "ieee"]

_LOG2E = 1.4426950408889634
_NO_LIMIT = 1 << 30  # positions
MERGED_AT_ONCE = 16  # splits
_SPLIT = 512  # slots
_MOST_SPLITS = 64
# The compiler must not fuse a multiplication with an addition in one loop and not in the other.
OPTIONS = {"enable_fp_fusion": False}
# Without it ptxas spills a few words of some variants to fit more programs on a multiprocessor.
ATTEND_OPTIONS = OPTIONS | {"maxnreg": 255}


class Blocks(NamedTuple):
    """How one program of `attend` works.

    Attributes:
        rows: Packed query rows.
        keys: Slots read at once; a divisor of 64, the width of a word of ancestor bits.
        warps: Warps.
        stages: Blocks of keys in flight.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def blocks_for(dtype: torch.dtype, block_dim: int, precision: Precision, major: int, *, is_padded: bool) -> Blocks:
    """Block sizes without register spills and within shared memory, as tests/test_kernels.py checks.

    They do not depend on the number of nodes, so a node's result does not either.

    Args:
        dtype: Type of query, keys and values.
        block_dim: The larger head size, padded to a power of two.
        precision: How float32 is multiplied.
        major: Compute capability of the GPU; from 9 on 4 warps hold accumulators of 64 rows.
        is_padded: Whether a head size is no power of two, and its loads take masks.
    """
    if dtype == torch.float32:
        return Blocks(16, 16, 8, 3) if precision == "ieee" else Blocks(16, 32, 4, 2)
    if block_dim > 128:
        return Blocks(64, 32, 8, 3 if major >= 9 else 2)
    if major >= 9:
        return Blocks(64, 64, 4, 3)
    return Blocks(64, 32 if is_padded else 64, 8, 3)


def split_for(slots: int) -> int:
    """Slots per split: few, so that short contexts fill a GPU, but at most 64 splits of partial sums."""
    split = _SPLIT
    while slots > split * _MOST_SPLITS:
        split *= 2
    return split


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    lengths: Tensor,
    nodes: Tensor,
    depths: Tensor,
    words: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    split: int | None = None,
    precision: Precision = "tf32x3",
) -> Tensor:
    """Attention of every node over its row's committed slots and its ancestors.

    Slots 0 … length - 1 of a row are committed, slot i at position i; node t stands at slot length + t and position
    length + depth. Other slots may hold anything. What changes from step to step is read on the device, and the grid
    depends on shapes only, so a captured launch works for every step. With the same `split`, a node of a chain gets the
    same bits however many nodes are scored at once.

    Args:
        query: bfloat16, float16 or float32 `[rows, heads, width, dim]`, width up to 256; dim a multiple of 16 up to
            256. Heads that share a KV head are adjacent.
        keys: `[rows, slots, kv_heads, dim]`, as `query` in type.
        values: `[rows, slots, kv_heads, value_dim]`, as `query` in type.
        lengths: int32 `[rows]`; committed slots; length + nodes must not exceed slots.
        nodes: int32 `[rows]`; nodes of each row's tree, up to width; the output of the others is 0.
        depths: int32 `[rows, width]`; edges between the root and the node.
        words: int64 `[rows, width, ceil(width / 64)]`; node j is an ancestor of node t, or node t itself, where bit
            j % 64 of `words[row, t, j // 64]` is set.
        scaling: Factor on the scores, above 0; `dim ** -0.5` when None.
        softcap: Scores become `softcap * tanh(scores / softcap)`, above 0.
        window: Positions a node may look back, itself included.
        chunk: A node looks at positions of its own chunk of so many only.
        sinks: Floating point `[heads]`; a logit per head that takes part in the softmax only.
        split: Slots per split, a multiple of 64; by the number of slots when None.
        precision: How float32 is multiplied: as three TF32 products, which lose about two of its 24 bits, or exactly
            ("ieee"), as always with head sizes above 128.

    Returns:
        `[rows, width, heads, value_dim]`, contiguous, in the type of `query`.

    Raises:
        ValueError: An argument is not as described; the message names it.
    """
    problem = shortcoming(query, keys, values)
    require(problem is None, str(problem))
    require(query.is_cuda or _interprets(), f"query must be on a CUDA device, got {query.device}")
    check_tree(query, lengths, nodes, depths, words)
    check_sinks(sinks, query)
    for name, number in (("scaling", scaling), ("softcap", softcap), ("window", window), ("chunk", chunk)):
        check_positive(name, number)
    require(split is None or (split > 0 and split % 64 == 0), f"split must be a multiple of 64, got {split}")
    require(precision in ("tf32x3", "ieee"), f"precision must be 'tf32x3' or 'ieee', got {precision!r}")
    return _launch(
        query, keys, values, (lengths, nodes, depths), words, sinks,
        scaling=query.shape[3] ** -0.5 if scaling is None else scaling, softcap=softcap, window=window, chunk=chunk,
        split=split_for(keys.shape[1]) if split is None else split, precision=precision,
    )  # fmt: skip


def _launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows_at: tuple[Tensor, Tensor, Tensor],
    words: Tensor,
    sinks: Tensor | None,
    *,
    scaling: float,
    softcap: float | None,
    window: int | None,
    chunk: int | None,
    split: int,
    precision: Precision,
) -> Tensor:
    """Launch `attend` and, where there is more than one split, `merge`."""
    rows, heads, width, dim = query.shape
    _, slots, kv_heads, value_dim = values.shape
    out = query.new_empty(rows, width, heads, value_dim)
    if rows == 0:
        return out
    packed, splits = width * heads // kv_heads, triton.cdiv(slots, split)
    blocks, shared, own = constants(
        query.dtype, dim, value_dim, heads // kv_heads, split=split, in_one=splits == 1,
        has_limit=window is not None or chunk is not None, has_softcap=softcap is not None,
        has_sinks=sinks is not None, precision=precision, major=_major(query.device),
    )  # fmt: skip
    sums, peaks = out, out  # unused with one split
    if splits > 1:
        sums = query.new_empty(rows, kv_heads, splits, packed, shared["BLOCK_VALUE"], dtype=torch.float32)
        peaks = query.new_empty(rows, kv_heads, splits, packed, 2, dtype=torch.float32)
    limits = (_NO_LIMIT if window is None else window, _NO_LIMIT if chunk is None else chunk)
    sinks = rows_at[0] if sinks is None else sinks
    factor, squeeze = (scaling, 1.0) if softcap is None else (softcap, scaling / softcap)
    with torch.cuda.device_of(query):
        attend[(splits * triton.cdiv(packed, blocks.rows), kv_heads, rows)](
            query, keys, values, *rows_at, words, sinks, out, sums, peaks,
            *_strides(query), *_strides(keys), *_strides(values),
            width, words.shape[2], splits, factor * _LOG2E, squeeze, *limits,
            **shared, **own, num_warps=blocks.warps, **ATTEND_OPTIONS,
        )  # fmt: skip
        if splits > 1:
            merge[(packed, kv_heads, rows)](
                *rows_at, sinks, out, sums, peaks, width, splits, *limits,
                **shared, AT_ONCE=MERGED_AT_ONCE, num_warps=4, **OPTIONS,
            )  # fmt: skip
    return out


def constants(
    dtype: torch.dtype,
    dim: int,
    value_dim: int,
    groups: int,
    *,
    split: int,
    in_one: bool,
    has_limit: bool,
    has_softcap: bool,
    has_sinks: bool,
    precision: Precision,
    major: int,
) -> tuple[Blocks, dict[str, Any], dict[str, Any]]:
    """Compile-time constants: the blocks, those of both `attend` and `merge`, and those of `attend` only."""
    block_dim, block_value = triton.next_power_of_2(dim), triton.next_power_of_2(value_dim)
    precision = "ieee" if max(dim, value_dim) > 128 else precision
    is_padded = (block_dim, block_value) != (dim, value_dim)
    blocks = blocks_for(dtype, max(block_dim, block_value), precision, major, is_padded=is_padded)
    shared = {
        "GROUPS": groups,
        "VALUE_DIM": value_dim,
        "BLOCK_VALUE": block_value,
        "SPLIT": split,
        "HAS_LIMIT": has_limit,
        "HAS_SINKS": has_sinks,
    }
    own = {
        "DIM": dim,
        "BLOCK_DIM": block_dim,
        "BLOCK_ROWS": blocks.rows,
        "BLOCK_KEYS": blocks.keys,
        "STAGES": blocks.stages,
        "SOFTCAP": has_softcap,
        "IN_ONE": in_one,
        "UPCAST": _interprets() and dtype == torch.bfloat16,
        "PRECISION": precision,
    }
    return blocks, shared, own


@cache
def _major(device: torch.device) -> int:
    """Major compute capability of a GPU; interpreted on the CPU, the blocks of the newest are used."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of all but the last dimension; 0, which has every alignment, for a dimension of size 1."""
    return tuple(step if size > 1 else 0 for size, step in zip(tensor.shape[:3], tensor.stride()[:3], strict=True))


def _interprets() -> bool:
    """Whether Triton interprets on the CPU, where its dot multiplies the raw bits of bfloat16."""
    return not isinstance(attend, triton.JITFunction)
