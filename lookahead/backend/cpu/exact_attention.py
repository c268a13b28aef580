"""Attention with the bits of the model's own, for half precision on a CPU: of trees, and of prompts.

In bf16 and fp16 a linear layer gives a row the same bits whatever the other rows are, up to `MAX_ROWS` rows. Attention
does not: its bits depend on the number and the slots of the keys. So every node attends alone, over its own path, in
the call that the model would make for one token. Prompts attend as the model would read them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig

from lookahead.backend.cpu.attention_inputs import cancelling, few_weights, many_weights
from lookahead.drafting.tree import TokenTree
from lookahead.kernels import prompt_attention, row_attention
from lookahead.kernels.microkernel import LANES
from lookahead.model.facts import Attention, attention_name, is_sdpa, sdpa
from lookahead.model.known_code import arithmetic_flags

Step = tuple[int, int, int, Tensor | None]
"""A node, its depth, the first depth whose slot must change before the node attends, and the nodes whose KV goes into
that slot and the following ones."""
MAX_ROWS = 32  # rows of a product; up to this number half precision was seen to keep the bits of each row alone
# Upper limit of non-root query elements times slots, below which the per-node kernel within one call for all layers is
# faster than masked attention in separate calls, if bits do not matter. With 16 lanes it always is.
MAX_KERNEL_PRODUCTS = sys.maxsize if LANES == 16 else 12 << 20
_BY_OWN = {"cache", "position_bias", "softcap"}  # options that only the model's own function serves
_PROMPTS = (200, 770, 1279)  # numbers of tokens of prompts that are compared with SDPA


class PerNodeAttention:
    """The per-node attention of a pass: its trees, the slot of each root, and the nodes scored by earlier passes."""

    def __init__(self, trees: Sequence[TokenTree], starts: Sequence[int], scored: Sequence[int]) -> None:
        self.trees, self.starts, self.scored = trees, starts, scored
        self.deepest = max(start + int(tree.depths.max()) for tree, start in zip(trees, starts, strict=True))

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """`nodes` and `trees` for `kernels.row_attention`."""
        nodes = np.zeros((len(self.trees), 2, max(map(len, self.trees))), np.int64)
        for row, tree in enumerate(self.trees):
            nodes[row, :, : len(tree)] = tree.parents, tree.depths
        sizes = np.array([self.starts, [len(tree) for tree in self.trees], self.scored], np.int64)
        return {"nodes": torch.from_numpy(nodes), "trees": torch.from_numpy(np.ascontiguousarray(sizes.T))}

    @cached_property
    def steps(self) -> list[list[Step]]:
        """For every row the nodes that no earlier pass scored, in depth-first order."""
        return [_steps_of(tree, scored) for tree, scored in zip(self.trees, self.scored, strict=True)]


def _steps_of(tree: TokenTree, scored: int) -> list[Step]:
    """Depth-first steps of a tree. Slot d holds node d at first, later the newest node of depth d."""
    depths: list[int] = tree.depths.tolist()
    children: list[list[int]] = [[] for _ in depths]
    for node, parent in enumerate(tree.parents[1:].tolist(), 1):
        children[parent].append(node)
    nodes, path, waiting, steps = list(range(len(depths))), [0] * len(depths), [0], []
    while waiting:
        node = waiting.pop()
        depth = depths[node]
        path[depth] = node
        if node >= scored:
            end = depth + 1
            first = next((at for at in range(end) if nodes[at] != path[at]), end)
            nodes[first:end] = path[first:end]
            steps.append((node, depth, first, torch.tensor(path[first:end], device="cpu") if first < end else None))
        waiting += reversed(children[node])
    return steps


@lru_cache(maxsize=64)
@torch.inference_mode()
def has_bits_of_sdpa(dim: int, groups: int, flags: tuple[Any, ...] = ()) -> bool:
    """Whether `kernels.row_attention` has the bits of SDPA for single queries in bfloat16 on this CPU.

    `groups` are query heads per KV head. `flags` are torch's settings, which choose its kernel.
    """
    nodes = torch.zeros(1, 2, 1, dtype=torch.int64, device="cpu")
    for one, keys, values in chain(cancelling(torch.bfloat16, 2 * groups, 2, dim), few_weights(), many_weights()):
        if not row_attention.is_supported(one, keys, values):
            return False
        alone = scaled_dot_product_attention(one, keys, values, enable_gqa=True)
        slots = [tensor.transpose(1, 2).contiguous() for tensor in (one, keys, values)]
        trees = torch.tensor([[keys.shape[2] - 1, 1, 0]], device="cpu")
        got = row_attention.row_attention(*slots, nodes=nodes, trees=trees, scale=one.shape[3] ** -0.5)
        if not torch.equal(got[0, 0], alone[0, :, 0]):
            return False
    return True


@lru_cache(maxsize=64)
@torch.inference_mode()
def has_bits_of_prompts(dim: int, flags: tuple[Any, ...] = ()) -> bool:
    """Whether `kernels.prompt_attention` has the bits of SDPA for prompts in bfloat16 on this CPU.

    Prompts are compared whole, and behind their first tokens, as transformers passes it with a mask. Their weights are
    those of single queries.
    """
    if not has_bits_of_sdpa(dim, 1, flags):
        return False
    for query, keys, values in cancelling(torch.bfloat16, 2, 2, dim, _PROMPTS):
        length = query.shape[2]
        seen = torch.ones(length, length, dtype=torch.bool, device="cpu").tril()
        for start in (0, length % 200):
            some, mask = query[:, :, start:], seen[start:] if start else None
            expected = scaled_dot_product_attention(some, keys, values, attn_mask=mask, is_causal=mask is None)
            q, k, v = (states[0].transpose(0, 1) for states in (some, keys, values))
            if not prompt_attention.is_supported(q, k, v):
                return False
            if not torch.equal(prompt_attention.prompt_attention(q, k, v, dim**-0.5), expected[0].transpose(0, 1)):
                return False
    return True


@lru_cache(maxsize=64)
@torch.inference_mode()
def has_bits_behind_windows(dim: int, groups: int, flags: tuple[Any, ...] = ()) -> bool:
    """Whether SDPA has the bits of single queries if a mask hides nothing, as transformers passes it behind a window.

    With a mask, the queries that share a KV head become rows of one product, whose bits differ too seldom for a
    comparison to show it.
    """
    if groups > 1:
        return False
    module: Any = nn.Module()
    module.num_key_value_groups, module.is_causal = groups, True
    for one, keys, values in cancelling(torch.bfloat16, 2 * groups, 2, dim):
        alone = scaled_dot_product_attention(one, keys, values, enable_gqa=True)
        seen = torch.ones(1, 1, 1, keys.shape[2], dtype=torch.bool, device="cpu")
        masked = sdpa()(module, one, keys, values, seen)[0]
        if not torch.equal(masked[0, 0], alone[0, :, 0]):
            return False
    return True


@lru_cache(maxsize=64)
@torch.inference_mode()
def _has_bits_of_shared_heads(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, flags: tuple[Any, ...]) -> bool:
    """Whether SDPA with one batch row per KV head has the bits of SDPA over heads that share keys.

    The former reads keys and values in the slots of the cache, the latter those that transformers concatenates. Torch
    2.8 has another attention kernel for the latter. Without flash attention, CPUs with AMX add products in an order
    that depends on the alignment of a matrix.
    """
    for query, keys, values in cancelling(dtype, heads, kv_heads, dim):
        slots = (states.transpose(1, 2).contiguous().transpose(1, 2) for states in (keys, values))
        expected = scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        if not torch.equal(scaled_dot_product_attention(*_by_kv_head(query, *slots)).view_as(expected), expected):
            return False
    return True


def _by_kv_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one row of queries, keys and values as a batch with one row per KV head, shared by its queries."""
    kv_heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    keys, values = (states[0][:, None].expand(-1, groups, -1, -1) for states in (key, value))
    return query[0].unflatten(0, (kv_heads, groups)), keys, values


def takes_rows(config: PretrainedConfig) -> bool:
    """Whether layers of a bfloat16 model can attend by `kernels.row_attention`."""
    try:
        heads, size = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
        if attention_name(config) != "sdpa" or not isinstance(heads, int) or not isinstance(size, int):
            return False
        dim = getattr(config, "head_dim", None) or size // heads
        groups = heads // (getattr(config, "num_key_value_heads", None) or heads)
    except RuntimeError:  # a size that differs between layers
        return False
    return has_bits_of_sdpa(dim, groups, arithmetic_flags())


def has_bits(own: Attention, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether `kernels.row_attention` has the bits of a model's attention function for these heads of size `dim`."""
    # For a single head torch would split the sums of a product among its threads.
    return is_sdpa(own) and heads > 1 and has_bits_of_sdpa(dim, heads // kv_heads, arithmetic_flags())


def attend_prompts(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Attention,
    options: Mapping[str, Any],
    *,
    as_whole: bool = False,
) -> Tensor | None:
    """Attention of the last tokens of texts to all tokens before them, with the bits of the model's own function.

    Args:
        module: The attention layer.
        query: `[rows, heads, width, dim]`.
        key: `[rows, kv_heads, slots, dim]`.
        value: `[rows, kv_heads, slots, value_dim]`.
        own: The model's attention function.
        options: Options that the model passes to it, such as `scaling`.
        as_whole: Whether the bits are those of a pass over the whole texts.

    Returns:
        `[rows, width, heads, value_dim]`; None if no kernel serves.
    """
    dim, is_causal = query.shape[3], options.get("is_causal", getattr(module, "is_causal", True))
    if not (is_sdpa(own) and is_causal and query.shape[1] > 1) or options.get("dropout") or _BY_OWN & set(options):
        return None
    texts = list(zip(*(states.transpose(1, 2) for states in (query, key, value)), strict=True))
    if not (
        prompt_attention.is_supported(*texts[0], as_whole=as_whole) and has_bits_of_prompts(dim, arithmetic_flags())
    ):
        return None
    scale = options.get("scaling", dim**-0.5)
    return torch.stack([prompt_attention.prompt_attention(q, k, v, scale, as_whole=as_whole) for q, k, v in texts])


def attend_per_node(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    per_node: PerNodeAttention,
    *,
    window: int | None,
    crops: bool,
    own: Attention,
    options: dict[str, Any],
) -> Tensor:
    """Attention of the nodes of all rows, each as the only token of its pass.

    Args:
        module: The attention layer.
        query: `[rows, heads, width, dim]`, the unscored nodes of each tree, and padding.
        key: `[rows, kv_heads, slots, dim]`, a view of the cache.
        value: `[rows, kv_heads, slots, value_dim]`, a view of the cache.
        per_node: The trees and their slots.
        window: How far back a query may look, itself included; None for no limit.
        crops: Whether the model's own cache drops positions outside the window; otherwise a mask hides them.
        own: The model's attention function.
        options: Options that the model passes to it, such as `scaling`.

    Returns:
        `[rows, width, heads, value_dim]`; zeros for padding.
    """
    rows, heads, width, dim = query.shape
    nodes, keys, values = (states.transpose(1, 2) for states in (query, key, value))  # as the cache holds them
    is_whole = keys[0].is_contiguous() and values[0].is_contiguous() and keys.stride() == values.stride()
    is_whole = is_whole and "position_bias" not in options
    if window is not None and per_node.deepest + 1 >= window:
        is_whole = is_whole and crops and has_bits_behind_windows(dim, heads // keys.shape[2], arithmetic_flags())
    is_whole = is_whole and row_attention.is_supported(nodes, keys, values)
    if is_whole and has_bits(own, heads, keys.shape[2], dim):
        scale = options.get("scaling", dim**-0.5)
        limits = row_attention.AttentionLimits(window or 0)
        return row_attention.row_attention(nodes, keys, values, **per_node.tensors, scale=scale, limits=limits)
    out = query.new_zeros(rows, width, heads, value.shape[3])
    call = partial(_attend_by_torch, module, window=window, crops=crops, own=own, options=options)
    for row, (start, scored, steps) in enumerate(zip(per_node.starts, per_node.scored, per_node.steps, strict=True)):
        one = slice(row, row + 1)
        out[row, : len(steps)] = call(query[one], key[one], value[one], start, scored, steps)
    return out


def _attend_by_torch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: int,
    scored: int,
    steps: Sequence[Step],
    *,
    window: int | None,
    crops: bool,
    own: Attention,
    options: dict[str, Any],
) -> Tensor:
    """`attend_per_node` of one row, without padding: `[nodes, heads, value_dim]`.

    While a node attends, the slots after the committed ones hold its path. Afterwards they hold the nodes in order.
    """
    by_sdpa, scale, bias = is_sdpa(own), options.get("scaling"), options.get("position_bias")
    heads = query.shape[1]
    nodes = slice(start, start + scored + len(steps))
    is_moved = any(moved is not None for *_, moved in steps)
    copies = [(states, states[:, :, nodes].clone()) for states in (key, value)] if is_moved else []
    # With one batch row per KV head, SDPA reads shared heads in place.
    shape = query.dtype, heads, key.shape[1], query.shape[3]
    is_shared = by_sdpa and bias is None and _has_bits_of_shared_heads(*shape, arithmetic_flags())
    grouped, keys, values = _by_kv_head(query, key, value)
    queries = grouped.split(1, 2)
    out: list[Any] = [None] * len(steps)
    for node, depth, first_moved, moved in steps:
        column, end = node - scored, start + depth + 1
        if moved is not None:
            for states, kept in copies:
                states[:, :, start + first_moved : end] = kept[:, :, moved]
        if is_shared and (window is None or end < window):
            attended = scaled_dot_product_attention(queries[column], keys[:, :, :end], values[:, :, :end], scale=scale)
            out[column] = attended.view(1, heads, -1)
            continue
        first, mask = 0, None
        if window is not None and end >= window:  # transformers masks from here on
            first = end - window if crops else 0
            mask = torch.arange(first, end, device="cpu")[None, None, None] >= end - window
            if not by_sdpa:
                mask = query.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(query.dtype).min)
        if bias is not None:  # a bias by distance: the last query is in the last slot
            options = {**options, "position_bias": bias[:, :, -1:, -end:]}
        one = query[:, :, column : column + 1]
        out[column] = own(module, one, key[:, :, first:end], value[:, :, first:end], mask, **options)[0][0]
    for states, kept in copies:
        states[:, :, nodes] = kept
    return torch.cat(out)
