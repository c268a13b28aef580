"""Attention of token trees over a slot cache: split-KV, GQA-packed, with the tree mask as bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from lookahead.kernels.attend import attend, merge
from lookahead.kernels.dispatch import KernelVariant, variant_of

TRITON_VERSION: str = triton.__version__
_LOG2E = 1.4426950408889634
_NO_LIMIT = 1 << 30  # positions
MERGED_AT_ONCE = 16  # splits
_LEAST_SPLIT = 128  # slots
_WARPS = 8  # with 255 registers a thread, for which a multiprocessor has room
# The compiler must not fuse a multiplication with an addition in one loop and not in the other.
OPTIONS = {"enable_fp_fusion": False}
# Without it ptxas spills a few words of some variants to fit more programs on a multiprocessor.
ATTEND_OPTIONS = OPTIONS | {"maxnreg": 255}


def blocks_for(dtype: torch.dtype, block_dim: int, major: int, *, is_padded: bool) -> tuple[int, int, int, int]:
    """Packed queries per program of `attend`, slots it reads at once, warps, and blocks of slots in flight.

    Chosen without register spills and within shared memory, as tests/test_kernels.py checks. They do not depend on the
    number of nodes, so a node's result does not either. `block_dim` is the larger head size, padded to a power of two.
    GPUs of the major compute capabilities 9 and 10 multiply 64 rows by 4 warps, and have more shared memory than all
    others. With `is_padded` a head size is not a power of two, and its loads take masks.
    """
    is_large = major in (9, 10)
    if dtype == torch.float32:
        return (16, 16, 8, 3) if block_dim > 128 else (16, 32, 4, 2)
    if block_dim > 128:
        return 64, 32, 8, 3 if is_large else 2
    keys = 32 if major >= 12 or (is_padded and major != 9) else 64  # divisors of 64, the width of a word of ancestors
    return 64, keys, 4 if is_large else 8, 3


def split_for(slots: int, packed: int, programs: int, at_once: int) -> int:
    """Slots per split, a power of two: as few as one wave of programs has room for.

    A split writes a partial sum for each of the `packed` query rows of a KV head, so it has at least as many slots.
    Each split takes `programs` programs over all rows and KV heads, of which a GPU runs `at_once` together. Not
    measured on a GPU.
    """
    split = max(_LEAST_SPLIT, 1 << (packed - 1).bit_length())
    while split < slots and programs * -(-slots // split) > at_once:
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
) -> Tensor:
    """Attention of every node over its row's committed slots and its ancestors.

    Slots 0 … length - 1 of a row are committed, slot i at position i; node t is in slot length + t at position
    length + depth. Other slots may hold anything. Values that change between steps are read on the device, and the grid
    depends on shapes only, so a captured launch works for every step. With the same `split`, a node of a chain gets the
    same bits however many nodes are scored at once. float32 is multiplied as three TF32 products, which lose about two
    of its 24 bits, and exactly with head sizes above 128.

    Args:
        query: bfloat16, float16 or float32 `[rows, heads, width, dim]`, width up to 256; dim a multiple of 16 up to
            256. Heads that share a KV head are adjacent.
        keys: `[rows, slots, kv_heads, dim]`, of the dtype of `query`.
        values: `[rows, slots, kv_heads, value_dim]`, of the dtype of `query`.
        lengths: int32 `[rows]`; committed slots; length + nodes must not exceed slots.
        nodes: int32 `[rows]`; nodes of each row's tree, up to width; the output of padding nodes is 0.
        depths: int32 `[rows, width]`; edges between the root and the node.
        words: int64 `[rows, width, ceil(width / 64)]`; bit j % 64 of `words[row, t, j // 64]` is set if node j is
            node t or one of its ancestors.
        scaling: Factor of the scores, above 0; `dim ** -0.5` if None.
        softcap: Scores become `softcap * tanh(scores / softcap)`, above 0.
        window: Positions a node may look back, itself included.
        chunk: Chunk size in positions; a node sees only positions of its own chunk.
        sinks: Floating point `[heads]`; a logit per head that only takes part in the softmax.
        split: Slots per split, a multiple of 64; chosen by shapes and GPU if None.

    Returns:
        `[rows, width, heads, value_dim]`, contiguous, in the dtype of `query`.
    """
    options = {"scaling": scaling, "softcap": softcap, "window": window, "chunk": chunk, "sinks": sinks, "split": split}
    launch = bind(query, keys, values, options)
    return launch(query, keys, values, lengths=lengths, nodes=nodes, depths=depths, words=words, sinks=sinks)


def bind(query: Tensor, keys: Tensor, values: Tensor, options: Mapping[str, Any]) -> Callable[..., Tensor]:
    """`tree_attention` for these shapes and strides, with the options of `dispatch.attention_for`, and "split"."""
    scaling, softcap, window, chunk, split = map(options.get, ("scaling", "softcap", "window", "chunk", "split"))
    rows, heads, width, dim = query.shape
    _, slots, kv_heads, value_dim = values.shape
    packed, (major, processors) = width * heads // kv_heads, _gpu(query.device)
    shared, own = constants(variant_of(query, keys, values, options), major)
    row_blocks = triton.cdiv(packed, own["BLOCK_ROWS"])
    if split is None:
        split = split_for(slots, packed, row_blocks * kv_heads * rows, processors * _WARPS // own["num_warps"])
    splits = triton.cdiv(slots, split)
    scaling = dim**-0.5 if scaling is None else scaling
    factor, squeeze = (scaling, 1.0) if softcap is None else (softcap, scaling / softcap)
    limits = (_NO_LIMIT if window is None else window, _NO_LIMIT if chunk is None else chunk)
    numbers = (
        *_strides(query), *_strides(keys), *_strides(values),
        width, -(-width // 64), splits, split, factor * _LOG2E, squeeze, *limits,
    )  # fmt: skip
    attending = {**shared, **own, "IN_ONE": splits == 1, **ATTEND_OPTIONS}
    merging = {**shared, "AT_ONCE": MERGED_AT_ONCE, "num_warps": 4, **OPTIONS}
    attend_all = attend[(splits * row_blocks, kv_heads, rows)]
    merge_all = merge[(packed, kv_heads, rows)]
    sums = peaks = query  # unused with one split
    if splits > 1:  # shared by the layers of a pass, which run one after the other on the device
        sums = query.new_empty(rows, kv_heads, splits, packed, shared["BLOCK_VALUE"], dtype=torch.float32)
        peaks = query.new_empty(rows, kv_heads, splits, packed, 2, dtype=torch.float32)

    def launch(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        lengths: Tensor,
        nodes: Tensor,
        depths: Tensor,
        words: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = query.new_empty(rows, width, heads, value_dim)
        if rows == 0:
            return out
        sinks = lengths if sinks is None else sinks  # an unused pointer
        with torch.cuda.device_of(query):
            attend_all(
                query, keys, values, lengths, nodes, depths, words, sinks, out, sums, peaks, *numbers, **attending
            )
            if splits > 1:
                merge_all(lengths, nodes, depths, sinks, out, sums, peaks, width, splits, split, *limits, **merging)
        return out

    return launch


@cache
def constants(variant: KernelVariant, major: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile-time constants: shared by `attend` and `merge`, and of `attend` alone except IN_ONE, with its warps."""
    _, dtype, dim, value_dim, groups, options, _ = variant
    block_dim, block_value = triton.next_power_of_2(dim), triton.next_power_of_2(value_dim)
    is_padded = (block_dim, block_value) != (dim, value_dim)
    rows, keys, warps, stages = blocks_for(dtype, max(block_dim, block_value), major, is_padded=is_padded)
    shared = {"GROUPS": groups, "VALUE_DIM": value_dim, "BLOCK_VALUE": block_value}
    shared |= {"HAS_LIMIT": not options.isdisjoint(("window", "chunk")), "HAS_SINKS": "sinks" in options}
    own = {"DIM": dim, "BLOCK_DIM": block_dim, "BLOCK_ROWS": rows, "BLOCK_KEYS": keys, "STAGES": stages}
    own |= {"SOFTCAP": "softcap" in options, "PRECISION": "ieee" if max(block_dim, block_value) > 128 else "tf32x3"}
    own |= {"UPCAST": _interprets() and dtype == torch.bfloat16, "num_warps": warps}
    return shared, own


@cache
def _gpu(device: torch.device) -> tuple[int, int]:
    """Major compute capability and multiprocessors of a GPU; those of an H100 if Triton interprets on the CPU."""
    if device.type != "cuda":
        return 9, 132
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of all but the last dimension; 0, which satisfies every alignment, for a dimension of size 1."""
    steps, (first, second, third, _) = tensor.stride(), tensor.shape
    return steps[0] if first > 1 else 0, steps[1] if second > 1 else 0, steps[2] if third > 1 else 0


def _interprets() -> bool:
    """Whether Triton interprets on the CPU, where its dot multiplies the raw bits of bfloat16."""
    return not isinstance(attend, triton.JITFunction)
