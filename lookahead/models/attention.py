"""Tree attention for a HuggingFace model: the registered attention function and the masks it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from lookahead.drafting.tree import IntArray, TokenTree, fill_ancestor_words
from lookahead.models.cache import TreeSlots

ATTENTION_NAME = "lookahead_tree"

_NO_END = np.iinfo(np.int64).max
# The bits of -inf, by the integer type of the same width: masks are written by Numba, which knows no bfloat16.
_MINUS_INF_BITS = {
    torch.float32: (torch.int32, -(1 << 23)),
    torch.bfloat16: (torch.int16, -(1 << 7)),
    torch.float16: (torch.int16, -(1 << 10)),
    torch.float64: (torch.int64, -(1 << 52)),
}


class Reach(NamedTuple):
    """How far back a query may look.

    Attributes:
        window: Positions, itself included; None for no end.
        chunk: Only positions of the query's own chunk of so many; None for no chunks.
    """

    window: int | None = None
    chunk: int | None = None


class TreeTensors(NamedTuple):
    """The trees of a pass where a kernel reads them.

    Attributes:
        lengths: int32 `[active]`; committed slots of each row.
        nodes: int32 `[active]`; nodes of each row's tree.
        depths: int32 `[active, width]`; edges between the root and the node, 0 past a tree's last node.
        words: int64 `[active, width, ceil(width / 64)]`; `TokenTree.ancestor_words`, 0 past a tree's last node.
    """

    lengths: Tensor
    nodes: Tensor
    depths: Tensor
    words: Tensor


class TreePass:
    """What the attention of one target pass needs to know about its trees.

    Masks are additive, made on first use, and shared by the layers of the pass; so are the tensors of the kernel.

    Args:
        slots: Where the rows stand; its pass must have begun.
        trees: One tree per active row, or None when every row writes a plain chain of `slots.width` tokens
            behind its committed ones (prefill).

        has_softcap: Whether the model's own attention caps scores where it is told to; SDPA does not.

    Attributes:
        has_softcap: As given.
        is_from_empty: No row has committed tokens and every row writes a chain: plain causal attention.
        sees_all: Every query may look at every slot, so that no mask is needed.
    """

    def __init__(self, slots: TreeSlots, trees: Sequence[TokenTree] | None, *, has_softcap: bool = True) -> None:
        self._slots = slots
        self._trees = trees
        self.has_softcap = has_softcap
        self.is_from_empty = trees is None and slots.kv_length == slots.width
        self.sees_all = slots.width == 1 and slots.is_even
        self._masks: dict[tuple[int, Reach, torch.dtype, torch.device], Tensor] = {}
        self._tensors: dict[torch.device, TreeTensors] = {}

    @property
    def scores_trees(self) -> bool:
        """Whether the pass scores trees; a prefill does not."""
        return self._trees is not None

    def tensors(self, device: torch.device) -> TreeTensors:
        """The trees on `device`, brought there in one copy."""
        if device not in self._tensors:
            self._tensors[device] = self._copy(device)
        return self._tensors[device]

    def mask(self, groups: int, reach: Reach, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Additive mask `[active, 1, width * groups, kv]`; node t's rows are t * groups … t * groups + groups - 1.

        Args:
            groups: Query heads per KV head that the caller packs into query rows.
            reach: How far back a query may look.
            dtype: Floating-point type of the mask.
            device: Where the mask is needed.
        """
        key = (groups, reach, dtype, device)
        if key not in self._masks:
            self._masks[key] = self._make(groups, reach, dtype).to(device, non_blocking=True)
        return self._masks[key]

    def _copy(self, device: torch.device) -> TreeTensors:
        """Pack the trees into one array of int64, copy it, and view its parts."""
        active, width = self._slots.active, self._slots.width
        parents, depths, nodes = self._lay_out()
        words = _pack_ancestors(parents, nodes)
        small = np.zeros((active * (width + 2) + 1) // 2 * 2, np.int32)
        np.concatenate((self._slots.lengths[:active], nodes, depths.reshape(-1)), out=small[: active * (width + 2)])
        packed = torch.from_numpy(np.concatenate([words.reshape(-1), small.view(np.int64)]))
        packed = packed.to(device, non_blocking=True)
        ints = packed[words.size :].view(torch.int32)
        return TreeTensors(
            ints[:active],
            ints[active : 2 * active],
            ints[2 * active : active * (width + 2)].view(active, width),
            packed[: words.size].view(words.shape),
        )

    def _make(self, groups: int, reach: Reach, dtype: torch.dtype) -> Tensor:
        """Fill a host mask with Numba and view it as `dtype`."""
        slots = self._slots
        bits_dtype, blocked = _MINUS_INF_BITS[dtype]
        if slots.width == 1 and reach == Reach():
            # Plain steps of rows that differ in length: the most frequent mask, and one line serves all groups.
            bits = torch.empty(slots.active, 1, 1, slots.kv_length, dtype=bits_dtype)
            _end_rows(bits.numpy(), slots.lengths, blocked)
            return bits.view(dtype).expand(-1, -1, groups, -1)
        bits = torch.empty(slots.active, 1, slots.width * groups, slots.kv_length, dtype=bits_dtype)
        window, chunk = (_NO_END if limit is None else limit for limit in reach)
        parents, depths, nodes = self._lay_out()
        _fill_masks(bits.numpy(), parents, depths, nodes, slots.lengths, groups, window, chunk, blocked)
        return bits.view(dtype)

    def _lay_out(self) -> tuple[IntArray, IntArray, IntArray]:
        """Parents and depths, int32 `[active, width]`, zeros behind a row's tree, and how many nodes each has."""
        active, width = self._slots.active, self._slots.width
        if self._trees is None or width == 1:
            chain = np.arange(width, dtype=np.int32)
            depths = np.repeat(chain[None], active, 0)
            return np.maximum(depths - 1, 0), depths, np.full(active, width, np.int32)
        parents, depths = np.zeros((2, active, width), np.int32)
        for row, tree in enumerate(self._trees):
            parents[row, : len(tree)] = tree.parents
            depths[row, : len(tree)] = tree.depths
        return parents, depths, np.array([len(tree) for tree in self._trees], np.int32)


@njit(cache=True)
def _pack_ancestors(parents, nodes):
    """`TokenTree.ancestor_words` of all rows, int64 `[active, width, ceil(width / 64)]`."""
    rows, width = parents.shape
    words = np.zeros((rows, width, (width + 63) // 64), np.int64)
    for row in range(rows):
        fill_ancestor_words(parents[row, : nodes[row]], words[row])
    return words


@njit(cache=True)
def _end_rows(masks, lengths, blocked):
    """Write masks `[active, 1, 1, kv]` of rows that see their committed slots and the one behind them."""
    for row in range(len(masks)):
        masks[row, 0, 0, : lengths[row] + 1] = 0
        masks[row, 0, 0, lengths[row] + 1 :] = blocked


@njit(cache=True)
def _fill_masks(masks, parents, depths, nodes, lengths, groups, window, chunk, blocked):
    """Write the mask of every row, `[active, 1, width * groups, kv]`."""
    for row in range(len(nodes)):
        count = nodes[row]
        _fill_mask(
            masks[row, 0], parents[row, :count], depths[row, :count], lengths[row], groups, window, chunk, blocked
        )


@njit(cache=True)
def _fill_mask(mask, parents, depths, length, groups, window, chunk, blocked):
    """Write one row's mask `[width * groups, kv]`: 0 where a node may look, `blocked` where it may not.

    A node sees the committed slots and its ancestors, as far as they are less than `window` positions behind it
    and in its chunk of positions. Queries of padding nodes look at the root alone, so that their softmax stays finite.
    """
    nodes = len(parents)
    for node in range(mask.shape[0] // groups):
        row = mask[node * groups]
        row[:] = blocked
        if node >= nodes:
            row[length] = 0
        else:
            position = length + depths[node]
            first = max(0, position - window + 1, position // chunk * chunk)
            row[first:length] = 0
            ancestor = node
            while length + depths[ancestor] >= first:
                row[length + ancestor] = 0
                if ancestor == 0:
                    break
                ancestor = parents[ancestor]
        for copy in range(1, groups):
            for slot in range(len(row)):
                mask[node * groups + copy, slot] = row[slot]


_running = local()  # no ContextVar: torch.compile cannot look into one


@contextmanager
def running(tree_pass: TreePass) -> Iterator[None]:
    """Make `tree_pass` the one that the registered attention serves."""
    outer = getattr(_running, "tree_pass", None)
    _running.tree_pass = tree_pass
    try:
        yield
    finally:
        _running.tree_pass = outer


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a running `TreePass`, in the signature transformers calls attention functions with.

    Trees, and on a CPU prompts in float32, go to a kernel where one serves them. Elsewhere the query heads that share a
    KV head are packed into query rows, so that keys and values are read once and one SDPA call does the work.

    Args:
        module: The attention layer; it says how far back it looks where the arguments do not.
        query: `[rows, heads, width, dim]`.
        key: `[rows, kv_heads, kv, dim]`.
        value: `[rows, kv_heads, kv, value_dim]`.
        attention_mask: Ignored: the mask follows from the pass.
        scaling: Factor on the scores; `dim ** -0.5` when None.
        softcap: Scores become `softcap * tanh(scores / softcap)`.
        s_aux: `[heads]`, a learned logit per head that takes part in the softmax only (attention sinks).
        **kwargs: What other attention functions read; of it `sliding_window`, the positions a query may look back,
            itself included.

    Returns:
        `[rows, width, heads, value_dim]`, contiguous, and None for the weights.
    """
    tree_pass: TreePass = _running.tree_pass
    reach = _reach(module, kwargs, key.shape[2])
    softcap = softcap if tree_pass.has_softcap else None
    rows, heads, width, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    # A prompt's chain is a tree too. A GPU's kernel is made for few queries, and in half precision a prompt is read as
    # `generate` reads it: other last bits in all its KV would show in the tokens.
    is_prompt_served = query.device.type == "cpu" and query.dtype == torch.float32
    if (tree_pass.scores_trees or is_prompt_served) and not torch.compiler.is_compiling():
        slots = (key.transpose(1, 2), value.transpose(1, 2))  # as the cache holds them
        limits = {"window": reach.window, "chunk": reach.chunk, "softcap": softcap, "sinks": s_aux}
        kernel = _kernel_for(query, *slots, limits)
        if kernel is not None:
            return kernel(query, *slots, **tree_pass.tensors(query.device)._asdict(), scaling=scaling, **limits), None
    packed = query.view(rows, kv_heads, groups, width, dim).transpose(2, 3).reshape(rows, kv_heads, width * groups, dim)
    plain = softcap is None and s_aux is None
    if plain and tree_pass.is_from_empty and reach == Reach():
        # Causal attention from an empty cache needs no mask, and SDPA skips half of the work.
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
        return out.transpose(1, 2).contiguous(), None
    mask = None
    if reach != Reach() or not tree_pass.sees_all:
        mask = tree_pass.mask(groups, reach, query.dtype, query.device)
    if plain:
        out = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    else:
        out = _softmax_attention(packed, key, value, mask, scaling or dim**-0.5, softcap, s_aux)
    out = out.view(rows, kv_heads, width, groups, -1).permute(0, 2, 1, 3, 4)
    return out.reshape(rows, width, heads, -1), None


def _kernel_for(query: Tensor, keys: Tensor, values: Tensor, limits: Mapping[str, Any]) -> Callable[..., Tensor] | None:
    """The kernel for these tensors, or None where SDPA serves them."""
    from lookahead.kernels.dispatch import attention_for

    return attention_for(query, keys, values, limits)


def _reach(module: Any, kwargs: dict[str, Any], kv_length: int) -> Reach:
    """How far back the queries of a layer may look, limits that nothing reaches left out."""
    config: Any = getattr(module, "config", None)
    window: int | None = getattr(module, "sliding_window", None)
    if "sliding_window" in kwargs:
        window = kwargs["sliding_window"]
    elif window is None and not hasattr(config, "layer_types"):
        # Some models put the window into masks only: Qwen2-MoE by its layers, PhiMoE in all of them.
        window = getattr(config, "sliding_window", None)
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    # Llama 4 tells no attention function which of its layers look at chunks only.
    if chunk is not None and config.layer_types[module.layer_idx] != "chunked_attention":
        chunk = None
    return Reach(*(limit if limit is not None and limit < kv_length else None for limit in (window, chunk)))


def _softmax_attention(
    packed: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention written out, for what SDPA cannot do: softcapping (Gemma 2) and sinks (gpt-oss)."""
    scores = packed @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if s_aux is None:
        return torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype) @ value
    kv_heads, rows = key.shape[1], packed.shape[2]
    groups = len(s_aux) // kv_heads
    sinks = s_aux.view(kv_heads, 1, groups).expand(kv_heads, rows // groups, groups).reshape(1, kv_heads, rows, 1)
    scores = torch.cat([scores, sinks.to(scores.dtype).expand(scores.shape[0], -1, -1, -1)], -1)
    return torch.softmax(scores, -1, dtype=torch.float32)[..., :-1].to(value.dtype) @ value


AttentionInterface.register(ATTENTION_NAME, tree_attention)
