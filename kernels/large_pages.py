"""Memory in large pages, for weights that every pass reads from end to end.

A CPU looks up one address per 2 MiB, with small pages one per 4 KiB.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from threading import RLock
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

_CHUNK = 1 << 25  # bytes requested from the system at a time; layers of a small model share large pages
_ALIGNMENT = 1 << 12

_guard = RLock()
_newest: tuple[ReferenceType[mmap.mmap], int] | None = None  # last chunk, while a tensor uses it, and its used bytes


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros on the CPU, like `torch.zeros`, in large pages if the system has them."""
    global _newest
    count = int(np.prod(shape))
    size = -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    with _guard:
        chunk, used = (None, 0) if _newest is None else (_newest[0](), _newest[1])
        if chunk is None or used + size > len(chunk):
            chunk, used = _map(max(size, _CHUNK)), 0
        _newest = ref(chunk), used + size
    part = np.frombuffer(chunk, np.uint8, count * dtype.itemsize, used)
    return torch.from_numpy(part).view(dtype).view(shape)


def _map(size: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages
    with suppress(AttributeError, OSError):  # a kernel without large pages
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk
