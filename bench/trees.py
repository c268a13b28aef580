"""Random trees over a cache whose unused slots hold NaN: inputs for the tests and the benchmark of the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lookahead.tree import TokenTree


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
    """Arguments of `tree_attention`: the first row's tree has `width` nodes and ends with the last slot, others less."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, width, kv_heads * groups, dim, generator=generator)
    keys = torch.randn(rows, slots, kv_heads, dim, generator=generator)
    values = torch.randn(rows, slots, kv_heads, value_dim, generator=generator)
    lengths, nodes = torch.zeros(2, rows, dtype=torch.int32)
    depths = torch.zeros(rows, width, dtype=torch.int32)
    words = torch.zeros(rows, width, (width + 63) // 64, dtype=torch.int64)
    for row in range(rows):
        count = int(rng.integers(1, width + 1)) if row else width
        length = int(rng.integers(0, slots - count + 1)) if row else slots - count
        parents = [max(0, i - 1) if chain else int(rng.integers(max(0, i - 4), max(1, i))) for i in range(count)]
        tree = TokenTree.from_parents(np.arange(count), parents)
        lengths[row], nodes[row] = length, count
        depths[row, :count] = torch.from_numpy(tree.depths)
        ancestors = torch.from_numpy(tree.ancestor_words())
        words[row, :count, : ancestors.shape[1]] = ancestors
        if not chain:
            keys[row, length + count :] = values[row, length + count :] = torch.nan
    inputs: dict[str, Tensor] = {
        "query": query.to(dtype).transpose(1, 2),
        "keys": keys.to(dtype),
        "values": values.to(dtype),
        "lengths": lengths,
        "nodes": nodes,
        "depths": depths,
        "words": words,
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖; NaN where anything is NaN."""
    return float((got.double() - want.double()).norm() / want.double().norm())
