"""Device times: of reading memory, of a recorded pass, and of steps of several sizes."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.passes import branching_tree
from lookahead.backend.gpu.cuda_graphs import CAPTURE_AT, Graph, Run
from lookahead.backend.gpu.gpu_backend import GpuBackend
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.verification.exact import read_scores

MAX_READ_BYTES = 4 << 30  # size of the buffer that is read: far larger than a GPU cache, and fits next to a model
BACK_TO_BACK = 8  # replays that are timed together
WARM_UP = CAPTURE_AT + 2  # passes until a shape is recorded and checked


def find_device(kind: str, command: str) -> tuple[torch.device, str]:
    """The device of a kind and its name; ends the command if a needed GPU is missing."""
    if kind == "cpu":
        return torch.device("cpu"), "cpu"
    if not torch.cuda.is_available():
        sys.exit(f"{command} needs a CUDA GPU, and torch finds none")
    device = torch.device("cuda", torch.cuda.current_device())
    return device, torch.cuda.get_device_name(device)


class Stopwatch:
    """Seconds of device work queued between `start` and `stop`, by events on a GPU and by the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._times = [0.0, 0.0]

    def start(self) -> None:
        self._mark(0)

    def stop(self) -> None:
        """Mark the end of the queued work. The host does not wait for it."""
        self._mark(1)

    @property
    def seconds(self) -> float:
        """Seconds from start to stop; waits until the device reaches the stop."""
        if not self._events:
            return self._times[1] - self._times[0]
        self._events[1].synchronize()
        return 1e-3 * float(self._events[0].elapsed_time(self._events[1]))

    def _mark(self, place: int) -> None:
        if self._events:
            self._events[place].record()
        else:
            self._times[place] = time.perf_counter()


class ByHand:
    """A stand-in for a graph that runs the operations of a pass one by one."""

    def __init__(self, run: Run) -> None:
        self.replay = run


class Replays:
    """Watches the graphs that a target with `captures=True` records and replays.

    On a CPU, or with `by_hand`, passes run eagerly.
    """

    def __init__(self, target: GpuBackend, device: torch.device, *, by_hand: bool = False) -> None:
        fast = target._graphs
        assert fast is not None
        self._capture: Callable[[Run], Graph] | None = ByHand
        if device.type == "cuda" and not by_hand:
            self._capture = fast._capture
        if self._capture is None:
            sys.exit("the passes of this model cannot be recorded as CUDA graphs; the log says why")
        self.watch = Stopwatch(device)  # of the newest replay; `alone_s` is the time of the graph alone
        self.count = 0  # replays so far
        self.newest: Graph | None = None  # the last replayed graph
        fast._capture = self._make

    def alone_s(self) -> float:
        """Device seconds of the newest graph, with the current content of its buffers."""
        assert self.newest is not None
        if isinstance(self.newest, ByHand):
            return self.watch.seconds  # it runs only within a step, where it was timed
        # A launch takes host time, in which an idle device waits. So one replay is launched first, and the timed ones
        # are queued before it ends.
        self.newest.replay()
        self.watch.start()
        for _ in range(BACK_TO_BACK):
            self.newest.replay()
        self.watch.stop()
        return self.watch.seconds / BACK_TO_BACK

    def _make(self, run: Run) -> Graph:
        assert self._capture is not None
        graph = self._capture(run)

        def replay() -> tuple[Tensor, ...]:
            self.watch.start()
            outputs = graph.replay()
            self.watch.stop()
            self.count += 1
            self.newest = graph
            return outputs

        return ByHand(replay)


def summary(seconds: Sequence[float], unit: float = 1e3) -> dict[str, float]:
    """Median and quartiles, in milliseconds unless another unit is given."""
    low, middle, high = (
        statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (seconds[0],) * 3
    )
    return {"median": round(unit * middle, 4), "low": round(unit * low, 4), "high": round(unit * high, 4)}


def step_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights read by one step: all but the input embeddings, unless they are tied to the LM head."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    whole = sum(parameter.nbytes for parameter in model.parameters())
    return whole if head is embedding else whole - int(embedding.nbytes)


def read_bandwidth(size: int, device: torch.device, trials: int) -> dict[str, Any]:
    """GB/s of a reduction and of a copy (read and write) of a buffer, and the maximum of both.

    The buffer has `size` bytes, at most 4 GiB.
    """
    source = torch.rand(min(size, MAX_READ_BYTES) // 4, dtype=torch.float32, device=device)
    copied = torch.empty_like(source)
    ways = {"reduction": (source.sum, source.nbytes), "copy": (lambda: copied.copy_(source), 2 * source.nbytes)}
    watch = Stopwatch(device)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for trial in range(trials + WARM_UP):
        for name, (run, read) in ways.items():
            run()  # before the timed one, so that its launch is hidden
            watch.start()
            run()
            watch.stop()
            if trial >= WARM_UP:
                rates[name].append(read / watch.seconds)
    found: dict[str, Any] = {f"{name}_gb_per_s": summary(each, 1e-9) for name, each in rates.items()}
    return found | {"gb_per_s": max(each["median"] for each in found.values()), "buffer_bytes": source.nbytes}


def measure_steps(
    model: PreTrainedModel, prompt: IntArray, sizes: Sequence[int], trials: int, device: torch.device
) -> list[dict[str, Any]]:
    """Measure steps over trees of every size after the same prompt, recorded and eager, in turn.

    A step is the pass and the host's read of the likeliest token after every node. Seconds are wall time.
    """
    options: dict[str, Any] = {"rows": 1, "capacity": len(prompt) + max(sizes)}
    graphs = GpuBackend(model, **options, captures=True, most_nodes=max(sizes))
    eager = GpuBackend(model, **options)
    replays = Replays(graphs, device)
    trees = [branching_tree(size, model.config.vocab_size) for size in sizes]
    taken = [{"graphs": [], "graph_alone": [], "eager": []} for _ in sizes]
    with graphs.serving():
        for target in (graphs, eager):
            target.read([prompt])
        for trial in range(trials + WARM_UP):
            for tree, seconds in zip(trees, taken, strict=True):
                before = replays.count
                stepped = {"graphs": _step(graphs, tree, device), "eager": _step(eager, tree, device)}
                if trial < WARM_UP:
                    continue
                if replays.count == before:
                    sys.exit("a step was not replayed from a graph; the log says why")
                stepped["graph_alone"] = replays.alone_s()
                for name, each in stepped.items():
                    seconds[name].append(each)
    return [
        {"nodes": size} | {f"{name}_ms": summary(each) for name, each in seconds.items()}
        for size, seconds in zip(sizes, taken, strict=True)
    ]


def _step(target: GpuBackend, tree: TokenTree, device: torch.device) -> float:
    """Seconds of one step on an otherwise idle device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    read_scores(target.score([tree]), with_top=False)
    return time.perf_counter() - begin
