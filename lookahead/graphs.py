"""CUDA graphs: the kernels of a pass, recorded once and launched together at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lookahead.static import Run


class Graph(Protocol):
    """A recorded pass."""

    def replay(self) -> tuple[Tensor, ...]:
        """Do on what the static buffers hold now what was recorded; the next replay overwrites what is returned."""
        ...


Capture = Callable[[Run], Graph]


class CudaGraphs:
    """Records passes as CUDA graphs that share one pool of memory.

    They may, in whatever order they are replayed: nothing in the pool is needed from one replay to the next.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Run) -> Graph:
        """Run a pass, so that all it compiles and allocates once is there, and record it.

        Raises:
            RuntimeError: The pass waits for the device, or does something else that cannot be recorded.
        """
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                run()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # What other threads do on the device is no business of this pass.
            mode = "thread_local"
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
                outputs = run()
        return _CudaGraph(graph, outputs)


class _CudaGraph:
    """One recorded pass; its outputs live as long as it does."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[Tensor, ...]) -> None:
        self._graph = graph
        self._outputs = outputs

    def replay(self) -> tuple[Tensor, ...]:
        """Launch what was recorded on the current stream."""
        self._graph.replay()
        return self._outputs
