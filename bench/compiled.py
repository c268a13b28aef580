"""What compiling the model is worth: a step of every size, and whole outputs, beside the same passes not compiled.

    python -m bench.compiled --dtype fp32
    python -m bench.compiled --dtype bf16 --model DIR --text FILE

One thread, batch 1. First comes what the first compiled step takes, in processor seconds with those of the C++
compiler; an empty folder in TORCHINDUCTOR_CACHE_DIR makes it that of a first process, on one core (`taskset -c 0`).
Steps of both kinds take turns with one of transformers, after `--context` tokens: medians of processor milliseconds by
nodes. Then passages of a text are summarized, or continued where the model knows no summaries, without drafts and with
them, plainly and compiled, every way in turn, by the clock on the wall, medians of rounds. In fp32 every output must be
that of `model.generate`, or the command fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.command import parser_of, processor, publish, use_one_thread
from bench.passes import branching_tree, measure
from bench.prompts import SUMMARIZER, cut, summary_prompts
from lookahead import LookaheadConfig
from lookahead.generation.draft_selection import compare
from lookahead.models.loading import load
from lookahead.models.target import Target

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "dust_unto_dust.txt"
STEPS = {"plain": {}, "compiled": {"compiles": True}}
WAYS = {
    "plain": LookaheadConfig(proposers=()),
    "plain, compiled": LookaheadConfig(proposers=(), compile=True),
    "drafts": LookaheadConfig(memory="request"),
    "drafts, compiled": LookaheadConfig(memory="request", compile=True),
}


def compare_outputs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], rounds: int, new: int
) -> dict[str, Any]:
    """Decoding in every way, in turn on every prompt; each round decodes all prompts once before, which compiles."""
    options: dict[str, Any] = {"warm_up": len(prompts), "max_new_tokens": new, "do_sample": False}
    scores = [compare(model, tokenizer, prompts, WAYS, **options) for _ in range(rounds)]
    figures: dict[str, Any] = {}
    for name in WAYS:
        speeds = [round(each[name].stats.tokens_per_s, 1) for each in scores]
        identical = min(each[name].identical for each in scores)
        if model.dtype == torch.float32 and identical < len(prompts):
            raise SystemExit(f"{name}: only {identical} of {len(prompts)} outputs are those of model.generate")
        figures[name] = {"median_tokens_per_s": median(speeds), "identical": identical, "tokens_per_s": speeds}
        print(f"{name:17} {figures[name]}", flush=True)
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, model=SUMMARIZER, dtype="fp32")
    parser.add_argument("--text", type=Path, default=EXAMPLE)
    parser.add_argument("--context", type=int, default=300, help="tokens before the steps")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--steps", type=int, default=200, help="steps of every size; 0 leaves them out")
    parser.add_argument("--rounds", type=int, default=5, help="over all prompts; 0 leaves whole outputs out")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    arguments = parser.parse_args(argv)
    use_one_thread()
    model, tokenizer = load(arguments.model, dtype=arguments.dtype, device="cpu")
    report: dict[str, Any] = {"model": arguments.model, "dtype": arguments.dtype, "device": f"cpu, {processor()}"}
    target = Target(model, rows=1, capacity=80, compiles=True)
    with target.serving():
        target.prefill([np.arange(5, 65, dtype=np.int32)])
        begin = sum(os.times()[:4])  # those of the compiler's processes too
        target.score([branching_tree(8, 60)])
    report["first_step_s"] = round(sum(os.times()[:4]) - begin, 2)
    print(f"first compiled step: {report['first_step_s']} s", flush=True)
    if arguments.steps:
        sizes = arguments.context, arguments.sizes, arguments.steps
        report["ms"] = measure(model, *sizes, STEPS, time.process_time)
        for name, times in report["ms"].items():
            print(f"{name:24}" + "".join(f"{nodes:4} nodes {ms:6.2f} ms" for nodes, ms in times.items()))
    if arguments.rounds:
        texts = [arguments.text.read_text(encoding="utf-8")]
        try:
            prompts = summary_prompts(iter(texts), tokenizer, limit=arguments.prompts, shortest=200, longest=280)
        except ValueError:
            paragraphs = [each.strip() for each in texts[0].split("\n\n") if each.strip()][: arguments.prompts]
            prompts = [cut(each, tokenizer, 64) for each in paragraphs]
        report["outputs"] = compare_outputs(model, tokenizer, prompts, arguments.rounds, arguments.max_new_tokens)
    publish(report, arguments.output)


if __name__ == "__main__":
    main()
