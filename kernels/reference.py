"""What the kernels compute, in plain torch: no blocks, no splits, a dense mask, any floating-point type."""

from __future__ import annotations

import torch
from torch import Tensor


def tree_mask(
    slots: int, lengths: Tensor, nodes: Tensor, depths: Tensor, words: Tensor, window: int | None, chunk: int | None
) -> Tensor:
    """bool `[rows, width, slots]`: which slots each node may look at; nothing for the nodes past a row's last.

    A node sees the committed slots and its ancestors, itself included, as far as their positions are less than
    `window` behind its own and in the same chunk of `chunk` positions.
    """
    rows, width = depths.shape
    device = depths.device
    node = torch.arange(width, device=device)
    slot = torch.arange(slots, device=device)
    position = lengths[:, None] + depths  # [rows, width]
    is_ancestor = (words[:, :, node // 64] >> (node % 64)) & 1 == 1  # [rows, width, width]
    behind = slot - lengths[:, None]  # [rows, slots]; the node a slot holds, negative where it is committed
    holds_node = (behind >= 0) & (behind < width)
    index = behind.clamp(0, width - 1)
    sees = is_ancestor.gather(2, index[:, None].expand(rows, width, slots)) & holds_node[:, None]
    sees = sees | (behind < 0)[:, None]
    slot_position = torch.where(holds_node, position.gather(1, index), slot)  # [rows, slots]
    if window is not None:
        sees = sees & (slot_position[:, None] > position[:, :, None] - window)
    if chunk is not None:
        sees = sees & (slot_position[:, None] // chunk == position[:, :, None] // chunk)
    return sees & (node < nodes[:, None])[:, :, None]


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
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """As `lookahead.kernels.tree_attention.tree_attention`, computed in `dtype` and returned in it.

    Slots that no node of a row sees may hold anything, NaN included.
    """
    rows, heads, _, dim = query.shape
    sees = tree_mask(keys.shape[1], lengths, nodes, depths, words, window, chunk)
    used = sees.any(1)[:, :, None, None]
    groups = heads // keys.shape[2]
    keys, values = (
        torch.where(used, each, 0).to(dtype).repeat_interleave(groups, 2).transpose(1, 2) for each in (keys, values)
    )
    scores = query.to(dtype) @ keys.transpose(2, 3) * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~sees[:, None], float("-inf"))
    if sinks is not None:
        sink = sinks.to(dtype).view(1, heads, 1, 1).expand(rows, heads, scores.shape[2], 1)
        scores = torch.cat([scores, sink], 3)
    weights = torch.softmax(scores, 3)[..., : keys.shape[2]]
    weights = torch.where(sees.any(2)[:, None, :, None], weights, 0)  # zeros, not NaN, for nodes past a row's last
    return (weights @ values).transpose(1, 2).contiguous()


def compact(buffer: Tensor, rows: Tensor, starts: Tensor, counts: Tensor, paths: Tensor) -> None:
    """As `lookahead.kernels.compaction.compact`, for one buffer `[rows, capacity, …]`, in place."""
    for row, start, count, path in zip(rows.tolist(), starts.tolist(), counts.tolist(), paths, strict=True):
        buffer[row, start : start + count] = buffer[row, start + path[:count].long()].clone()
