"""Decoding of one prompt on a GPU: step times relative to memory bandwidth, and speed relative to transformers.

    python -m bench.gpu_decode
    python -m bench.gpu_decode --tokenizer DIR --pairs outputs.jsonl
    python -m bench.gpu_decode --shape tiny --device cpu

The model has the shape of Llama-3-8B and random weights; its output is meaningless, but its passes cost as much as with
real weights. The figures are medians and quartiles, with all ways measured in turn:

- the time to read as many bytes as the weights of a step (at the rate of a reduction or a copy of up to 4 GiB,
  whichever is faster), and its share of a step
- steps of 1, 16 and 64 nodes after `--context` tokens, with and without CUDA graphs
- the host time of a plain step outside the graph
- tokens per second of plain decoding without the prefill, along with transformers' own `generate`

Steps up to the check of a graph are left out.

A random model does not write text in which drafts are accepted. So with `--pairs` a recorded text (in the forms of
`bench.replay`) dictates the output on the device after every pass. Drafts are accepted as in the recorded text, and the
time of the dictation counts as ours. `generate` decodes as many tokens after the same prompt, without dictation.

The gate comes first: in fp32 a tiny model must give the tokens of `model.generate`, and this model must give the same
tokens with CUDA graphs as with eager passes, or nothing is timed. On a CPU, eager passes replace the graphs: this shows
that the command works, and measures nothing about a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from bench.command import parser_of, publish
from bench.decoding_rates import Trace, check_lossless, compare_dictated, compare_plain
from bench.gpu_steps import find_device, measure_steps, read_bandwidth, step_bytes
from bench.replay import load_tokenizer, read_pairs
from bench.targets import GPU_DECODE, print_goals
from lookahead.backend.gpu import cuda_graphs
from lookahead.kernels.dispatch import runs_on, verdicts

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES = (1, 16, 64)
STEP_TIMES = ("graphs_ms", "graph_alone_ms", "eager_ms")
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


def read_traces(arguments: argparse.Namespace, vocabulary: int) -> list[Trace]:
    """The first recorded outputs that are long enough, cut to `--max-new-tokens`. Prompts keep their ends."""
    if arguments.pairs is None:
        return []
    tokenizer = load_tokenizer(arguments.tokenizer)
    traces: list[Trace] = []
    for texts in read_pairs(arguments.pairs):
        prompt, output = (tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"] for text in texts)
        if prompt and len(output) >= arguments.max_new_tokens and len(traces) < arguments.limit:
            traces.append(Trace(prompt[-arguments.context :], output[: arguments.max_new_tokens]))
    if not traces:
        sys.exit(f"{arguments.pairs} holds no output of {arguments.max_new_tokens} tokens; lower --max-new-tokens")
    if max(max(trace.prompt + trace.output) for trace in traces) >= vocabulary:
        sys.exit(f"the tokenizer has tokens beyond the {vocabulary} of this shape")
    return traces


def measure(model: PreTrainedModel, traces: list[Trace], arguments: argparse.Namespace) -> dict[str, Any]:
    device, trials = model.device, arguments.trials
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, arguments.context).astype(np.int32)
    weights = step_bytes(model)
    memory = read_bandwidth(weights, device, trials)
    steps = measure_steps(model, prompt, SIZES, trials, device)
    plain = compare_plain(model, prompt, arguments.max_new_tokens, arguments.rounds, device)
    medians = [step["graphs_ms"]["median"] for step in steps]
    limit_ms = weights / memory["gb_per_s"] / 1e6
    figures = {f"step_ratio_{size}": medians[i] / medians[0] for i, size in enumerate(SIZES) if i}
    figures |= {"weight_read_share": limit_ms / medians[0], "host_us": plain["host_us"]["median"]}
    figures["plain_speedup"] = plain["speedup"]["median"]
    result = {"step_weight_bytes": weights, "weight_read_ms": limit_ms, "memory": memory, "steps": steps}
    result["plain"] = plain
    if traces:
        result["dictated"] = compare_dictated(model, traces, arguments.rounds, device)
        figures["dictated_speedup"] = result["dictated"]["speedup"]["median"]
    return {"figures": {name: round(each, 4) for name, each in figures.items()}} | result


def show(result: dict[str, Any]) -> None:
    """Print medians with quartiles, and the figures with goals."""

    def words(each: dict[str, float]) -> str:
        return f"{each['median']:.3f} ({each['low']:.3f}-{each['high']:.3f})"

    for way in ("reduction", "copy"):
        print(f"memory, {way}: {words(result['memory'][f'{way}_gb_per_s'])} GB/s")
    print(f"reading the {result['step_weight_bytes']} bytes of a step's weights: {result['weight_read_ms']:.3f} ms")
    print(f"steps, ms ({result['graphs']})\nnodes  {'with graphs':28}  {'the graph alone':28}  eager")
    for step in result["steps"]:
        print(f"{step['nodes']:5}  {'  '.join(f'{words(step[key]):28}' for key in STEP_TIMES)}")
    names = {"plain": "plain decoding after random tokens", "dictated": "a recorded text dictates what the model says"}
    for name in [name for name in names if name in result]:
        print(f"{names[name]}, tokens/s, prefill excluded:")
        for way, each in result[name]["tokens_per_s"].items():
            print(f"  {way:20} {words(each)}")
    same, new = result["plain"]["same_tokens"], result["max_new_tokens"]
    print(f"plain decoding: {same} of {new} tokens are those of `generate`, before the first that is not")
    if "dictated" in result:
        print(f"tokens per pass {result['dictated']['mean_acceptance_length']}: of the recorded text, not this model")
    print_goals(GPU_DECODE, result["figures"], has_targets=result["has_targets"])


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--context", type=int, default=2048, help="tokens of the prompt; of recorded ones at most")
    parser.add_argument("--trials", type=int, default=50, help="of every step and read of memory")
    parser.add_argument("--rounds", type=int, default=3, help="timed outputs of every way; one more warms up")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--pairs", type=Path, help="recorded prompts and outputs, as bench.replay takes them")
    parser.add_argument("--tokenizer", help="folder of the tokenizer they are read with")
    parser.add_argument("--limit", type=int, default=8, help="recorded outputs")
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu" and arguments.shape != "tiny":
        parser.error("--device cpu takes --shape tiny alone")
    if (arguments.pairs is None) != (arguments.tokenizer is None):
        parser.error("--pairs and --tokenizer go together")
    for name, least in {"context": 2, "trials": 1, "rounds": 1, "limit": 1, "max_new_tokens": 8}.items():
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(arguments, name)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    device, name = find_device(arguments.device, "bench.gpu_decode")
    is_gpu = device.type == "cuda"
    if not is_gpu:
        cuda_graphs.graphs_unsupported_reason = lambda *_: None  # passes run eagerly
    traces = read_traces(arguments, SHAPES[arguments.shape]["vocab_size"])
    check_lossless(make_model("tiny", "fp32", device, 0), device)
    positions = arguments.context + arguments.max_new_tokens + max(SIZES)
    model = make_model(arguments.shape, arguments.dtype, device, positions)
    check_lossless(model, device)
    print(f"{arguments.shape}, random weights, {arguments.dtype}, {name}, {arguments.context} tokens of context")
    taken = ("shape", "dtype", "context", "trials", "rounds", "max_new_tokens")
    report = {key: getattr(arguments, key) for key in taken} | {"device": name}
    report["model"] = SHAPES[arguments.shape] | {"weights": "random", "parameters": model.num_parameters()}
    report["graphs"] = "CUDA graphs" if is_gpu else "no CUDA graphs on a CPU: passes run by hand"
    report |= {"has_targets": is_gpu and arguments.shape == "llama3-8b", "tree_attention_kernel": runs_on(device)}
    lengths = [len(trace.prompt) for trace in traces]
    report |= {"traces": len(traces), "median_trace_prompt": median(lengths) if lengths else None}
    report |= measure(model, traces, arguments)
    report["kernels"] = {variant.name: verdict._asdict() for variant, verdict in verdicts.items()}
    show(report)
    publish(report, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
