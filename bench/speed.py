"""How fast: transformers' own decoding and ours, side by side, on real prompts.

    python -m bench.speed --model tests/models/summarizer --prompts stories.jsonl --field document --limit 40
    python -m bench.speed --model DIR --draft DIR --task continue --prompts prompts.jsonl --field prompt

Every prompt is decoded by every method in turn, one after the other, on one thread; the order of the methods
rotates. A first round, not timed, warms up and is the losslessness gate: in fp32 every method of ours must give
the tokens of greedy `model.generate`, or nothing is timed. Decode seconds leave the prefill out: they run from a
method's first token to its last, which is `tokens - 1` tokens. Tokens per pass count every pass, the prefill too.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from bench.prompts import SUMMARIZER, continuation_prompts, read_texts, summary_prompts
from lookahead import LookaheadConfig
from lookahead.generation import prepare
from lookahead.loading import load

LOOKUP_LENGTHS = (3, 10, 20)


@dataclass(slots=True)
class Run:
    """What one method did with one prompt."""

    tokens: list[int]
    steps_timed: int
    decode_s: float
    total_s: float
    passes: int


@dataclass(slots=True)
class Method:
    """A way to decode, and its runs: `rounds[r]` holds one run per prompt."""

    name: str
    decode: Callable[[torch.Tensor], Run]
    rounds: list[list[Run]] = field(default_factory=list)

    def s_per_token(self, round_index: int) -> float:
        """Decode seconds per token of one round, all prompts together."""
        runs = self.rounds[round_index]
        return sum(run.decode_s for run in runs) / max(1, sum(run.steps_timed for run in runs))

    def total_s(self, round_index: int) -> float:
        """Seconds of one round, prefill included."""
        return sum(run.total_s for run in self.rounds[round_index])

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens per target pass."""
        runs = self.rounds[0]
        return sum(len(run.tokens) for run in runs) / sum(run.passes for run in runs)


class FirstToken(StoppingCriteria):
    """Stops nothing; notes when the first token was there."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.at is None:
            self.at = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class PassCounter:
    """Counts the forward passes of a model while the block runs."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.passes = model, 0

    def _count(self, *args: Any) -> None:
        self.passes += 1

    def __enter__(self) -> PassCounter:
        self.handle = self.model.register_forward_pre_hook(self._count)
        return self

    def __exit__(self, *exc: object) -> None:
        self.handle.remove()


def huggingface(model: PreTrainedModel, max_new_tokens: int, **options: Any) -> Callable[[torch.Tensor], Run]:
    """Greedy `model.generate` with some options."""

    def decode(ids: torch.Tensor) -> Run:
        first = FirstToken()
        with PassCounter(model) as counter:
            start = time.perf_counter()
            out = model.generate(
                ids,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([first]),
                **options,
            )
            end = time.perf_counter()
        tokens = out[0, ids.shape[1] :].tolist()
        assert first.at is not None
        return Run(tokens, len(tokens) - 1, end - first.at, end - start, counter.passes)

    return decode


def ours(model: PreTrainedModel, max_new_tokens: int, config: LookaheadConfig) -> Callable[[torch.Tensor], Run]:
    """Greedy decoding with lookahead."""

    def decode(ids: torch.Tensor) -> Run:
        start = time.perf_counter()
        engine = model.generate(
            ids, max_new_tokens=max_new_tokens, do_sample=False, custom_generate=prepare, lookahead_config=config
        )
        with engine.serving():  # as `lookahead.decode` does
            tokens = [token for step in engine.run() for token in step[0].tokens.tolist()]
        total = time.perf_counter() - start
        stats = engine.stats[0]
        return Run(tokens, len(tokens) - 1, stats.decode_s, total, stats.target_forwards + 1)

    return decode


def make_methods(model: PreTrainedModel, arguments: argparse.Namespace) -> list[Method]:
    """The methods to compare."""
    limit = arguments.max_new_tokens
    config = LookaheadConfig(
        proposers=tuple(arguments.proposers.split(",")),
        memory="request",  # every round decodes the same prompts: what one left would serve the next
        **({"max_nodes": arguments.max_nodes} if arguments.max_nodes else {}),
        **({"min_probability": arguments.min_probability} if arguments.min_probability is not None else {}),
    )
    methods = [Method("hf_greedy", huggingface(model, limit))]
    methods += [
        Method(f"hf_prompt_lookup_{n}", huggingface(model, limit, prompt_lookup_num_tokens=n)) for n in LOOKUP_LENGTHS
    ]
    if arguments.draft:
        draft, _ = load(arguments.draft, dtype=arguments.dtype, device="cpu")
        methods.append(Method("hf_assisted", huggingface(model, limit, assistant_model=draft)))
    methods.append(Method("ours_plain", ours(model, limit, LookaheadConfig(proposers=()))))
    methods.append(Method("ours", ours(model, limit, config)))
    return methods


def spread(values: list[float]) -> dict[str, float]:
    """Median and range of what the rounds gave."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def report(methods: list[Method], prompts: list[torch.Tensor], arguments: argparse.Namespace) -> dict[str, Any]:
    """Print a table and return the figures."""
    rounds = range(len(methods[0].rounds))
    by_name = {method.name: method for method in methods}
    greedy, plain, best = by_name["hf_greedy"], by_name["ours_plain"], by_name["ours"]

    def speedup(method: Method, over: Method) -> list[float]:
        return [over.s_per_token(r) / method.s_per_token(r) for r in rounds]

    lookups = [by_name[f"hf_prompt_lookup_{n}"] for n in LOOKUP_LENGTHS]
    lookup = min(lookups, key=lambda method: statistics.median(method.s_per_token(r) for r in rounds))
    print(f"{'method':22} {'ms/token':>9} {'x greedy':>9} {'tokens/pass':>12} {'end to end':>11} {'identical':>10}")
    details = {}
    for method in methods:
        same = sum(a.tokens == b.tokens for a, b in zip(method.rounds[0], greedy.rounds[0], strict=True))
        ms = 1e3 * statistics.median(method.s_per_token(r) for r in rounds)
        gain = spread(speedup(method, greedy))
        end_to_end = spread([greedy.total_s(r) / method.total_s(r) for r in rounds])
        details[method.name] = {
            "ms_per_token": round(ms, 3),
            "speedup": gain,
            "end_to_end": end_to_end,
            "mean_acceptance_length": round(method.mean_acceptance_length, 3),
            "identical": same,
        }
        print(
            f"{method.name:22} {ms:9.3f} {gain['median']:9.2f} {method.mean_acceptance_length:12.2f} "
            f"{end_to_end['median']:11.2f} {same:6d}/{len(prompts)}"
        )
    lengths = [ids.shape[1] for ids in prompts]
    return {
        "speedup_vs_hf_greedy": details["ours"]["speedup"]["median"],
        "speedup_vs_hf_prompt_lookup": spread(speedup(best, lookup))["median"],
        "end_to_end_speedup_vs_hf_greedy": details["ours"]["end_to_end"]["median"],
        "plain_speedup_vs_hf_greedy": spread(speedup(plain, greedy))["median"],
        "identical": details["ours"]["identical"] == len(prompts),
        "prompts": len(prompts),
        "mean_acceptance_length": details["ours"]["mean_acceptance_length"],
        "hf_prompt_lookup_best": lookup.name,
        "hf_prompt_lookup_mean_acceptance_length": max(m.mean_acceptance_length for m in lookups),
        "dtype": arguments.dtype,
        "device": "cpu",
        "threads": 1,
        "trials": len(rounds),
        "model": arguments.model,
        "prompt_tokens": {"min": min(lengths), "median": statistics.median(lengths), "max": max(lengths)},
        "new_tokens": sum(len(run.tokens) for run in best.rounds[0]),
        "max_new_tokens": arguments.max_new_tokens,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "methods": details,
    }


def check_lossless(methods: list[Method], dtype: str) -> None:
    """The gate: leave unless every method of ours gave the tokens of greedy decoding (fp32)."""
    greedy = methods[0].rounds[0]
    for method in methods:
        different = [i for i, run in enumerate(method.rounds[0]) if run.tokens != greedy[i].tokens]
        if different and dtype == "fp32" and method.name.startswith("ours"):
            sys.exit(f"not lossless: {method.name} differs from hf_greedy on prompts {different}; nothing was timed")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SUMMARIZER, help="a folder, or a name on the Hub")
    parser.add_argument("--draft", help="a draft model, for transformers' assisted generation")
    parser.add_argument(
        "--prompts", type=Path, required=True, help="a .jsonl file, or a text file of one prompt a line"
    )
    parser.add_argument("--field", default="text", help="the field of each JSON line")
    parser.add_argument("--limit", type=int, default=40, help="how many prompts")
    parser.add_argument("--task", choices=("summarize", "continue"), default="summarize")
    parser.add_argument("--shortest", type=int, default=200, help="tokens of the shortest passage")
    parser.add_argument("--longest", type=int, default=900, help="tokens of the longest passage or prompt")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--trials", type=int, default=3, help="timed rounds")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--proposers", default="prompt,outputs,recycled")
    parser.add_argument("--max-nodes", type=int)
    parser.add_argument("--min-probability", type=float)
    return parser.parse_args()


def main() -> None:
    """Run the benchmark."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model, tokenizer = load(arguments.model, dtype=arguments.dtype, device="cpu")
    texts = read_texts(arguments.prompts, arguments.field)
    if arguments.task == "summarize":
        written = summary_prompts(
            texts, tokenizer, limit=arguments.limit, shortest=arguments.shortest, longest=arguments.longest
        )
    else:
        written = continuation_prompts(texts, tokenizer, limit=arguments.limit, longest=arguments.longest)
    special = arguments.task == "continue"
    prompts = [torch.tensor([tokenizer(text, add_special_tokens=special)["input_ids"]]) for text in written]
    methods = make_methods(model, arguments)
    for trial in range(-1, arguments.trials):
        runs: dict[str, list[Run]] = {method.name: [] for method in methods}
        for i, ids in enumerate(prompts):
            turn = i % len(methods)
            for method in methods[turn:] + methods[:turn]:
                runs[method.name].append(method.decode(ids))
        for method in methods:
            method.rounds.append(runs[method.name])
        if trial == -1:
            check_lossless(methods, arguments.dtype)
            for method in methods:
                method.rounds.clear()
    print(json.dumps(report(methods, prompts, arguments)))


if __name__ == "__main__":
    main()
