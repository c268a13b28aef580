"""Compaction of an accepted path: one launch moves its KV to the front of the tree's slots in all layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lookahead.utils.addresses import KeepsAddresses

_WORD = 4  # bytes
_BLOCK_WORDS = 32
_LEAST_NODES = 16  # most paths are short and share one compiled variant


class SlotBuffers(KeepsAddresses):
    """The KV buffers of all layers, `[rows, capacity, …]` on one device, by address; valid while the buffers live."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.capacity, device = buffers[0].shape[1], buffers[0].device
        sizes = [math.prod(buffer.shape[2:]) * buffer.element_size() // _WORD for buffer in buffers]
        self.largest = max(sizes)
        self.addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64).to(device)
        self.sizes = torch.tensor(sizes, dtype=torch.int32).to(device)


@triton.jit(
    do_not_specialize=["capacity", "width"], do_not_specialize_on_alignment=["rows", "starts", "counts", "paths"]
)
def _compact(
    addresses, sizes, rows, starts, counts, paths, capacity, width,
    BLOCK_NODES: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Move some columns of one row's path in one buffer. Programs share no columns."""
    buffer = tl.program_id(1)
    which = tl.program_id(2)
    size = tl.load(sizes + buffer)
    words = tl.load(addresses + buffer).to(tl.pointer_type(tl.int32))
    first = tl.load(rows + which).to(tl.int64) * capacity + tl.load(starts + which)
    node = tl.arange(0, BLOCK_NODES)
    is_kept = node < tl.load(counts + which)
    path = tl.load(paths + which * width + node, mask=is_kept, other=0)
    column = tl.program_id(0) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    is_moved = (is_kept & (path != node))[:, None] & (column[None, :] < size)
    base = words + first * size
    kept = tl.load(base + path[:, None] * size + column[None, :], mask=is_moved)
    tl.debug_barrier()  # source and destination overlap: finish all loads first
    tl.store(base + node[:, None] * size + column[None, :], kept, mask=is_moved)


def compact(buffers: SlotBuffers, *, rows: Tensor, starts: Tensor, counts: Tensor, paths: Tensor) -> None:
    """Move slot `starts[i] + paths[i, j]` of row `rows[i]` to slot `starts[i] + j`, for every j below `counts[i]`.

    Bytes are copied, so the result is exact. Other slots keep their contents. Values that change from step to step are
    read on the device.

    Args:
        buffers: The buffers of all layers.
        rows: int32 `[n]`, distinct.
        starts: int32 `[n]`; the slot of each row's root.
        counts: int32 `[n]`; nodes on each path, up to width.
        paths: int32 `[n, width]`; ascending nodes, counted from the root.
    """
    count, width = paths.shape
    if count == 0:
        return
    columns = triton.cdiv(buffers.largest, _BLOCK_WORDS)
    with torch.cuda.device_of(paths):
        _compact[(columns, len(buffers.sizes), count)](
            buffers.addresses, buffers.sizes, rows, starts, counts, paths, buffers.capacity, width,
            BLOCK_NODES=max(_LEAST_NODES, triton.next_power_of_2(width)), BLOCK_WORDS=_BLOCK_WORDS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
