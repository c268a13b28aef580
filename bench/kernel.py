"""Kernel speed on a GPU: tree attention compared to SDPA and to memory bandwidth, and compaction.

    python -m bench.kernel --output bench/results/kernel.json
    python -m bench.kernel --contexts 8192 32768 --widths 1 16 64 --rows 1 8 --split 1024

Both attend over the same trees, in the caches of as many layers as a model has, so that the GPU's cache does not serve
one layer with another layer's reads. One CUDA graph holds all layers. The output is the median time of its replays per
layer, with an untimed replay before each timed one. SDPA gets a ready dense mask, since it is made once per step. A
method that differs from float64 by more than half precision explains is not timed, and the command fails. Bandwidth
counts keys and values once, and is compared to a plain copy. Compaction moves 5 tokens in all layers. On a CPU, with
one thread, nothing is recorded, and references replace the kernels: this shows that the command runs, and measures
nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bench.command import parser_of, publish, seconds_of, use_one_thread
from lookahead.backend.gpu.cuda_graphs import CudaGraphs
from lookahead.kernels.dispatch import masked_attention, runs_on
from tests.support import kernel_reference as reference
from tests.support.random_trees import relative_error, tree_tensors

Pass = Callable[[], tuple[Tensor, ...]]
Attend = Callable[..., Tensor]  # from a layer to its attention outputs, in the kernel's layout

TOLERANCE = 1e-2
MAX_COPY_BYTES = 4 << 30  # far larger than a GPU cache, and fits next to a model
COPY_BYTES = {"cuda": 2 << 30, "cpu": 1 << 26}
WARM_UP = 3
MAX_MEMORY_BOUND_QUERIES = 64  # maximum nodes times query heads per KV head for which memory bandwidth is the limit
KEPT = (0, 2, 3, 7, 11)  # nodes of the path that compaction keeps
LAUNCHES = 32  # of compaction in one graph


class Goal(NamedTuple):
    """A goal for a figure on a GPU, an H200 with the heads of Llama-3-8B."""

    key: str  # the name of the figure in the result
    what: str  # in words
    bound: float  # the goal
    side: Literal["at least", "at most"] = "at least"

    @property
    def target(self) -> str:
        return f"{self.side} {self.bound:g}"

    def falls_short(self, figure: float) -> bool:
        return figure < self.bound if self.side == "at least" else figure > self.bound


# Every figure is the worst measured value. Queries: nodes times query heads per KV head.
GOALS = (
    Goal("copy_share_32k", "tree attention, up to 64 queries after 32k tokens: bandwidth over a copy's", 0.8),
    Goal("copy_share_8k", "the same after 8k tokens, batch 1", 0.55),
    Goal("over_sdpa_32k", "time of SDPA with a dense mask over the kernel's, 32k tokens", 5),
    Goal("tflops_128", "TFLOP/s of trees of 128 nodes, 8k tokens or more", 400),
    Goal("compaction_us", "compaction of 5 tokens in all layers, us", 5, "at most"),
)


def print_goals(figures: Mapping[str, float], *, has_targets: bool) -> None:
    """Print the figures that have a goal; with targets also the goals, and what falls short. That is no failure."""
    for goal in GOALS:
        if goal.key in figures:
            figure = figures[goal.key]
            verdict = f"{'  FALLS SHORT' * goal.falls_short(figure)}  (target: {goal.target})" if has_targets else ""
            print(f"{goal.what}: {figure:.3f}{verdict}")


def find_device(kind: str, command: str) -> tuple[torch.device, str]:
    """The device of a kind and its name; ends the command if a needed GPU is missing."""
    if kind == "cpu":
        return torch.device("cpu"), "cpu"
    if not torch.cuda.is_available():
        sys.exit(f"{command} needs a CUDA GPU, and torch finds none")
    device = torch.device("cuda", torch.cuda.current_device())
    return device, torch.cuda.get_device_name(device)


def device_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the device work of a call: by events on a GPU, by the clock elsewhere."""
    if device.type != "cuda":
        return seconds_of(run, time.perf_counter)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return 1e-3 * float(begin.elapsed_time(end))


def median_s(run: Callable[[], object], device: torch.device, trials: int) -> float:
    """Median seconds of device work, each after an untimed run that hides its launch."""
    times = list[float]()
    for _ in range(trials + WARM_UP):
        run()
        times.append(device_s(run, device))
    return statistics.median(times[WARM_UP:])


def copy_bandwidth(size: int, device: torch.device, trials: int) -> float:
    """Bytes read and written per second by a copy of a buffer of `size` bytes, at most 4 GiB."""
    source = torch.rand(min(size, MAX_COPY_BYTES) // 4, dtype=torch.float32, device=device)
    copied = torch.empty_like(source)
    return 2 * source.nbytes / median_s(lambda: copied.copy_(source), device, trials)


def recorded_s(run: Pass, device: torch.device, trials: int) -> float:
    """Median seconds of replays of a CUDA graph of `run`; on a CPU, of `run` itself."""
    return median_s(CudaGraphs(device)(run).replay if device.type == "cuda" else run, device, trials)


def methods(
    tree: dict[str, Tensor], slots: int, groups: int, split: int | None, device: torch.device
) -> dict[str, Attend]:
    """Both ways to attend over a tree."""
    kernel = reference.tree_attention
    if device.type == "cuda":
        from lookahead.kernels.tree_attention import tree_attention

        kernel = partial(tree_attention, split=split)
    sees = reference.tree_mask(slots, *tree.values(), None, None)
    blocked = torch.zeros(sees.shape, device=device).masked_fill(~sees, float("-inf"))
    masks: dict[torch.dtype, Tensor] = {}

    def sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if query.dtype not in masks:
            masks[query.dtype] = blocked.to(query.dtype).repeat_interleave(groups, 1)[:, None]
        return masked_attention(query, keys.transpose(1, 2), values.transpose(1, 2), masks[query.dtype])

    return {"kernel": partial(kernel, **tree), "sdpa": sdpa}


def compaction_us(args: argparse.Namespace, device: torch.device) -> float:
    """Microseconds to move the KV of 5 tokens in the buffers of all layers."""
    shape = (1, 256, args.kv_heads, args.dim)
    dtype = getattr(torch, args.dtype)
    buffers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * args.layers)]
    plan = {"rows": [0], "starts": [100], "counts": [len(KEPT)], "paths": [KEPT]}
    arguments = {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in plan.items()}

    moves = [partial(reference.compact, buffer, **arguments) for buffer in buffers]
    if device.type == "cuda":
        from lookahead.kernels import compaction

        moves = [partial(compaction.compact, compaction.SlotBuffers(buffers), **arguments)]

    def run() -> tuple[Tensor, ...]:
        for move in moves * LAUNCHES:
            move()
        return ()

    return 1e6 * recorded_s(run, device, args.replays) / LAUNCHES


def measure(
    args: argparse.Namespace, device: torch.device, rows: int, context: int, width: int, pace: float
) -> list[dict[str, Any]]:
    """One result per method for trees of `width` nodes after `context` committed tokens."""
    slots = (context + width + 63) // 64 * 64  # dense masks of other widths cost SDPA a copy
    tree = tree_tensors([context] * rows, [width] * rows, width, seed=0, chain=False)
    tree = {name: tensor.to(device) for name, tensor in tree.items()}
    dtype = getattr(torch, args.dtype)

    def random(heads: int, tokens: int) -> Tensor:
        return torch.randn(rows, tokens, heads, args.dim, dtype=dtype, device=device)

    sizes = (args.heads, width), (args.kv_heads, slots), (args.kv_heads, slots)
    drawn = [[random(*size) for size in sizes] for _ in range(args.layers)]
    layers = [(query.transpose(1, 2), keys, values) for query, keys, values in drawn]
    want = reference.tree_attention(*layers[0], **tree)
    read = (layers[0][1].nbytes + layers[0][2].nbytes) * (context + width) / slots
    results = []
    for name, attend in methods(tree, slots, args.heads // args.kv_heads, args.split, device).items():
        error = relative_error(attend(*layers[0]), want)
        if not error < TOLERANCE:
            sys.exit(f"{name} differs from float64 by {error:.1e}, more than {TOLERANCE}: not timed")

        def run(attend: Attend = attend) -> tuple[Tensor, ...]:
            return tuple(attend(*layer) for layer in layers)

        taken = recorded_s(run, device, args.replays) / args.layers
        bandwidth = read / taken
        tflops = 4e-12 * rows * args.heads * args.dim * width * (context + width / 2) / taken
        result = {"method": name, "rows": rows, "context": context, "width": width, "us_per_layer": 1e6 * taken}
        results.append(result | {"of_copy": bandwidth / pace, "tflops": tflops, "error": error})
        share = f"{bandwidth / pace:8.0%}"
        print(
            f"{name:8} {rows:4} {context:8} {width:6} {1e6 * taken:10.2f} {bandwidth / 1e9:10.0f} {share} {tflops:8.1f}"
        )
    return results


def figures_of(results: Sequence[dict[str, Any]], groups: int, compaction: float) -> dict[str, float]:
    """The worst value of every figure that has a goal and was measured."""
    keyed = {(each["method"], each["rows"], each["context"], each["width"]): each for each in results}
    ours = {key[1:]: each for key, each in keyed.items() if key[0] == "kernel"}
    few = {key: each["of_copy"] for key, each in ours.items() if key[2] * groups <= MAX_MEMORY_BOUND_QUERIES}
    found = {
        "copy_share_32k": [share for key, share in few.items() if key[1] >= 32768],
        "copy_share_8k": [share for key, share in few.items() if key[:2] == (1, 8192)],
        "over_sdpa_32k": [
            keyed[("sdpa", *key)]["us_per_layer"] / each["us_per_layer"]
            for key, each in ours.items()
            if key[1] >= 32768
        ],
        "tflops_128": [each["tflops"] for key, each in ours.items() if key[2] == 128 and key[1] >= 8192],
    }
    return {name: round(min(each), 4) for name, each in found.items() if each} | {"compaction_us": round(compaction, 3)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 16, 64, 128], help="nodes of a tree")
    for name, size in {"--heads": 32, "--kv-heads": 8, "--dim": 128, "--layers": 32, "--replays": 30}.items():
        parser.add_argument(name, type=int, default=size)
    parser.add_argument("--split", type=int, help="slots per split; as shapes and the GPU suggest if not given")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(argv)
    device, name = find_device(args.device, "bench.kernel")
    if device.type == "cpu":
        use_one_thread()
    elif not runs_on(device):
        sys.exit("bench.kernel needs triton and an NVIDIA GPU")
    torch.manual_seed(0)
    pace = copy_bandwidth(COPY_BYTES[device.type], device, args.replays)
    print(f"{name}, copy {pace / 1e9:.0f} GB/s")
    print("method   rows  context  nodes   us/layer       GB/s  of copy  TFLOP/s")
    results = []
    for sizes in product(args.rows, args.contexts, args.widths):
        results += measure(args, device, *sizes, pace)
    figures = figures_of(results, args.heads // args.kv_heads, compaction_us(args, device))
    print_goals(figures, has_targets=device.type == "cuda")
    options = {key: value for key, value in vars(args).items() if key != "output"}
    measured = {"device": name, "copy_gb_per_s": pace / 1e9, "figures": figures, "results": results}
    publish(options | measured, args.output)


if __name__ == "__main__":
    main()
