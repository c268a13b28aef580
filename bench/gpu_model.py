"""Modelled time per token on various GPUs. This is a cost model, not a measurement.

    python -m bench.gpu_model --passes bench/results/passes_*.json

A step of Llama-3-8B in bf16 takes the time to read all weights, keys and values once, or to multiply, whichever is
longer, at shares of the rated speeds. In addition it launches kernels. One by one ("eager"), each takes `--launch-us`
on the host and a gap on the device, and the slower of both counts; in a recorded graph ("graphs") the gap is shorter.
Every step takes another `--host-us` on the host. The output is milliseconds per token of a row, plain and with drafts
of several sizes, with the acceptance that `bench.replay` recorded.

`--passes` compares the same model with measurements of SmolLM2-135M on a CPU by `bench.passes`, without launches.
Errors are the modelled time over the measured time, minus 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.command import parser_of, publish
from bench.gpu_decode import SHAPES, make_model
from bench.passes import perfect_ms

# Bytes per second, operations per second (dense bf16 with float32 sums), and bytes of memory. Source: NVIDIA's data
# sheets of A100 80GB SXM, H100 SXM, H200 SXM and HGX B200, and its white papers of Ada and Blackwell.
GPUS = {
    "A100": (2.039e12, 312e12, 80e9),
    "RTX 4090": (1.008e12, 165.2e12, 24e9),
    "H100": (3.35e12, 989.4e12, 80e9),
    "H200": (4.8e12, 989.4e12, 141e9),
    "RTX 5090": (1.792e12, 209.5e12, 32e9),
    "B200": (8e12, 2250e12, 180e9),
}
# Kernels of a layer. A step of transformers' Llama-3-8B has 1,169 operations other than views, counted on the meta
# device.
KERNELS = 36.5
# Source: A. Gray 2019, "Getting Started with CUDA Graphs", NVIDIA's technical blog: on a V100, kernels of 2.9 us took
# 3.8 us each when launched one by one, and 3.4 us each in a graph.
GAP_US = {"eager": 0.9, "graphs": 0.5}
ASSUMED = {
    "bandwidth_share": 0.85,  # the goal of `weight_read_share` in bench.targets
    "flops_share": 0.7,  # a guess
    # Source: cloudai.pt 2026, "CUDA Graphs + torch.compile: 1.65x LLM Decode Speedup": 8.4 ms per step of Llama 3.1 8B
    # in eager mode on an H100, divided by 1,169 kernels.
    "launch_us": 7.2,
    "host_us": 300.0,  # on a CPU, 3 to 4% of steps of 6 to 9 ms: "Never slower" in docs/measurements.md
}
NODES = (16, 32, 64)
ACCEPTANCE = Path(__file__).parent / "results" / "replay_llama3.json"
# Source: config.json of HuggingFaceTB/SmolLM2-135M-Instruct.
SMOLLM2 = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}


def kv_bytes(shape: dict[str, Any], item: int = 2) -> float:
    """Bytes of the keys and values of a token, with `item` bytes per number."""
    shared = shape["num_attention_heads"] / shape["num_key_value_heads"]
    return 2 * item * shape["num_hidden_layers"] * shape["hidden_size"] / shared


def attention_ms(shape: dict[str, Any], nodes: int, reach: int, bandwidth: float, flops: float, item: int = 2) -> float:
    """Milliseconds to read the keys and values of `reach` tokens, or to multiply `nodes` nodes with them."""
    products = 4 * shape["num_hidden_layers"] * shape["hidden_size"] * nodes * reach
    return 1e3 * max(reach * kv_bytes(shape, item) / bandwidth, products / flops)


def step_ms(way: str, work_ms: float, arguments: argparse.Namespace) -> float:
    """Milliseconds of a step whose kernels work for `work_ms`."""
    kernels = 1e-3 * KERNELS * SHAPES["llama3-8b"]["num_hidden_layers"]
    launches_ms = kernels * arguments.launch_us if way == "eager" else 0.0
    return 1e-3 * arguments.host_us + max(launches_ms, work_ms + kernels * GAP_US[way])


def simulate(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds per token by way and nodes, for each GPU, batch and context that fits."""
    recorded = json.loads(arguments.acceptance.read_text(encoding="utf-8"))["methods"]
    accepted = {"plain": (1, 1.0)}
    accepted |= {f"{nodes}_nodes": (1 + nodes, recorded[f"ours@{nodes}"]["tokens_per_step"]) for nodes in NODES}
    shape, model = SHAPES["llama3-8b"], make_model("llama3-8b", "bf16", torch.device("meta"), 0)
    size, table = sum(each.nbytes for each in model.parameters()), []
    for name, rows, context in product(arguments.gpu, arguments.rows, arguments.contexts):
        bandwidth, flops, memory = GPUS[name]
        if size + rows * context * kv_bytes(shape) > memory:
            continue
        rates = bandwidth * arguments.bandwidth_share, flops * arguments.flops_share
        result: dict[str, Any] = {"gpu": name, "rows": rows, "context": context} | {way: {} for way in GAP_US}
        for way, (drafts, (nodes, tokens)) in product(GAP_US, accepted.items()):
            attention = attention_ms(shape, nodes, rows * (context + nodes), *rates)
            work_ms = perfect_ms(model, rows * nodes, *rates) + attention
            result[way][drafts] = round(step_ms(way, work_ms, arguments) / tokens, 2)
        table.append(result)
    return table


def compare_passes(path: Path) -> list[dict[str, Any]]:
    """The error of the model on measured passes: median and extremes over trees of several sizes."""
    measured, table = json.loads(path.read_text(encoding="utf-8")), list[dict[str, Any]]()
    if "smollm2" not in measured["model"].lower():
        sys.exit(f"{path}: the passes are of {measured['model']}, not of SmolLM2-135M")
    rates = 1e9 * measured["gb_per_s"], 1e9 * measured["gflop_per_s"], 4 if measured["dtype"] == "fp32" else 2
    for (context, ways), way in product(measured["ms"].items(), ("exact", "fast")):
        errors = [
            (perfect + attention_ms(SMOLLM2, int(nodes), int(context) + int(nodes), *rates)) / ways[way][nodes] - 1
            for nodes, perfect in measured["perfect_ms"].items()
            if way in ways
        ]
        if errors:
            low, middle, high = (round(each, 2) for each in (min(errors), median(errors), max(errors)))
            named = {"lowest_error": low, "median_error": middle, "highest_error": high}
            table.append({"passes": path.stem, "context": int(context), "way": way, **named})
            print(f"{path.stem}, {context} tokens, {way}: error {middle:+.0%} ({low:+.0%} to {high:+.0%})")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--gpu", choices=list(GPUS), nargs="+", default=list(GPUS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    for name, default in ASSUMED.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default, help=f"default {default}")
    parser.add_argument("--acceptance", type=Path, default=ACCEPTANCE, help="a result of bench.replay")
    parser.add_argument("--passes", type=Path, nargs="+", default=[], help="results of bench.passes to compare with")
    arguments = parser.parse_args(argv)
    print("a model, not measured; ms per token of a row")
    print("gpu        rows  context  way          plain", *(f" {nodes} nodes" for nodes in NODES))
    results = simulate(arguments)
    for each, way in product(results, GAP_US):
        cells = "".join(f"{ms:10.2f}" for ms in each[way].values())
        print(f"{each['gpu']:10} {each['rows']:4} {each['context']:8}  {way:8}{cells}")
    report = {"is_measured": False, "device": "none: a model", "model": "llama3-8b", "dtype": "bf16"}
    report |= {name: getattr(arguments, name) for name in ASSUMED} | {"acceptance": arguments.acceptance.name}
    report |= {"results": results, "errors": [error for path in arguments.passes for error in compare_passes(path)]}
    publish(report, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
