"""Passes of fixed shape: trees padded into buffers that stay where they are, so that code is compiled for them once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lookahead.drafting.tree import TokenTree
from lookahead.models.attention import Reach, TreePass, TreeTensors
from lookahead.models.cache import TreeSlots

Run = Callable[[], tuple[Tensor, ...]]  # a pass over what its static buffers hold

_LEAST_SLOTS = 256


def padded_rows(active: int, rows: int) -> int:
    """Rows of a pass for `active` rows of a batch of `rows`: a power of two, or all."""
    return min(1 << (active - 1).bit_length(), rows)


def padded_slots(slots: int) -> int:
    """Slots a row for passes that need `slots`: a power of two, so that a text that grows meets few shapes."""
    return max(_LEAST_SLOTS, 1 << (slots - 1).bit_length())


class StaticPass(TreePass):
    """A pass of fixed shape, used for one step after the other: `fill` is all that changes between them.

    Padding nodes are copies of their row's root that no other node sees; padding rows hold a root at slot 0.

    Args:
        slots: Where the rows stand; its capacity is part of the shape.
        rows: Rows of the pass.
        width: Nodes of a row.
        device: Where the model takes its tokens.
        has_softcap: As for `TreePass`.

    Attributes:
        width: As given.
        tokens: int64 `[rows, width]`.
        positions: int64 `[rows, width]`.
        index: int64 `[rows * width]`; the slot of every node, rows laid end to end.
        trees: What the attention reads; padding nodes see what the root sees, and are not counted.
    """

    def __init__(self, slots: TreeSlots, rows: int, width: int, device: torch.device, *, has_softcap: bool) -> None:
        super().__init__(slots, (), has_softcap=has_softcap)
        self.sees_all = False
        self.width = width
        self._rows, self._capacity = rows, slots.capacity
        words = (width + 63) // 64
        # Every part starts at a multiple of 16 bytes, which compiled code asks for.
        sizes = [rows * width, rows * width, rows * width, rows * width * words, rows, rows, rows * width]
        ends = np.cumsum([(size + 3) // 4 * 4 for size in sizes]).tolist()
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(ends[-1], dtype=torch.int64, pin_memory=on_gpu)
        self._packed = self._host.to(device) if device.type != "cpu" else self._host
        self._copied = torch.cuda.Event() if on_gpu else None
        shapes = [(rows, width), (rows, width), (rows * width,), (rows, width, words), (rows,), (rows,), (rows, width)]
        self._filled = tuple(part.numpy() for part in _split(self._host, ends, sizes, shapes))
        self.tokens, self.positions, self.index, *trees = _split(self._packed, ends, sizes, shapes)
        self.trees = TreeTensors(lengths=trees[1], nodes=trees[2], depths=trees[3], words=trees[0])

    def fill(self, trees: Sequence[TokenTree]) -> None:
        """Take the trees of a step, one per active row, none larger than the width."""
        if self._copied is not None:
            self._copied.synchronize()  # the host's side is still being read otherwise
        lengths = self._slots.lengths
        for row, tree in enumerate(trees):
            _fill_row(self._filled, row, tree.tokens, tree.parents, tree.depths, lengths[row], self._capacity)
        root = trees[0].tokens[:1]
        nothing = np.zeros(1, np.int32)
        for row in range(len(trees), self._rows):
            _fill_row(self._filled, row, root, nothing, nothing, 0, self._capacity)
        if self._packed is not self._host:
            self._packed.copy_(self._host, non_blocking=self._copied is not None)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._packed.device))

    def tensors(self, device: torch.device) -> TreeTensors:
        """The trees, which are where the model takes its tokens."""
        return self.trees

    def mask(self, groups: int, reach: Reach, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Additive mask as that of `TreePass`, over all slots, made where the trees are."""
        key = (groups, reach, dtype, device)
        if torch.compiler.is_compiling():
            return self._build(*key)
        if key not in self._masks:
            self._masks[key] = self._build(*key)
        return self._masks[key]

    def forget_masks(self) -> None:
        """Let the next pass make its masks anew."""
        self._masks.clear()

    def _build(self, groups: int, reach: Reach, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a mask with tensors alone."""
        lengths, _, depths, words = self.trees
        nodes = torch.arange(self.width, device=depths.device)
        own = lengths[:, None] + depths
        slots = torch.arange(self._capacity, device=depths.device, dtype=torch.int32)
        # The position of what stands at a slot, and -1 where a node must not look.
        seen = torch.where(slots < lengths[:, None], slots, -1)[:, None].expand(-1, self.width, -1)
        is_ancestor = (words[:, :, nodes // 64] >> (nodes % 64)) & 1
        ahead = torch.where(is_ancestor == 1, own[:, None], -1)
        places = (lengths[:, None] + nodes).long()[:, None].expand(-1, self.width, -1)
        seen = seen.scatter(2, places, ahead)
        first = torch.zeros_like(own)
        if reach.window is not None:
            first = torch.maximum(first, own - reach.window + 1)
        if reach.chunk is not None:
            first = torch.maximum(first, own // reach.chunk * reach.chunk)
        hidden = torch.full((), -torch.inf, dtype=dtype, device=depths.device)
        mask = torch.where(seen >= first[:, :, None], torch.zeros_like(hidden), hidden)
        mask = mask[:, :, None].expand(-1, -1, groups, -1).reshape(self._rows, 1, self.width * groups, self._capacity)
        return mask.to(device)


def _split(
    packed: Tensor, ends: Sequence[int], sizes: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """The parts of a packed int64 tensor: four of int64, then int32 ones."""
    parts = []
    for number, (end, size, shape) in enumerate(zip(ends, sizes, shapes, strict=True)):
        begin = end - (size + 3) // 4 * 4
        part = packed[begin:end]
        parts.append((part if number < 4 else part.view(torch.int32))[:size].view(shape))
    return parts


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
