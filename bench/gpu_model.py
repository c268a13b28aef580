"""What a step and a token should take on GPUs that are not at hand: a model of their cost, and no measurement.

    python -m bench.gpu_model
    python -m bench.gpu_model --gpu H100 --contexts 8192 --passes passes.json

A step reads every weight and all keys and values once, or multiplies, whichever takes longer, at the speed of the data
sheets times `--bandwidth-share` and `--flops-share`, which are assumptions. Beside that it launches kernels. Launched
one by one (`eager`), each takes the host `--launch-us` and the device a gap; the step takes as long as the slower of
both. In a recorded graph (`graphs`) the gap is shorter; `compiled` is a graph of fewer kernels. Kernels of the eager
pass are counted on the meta device; those of the compiled one are an assumption. `--host-us` is what drafting and
reading take outside the pass, an assumption too.

Tokens per step are those recorded by `bench.replay` for drafts of so many nodes, at every row alike. The shape is that
of Llama-3-8B in bf16. Printed are milliseconds per token of a row, plain and with the number of nodes that gives the
most, and the speedup.

`--passes FILE` takes what `bench.passes` measured of `--model` on a CPU, and says how far the same model of the cost,
with the bandwidth and the peak measured there and no launches, is from it. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bench.command import parser_of, publish
from bench.gpu_decode import SHAPES
from lookahead import load
from lookahead.drafting.tree import TokenTree
from lookahead.models.loading import DEFAULT_MODEL
from lookahead.models.machine import Machine
from lookahead.models.target import Target

ACCEPTANCE = Path(__file__).parent / "results" / "replay_llama3.json"
# Dense bf16 with float32 sums, bytes a second, and GB of memory. Source: NVIDIA's data sheets and white papers.
GPUS = {
    "A100": (Machine(312e12, 2.039e12), 80),
    "RTX 4090": (Machine(165.2e12, 1.008e12), 24),
    "H100": (Machine(989.4e12, 3.35e12), 80),
    "H200": (Machine(989.4e12, 4.8e12), 141),
    "RTX 5090": (Machine(209.5e12, 1.792e12), 32),
    "B200": (Machine(2250e12, 8e12), 180),
}
# Source: A. Gray 2019, "Getting Started with CUDA Graphs", NVIDIA's technical blog: kernels of 2.9 us took 3.8 us each
# launched one after the other, and 3.4 us each in a graph, on a V100.
EAGER_GAP_US, GRAPH_GAP_US = 0.9, 0.5
# As 1,168 kernels took 8.4 ms in a step of Llama 3.1 8B on an H100 (5.1 ms in a graph). Source: cloudai.pt 2026,
# "CUDA Graphs + torch.compile: 1.65x LLM Decode Speedup".
LAUNCH_US = 7.2
# Seven products, two of attention, two norms, rotation, activation, and two writes into the cache.
COMPILED_KERNELS = 15
WAYS = ("eager", "graphs", "compiled")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a pass of a model reads and multiplies.

    Attributes:
        weights: Parameters of linear layers.
        kv: Numbers that a token keeps in the cache.
        queries: Query heads times head size, of all layers.
        item: Bytes of a number.
    """

    weights: int
    kv: int
    queries: int
    item: int

    @classmethod
    def of(cls, config: Any, linear: int, item: int) -> Sizes:
        """The sizes that a configuration names."""
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers = config.num_hidden_layers
        return cls(
            linear, 2 * layers * config.num_key_value_heads * dim, layers * config.num_attention_heads * dim, item
        )

    def seconds(self, machine: Machine, rows: int, nodes: int, context: int) -> float:
        """Linear layers and attention, each as long as memory or multiplication takes."""
        tokens, reach = rows * nodes, context + nodes
        linear = max(self.weights * self.item / machine.bytes_per_s, 2 * self.weights * tokens / machine.flops)
        attention = 4 * self.queries * tokens * reach / machine.flops
        return linear + max(rows * reach * self.kv * self.item / machine.bytes_per_s, attention)

    def gigabytes(self, rows: int, context: int) -> float:
        """Memory of weights and cache."""
        return 1e-9 * self.item * (self.weights + rows * context * self.kv)


class Launches(TorchDispatchMode):
    """Counts operations that do more than look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        writes = any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments)
        is_view = not writes and any(each.alias_info is not None for each in func._schema.returns)
        self.count += not is_view and "empty" not in str(func)
        return func(*args, **(kwargs or {}))


def eager_kernels(model: PreTrainedModel) -> int:
    """Operations of a step of one node of a model on the meta device."""
    target = Target(model, rows=1, capacity=8, device=torch.device("meta"))
    with target.serving():
        target.prefill([np.zeros(4, np.int32)])
        with Launches() as launches:
            target.score([TokenTree.root(0)])
    return launches.count


def step_s(way: str, work_s: float, kernels: int, layers: int, arguments: argparse.Namespace) -> float:
    """Seconds of a step whose kernels work for `work_s`."""
    host_s = 1e-6 * arguments.host_us
    if way == "eager":
        return host_s + max(1e-6 * kernels * arguments.launch_us, work_s + 1e-6 * kernels * EAGER_GAP_US)
    return host_s + work_s + 1e-6 * GRAPH_GAP_US * (kernels if way == "graphs" else layers * COMPILED_KERNELS)


def simulate(sizes: Sizes, kernels: int, layers: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per GPU, batch, context and way."""
    recorded = json.loads(arguments.acceptance.read_text(encoding="utf-8"))["methods"]
    drafts = {
        round(each["drafted_per_step"]): each["tokens_per_step"]
        for name, each in recorded.items()
        if name.startswith(f"{arguments.method}@")
    }
    table = []
    for gpu in arguments.gpu or GPUS:
        rated, memory = GPUS[gpu]
        machine = Machine(rated.flops * arguments.flops_share, rated.bytes_per_s * arguments.bandwidth_share)
        for rows in arguments.rows:
            for context in arguments.contexts:
                if sizes.gigabytes(rows, context) > memory:
                    continue
                for way in WAYS:
                    ms = {
                        nodes: 1e3
                        * step_s(way, sizes.seconds(machine, rows, 1 + nodes, context), kernels, layers, arguments)
                        for nodes in (0, *drafts)
                    }
                    best = min(drafts, key=lambda nodes: ms[nodes] / drafts[nodes])
                    plain, drafted = ms[0], ms[best] / drafts[best]
                    table.append(
                        {"gpu": gpu, "rows": rows, "context": context, "way": way, "plain_ms": round(plain, 3)}
                        | {"nodes": best, "drafted_ms": round(drafted, 3), "speedup": round(plain / drafted, 3)}
                    )
    return table


def compare_passes(path: Path, name: str) -> list[dict[str, Any]]:
    """The time that the model of the cost foretells over the measured one, less 1.

    `error` is of the whole pass. For `error_over_plain`, what a pass of one node took beyond the model is added to all.
    """
    measured = json.loads(path.read_text(encoding="utf-8"))
    model = load(name, dtype=measured["dtype"], device="cpu").model
    linear = {id(each.weight): each.weight.numel() for each in model.modules() if type(each) is torch.nn.Linear}
    sizes = Sizes.of(model.config, sum(linear.values()), model.dtype.itemsize)
    machine = Machine(1e9 * measured["gflop_per_s"], 1e9 * measured["gb_per_s"])
    table = []
    for context, ways in measured["ms"].items():
        foretold = {nodes: 1e3 * sizes.seconds(machine, 1, int(nodes), int(context)) for nodes in ways["fast"]}
        beyond = ways["fast"]["1"] - foretold["1"]
        for nodes, ms in ways["fast"].items():
            errors = {"error": foretold[nodes] / ms - 1, "error_over_plain": (foretold[nodes] + beyond) / ms - 1}
            print(
                f"{context:>6} tokens, {nodes:>3} nodes: "
                + ", ".join(f"{key} {each:+.0%}" for key, each in errors.items())
            )
            table.append({"context": int(context), "nodes": int(nodes)} | {k: round(v, 3) for k, v in errors.items()})
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Model, compare and print."""
    parser = parser_of(__doc__, model=DEFAULT_MODEL)
    parser.add_argument("--gpu", choices=list(GPUS), nargs="+")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--bandwidth-share", type=float, default=0.85)
    parser.add_argument("--flops-share", type=float, default=0.7)
    parser.add_argument("--launch-us", type=float, default=LAUNCH_US)
    parser.add_argument("--host-us", type=float, default=500.0)
    parser.add_argument("--acceptance", type=Path, default=ACCEPTANCE, help="a result of bench.replay")
    parser.add_argument("--method", default="ours", help="a method of it")
    parser.add_argument("--passes", type=Path, help="a result of bench.passes, to compare the model with")
    arguments = parser.parse_args(argv)
    if arguments.passes is not None:
        publish({"results": compare_passes(arguments.passes, arguments.model)}, arguments.output)
        return 0
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES["llama3-8b"])).to(torch.bfloat16).eval()
    linear = sum(each.weight.numel() for each in model.modules() if type(each) is torch.nn.Linear)
    sizes, layers = Sizes.of(model.config, linear, 2), model.config.num_hidden_layers
    kernels = eager_kernels(model)
    print(f"a model, not measured: {kernels} kernels a step, {layers * COMPILED_KERNELS} compiled")
    print("gpu        rows  context  way       plain ms  nodes  ms/token  speedup")
    table = simulate(sizes, kernels, layers, arguments)
    for each in table:
        print(
            f"{each['gpu']:10} {each['rows']:4} {each['context']:8}  {each['way']:8} {each['plain_ms']:9.2f} "
            f"{each['nodes']:6} {each['drafted_ms']:9.2f} {each['speedup']:8.2f}"
        )
    names = ("bandwidth_share", "flops_share", "launch_us", "host_us", "method")
    assumed = {name: getattr(arguments, name) for name in names}
    publish({"is_measured": False, "assumed": assumed, "kernels": kernels, "results": table}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
