"""How fast tree attention is on one thread of this CPU: the kernel, and torch's attention with a dense mask.

    python -m bench.cpu_attention
    python -m bench.cpu_attention --shapes 8x4x128 --contexts 640 8192 --widths 4 16 64

A shape is KV heads, query heads per KV head, head size. Both attend over the same tree in turn; what is printed is the
median of processor microseconds, as one layer of a model takes it, and the error of both against float64. The mask is
made beforehand. The last line is one JSON object.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.command import parser_of, publish, seconds_of, use_one_thread
from lookahead.kernels import dispatch as choice
from lookahead.kernels import reference
from lookahead.kernels.cpu_attention import tree_attention
from tests.support.random_trees import random_trees, relative_error

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRODUCTS = 2e10  # multiplications timed for every figure, about
ROUNDS = (7, 61)  # fewest, most


def packed_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Torch's attention as the engine calls it: the query heads of one KV head are rows of one query."""
    rows, heads, width, dim = query.shape
    kv_heads = keys.shape[2]
    groups = heads // kv_heads
    packed = query.view(rows, kv_heads, groups, width, dim).transpose(2, 3).reshape(rows, kv_heads, width * groups, dim)
    out = scaled_dot_product_attention(packed, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask)
    return out.view(rows, kv_heads, width, groups, -1).permute(0, 2, 1, 3, 4).reshape(rows, width, heads, -1)


def medians_us(ways: list[Callable[[], Tensor]], rounds: int) -> list[float]:
    """Median processor microseconds of each way; they take turns."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds + 2):
        for way, seconds in zip(ways, times, strict=True):
            seconds.append(seconds_of(way, time.thread_time))
    return [1e6 * statistics.median(seconds[2:]) for seconds in times]


@torch.inference_mode()
def compare(kv_heads: int, groups: int, dim: int, context: int, width: int, dtype: str) -> dict[str, Any]:
    """Time and check both on one random tree behind so many committed slots."""
    inputs = random_trees(
        rows=1, slots=context + width, width=width, kv_heads=kv_heads, groups=groups, dim=dim, value_dim=dim,
        dtype=DTYPES[dtype], seed=0,
    )  # fmt: skip
    query, keys, values = (inputs.pop(name) for name in ("query", "keys", "values"))
    sees = reference.tree_mask(context + width, **inputs, window=None, chunk=None)
    mask = torch.zeros(sees.shape, dtype=DTYPES[dtype]).masked_fill(~sees, float("-inf"))
    mask = mask.repeat_interleave(groups, 1)[:, None]
    ways = [lambda: packed_attention(query, keys, values, mask), lambda: tree_attention(query, keys, values, **inputs)]
    products = 2 * kv_heads * groups * width * dim * (context + width)
    rounds = int(min(max(PRODUCTS / products, ROUNDS[0]), ROUNDS[1]))
    torch_us, kernel_us = medians_us(ways, rounds)
    wanted = reference.tree_attention(query, keys, values, **inputs)
    return {
        "shape": f"{kv_heads}x{groups}x{dim}",
        "context": context,
        "width": width,
        "dtype": dtype,
        "torch_us": round(torch_us, 1),
        "kernel_us": round(kernel_us, 1),
        "speedup": round(torch_us / kernel_us, 2),
        "errors": [relative_error(way(), wanted) for way in ways],
        "chosen": choice.attention_for(query, keys, values) is not None,
    }


def main() -> int:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["2x2x64", "8x4x128"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 640, 2048])
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 2, 4, 8, 16, 33, 64])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    arguments = parser.parse_args()
    use_one_thread()
    results = []
    print("shape     context  width  dtype    torch   kernel  speedup  errors, chosen")
    for shape in arguments.shapes:
        for dtype in arguments.dtypes:
            for context in arguments.contexts:
                for width in arguments.widths:
                    result = compare(*map(int, shape.split("x")), context, width, dtype)
                    results.append(result)
                    errors = " ".join(f"{error:.0e}" for error in result["errors"])
                    print(
                        f"{shape:9} {context:7} {width:6} {dtype:>6} {result['torch_us']:8.0f} "
                        f"{result['kernel_us']:8.0f} {result['speedup']:8.2f}  {errors}, {result['chosen']}",
                        flush=True,
                    )
    publish({"results": results}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
