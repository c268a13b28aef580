"""The masks and tensors of a pass over token trees, for one pass or for fixed-shape passes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.backend.cpu.exact_attention import PerNodeAttention
from lookahead.drafting.tree import TokenTree
from lookahead.model.cache import TreeSlots
from lookahead.utils.jit import njit

_KEEPS_ALL = torch.empty(0, dtype=torch.int64)


class AttentionSpan(NamedTuple):
    """How far back a query may look; None for no limit."""

    window: int | None = None  # positions, the query's own included
    chunk: int | None = None  # chunk size; a query sees only positions in its own chunk


class TreeTensors(NamedTuple):
    """The trees of a pass, as `lookahead.kernels.tree_attention` takes them. Copies of the root pad a tree."""

    lengths: Tensor
    nodes: Tensor
    depths: Tensor
    words: Tensor


class TreePass:
    """One pass of the target over a tree or a part of a prompt per row.

    Masks are additive, made on first use, and shared by the layers.

    Args:
        slots: The slots of the cache; the pass must have begun.
        device: Where the model takes its tokens.
        trees: One tree per active row; none in a prefill. Padding nodes are copies of their row's root that no other
            node sees.
        scored: int64 `[active]`; how many first nodes of each tree earlier passes scored. Their KV is in their slots.
        prompt: In a prefill int64 `[active, width]`, the tokens that rows write after their committed ones, and int64
            `[columns]`, the columns whose logits are wanted.
        windows: If nodes attend one by one, as single-token passes: the positions that each layer of the model's own
            cache keeps for a query; None for all.
    """

    def __init__(
        self,
        slots: TreeSlots,
        device: torch.device,
        trees: Sequence[TokenTree] = (),
        scored: NDArray[np.int64] | None = None,
        *,
        prompt: Sequence[NDArray[np.int64]] = (),
        windows: Sequence[int | None] | None = None,
    ) -> None:
        self._slots, self.trees, self._scored = slots, trees, scored
        self._most = slots.width if scored is None else max(map(len, trees))  # nodes of a tree
        self.firsts = [0] * len(trees) if scored is None else scored.tolist()  # first node of each tree in the pass
        self.windows = windows
        self.is_prefill = bool(prompt)
        self.attends_per_node = windows is not None and not prompt
        self.scores_trees = scored is None and not prompt  # whole trees, as the kernels need
        self.is_causal = self.is_prefill and slots.is_even  # chains after equally many committed tokens
        self.is_from_empty = self.is_prefill and slots.kv_length == slots.width  # no committed tokens
        is_one = slots.width == 1 and slots.is_even
        lengths = slots.lengths[: slots.active]
        self._starts: list[int] = lengths.tolist()
        self.prefix = min(self._starts) if trees else 0  # first slots that all nodes see
        self.sees_all = is_one and all(int(tree.depths[-1]) == len(tree) - 1 for tree in trees)  # needs no mask
        self.cross: Any = None  # attention to what an encoder has read
        self.reads_by_kernel = False  # a kernel may replace the attention of a prompt that the model reads by itself
        self._biased: tuple[Tensor, Tensor] | None = None  # the newest bias, and the mask with it
        self.kernels: dict[Hashable, Callable[..., Any] | None] = {}  # by shapes; None for torch's own kernel
        self.unserved: set[str] = set()  # why layers had no kernel on a GPU; holds an empty string if some had one
        self._masks: dict[tuple[int, AttentionSpan, torch.dtype, torch.device, int], Tensor] = {}
        self._tensors: dict[torch.device, TreeTensors] = {}
        arrays: tuple[NDArray[Any], ...]
        if prompt:
            positions = lengths[:, None] + np.arange(slots.width)
            starts = (slots.first + np.arange(slots.active)) * slots.capacity
            arrays = prompt[0], positions, (starts[:, None] + positions).reshape(-1)
        else:
            size = slots.active, slots.width
            arrays = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size[0] * size[1], np.int64)
            for row, (tree, start, first) in enumerate(zip(trees, self._starts, self.firsts, strict=False)):
                _fill_nodes(*arrays, row, tree.tokens, tree.depths, start, first, slots.capacity)
        # A device gets all arrays in one copy; on a CPU only masks need the trees.
        filled = self._filled_trees(slots.active, self._most) if trees and device.type != "cpu" else ()
        self.tokens, self.positions, index, *tensors = on_device((*arrays, *filled), device)
        self.keep = torch.from_numpy(prompt[1]) if prompt else _KEEPS_ALL
        if filled:
            self._tensors[device] = TreeTensors(*tensors)
        slots.index = None if slots.is_even else index

    def _filled_trees(self, rows: int, nodes: int) -> tuple[NDArray[Any], ...]:
        """The fields of `TreeTensors` of the trees, with room for `rows` trees of as many nodes."""
        words = np.empty((rows, nodes, (nodes + 63) // 64), np.int64)
        shapes = rows, rows, (rows, nodes)
        arrays: tuple[NDArray[Any], ...] = *(np.empty(shape, np.int32) for shape in shapes), words
        for row, (tree, start) in enumerate(zip(self.trees, self._starts, strict=False)):
            _fill_tree(*arrays, row, tree.parents, tree.depths, start)
        return arrays

    def tensors(self, device: torch.device) -> TreeTensors:
        """The trees on `device`. On a CPU they, and the chains of prompts, are made on first use."""
        if not self._tensors and self.trees:
            self._tensors[device] = TreeTensors(*on_device(self._filled_trees(len(self.trees), self._most), device))
        if not self._tensors:
            active, chain = self._slots.active, np.arange(self._slots.width, dtype=np.int32)
            words = TokenTree(chain, np.maximum(chain - 1, 0), chain, chain).ancestor_words()
            lengths, nodes = self._slots.lengths[:active].astype(np.int32), np.full(active, len(chain), np.int32)
            arrays = lengths, nodes, np.repeat(chain[None], active, 0), np.repeat(words[None], active, 0)
            self._tensors[device] = TreeTensors(*on_device(arrays, device))
        if device not in self._tensors:
            first = next(iter(self._tensors.values()))
            self._tensors[device] = TreeTensors(*(tensor.to(device) for tensor in first))
        return self._tensors[device]

    def mask(
        self, groups: int, span: AttentionSpan, dtype: torch.dtype, device: torch.device, start: int = 0
    ) -> Tensor:
        """Additive mask `[active, 1, width * groups, slots - start]`.

        Node t has the rows t * groups … t * groups + groups - 1. Only tensor operations are used, which can be compiled
        and captured.

        Args:
            groups: Query heads that are packed into query rows.
            span: How far back a query may look.
            dtype: Dtype of the mask.
            device: Device of the mask.
            start: The first slot of the mask, at most `prefix`.
        """
        key, is_kept = (groups, span, dtype, device, start), not torch.compiler.is_compiling()
        if is_kept and key in self._masks:
            return self._masks[key]
        lengths, _, depths, words = self.tensors(device)
        rows, nodes = depths.shape
        # Padding nodes of a partly scored row lie after the slots that are read.
        slots = self._slots.kv_length + (0 if self._scored is None else nodes)
        own, node = lengths[:, None] + depths, torch.arange(nodes, device=device)
        at = torch.arange(start, slots, device=device, dtype=torch.int32)
        # The position of the token in each slot; -1 if the node must not see it.
        seen = torch.where(at < lengths[:, None], at, -1)[:, None].expand(-1, nodes, -1)
        is_ancestor = ((words[:, :, node // 64] >> (node % 64)) & 1) == 1
        places = (lengths[:, None] + node - start).long()[:, None].expand(-1, nodes, -1)
        seen = seen.scatter(2, places, torch.where(is_ancestor, own[:, None], -1))
        first = torch.zeros_like(own)
        if span.window is not None:
            first = torch.maximum(first, own - span.window + 1)
        if span.chunk is not None:
            first = torch.maximum(first, own // span.chunk * span.chunk)
        hidden = torch.full((), -torch.inf, dtype=dtype, device=device)
        mask = torch.where(seen >= first[:, :, None], torch.zeros_like(hidden), hidden)
        if self._scored is not None:
            queries = torch.from_numpy(self._scored[:, None] + np.arange(self._slots.width)).to(device)
            mask = mask.gather(1, queries.clamp_max(nodes - 1)[:, :, None].expand(-1, -1, slots - start))
        mask = mask[:, :, None, : self._slots.kv_length - start].expand(-1, -1, groups, -1)
        mask = mask.reshape(rows, 1, -1, self._slots.kv_length - start)
        if is_kept:
            self._masks[key] = mask
        return mask

    def biased_mask(self, bias: Tensor) -> Tensor:
        """Additive mask `[active, heads, width, kv]` with a bias for every distance between two positions.

        `bias` is the bias between slots, `[1, heads, width, kv]`; its last query is in the last slot.
        """
        if self._biased is None or self._biased[0] is not bias:
            lengths, _, depths, _ = self.tensors(bias.device)
            at = torch.arange(bias.shape[3], device=bias.device)
            node = (at - lengths[:, None]).clamp(0, depths.shape[1] - 1)
            keys = torch.where(at < lengths[:, None], at, lengths[:, None] + depths.gather(1, node))
            distances = self.positions.to(bias.device)[:, :, None] - keys[:, None]
            by_distance = bias[0, :, -1].flip(1)[:, distances.clamp(0, len(at) - 1)].transpose(0, 1)
            self._biased = bias, by_distance + self.mask(1, AttentionSpan(), bias.dtype, bias.device)
        return self._biased[1]

    @cached_property
    def per_node(self) -> PerNodeAttention:
        """The attention of the nodes one by one."""
        return PerNodeAttention(self.trees, self._slots.lengths[: len(self.trees)].tolist(), self.firsts)


class PackedPrompts(TreePass):
    """A pass over the last tokens of several prompts, one prompt after the other in a single row of tokens.

    Each prompt attends to itself only, by the model's own attention, as if it were read alone.

    Args:
        slots: The slots of the cache; the pass must have begun.
        device: Where the model takes its tokens.
        tokens: int32 `[new]` for each active row, the tokens after its committed ones.
        has_copies: Whether committed tokens are copied from other prompts.

    Attributes:
        starts: Committed tokens of each row.
        sizes: New tokens of each row.
    """

    def __init__(
        self, slots: TreeSlots, device: torch.device, tokens: Sequence[NDArray[np.int32]], *, has_copies: bool = False
    ) -> None:
        super().__init__(slots, device)
        self.has_copies = has_copies
        self.starts: list[int] = slots.lengths[: slots.active].tolist()
        self.sizes = [len(some) for some in tokens]
        spans = [np.arange(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True)]
        places = [(slots.first + row) * slots.capacity + span for row, span in enumerate(spans)]
        arrays = [np.concatenate(some).astype(np.int64) for some in (tokens, spans, places)]
        whole, positions, slots.index = on_device(arrays, device)
        self.tokens, self.positions = whole[None], positions[None]
        self.keep = torch.from_numpy(np.cumsum(self.sizes) - 1)


def padded_rows(active: int, rows: int) -> int:
    """Rows of a fixed-shape pass for `active` rows of a batch of `rows`: a power of two, or all."""
    return min(1 << (active - 1).bit_length(), rows)


class FixedShapePass(TreePass):
    """A pass of `[rows, width]` nodes for many steps, which only `fill` changes.

    The capacity of the slots is part of its shape. Padding rows hold a root at slot 0; padding nodes see what their
    root sees.
    """

    def __init__(self, slots: TreeSlots, rows: int, width: int, device: torch.device) -> None:
        super().__init__(slots, device)
        self.sees_all = False
        self._rows, self._capacity = rows, slots.capacity
        shapes = (rows, width), (rows, width), rows * width
        self._arrays = *(np.empty(shape, np.int64) for shape in shapes), *self._filled_trees(rows, width)
        self._whole = torch.from_numpy(_pack(self._arrays)).to(device) if device.type != "cpu" else None
        tensors = on_device(self._arrays, device) if self._whole is None else _unpack(self._whole, self._arrays)
        self.tokens, self.positions, self.index, *tensors = tensors
        self._filled = TreeTensors(*tensors)

    @contextmanager
    def running(self, reach: int) -> Iterator[None]:
        """A block for the pass, in which Python values never change; the slots of inactive rows are unused.

        Its queries may look at the first `reach` slots.
        """
        slots, active = self._slots, self._slots.active
        slots.is_even, slots.is_plain, slots.is_fixed, slots.index = False, False, True, self.index
        slots.active, slots.width, slots.kv_length = self._rows, self.tokens.shape[1], reach
        try:
            yield
        finally:
            slots.active, slots.is_fixed, slots.index = active, False, None

    def fill(self, trees: Sequence[TokenTree]) -> None:
        """Set the trees of a step, one per active row, none larger than the width."""
        root = TokenTree.root(trees[0].tokens[0])
        for row in range(self._rows):
            tree, length = (trees[row], int(self._slots.lengths[row])) if row < len(trees) else (root, 0)
            _fill_nodes(*self._arrays[:3], row, tree.tokens, tree.depths, length, 0, self._capacity)
            _fill_tree(*self._arrays[3:], row, tree.parents, tree.depths, length)
        if self._whole is not None:
            self._whole.copy_(torch.from_numpy(_pack(self._arrays)), non_blocking=may_return_early(self._whole.device))

    def tensors(self, device: torch.device) -> TreeTensors:
        """The trees of the newest step, on `device`."""
        return TreeTensors(*(tensor.to(device) for tensor in self._filled))

    def forget(self) -> None:
        """Discard masks and the choice of kernels."""
        self._masks.clear()
        self.kernels.clear()


def may_return_early(device: torch.device) -> bool:
    """Whether a copy of host memory that is freed at once may be asked for without waiting.

    CUDA has read pageable memory when the call returns. Metal may still read it (pytorch/pytorch#189690).
    """
    return device.type == "cuda"


def on_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Arrays of int32 and int64 as tensors on a device, after one copy; on a CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return _unpack(torch.from_numpy(_pack(arrays)).to(device, non_blocking=may_return_early(device)), arrays)


def _pack(arrays: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """The arrays one after the other, int64 `[words]`."""
    whole, at = np.zeros(sum(map(_words, arrays)), np.int64), 0
    for array in arrays:
        whole[at:].view(array.dtype)[: array.size] = array.reshape(-1)
        at += _words(array)
    return whole


def _unpack(whole: Tensor, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """The parts of packed arrays, as views."""
    parts, at = list[Tensor](), 0
    for array in arrays:
        kind = torch.int32 if array.dtype == np.int32 else torch.int64
        parts.append(whole[at : at + _words(array)].view(kind)[: array.size].view(array.shape))
        at += _words(array)
    return parts


def _words(array: NDArray[Any]) -> int:
    """Words of 8 bytes that an array takes, so that the next one begins at a multiple of 16 bytes, for Triton."""
    return -(-array.nbytes // 16) * 2


@njit()
def _fill_nodes(all_tokens, all_positions, all_slots, row, tokens, depths, length, first, capacity):
    """Write one row of the tokens, positions and slots of a pass; nodes before `first` are not in it."""
    nodes, width = len(tokens), all_tokens.shape[1]
    for column in range(width):
        node = first + column
        kept = node if node < nodes else 0
        all_tokens[row, column] = tokens[kept]
        all_positions[row, column] = length + depths[kept]
        all_slots[row * width + column] = row * capacity + length + node


@njit()
def _fill_tree(lengths, counts, all_depths, all_words, row, parents, depths, length):
    """Write one row of the fields of `TreeTensors`."""
    nodes = len(parents)
    lengths[row], counts[row] = length, nodes
    for node in range(all_depths.shape[1]):
        kept = node if node < nodes else 0
        all_depths[row, node] = depths[kept]
        for word in range(all_words.shape[2]):
            all_words[row, node, word] = all_words[row, parents[kept], word] if kept else 0
        all_words[row, node, kept // 64] |= np.int64(1) << np.int64(kept % 64)
