"""References of the kernels in plain torch: no blocks, no splits, a dense mask, any floating-point type."""

from __future__ import annotations

import torch
from torch import Tensor

from lookahead.kernels.self_test import compact, tree_mask

__all__ = ["compact", "tree_attention", "tree_mask"]


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
    """Like `lookahead.kernels.tree_attention.tree_attention`, computed and returned in `dtype`.

    Slots that no node of a row sees may hold any value, including NaN.
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
