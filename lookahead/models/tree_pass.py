"""Passes over token trees as attention sees them: masks and tensors, for one pass or for fixed-shape passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from lookahead.drafting.tree import TokenTree, fill_ancestor_words
from lookahead.models.cache import TreeSlots
from lookahead.models.exact_attention import Turns

_MIN_SLOTS = 256
_ALIGNMENT = 16  # bytes; of tensors that share a buffer

_Kind = tuple[tuple[int, ...], torch.dtype]  # shape and type of a tensor


class AttentionSpan(NamedTuple):
    """How far back a query may look.

    Attributes:
        window: Positions, the query's own included; None for no limit.
        chunk: Only positions of the query's own chunk of this size; None for no chunks.
    """

    window: int | None = None
    chunk: int | None = None


class TreeTensors(NamedTuple):
    """The trees of a pass as tensors for a kernel.

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


_MaskKey = tuple[int, AttentionSpan, torch.dtype, torch.device]


class TreePass:
    """One pass of the target over a tree or a prompt chunk per row.

    Masks are additive, made on first use, and shared by the layers of the pass. So are the tensors for kernels.

    Args:
        slots: The slots of the cache; the pass must have begun.
        trees: One tree per active row. None in a prefill: every row writes a chain of `slots.width` tokens behind its
            committed ones.
        scored: int64 `[active]`; how many of its first nodes earlier passes scored. Their KV is in their slots and
            counts as committed in `slots.lengths`. None: no node was scored.
        has_softcap: Whether the model's own attention applies softcapping; SDPA does not.
        windows: For a pass of one row whose nodes attend alone, with the bits of decoding token by token: how many
            positions each layer of the model's own cache keeps for a query; None for all.

    Attributes:
        has_softcap: As given.
        windows: As given.
        is_exact: Whether every node attends alone; never in a prefill.
        is_prefill: Whether rows write prompt tokens.
        scores_trees: Whether the pass scores whole trees, as the kernels do.
        is_causal: Every row writes a chain behind as many committed tokens: causal attention without a mask of its own.
        is_from_empty: And there are none.
        sees_all: Every query may look at every slot, so that no mask is needed.
        kernels: The kernels of its layers by their shapes; None where torch's attention serves.
    """

    def __init__(
        self,
        slots: TreeSlots,
        trees: Sequence[TokenTree] | None,
        scored: NDArray[np.int64] | None = None,
        *,
        has_softcap: bool = True,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        self._slots = slots
        self._trees = trees
        self._scored = scored
        self.has_softcap = has_softcap
        self.windows = windows
        self.is_exact = windows is not None and trees is not None
        self.is_prefill = trees is None
        self.scores_trees = trees is not None and scored is None
        self.is_causal = trees is None and slots.is_even
        self.is_from_empty = trees is None and slots.kv_length == slots.width
        self.sees_all = slots.width == 1 and slots.is_even
        if scored is not None and trees is not None:
            self.sees_all = self.sees_all and all(int(tree.depths[-1]) == len(tree) - 1 for tree in trees)
        self.kernels: dict[Hashable, Callable[..., Tensor] | None] = {}
        self._masks: dict[_MaskKey, Tensor] = {}
        self._tensors: dict[torch.device, TreeTensors] = {}

    def load(self, arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
        """Copy arrays to a device, and in the same transfer what attention and cache read of the trees there."""
        places = [] if self._slots.is_even else [self._slots.places()]
        trees = self._arrays() if self.scores_trees and device.type != "cpu" else ()
        copies = copy_together([*arrays, *places, *trees], device)
        if places:
            self._slots.flat[device] = copies[len(arrays)]
        if trees:
            self._tensors[device] = TreeTensors(*copies[-len(trees) :])
        return copies[: len(arrays)]

    def tensors(self, device: torch.device) -> TreeTensors:
        """The trees on `device`."""
        if device not in self._tensors:
            self._tensors[device] = TreeTensors(*copy_together(self._arrays(), device))
        return self._tensors[device]

    def _arrays(self) -> Sequence[NDArray[Any]]:
        """The fields of `TreeTensors`."""
        active, width = self._slots.active, self._slots.width
        if self._trees is None or (width == 1 and self._scored is None):
            nodes, chain = np.full(active, width, np.int32), np.arange(width, dtype=np.int32)
            depths = np.repeat(chain[None], active, 0)
            parents = np.maximum(depths - 1, 0)
        else:
            nodes = np.array([len(tree) for tree in self._trees], np.int32)
            parents, depths = np.zeros((2, active, width if self._scored is None else int(nodes.max())), np.int32)
            for row, tree in enumerate(self._trees):
                parents[row, : len(tree)] = tree.parents
                depths[row, : len(tree)] = tree.depths
        words = np.zeros((*parents.shape, (parents.shape[1] + 63) // 64), np.int64)
        for row, count in enumerate(nodes.tolist()):
            fill_ancestor_words(parents[row, :count], words[row])
        lengths = self._slots.lengths[:active]
        committed = lengths if self._scored is None else lengths - self._scored
        return committed.astype(np.int32), nodes, depths, words

    def mask(self, groups: int, span: AttentionSpan, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Additive mask `[active, 1, width * groups, kv]`; node t has the rows t * groups … t * groups + groups - 1.

        Args:
            groups: Query heads per KV head that the caller packs into query rows.
            span: How far back a query may look.
            dtype: Floating-point type of the mask.
            device: Where the mask is needed.
        """
        key = (groups, span, dtype, device)
        if key not in self._masks:
            trees, queries, slots = self.tensors(device), None, self._slots.kv_length
            if self._scored is not None:
                queries = torch.from_numpy(self._scored[:, None] + np.arange(self._slots.width)).to(device)
                queries = queries.minimum(trees.nodes[:, None] - 1)  # in place of padding, a row's last node
                slots += trees.depths.shape[1]  # padding nodes of a long row stand behind what is read
            mask = mask_of(trees, slots, groups, span, dtype, queries)
            self._masks[key] = mask[..., : self._slots.kv_length]
        return self._masks[key]

    @cached_property
    def turns(self) -> Turns:
        """How the nodes of the only row attend in turn."""
        assert self._trees is not None
        scored = 0 if self._scored is None else int(self._scored[0])
        return Turns(self._trees[0], int(self._slots.lengths[0]) - scored, scored)


def padded_rows(active: int, rows: int) -> int:
    """Rows of a fixed-shape pass for `active` rows of a batch of `rows`: a power of two, or all."""
    return min(1 << (active - 1).bit_length(), rows)


def padded_slots(slots: int) -> int:
    """Slots a row for fixed-shape passes that need `slots`: a power of two, so that a growing text has few shapes."""
    return max(_MIN_SLOTS, 1 << (slots - 1).bit_length())


class FixedShapePass(TreePass):
    """A pass that is used for many steps: `fill` is all that changes between them.

    Padding nodes are copies of their row's root that no other node sees; padding rows hold a root at slot 0.

    Args:
        slots: The slots of the cache; their capacity is part of the shape.
        rows: Rows of the pass.
        width: Nodes of a row.
        device: Where the model takes its tokens.
        has_softcap: As for `TreePass`.

    Attributes:
        width: As given.
        tokens: int64 `[rows, width]`.
        positions: int64 `[rows, width]`.
        index: int64 `[rows * width]`; the slot of every node, rows laid end to end.
        trees: What the attention reads. Padding nodes see what the root sees, and are not counted.
    """

    def __init__(self, slots: TreeSlots, rows: int, width: int, device: torch.device, *, has_softcap: bool) -> None:
        super().__init__(slots, (), has_softcap=has_softcap)
        self.sees_all = False
        self.width = width
        self._rows, self._capacity = rows, slots.capacity
        words = (width + 63) // 64
        on_gpu = device.type == "cuda"
        kinds: list[_Kind] = [
            *((shape, torch.int64) for shape in ((rows, width), (rows, width), (rows * width,), (rows, width, words))),
            *((shape, torch.int32) for shape in ((rows,), (rows,), (rows, width))),
        ]
        self._host = torch.zeros(_bytes_of(kinds), dtype=torch.uint8, pin_memory=on_gpu)
        self._buffer = self._host.to(device)  # on a CPU the same tensor
        self._copied = torch.cuda.Event() if on_gpu else None
        self._filled = tuple(each.numpy() for each in _views(self._host, kinds))
        self.tokens, self.positions, self.index, tree_words, lengths, nodes, depths = _views(self._buffer, kinds)
        self.trees = TreeTensors(lengths, nodes, depths, tree_words)

    def fill(self, trees: Sequence[TokenTree]) -> None:
        """Take the trees of a step, one per active row, none larger than the width."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still read the host buffers
        lengths = self._slots.lengths
        for row, tree in enumerate(trees):
            _fill_row(self._filled, row, tree.tokens, tree.parents, tree.depths, lengths[row], self._capacity)
        root = trees[0].tokens[:1]
        zero = np.zeros(1, np.int32)
        for row in range(len(trees), self._rows):
            _fill_row(self._filled, row, root, zero, zero, 0, self._capacity)
        if self._buffer is not self._host:
            self._buffer.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.tokens.device))

    def tensors(self, device: torch.device) -> TreeTensors:
        """The trees, which are on the device of the model's tokens."""
        return self.trees

    def mask(self, groups: int, span: AttentionSpan, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Additive mask as that of `TreePass`, over all slots, made on the device of the trees."""
        key = (groups, span, dtype, device)
        if torch.compiler.is_compiling():
            return self._build_mask(*key)
        if key not in self._masks:
            self._masks[key] = self._build_mask(*key)
        return self._masks[key]

    def forget_masks(self) -> None:
        """Let the next pass make new masks."""
        self._masks.clear()

    def _build_mask(self, groups: int, span: AttentionSpan, dtype: torch.dtype, device: torch.device) -> Tensor:
        return mask_of(self.trees, self._capacity, groups, span, dtype).to(device)


def copy_together(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies of arrays on a device, made by one transfer; on a CPU tensors that share their memory."""
    tensors = [torch.from_numpy(each) for each in arrays]
    if device.type == "cpu":
        return tensors
    kinds: list[_Kind] = [(tuple(each.shape), each.dtype) for each in tensors]
    host = torch.empty(_bytes_of(kinds), dtype=torch.uint8)
    for view, each in zip(_views(host, kinds), tensors, strict=True):
        view.copy_(each)
    return _views(host.to(device, non_blocking=True), kinds)


def _views(buffer: Tensor, kinds: Sequence[_Kind]) -> list[Tensor]:
    """Tensors that share a buffer of bytes."""
    views, start = [], 0
    for shape, dtype in kinds:
        end = start + math.prod(shape) * dtype.itemsize
        views.append(buffer[start:end].view(dtype).view(shape))
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
    return views


def _bytes_of(kinds: Sequence[_Kind]) -> int:
    """Bytes of a buffer for `_views`."""
    return sum(-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype in kinds)


def mask_of(
    trees: TreeTensors,
    slots: int,
    groups: int,
    span: AttentionSpan,
    dtype: torch.dtype,
    queries: Tensor | None = None,
) -> Tensor:
    """Additive mask `[rows, 1, queries * groups, slots]` on the device of the trees.

    It is made with tensor operations alone, which can be compiled and captured. Padding nodes see the root at least,
    so that their softmax is finite.

    Args:
        trees: The trees of the rows.
        slots: Slots a row's queries may look at.
        groups: As for `TreePass.mask`.
        span: How far back a query may look.
        dtype: Floating-point type of the mask.
        queries: int64 `[rows, queries]`, the nodes that attend; all of them when None.
    """
    lengths, counts, depths, words = trees
    rows, width = depths.shape
    nodes = torch.arange(width, device=depths.device)
    own = lengths[:, None] + depths
    at = torch.arange(slots, device=depths.device, dtype=torch.int32)
    # The position of the token in a slot, and -1 where a node must not look.
    seen = torch.where(at < lengths[:, None], at, -1)[:, None].expand(-1, width, -1)
    is_ancestor = ((words[:, :, nodes // 64] >> (nodes % 64)) & 1) == 1
    is_ancestor = is_ancestor | ((nodes[:, None] >= counts[:, None, None]) & (nodes == 0))
    ahead = torch.where(is_ancestor, own[:, None], -1)
    places = (lengths[:, None] + nodes).long()[:, None].expand(-1, width, -1)
    seen = seen.scatter(2, places, ahead)
    first = torch.zeros_like(own)
    if span.window is not None:
        first = torch.maximum(first, own - span.window + 1)
    if span.chunk is not None:
        first = torch.maximum(first, own // span.chunk * span.chunk)
    hidden = torch.full((), -torch.inf, dtype=dtype, device=depths.device)
    mask = torch.where(seen >= first[:, :, None], torch.zeros_like(hidden), hidden)
    if queries is not None:
        mask = mask.gather(1, queries[:, :, None].expand(-1, -1, slots))
    return mask[:, :, None].expand(-1, -1, groups, -1).reshape(rows, 1, -1, slots)


@njit(cache=True)
def _fill_row(filled, row, tokens, parents, depths, length, capacity):
    """Write one row's part of every array; its padding nodes repeat the root."""
    all_tokens, all_positions, all_slots, all_words, lengths, counts, all_depths = filled
    nodes, width = len(tokens), all_tokens.shape[1]
    lengths[row], counts[row] = length, nodes
    for node in range(width):
        kept = node if node < nodes else 0
        all_tokens[row, node] = tokens[kept]
        all_positions[row, node] = length + depths[kept]
        all_depths[row, node] = depths[kept]
        all_slots[row * width + node] = row * capacity + length + node
        all_words[row, node] = all_words[row, parents[kept]]
        if kept == 0:
            all_words[row, node] = 0
        all_words[row, node, kept // 64] |= np.int64(1) << np.int64(kept % 64)
