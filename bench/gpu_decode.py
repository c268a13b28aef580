"""Decoding of one prompt on a GPU: step times relative to memory bandwidth, and speed relative to transformers.

    python -m bench.gpu_decode
    python -m bench.gpu_decode --shape tiny --device cpu

The model has the shape of Llama-3-8B and random weights; its output is meaningless, but its passes cost as much as with
real weights. The figures are medians and quartiles, with all ways measured in turn:

- the time to read as many bytes as the weights of a step, at the rate of a copy, and its share of a step
- steps of 1, 16 and 64 nodes after `--context` tokens, with and without CUDA graphs
- the host time of a plain step outside the graph
- tokens per second of plain decoding without the prefill, along with transformers' own `generate`

Steps up to the check of a graph are left out. Speed with drafts depends on what the model writes: `lookahead bench`
measures it on a real model.

The gate comes first: in fp32 a tiny model must give the tokens of `model.generate` through graphs, plain and with
drafts, or nothing is timed. On a CPU, eager passes replace the graphs: this shows that the command works, and measures
nothing about a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from bench.command import make_engine, parser_of, publish
from bench.kernel import Stopwatch, copy_bandwidth, find_device
from bench.passes import branching_tree
from bench.prompts import agreed
from bench.targets import GPU_DECODE, print_goals
from lookahead import LookaheadConfig
from lookahead.backend.gpu import cuda_graphs
from lookahead.backend.gpu.gpu_backend import GpuBackend
from lookahead.drafting.tree import IntArray
from lookahead.kernels.dispatch import runs_on, verdicts
from lookahead.verification.exact import read_scores

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES = (1, 16, 64)
SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "tiny": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 4096, "initializer_range": 0.1,
    },
}  # fmt: skip
PLAIN = LookaheadConfig(proposers=())
DRAFTS = LookaheadConfig(memory="request", draft="fixed", max_nodes=15)
GATE_TOKENS = 48
WARM_UP = cuda_graphs.CAPTURE_AT + 2  # passes until a shape is recorded and checked


@contextmanager
def timed_graphs(device: torch.device) -> Iterator[Stopwatch]:
    """A stopwatch that times every replay of a graph in the block. On a CPU, passes run by hand."""
    watch, capture = Stopwatch(device), cuda_graphs.CudaGraphs
    is_gpu = device.type == "cuda"

    def recorder(device: torch.device) -> Any:
        record = capture(device) if is_gpu else lambda run: SimpleNamespace(replay=run)

        def timed(run: cuda_graphs.Run) -> Any:
            graph = record(run)

            def replay() -> tuple[torch.Tensor, ...]:
                watch.start()
                outputs: tuple[torch.Tensor, ...] = graph.replay()
                watch.stop()
                return outputs

            return SimpleNamespace(replay=replay)

        return timed

    unsupported = cuda_graphs.graphs_unsupported_reason if is_gpu else lambda *_: None
    with mock.patch.multiple(cuda_graphs, CudaGraphs=recorder, graphs_unsupported_reason=unsupported):
        yield watch


def quartiles(values: Sequence[float], unit: float = 1e3) -> dict[str, float]:
    """Median and quartiles, of seconds in milliseconds unless another unit is given."""
    cuts = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {name: round(unit * value, 4) for name, value in zip(("low", "median", "high"), cuts, strict=True)}


def step_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights read by one step: all but the input embeddings, unless they are tied to the LM head."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    return whole if head.weight is embedding.weight else whole - int(embedding.weight.nbytes)


def measure_steps(model: PreTrainedModel, prompt: IntArray, trials: int) -> list[dict[str, Any]]:
    """Measure steps over trees of every size after the same prompt, recorded and eager, in turn.

    A step is the pass and the host's read of the likeliest token after every node. Seconds are wall time.
    """
    options: dict[str, Any] = {"rows": 1, "capacity": len(prompt) + max(SIZES)}
    graphs = GpuBackend(model, **options, captures=True, most_nodes=max(SIZES))
    backends = {"graphs_ms": graphs, "eager_ms": GpuBackend(model, **options)}
    taken: list[dict[str, list[float]]] = [{name: [] for name in backends} for _ in SIZES]
    with graphs.serving():
        for backend in backends.values():
            backend.read([prompt])
        for trial in range(trials + WARM_UP):
            for size, seconds in zip(SIZES, taken, strict=True):
                tree = branching_tree(size, model.config.vocab_size)
                for name, backend in backends.items():
                    if model.device.type == "cuda":
                        torch.cuda.synchronize(model.device)
                    begin = time.perf_counter()
                    read_scores(backend.score([tree]), with_top=False)
                    if trial >= WARM_UP:
                        seconds[name].append(time.perf_counter() - begin)
                check_replayed(graphs, is_warm=trial >= WARM_UP)
    return [
        {"nodes": size, **{name: quartiles(values) for name, values in seconds.items()}}
        for size, seconds in zip(SIZES, taken, strict=True)
    ]


def check_replayed(backend: Any, *, is_warm: bool) -> None:
    """End the command if the newest pass of a warm backend was no replay."""
    if backend._graphs is None or backend._graphs.problem or (is_warm and backend.is_cold):
        sys.exit("a step was not replayed from a graph; the log says why")


def generate(model: PreTrainedModel, ids: torch.Tensor, new: int) -> tuple[list[int], float]:
    """New tokens of greedy `model.generate`, and its tokens per second from the first to the last token."""
    times, causal_lm = list[float](), cast(Any, model)

    def read_clock(ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        int(ids[0, -1])  # waits until the token is on the host
        times.append(time.perf_counter())
        return False

    whole = causal_lm.generate(ids, max_new_tokens=new, do_sample=False, stopping_criteria=[read_clock])
    return whole[0, ids.shape[1] :].tolist(), (new - 1) / (times[-1] - times[0])


def decode(
    model: PreTrainedModel, ids: torch.Tensor, config: LookaheadConfig, new: int, watch: Stopwatch
) -> tuple[list[int], list[tuple[float, float]]]:
    """New tokens, and the seconds of every step after the check of its graph: of the step, and of the graph alone.

    Every step ends with its tokens on the host, so wall time measures it.
    """
    engine = make_engine(model, ids, config, max_new_tokens=new)
    backend: Any = engine._backend
    loop, tokens, steps = engine.run(), list[int](), list[tuple[float, float]]()
    with engine.serving():
        tokens += next(loop)[0].tokens.tolist()
        begin = time.perf_counter()
        for outputs in loop:
            seconds = time.perf_counter() - begin
            tokens += outputs[0].tokens.tolist()
            check_replayed(backend, is_warm=False)
            if not backend.is_cold:
                steps.append((seconds, watch.seconds))
            begin = time.perf_counter()
    return tokens, steps


def check_lossless(device: torch.device, watch: Stopwatch) -> None:
    """The gate: recorded passes of a tiny model in fp32 give the tokens of `model.generate`."""
    model = make_model("tiny", "fp32", device, 0)
    ids = torch.randint(model.config.vocab_size, (1, 40), generator=torch.Generator().manual_seed(0)).to(device)
    expected, _ = generate(model, ids, GATE_TOKENS)
    for what, config in {"plain passes": PLAIN, "passes over drafts": DRAFTS}.items():
        tokens, _ = decode(model, ids, config, GATE_TOKENS, watch)
        if tokens != expected:
            same = agreed(tokens, expected)
            sys.exit(f"not lossless: {what} part from model.generate after {same} tokens; nothing is timed")


def compare_plain(model: PreTrainedModel, prompt: IntArray, new: int, rounds: int, watch: Stopwatch) -> dict[str, Any]:
    """Measure plain decoding after a prompt: transformers and ours with graphs, in turn; the first round warms up."""
    ids = torch.from_numpy(prompt).long()[None].to(model.device)
    theirs, ours, host, same = list[float](), list[float](), list[float](), list[int]()
    for number in range(rounds + 1):
        expected, rate = generate(model, ids, new)
        tokens, steps = decode(model, ids, PLAIN, new, watch)
        if not steps:
            sys.exit("no step was replayed from a graph: --max-new-tokens is too low")
        if number:
            theirs.append(rate)
            ours.append(len(steps) / sum(seconds for seconds, _ in steps))
            host += [seconds - graph_s for seconds, graph_s in steps]
            same.append(agreed(tokens, expected))
    return {
        "tokens_per_s": {"transformers": quartiles(theirs, 1), "lookahead": quartiles(ours, 1)},
        "speedup": quartiles([mine / other for mine, other in zip(ours, theirs, strict=True)], 1),
        "host_us": quartiles(host, 1e6),
        "same_tokens": min(same),
    }


def make_model(shape: str, dtype: str, device: torch.device, positions: int) -> PreTrainedModel:
    """A model with random weights, created on its device. It never ends a text."""
    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=max(8192, positions), tie_word_embeddings=False, bos_token_id=1
    )
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def measure(model: PreTrainedModel, arguments: argparse.Namespace, watch: Stopwatch) -> dict[str, Any]:
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, arguments.context).astype(np.int32)
    weights = step_bytes(model)
    read_s = weights / copy_bandwidth(weights, model.device, arguments.trials)
    steps = measure_steps(model, prompt, arguments.trials)
    plain = compare_plain(model, prompt, arguments.max_new_tokens, arguments.rounds, watch)
    medians = [step["graphs_ms"]["median"] for step in steps]
    figures = {f"step_ratio_{size}": medians[i] / medians[0] for i, size in enumerate(SIZES) if i}
    figures |= {"weight_read_share": 1e3 * read_s / medians[0], "host_us": plain["host_us"]["median"]}
    figures["plain_speedup"] = plain["speedup"]["median"]
    figures = {name: round(figure, 4) for name, figure in figures.items()}
    return {"figures": figures, "weight_read_ms": 1e3 * read_s, "steps": steps, "plain": plain}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--context", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--trials", type=int, default=50, help="of every step and read of memory")
    parser.add_argument("--rounds", type=int, default=3, help="timed outputs of every way; one more warms up")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu" and arguments.shape != "tiny":
        parser.error("--device cpu takes --shape tiny alone")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    device, name = find_device(arguments.device, "bench.gpu_decode")
    with timed_graphs(device) as watch:
        check_lossless(device, watch)
        positions = arguments.context + arguments.max_new_tokens + max(SIZES)
        model = make_model(arguments.shape, arguments.dtype, device, positions)
        print(f"{arguments.shape}, random weights, {arguments.dtype}, {name}, {arguments.context} tokens of context")
        result = measure(model, arguments, watch)
    is_gpu = device.type == "cuda"
    graphs = "CUDA graphs" if is_gpu else "no CUDA graphs on a CPU: passes run by hand"
    print(f"reading the weights of a step: {result['weight_read_ms']:.3f} ms; median ms of a step ({graphs}):")
    for step in result["steps"]:
        print(f"{step['nodes']:5} nodes {step['graphs_ms']['median']:9.3f}, eager {step['eager_ms']['median']:9.3f}")
    for way, rate in result["plain"]["tokens_per_s"].items():
        print(f"plain decoding, {way}: {rate['median']:.1f} tokens/s, prefill excluded")
    print(f"{result['plain']['same_tokens']} of {arguments.max_new_tokens} tokens are those of `generate`")
    print_goals(GPU_DECODE, result["figures"], has_targets=is_gpu and arguments.shape == "llama3-8b")
    options = {key: value for key, value in vars(arguments).items() if key != "output"}
    kernels = {variant.name: verdict._asdict() for variant, verdict in verdicts.items()}
    report = {**options, "device": name, "graphs": graphs, "tree_attention_kernel": runs_on(device), "kernels": kernels}
    publish(report | result, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
