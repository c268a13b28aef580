"""Random trees over a cache with NaN in unused slots: inputs for the tests and the benchmark of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.drafting.tree import TokenTree

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
# nodes, query heads per KV head, head size, value head size, type, options
CASES: dict[str, tuple[int, int, int, int, torch.dtype, dict[str, Any]]] = {
    "plain decoding": (1, 1, 64, 64, FULL, {}),
    "plain decoding, grouped": (1, 8, 128, 128, BRAIN, {}),
    "small tree": (3, 4, 64, 64, HALF, {}),
    "three heads a group": (17, 3, 80, 80, BRAIN, {}),
    "head size 96": (17, 1, 96, 96, HALF, {}),
    "values smaller than keys": (17, 4, 96, 64, FULL, {}),
    "values larger than keys": (3, 3, 64, 128, BRAIN, {}),
    "several blocks of query rows": (17, 8, 64, 64, BRAIN, {}),
    "a full word of ancestors": (64, 1, 64, 64, FULL, {}),
    "two words of ancestors": (70, 1, 64, 64, HALF, {}),
    "sixteen heads a group": (3, 16, 64, 64, BRAIN, {}),
    "four words of ancestors": (256, 1, 32, 16, HALF, {}),
    "softcap": (17, 3, 64, 64, FULL, {"softcap": 1.5}),
    "window": (17, 4, 64, 64, FULL, {"window": 9}),
    "window smaller than the tree is deep": (17, 1, 64, 64, FULL, {"window": 2}),
    "window larger than a block": (17, 3, 80, 80, BRAIN, {"window": 100}),
    "chunks": (17, 4, 64, 64, FULL, {"chunk": 50}),
    "chunks that end inside the tree": (17, 1, 64, 64, HALF, {"chunk": 5}),
    "sinks": (3, 4, 64, 64, FULL, {"sinks": True}),
    "everything at once": (17, 3, 80, 80, FULL, {"softcap": 2.0, "window": 90, "chunk": 64, "sinks": True}),
    "own scaling": (3, 3, 80, 80, FULL, {"scaling": 0.3}),
    "heads of 160": (3, 3, 160, 160, FULL, {}),
}


def ancestor_mask(tree: TokenTree) -> NDArray[np.bool_]:
    """bool `[n, n]`: whether node i attends to node j, which is on the path from the root to i."""
    mask = np.eye(len(tree), dtype=bool)
    for node in range(1, len(tree)):
        mask[node] |= mask[tree.parents[node]]
    return mask


def tree_tensors(lengths: Sequence[int], counts: Sequence[int], width: int, seed: int, chain: bool) -> dict[str, Any]:
    """Lengths, nodes, depths and words of random trees in the kernels' layout, on the CPU."""
    rng = np.random.default_rng(seed)
    rows = len(lengths)
    depths = torch.zeros(rows, width, dtype=torch.int32)
    words = torch.zeros(rows, width, (width + 63) // 64, dtype=torch.int64)
    for row, count in enumerate(counts):
        parents = [max(0, i - 1) if chain else int(rng.integers(max(0, i - 4), max(1, i))) for i in range(count)]
        tree = TokenTree.from_parents(np.arange(count), parents)
        depths[row, :count] = torch.from_numpy(tree.depths)
        ancestors = torch.from_numpy(tree.ancestor_words())
        words[row, :count, : ancestors.shape[1]] = ancestors
    sizes = {"lengths": lengths, "nodes": counts}
    return {name: torch.tensor(each, dtype=torch.int32) for name, each in sizes.items()} | {
        "depths": depths,
        "words": words,
    }


def random_trees(
    *,
    rows: int,
    slots: int,
    width: int,
    kv_heads: int,
    groups: int,
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
    seed: int,
    chain: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """Arguments of `tree_attention`.

    The first row's tree has `width` nodes and ends at the last slot; others have at most `width`. With `chain`, every
    row has a chain and no slot is NaN.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, width, kv_heads * groups, dim, generator=generator)
    keys = torch.randn(rows, slots, kv_heads, dim, generator=generator)
    values = torch.randn(rows, slots, kv_heads, value_dim, generator=generator)
    counts = [width] + [int(rng.integers(1, width + 1)) for _ in range(1, rows)]
    lengths = [int(rng.integers(0, slots - count + 1)) if row else slots - count for row, count in enumerate(counts)]
    for row, end in enumerate(np.add(lengths, counts)):
        if not chain:
            keys[row, end:] = values[row, end:] = torch.nan
    inputs: dict[str, Tensor] = {
        "query": query.to(dtype).transpose(1, 2),
        "keys": keys.to(dtype),
        "values": values.to(dtype),
        **tree_tensors(lengths, counts, width, seed, chain),
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖; NaN if any value is NaN."""
    return float((got.double() - want.double()).norm() / want.double().norm())
