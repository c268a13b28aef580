"""Tree attention that gives the bits of decoding token by token, for half precision on a CPU.

In bf16 and fp16 a linear layer gives a row the same bits whatever rows stand beside it, up to `MAX_ROWS` of them.
Attention does not: its bits depend on how many keys there are and where they stand. So every node attends alone, over
its own path, in the call that the model would make for one token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lookahead.errors import UnsupportedModelError

Attention = Callable[..., tuple[Tensor, Any]]
MAX_ROWS = 32  # rows of a product up to which half precision was seen to give each the bits it has alone
Steps = list[tuple[int, int, bool]]
"""For every node, depth first: the node, its depth, and whether its KV must be moved to the slot of its depth."""


@njit(cache=True)
def _depth_first(parents, depths):
    """Nodes depth first, and whether a node is out of place: int64 `[n, 3]` of node, depth, 0 or 1.

    Slot d holds node d at first, and the newest node of depth d after that.
    """
    nodes = len(parents)
    child, sibling = np.full(nodes, -1), np.full(nodes, -1)
    for node in range(nodes - 1, 0, -1):
        sibling[node] = child[parents[node]]
        child[parents[node]] = node
    steps = np.empty((nodes, 3), np.int64)
    held = np.arange(nodes)
    waiting = np.zeros(nodes + 1, np.int64)
    count = 1
    for place in range(nodes):
        count -= 1
        node = waiting[count]
        depth = depths[node]
        steps[place, 0], steps[place, 1], steps[place, 2] = node, depth, held[depth] != node
        held[depth] = node
        if node and sibling[node] >= 0:
            waiting[count] = sibling[node]
            count += 1
        if child[node] >= 0:
            waiting[count] = child[node]
            count += 1
    return steps


def depth_first(parents: NDArray[np.int32], depths: NDArray[np.int32]) -> Steps:
    """The order in which the nodes of a tree (int32 `[n]` each) attend."""
    return [(int(node), int(depth), bool(moves)) for node, depth, moves in _depth_first(parents, depths).tolist()]


def own_attention(module: Any, config: PretrainedConfig) -> Attention:
    """The attention function that a layer of the model calls by itself.

    Raises:
        UnsupportedModelError: The layer has none that takes one row at a time.
    """
    name = config._attn_implementation
    if name == "sdpa":
        return sdpa_attention_forward
    if name != "eager":
        raise UnsupportedModelError(f"the attention {name!r} has no form for single rows")
    own: Attention = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return own


def attend_in_turn(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    steps: Steps,
    *,
    start: int,
    scored: int,
    window: int | None,
    crops: bool,
    own: Attention,
    options: dict[str, Any],
) -> Tensor:
    """Attention of the nodes of one row, each as if it were the only token of its pass.

    While a node attends, the slots after the committed ones hold its path. Afterwards they hold the nodes in order.

    Args:
        module: The attention layer.
        query: `[1, heads, width, dim]`; the nodes from `scored` on.
        key: `[1, kv_heads, kv, dim]`, a view of the cache.
        value: `[1, kv_heads, kv, value_dim]`, likewise.
        steps: The nodes, depth first.
        start: The slot of the root.
        scored: First nodes of the tree that an earlier pass scored.
        window: How far back a query may look, itself included; None for no limit.
        crops: Whether the model's own cache drops what is outside the window; else a mask hides it.
        own: The model's attention function.
        options: What the model passes to its function, `scaling` among them.

    Returns:
        `[1, width, heads, value_dim]`.
    """
    heads, width = query.shape[1:3]
    kv_heads = key.shape[1]
    tree = slice(start, start + scored + width)
    is_moved = any(moves for _, _, moves in steps)
    held = [(each, each[:, :, tree].clone()) for each in (key, value)] if is_moved else []
    # With one row of a batch for each KV head, SDPA reads shared heads in place and computes the same bits.
    queries = query[0].unflatten(0, (kv_heads, heads // kv_heads)).split(1, 2)
    keys, values = (each[0][:, None].expand(-1, heads // kv_heads, -1, -1) for each in (key, value))
    is_sdpa, scale = own is sdpa_attention_forward, options.get("scaling")
    seen: dict[int, tuple[Tensor, Tensor]] = {}  # views of the slots up to an end
    out: list[Any] = [None] * width
    for node, depth, moves in steps:
        if moves:
            for each, kept in held:
                each[:, :, start + depth] = kept[:, :, node]
        if node < scored:
            continue
        column, end = node - scored, start + depth + 1
        if is_sdpa and (window is None or end < window):
            if end not in seen:
                seen[end] = keys.narrow(2, 0, end), values.narrow(2, 0, end)
            attended = scaled_dot_product_attention(queries[column], *seen[end], scale=scale)
            out[column] = attended.view(1, 1, heads, -1)
            continue
        first, mask = 0, None
        if window is not None and end >= window:  # transformers makes a mask from here on
            first = end - window if crops else 0
            mask = torch.arange(first, end)[None, None, None] >= end - window
            if not is_sdpa:
                mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
        one = query[:, :, column : column + 1]
        out[column] = own(module, one, key[:, :, first:end], value[:, :, first:end], mask, **options)[0]
    for each, kept in held:
        each[:, :, tree] = kept
    return torch.cat(out, 1)
