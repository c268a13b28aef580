"""CUDA graphs: the kernels of a pass are recorded once and launched together at every step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Run = Callable[[], tuple[Tensor, ...]]  # a pass over what its static buffers hold

_aten = torch.ops.aten
_WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # the host waits for a value
_COPYING = {_aten._to_copy, _aten.copy_}  # wait only between host and device
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_}  # wait only with a mask or indices on the host
_recording = Lock()  # torch records one graph at a time in a process


class Graph:
    """One recorded pass; its outputs live as long as it does."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[Tensor, ...]) -> None:
        self._graph = graph
        self._outputs = outputs

    def replay(self) -> tuple[Tensor, ...]:
        """Run the recording on what the static buffers hold now; the next replay overwrites the returned tensors."""
        self._graph.replay()
        return self._outputs


def graph_shortcoming(model: torch.nn.Module, device: torch.device) -> str | None:
    """Why passes of a model that takes its tokens on `device` cannot be recorded, or None if they may."""
    if device.type != "cuda":
        return f"it is on {device}"
    devices = {str(each.device) for each in model.parameters()}
    if devices != {str(device)}:
        return f"its weights are on {', '.join(sorted(devices))}, and a recording is of one GPU"
    return None


class Watch(TorchDispatchMode):
    """Refuses operations that wait for a kind of device, in this thread, while it is entered.

    One of them would make a recording fail, and torch's allocator would believe that the recording goes on.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; RuntimeError if it waits."""
        made = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", func)
        kinds = {each.device.type for each in tree_leaves((args, made)) if isinstance(each, Tensor)}
        waits = packet in _COPYING | _INDEXING and len(kinds) > 1
        if packet in _INDEXING:  # a mask is counted, indices are not
            waits |= any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1])
        else:
            waits |= packet is _aten.lift_fresh or not _WAITING_TAGS.isdisjoint(getattr(func, "tags", ()))
        if waits and self._kind in kinds:
            raise RuntimeError(f"{packet} waits for the device")
        return made


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device that passes are recorded on: one, since cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(device)


class CudaGraphs:
    """Records passes as CUDA graphs that share one pool of memory.

    No replay needs what another one left in the pool, so they may run in any order. Compiled code needs no watch, and
    cannot be compiled under one.
    """

    def __init__(self, device: torch.device, *, is_watched: bool = True) -> None:
        self._device = device
        self._watch = Watch(device) if is_watched else nullcontext()
        self._pool: Any = None
        self._living: WeakSet[Graph] = WeakSet()

    def __call__(self, run: Run) -> Graph:
        """Run a pass once, so that all it compiles and allocates exists, and record it; RuntimeError if it waits."""
        side = _side_stream(self._device)
        with torch.cuda.device(self._device), _recording:
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side), self._watch:
                run()
            current.wait_stream(side)
            if not self._living:
                self._pool = torch.cuda.graph_pool_handle()  # a pool without graphs cannot be used again
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile. A failed recording leaves its stream the current one, and the
            # outer block restores the other.
            recording = torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local")
            with torch.cuda.stream(current), recording:
                outputs = run()
            recorded = Graph(graph, outputs)
            self._living.add(recorded)
        return recorded
