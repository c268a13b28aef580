"""Memory in large pages, for weights that every pass reads from end to end.

A CPU looks up one address per 2 MiB, with small pages one per 4 KiB. Where the first touch of a large page takes longer
than those of the small ones, as in a virtual machine whose host has to find the memory, pages stay small until a chunk
is full. The system may merge them afterwards.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from threading import RLock
from time import thread_time
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

_CHUNK = 1 << 25  # bytes requested from the system at a time; layers of a small model share large pages
_ALIGNMENT = 1 << 12
_LARGE_PAGE, _MOST_SECONDS = 1 << 21, 1e-3  # and CPU time of its first touch: small pages take about as long

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
            _advise(chunk, "MADV_HUGEPAGE")
            chunk, used = _map(max(size, _CHUNK)), 0
        _newest = ref(chunk), used + size
    part = np.frombuffer(chunk, np.uint8, count * dtype.itemsize, used)
    return torch.from_numpy(part).view(dtype).view(shape)


def _map(size: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages
    _advise(chunk, "MADV_HUGEPAGE")
    first = -np.frombuffer(chunk, np.uint8).ctypes.data % _LARGE_PAGE
    if first + _LARGE_PAGE <= size:
        begin = thread_time()
        chunk[first] = 0
        if thread_time() - begin > _MOST_SECONDS:
            _advise(chunk, "MADV_NOHUGEPAGE")
    return chunk


def _advise(chunk: mmap.mmap | None, advice: str) -> None:
    with suppress(AttributeError, OSError):  # a kernel without large pages
        if chunk is not None:
            chunk.madvise(getattr(mmap, advice))
