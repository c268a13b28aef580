"""Tree attention that gives the bits of decoding token by token, for half precision on a CPU.

In bf16 and fp16 a linear layer gives a row the same bits whatever rows stand beside it, up to `MAX_ROWS` of them.
Attention does not: its bits depend on how many keys there are and where they stand. So every node attends alone, over
its own path, in the call that the model would make for one token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lookahead.drafting.tree import TokenTree
from lookahead.errors import UnsupportedModelError

Attention = Callable[..., tuple[Tensor, Any]]
MAX_ROWS = 32  # rows of a product up to which half precision was seen to give each the bits it has alone
_LENGTHS = (1, 7, 16, 40, 100, 530, 1060)  # keys for which the kernel for rows is compared with SDPA
Step = tuple[int, int, int, int | Tensor | None]
"""A node, its depth, the first depth whose slot must change before it attends, and the nodes whose KV goes there."""


class Turns(NamedTuple):
    """How the nodes of one row's tree attend in turn.

    Attributes:
        tree: The tree, the nodes that an earlier pass scored included.
        start: The slot of the root.
        scored: First nodes of the tree that an earlier pass scored.
        steps: The nodes from `scored` on, depth first.
        nodes: For `kernels.row_attention`.
    """

    tree: TokenTree
    start: int
    scored: int
    steps: Sequence[Step]
    nodes: Tensor

    @classmethod
    def of(cls, tree: TokenTree, start: int, scored: int) -> Turns:
        """The turns of a tree whose root stands in slot `start`."""
        from lookahead.kernels.row_attention import pack_nodes

        steps = depth_first(tree.parents, tree.depths, scored)
        order = np.array([node for node, *_ in steps])
        return cls(tree, start, scored, steps, pack_nodes(order, tree.parents, tree.depths))


@njit(cache=True)
def _depth_first(parents, depths, scored):
    """The nodes from `scored` on, depth first, and the nodes to move: int64 `[n, 4]` and `[moves]`.

    Of every node: the node, its depth, the first depth to change, and where its moves end. Slot d holds node d at
    first, and after that the newest node of depth d that was moved there.
    """
    nodes = len(parents)
    child, sibling = np.full(nodes, -1), np.full(nodes, -1)
    for node in range(nodes - 1, 0, -1):
        sibling[node] = child[parents[node]]
        child[parents[node]] = node
    deepest = 0
    for node in range(nodes):
        deepest = max(deepest, depths[node])
    steps = np.empty((nodes - scored, 4), np.int64)
    moves = np.empty(nodes + (nodes - scored) * (deepest + 1), np.int64)
    held, path = np.arange(nodes), np.empty(nodes, np.int64)
    waiting = np.zeros(nodes + 1, np.int64)
    waits, step, moved = 1, 0, 0
    while waits:
        waits -= 1
        node = waiting[waits]
        depth = depths[node]
        path[depth] = node
        if node >= scored:
            first = 0
            while first <= depth and held[first] == path[first]:
                first += 1
            for at in range(first, depth + 1):
                held[at] = moves[moved] = path[at]
                moved += 1
            steps[step, 0], steps[step, 1], steps[step, 2], steps[step, 3] = node, depth, first, moved
            step += 1
        if node and sibling[node] >= 0:
            waiting[waits] = sibling[node]
            waits += 1
        if child[node] >= 0:
            waiting[waits] = child[node]
            waits += 1
    return steps, moves[:moved]


def depth_first(parents: NDArray[np.int32], depths: NDArray[np.int32], scored: int = 0) -> list[Step]:
    """The order in which the nodes of a tree (int32 `[n]` each) attend, those before `scored` left out."""
    steps, moves = _depth_first(parents, depths, scored)
    order: list[Step] = []
    begin = 0
    for node, depth, first, end in steps.tolist():
        moved: int | Tensor | None = torch.from_numpy(moves[begin:end]) if end > begin else None
        order.append((node, depth, first, node if end == begin + 1 else moved))
        begin = end
    return order


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


@lru_cache(maxsize=64)
@torch.inference_mode()
def has_bits_of_sdpa(dim: int, groups: int) -> bool:
    """Whether `kernels.row_attention` has the bits of SDPA for single queries in bfloat16, on this CPU.

    Scores that nearly cancel, and values that do, show any other order of the sums.

    Args:
        dim: Dimensions of a head.
        groups: Query heads per KV head.
    """
    from lookahead.kernels import row_attention

    source, root = torch.Generator().manual_seed(0), TokenTree.root(0)
    nodes = row_attention.pack_nodes(np.zeros(1, np.int64), root.parents, root.depths)
    for length in _LENGTHS:
        query, key, value = (
            torch.randn(heads, rows, dim, generator=source)
            for heads, rows in ((2 * groups, 1), (2, length), (2, length))
        )
        half = dim // 2
        near = torch.cat([key[..., :half], key[..., :half]], 2) * 2**22  # what is left of the scores is near 1
        far = torch.cat([query[..., :half], -query[..., :half]], 2)
        pairs = value.clone()
        pairs[:, 1::2] = -pairs[:, : length // 2 * 2 : 2]
        same = key.clone()
        same[:, 1::2] = same[:, : length // 2 * 2 : 2]
        for each in ((query, key, value), (far, near, value), (query, same, pairs)):
            one, keys, values = (tensor.bfloat16() for tensor in each)
            if not row_attention.is_supported(one, keys, values):
                return False
            shared = [tensor.repeat_interleave(groups, 0)[None] for tensor in (keys, values)]
            alone = scaled_dot_product_attention(one[None], shared[0], shared[1])
            slots = [tensor.transpose(0, 1).contiguous() for tensor in (one, keys, values)]
            got = row_attention.row_attention(
                slots[0], slots[1], slots[2], nodes=nodes, start=length - 1, scale=dim**-0.5
            )
            if not torch.equal(got[0], alone[0, :, 0]):
                return False
    return True


def takes_rows(config: PretrainedConfig) -> bool:
    """Whether layers of a model in bfloat16 attend by `kernels.row_attention`, where they have no windows."""
    heads, size = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if config._attn_implementation != "sdpa" or not isinstance(heads, int) or not isinstance(size, int):
        return False
    dim = getattr(config, "head_dim", None) or size // heads
    groups = heads // (getattr(config, "num_key_value_heads", None) or heads)
    return has_bits_of_sdpa(dim, groups)


def attend_in_turn(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    turns: Turns,
    *,
    window: int | None,
    crops: bool,
    own: Attention,
    options: dict[str, Any],
) -> Tensor:
    """Attention of the nodes of one row, each as if it were the only token of its pass.

    While a node attends, the slots after the committed ones hold its path. Afterwards they hold the nodes in order.

    Args:
        module: The attention layer.
        query: `[1, heads, width, dim]`; the nodes from `turns.scored` on.
        key: `[1, kv_heads, kv, dim]`, a view of the cache.
        value: `[1, kv_heads, kv, value_dim]`, likewise.
        turns: The tree, and the order of its nodes.
        window: How far back a query may look, itself included; None for no limit.
        crops: Whether the model's own cache drops what is outside the window; else a mask hides it.
        own: The model's attention function.
        options: What the model passes to its function, `scaling` among them.

    Returns:
        `[1, width, heads, value_dim]`.
    """
    tree, start, scored, steps, packed_nodes = turns
    is_sdpa, scale = own is sdpa_attention_forward, options.get("scaling")
    if is_sdpa and (window is None or start + int(tree.depths.max()) + 1 < window):
        from lookahead.kernels import row_attention

        slots = key[0].transpose(0, 1), value[0].transpose(0, 1)  # as the cache holds them
        rows = query[0].transpose(0, 1)
        # For a single head torch would share the sums of a product among its threads.
        is_whole = query.shape[1] > 1 and all(each.is_contiguous() for each in slots)
        if (
            is_whole
            and row_attention.is_supported(rows, *slots)
            and has_bits_of_sdpa(query.shape[3], query.shape[1] // key.shape[1])
        ):
            return row_attention.row_attention(
                rows, *slots, nodes=packed_nodes, start=start, scale=query.shape[3] ** -0.5 if scale is None else scale
            )[None]
    heads, width = query.shape[1:3]
    kv_heads = key.shape[1]
    nodes = slice(start, start + scored + width)
    is_moved = any(moved is not None for _, _, _, moved in steps)
    held = [(each, each[:, :, nodes].clone()) for each in (key, value)] if is_moved else []
    # With one row of a batch for each KV head, SDPA reads shared heads in place and computes the same bits.
    queries = query[0].unflatten(0, (kv_heads, heads // kv_heads)).split(1, 2)
    keys, values = (each[0][:, None].expand(-1, heads // kv_heads, -1, -1) for each in (key, value))
    seen: dict[int, tuple[Tensor, Tensor]] = {}  # views of the slots up to an end
    out: list[Any] = [None] * width
    for node, depth, first_moved, moved in steps:
        column, end = node - scored, start + depth + 1
        if moved is not None:
            for each, kept in held:
                each[:, :, start + first_moved : end] = (
                    kept[:, :, moved] if isinstance(moved, Tensor) else kept[:, :, moved, None]
                )
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
        each[:, :, nodes] = kept
    return torch.cat(out, 1)
