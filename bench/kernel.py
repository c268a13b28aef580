"""Kernel speed: tree attention compared to SDPA, FlexAttention and memory bandwidth, and compaction.

    python -m bench.kernel --output bench/results/kernel.json
    python -m bench.kernel --contexts 8192 32768 --widths 1 16 64 --rows 1 8 --split 1024

Every method attends over the same trees, in the caches of as many layers as a model has, so that the GPU's cache does
not serve one layer with another layer's reads. One CUDA graph holds all layers. The output is the median time of its
replays per layer, with an untimed replay before each timed one. SDPA gets a ready dense mask and FlexAttention a ready
block mask, since they are made once per step. "flash, merged" uses a mask of the nodes alone, and flash attention for
the context. "flex, mask inside" makes the block mask in the graph, once for all layers. A method that differs from
float64 by more than half precision explains is not timed, and the command fails. Bandwidth counts keys and values once,
and is compared to a plain copy. Compaction moves 5 tokens in all layers. On a CPU, with one thread, nothing is
recorded, FlexAttention is not compiled, and references replace the kernels: this shows that the command runs, and
measures nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.command import parser_of, publish, use_one_thread
from bench.gpu_steps import ByHand, Stopwatch, find_device, read_bandwidth
from bench.targets import KERNEL, print_goals
from lookahead.backend.gpu.cuda_graphs import CudaGraphs, Graph
from lookahead.kernels.dispatch import masked_attention, runs_on
from tests.support import kernel_reference as reference
from tests.support.random_trees import relative_error, tree_tensors

Layer = tuple[Tensor, Tensor, Tensor]  # query, keys and values in the kernel's layout
Step = Callable[[], tuple[Tensor, ...]]
Attend = Callable[[Sequence[Layer]], tuple[Tensor, ...]]  # attention outputs of every layer, in the kernel's layout

TOLERANCE = 1e-2
COPY_BYTES = {"cuda": 2 << 30, "cpu": 1 << 26}
WARM_UP = 3
MAX_MEMORY_BOUND_QUERIES = 64  # maximum nodes times query heads per KV head for which memory bandwidth is the limit
KEPT = (0, 2, 3, 7, 11)  # nodes of the path that compaction keeps
LAUNCHES = 32  # of compaction in one graph


def methods(
    tree: dict[str, Tensor], slots: int, groups: int, split: int | None, device: torch.device
) -> dict[str, Callable[[], Attend]]:
    """Factories of each way to attend over a tree. The layers of a step share the result."""
    sees = reference.tree_mask(slots, *tree.values(), None, None)
    is_gpu, kernel = device.type == "cuda", reference.tree_attention
    if is_gpu:
        from lookahead.kernels.tree_attention import tree_attention

        kernel = partial(tree_attention, split=split)
    return {
        "kernel": lambda: lambda layers: tuple(kernel(*layer, **tree) for layer in layers),
        "sdpa": partial(_sdpa, sees, groups),
        "flash, merged": partial(_sdpa, sees, groups, int(tree["lengths"].min())),
        "flex": partial(_flex, sees, is_inside=False, is_compiled=is_gpu),
        "flex, mask inside": partial(_flex, sees, is_inside=True, is_compiled=is_gpu),
    }


def _sdpa(sees: Tensor, groups: int, start: int = 0) -> Attend:
    """The engine's attention in torch, with a dense mask of the slots from `start` on."""
    blocked = torch.zeros(sees.shape, device=sees.device).masked_fill(~sees, float("-inf"))
    masks: dict[torch.dtype, Tensor] = {}

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if query.dtype not in masks:
            masks[query.dtype] = blocked.to(query.dtype).repeat_interleave(groups, 1)[:, None, :, start:]
        return masked_attention(query, keys.transpose(1, 2), values.transpose(1, 2), masks[query.dtype])

    return lambda layers: tuple(attend(*layer) for layer in layers)


def _flex(sees: Tensor, *, is_inside: bool, is_compiled: bool) -> Attend:
    """FlexAttention. Its block mask is made beforehand, or with `is_inside` at every call."""
    rows, width, slots = sees.shape

    def visible(row: Tensor, head: Tensor, node: Tensor, slot: Tensor) -> Tensor:
        return sees[row, node, slot]

    compiled: Any = partial(torch.compile, dynamic=False) if is_compiled else lambda each: each
    make, attend = compiled(create_block_mask), compiled(flex_attention)

    make_mask = partial(make, visible, rows, None, width, slots, device=str(sees.device))
    ready = None if is_inside else make_mask()

    def run(layers: Sequence[Layer]) -> tuple[Tensor, ...]:
        among = {"block_mask": make_mask() if ready is None else ready, "enable_gqa": True}
        given = ((query, keys.transpose(1, 2), values.transpose(1, 2)) for query, keys, values in layers)
        return tuple(attend(*each, **among).transpose(1, 2) for each in given)

    return run


def median_us(run: Step, device: torch.device, replays: int, *, is_recorded: bool = True) -> float:
    """Median microseconds of replays of a CUDA graph of `run`; on a CPU, or if not recorded, of `run` itself."""
    run()
    graph: Graph = ByHand(run)
    if is_recorded and device.type == "cuda":
        graph = CudaGraphs(device, is_watched=False)(run)
    watch = Stopwatch(device)
    times = []
    for _ in range(replays + WARM_UP):
        graph.replay()  # keeps the device busy while the host launches the timed one
        watch.start()
        graph.replay()
        watch.stop()
        times.append(1e6 * watch.seconds)
    return statistics.median(times[WARM_UP:])


def compaction_us(args: argparse.Namespace, device: torch.device) -> float:
    """Microseconds to move the KV of 5 tokens in the buffers of all layers."""
    shape = (1, 256, args.kv_heads, args.dim)
    dtype = getattr(torch, args.dtype)
    buffers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * args.layers)]
    plan = {"rows": [0], "starts": [100], "counts": [len(KEPT)], "paths": [KEPT]}
    arguments = {name: torch.tensor(each, dtype=torch.int32, device=device) for name, each in plan.items()}

    moves = [partial(reference.compact, buffer, **arguments) for buffer in buffers]
    if device.type == "cuda":
        from lookahead.kernels import compaction

        moves = [partial(compaction.compact, compaction.SlotBuffers(buffers), **arguments)]

    def run() -> tuple[Tensor, ...]:
        for move in moves * LAUNCHES:
            move()
        return ()

    return median_us(run, device, args.replays) / LAUNCHES


def make_layers(args: argparse.Namespace, rows: int, slots: int, width: int, device: torch.device) -> list[Layer]:
    """Random query, keys and values of every layer."""

    def random(heads: int, tokens: int) -> Tensor:
        return torch.randn(rows, tokens, heads, args.dim, dtype=getattr(torch, args.dtype), device=device)

    sizes = (args.heads, width), (args.kv_heads, slots), (args.kv_heads, slots)
    drawn = [[random(*size) for size in sizes] for _ in range(args.layers)]
    return [(query.transpose(1, 2), keys, values) for query, keys, values in drawn]


def measure(
    args: argparse.Namespace, device: torch.device, rows: int, context: int, width: int, pace: float
) -> list[dict[str, Any]]:
    """One result per method for trees of `width` nodes after `context` committed tokens."""
    slots = (context + width + 63) // 64 * 64  # dense masks of other widths cost SDPA a copy
    tree = tree_tensors([context] * rows, [width] * rows, width, seed=0, chain=False)
    tree = {name: tensor.to(device) for name, tensor in tree.items()}
    layers = make_layers(args, rows, slots, width, device)
    want = reference.tree_attention(*layers[0], **tree)
    read = (layers[0][1].nbytes + layers[0][2].nbytes) * (context + width) / slots
    results = []
    for name, make in methods(tree, slots, args.heads // args.kv_heads, args.split, device).items():
        result: dict[str, Any] = {"method": name, "rows": rows, "context": context, "width": width}
        results.append(result)
        try:
            attend = make()
            error = relative_error(attend(layers[:1])[0], want)
            if not error < TOLERANCE:
                sys.exit(f"{name} differs from float64 by {error:.1e}, more than {TOLERANCE}: not timed")
            time = _time(lambda attend=attend: attend(layers), device, args.replays, result) / args.layers
        except Exception as failure:  # a method of torch that cannot serve a shape
            if name == "kernel":
                raise
            result["failed"] = f"{type(failure).__name__}: {failure}".splitlines()[0]
            print(f"{name:18} {rows:4} {context:8} {width:6} failed: {result['failed']}")
            continue
        bandwidth = read / time / 1e3
        tflops = 4e-6 * rows * args.heads * args.dim * width * (context + width / 2) / time
        result |= {"us_per_layer": time, "gb_per_s": bandwidth, "of_copy": bandwidth / pace}
        result |= {"tflops": tflops, "error": error}
        share = f"{bandwidth / pace:8.0%}"
        print(f"{name:18} {rows:4} {context:8} {width:6} {time:10.2f} {bandwidth:10.0f} {share} {tflops:8.1f}")
    return results


def _time(run: Step, device: torch.device, replays: int, result: dict[str, Any]) -> float:
    """Microseconds of a method, recorded if possible and otherwise eager; the result says which."""
    try:
        return median_us(run, device, replays)
    except Exception:  # a method that cannot be recorded is timed eagerly
        if result["method"] == "kernel":
            raise
        result["by_hand"] = True
        return median_us(run, device, replays, is_recorded=False)


def figures_of(results: Sequence[dict[str, Any]], groups: int, compaction: float) -> dict[str, float]:
    """The worst value of every figure that has a goal and was measured."""
    timed = {
        (each["method"], each["rows"], each["context"], each["width"]): each for each in results if "failed" not in each
    }
    ours = {key[1:]: each for key, each in timed.items() if key[0] == "kernel"}

    def over(method: str, least_context: int) -> list[float]:
        return [
            timed[(method, *key)]["us_per_layer"] / each["us_per_layer"]
            for key, each in ours.items()
            if key[1] >= least_context and (method, *key) in timed
        ]

    few = {key: each["of_copy"] for key, each in ours.items() if key[2] * groups <= MAX_MEMORY_BOUND_QUERIES}
    found = {
        "copy_share_32k": [share for key, share in few.items() if key[1] >= 32768],
        "copy_share_8k": [share for key, share in few.items() if key[:2] == (1, 8192)],
        "over_sdpa_32k": over("sdpa", 32768),
        "over_flex": over("flex", 8192),
        "over_flex_inside": over("flex, mask inside", 8192),
        "tflops_128": [each["tflops"] for key, each in ours.items() if key[2] == 128 and key[1] >= 8192],
    }
    return {name: round(min(each), 4) for name, each in found.items() if each} | {"compaction_us": round(compaction, 3)}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 16, 64, 128], help="nodes of a tree")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=32, help="distinct caches in one graph")
    parser.add_argument("--split", type=int, help="slots per split; as shapes and the GPU suggest if not given")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args(argv)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    device, name = find_device(args.device, "bench.kernel")
    if device.type == "cpu":
        use_one_thread()
    elif not runs_on(device):
        sys.exit("bench.kernel needs triton and an NVIDIA GPU")
    torch.manual_seed(0)
    pace = read_bandwidth(COPY_BYTES[device.type], device, args.replays)["copy_gb_per_s"]["median"]
    print(f"{name}, copy {pace:.0f} GB/s")
    print("method             rows  context  nodes   us/layer       GB/s  of copy  TFLOP/s")
    results = []
    for sizes in product(args.rows, args.contexts, args.widths):
        results += measure(args, device, *sizes, pace)
    figures = figures_of(results, args.heads // args.kv_heads, compaction_us(args, device))
    print_goals(KERNEL, figures, has_targets=device.type == "cuda")
    options = {key: each for key, each in vars(args).items() if key != "output"}
    measured = {"device": name, "copy_gb_per_s": pace, "figures": figures, "results": results}
    publish(options | measured, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
