"""How fast tree attention is on this GPU: the kernel, SDPA with a dense mask, FlexAttention, and the memory's own pace.

    python -m bench.kernel
    python -m bench.kernel --contexts 8192 32768 --widths 1 16 64 --rows 1 8 --split 1024

Every method attends over the same trees, in the caches of as many layers as a model has, so that no cache of the GPU
helps one layer with what another has read. One CUDA graph holds all layers and is replayed; what is printed is the
median of the replays, per layer. A method that differs from float64 by more than half precision explains is not
timed, and the command fails. Bandwidth counts keys and values once, and stands beside that of a plain copy, which
counts what it reads and what it writes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from bench.trees import relative_error, tree_tensors
from lookahead.kernels import reference

TOLERANCE = 1e-2
COPY_BYTES = 2 << 30
REPLAYS, WARM_UP = 30, 3
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, keys and values as the kernel takes them


def median_us(run: Callable[[], object]) -> float:
    """Median microseconds of the replays of one CUDA graph of `run`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPLAYS + WARM_UP):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[WARM_UP:])


def copy_bandwidth() -> float:
    """Gigabytes per second of a plain copy on the device, bytes read and bytes written counted."""
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_us(lambda: target.copy_(source)) / 1e3


def methods(tree: dict[str, Tensor], slots: int, heads: int, split: int | None) -> dict[str, Attend]:
    """The ways to attend, by name; masks are made here, once, as they would be once per step."""
    from lookahead.kernels.tree_attention import tree_attention

    rows, width = tree["depths"].shape
    sees = reference.tree_mask(slots, *tree.values(), None, None)

    def kernel(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return tree_attention(query, keys, values, **tree, split=split)

    masks: dict[int, Tensor] = {}

    def sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        kv_heads, groups = keys.shape[2], heads // keys.shape[2]
        if groups not in masks:
            blocked = torch.zeros(sees.shape, dtype=query.dtype, device="cuda").masked_fill(~sees, float("-inf"))
            masks[groups] = blocked.repeat_interleave(groups, 1)[:, None]
        packed = query.unflatten(1, (kv_heads, groups)).transpose(2, 3).flatten(2, 3)
        out = scaled_dot_product_attention(packed, keys.transpose(1, 2), values.transpose(1, 2), masks[groups])
        return out.unflatten(2, (width, groups)).permute(0, 2, 1, 3, 4).flatten(2, 3)

    def visible(row: Tensor, head: Tensor, node: Tensor, slot: Tensor) -> Tensor:
        return sees[row, node, slot]

    block_mask = create_block_mask(visible, rows, None, width, slots, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def flex(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        kv = (keys.transpose(1, 2), values.transpose(1, 2))
        out: Tensor = compiled(query, *kv, block_mask=block_mask, enable_gqa=True)
        return out.transpose(1, 2)

    return {"kernel": kernel, "sdpa": sdpa, "flex": flex}


def measure(args: argparse.Namespace, rows: int, context: int, width: int, pace: float) -> list[dict[str, Any]]:
    """One result per method for trees of `width` nodes behind `context` committed tokens."""
    dtype = getattr(torch, args.dtype)
    slots = context + width
    tree = tree_tensors([context] * rows, [width] * rows, width, seed=0, chain=False)
    tree = {name: tensor.cuda() for name, tensor in tree.items()}
    layers = [
        (
            torch.randn(rows, width, args.heads, args.dim, dtype=dtype, device="cuda").transpose(1, 2),
            torch.randn(rows, slots, args.kv_heads, args.dim, dtype=dtype, device="cuda"),
            torch.randn(rows, slots, args.kv_heads, args.dim, dtype=dtype, device="cuda"),
        )
        for _ in range(args.layers)
    ]
    want = reference.tree_attention(*layers[0], **tree)
    read = layers[0][1].nbytes + layers[0][2].nbytes
    results = []
    for name, attend in methods(tree, slots, args.heads, args.split).items():
        result: dict[str, Any] = {"method": name, "rows": rows, "context": context, "width": width}
        try:
            error = relative_error(attend(*layers[0]), want)
            if not error < TOLERANCE:
                sys.exit(f"{name} differs from float64 by {error:.1e}, more than {TOLERANCE}: not timed")
            time = median_us(lambda attend=attend: [attend(*layer) for layer in layers]) / args.layers
            bandwidth = read / time / 1e3
            result |= {"us_per_layer": time, "gb_per_s": bandwidth, "of_copy": bandwidth / pace, "error": error}
            print(f"{name:8} {rows:4} {context:8} {width:6} {time:10.2f} {bandwidth:10.0f} {bandwidth / pace:8.0%}")
        except (RuntimeError, NotImplementedError) as failure:  # a method of torch that cannot serve a shape
            if name == "kernel":
                raise
            result["failed"] = f"{type(failure).__name__}: {failure}".splitlines()[0]
            print(f"{name:8} {rows:4} {context:8} {width:6} failed: {result['failed']}")
        results.append(result)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernel", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=32, help="distinct caches in one graph")
    parser.add_argument("--split", type=int, help="slots per split, by the number of slots if not given")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench.kernel needs a CUDA device, and torch finds none", file=sys.stderr)
        return 2
    from lookahead.kernels.choice import runs_on

    if not runs_on(torch.device("cuda", torch.cuda.current_device())):
        print("bench.kernel needs triton and an NVIDIA GPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    pace = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {pace:.0f} GB/s")
    print("method   rows  context  nodes   us/layer       GB/s  of copy")
    results = []
    for rows in args.rows:
        for context in args.contexts:
            for width in args.widths:
                results += measure(args, rows, context, width, pace)
    setting = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_gb_per_s": pace}
    print(json.dumps(setting | vars(args) | {"results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
