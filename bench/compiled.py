"""What compiling the model is worth: a step of every size, and whole outputs, beside the same passes not compiled.

    python -m bench.compiled --dtype fp32
    python -m bench.compiled --dtype bf16 --model DIR --text FILE

One thread, whose processor time is measured, batch 1. Steps of both kinds are taken in turn on random trees after
`--context` tokens; medians of many, and the quartiles around them. Then passages of a text are summarized, or continued
where the model knows no summaries, by the engine without drafts and with them, plainly and compiled, every way in turn;
the first round compiles, and counts for nothing but the seconds that passed. In fp32 every output must be that of
`model.generate`, or nothing is measured. The last line is one JSON object.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.command import parser_of, publish, use_one_thread
from bench.prompts import SUMMARIZER, continuation_prompts, summary_prompts
from lookahead import LookaheadConfig
from lookahead.drafting.tree import TokenTree
from lookahead.generation.api import prepare_ids
from lookahead.models.loading import load
from lookahead.models.model_state import LearnedState, use_learned
from lookahead.models.target import Target
from lookahead.verification.topk import likeliest

ROOT = Path(__file__).resolve().parent.parent
WAYS = {
    "plain": LookaheadConfig(proposers=()),
    "plain, compiled": LookaheadConfig(proposers=(), compile=True),
    "drafts": LookaheadConfig(memory="request"),
    "drafts, compiled": LookaheadConfig(memory="request", compile=True),
}


def random_tree(rng: np.random.Generator, nodes: int, vocabulary: int) -> TokenTree:
    """A tree whose branches have two children each, which differ."""
    tokens = (np.arange(nodes) + rng.integers(vocabulary)) % vocabulary
    return TokenTree.from_parents(tokens.astype(np.int32), [max(0, (node - 1) // 2) for node in range(nodes)])


def compare_steps(model: PreTrainedModel, context: int, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Seconds of steps of every size, plain and compiled in turn."""
    rng, vocabulary = np.random.default_rng(0), model.config.vocab_size
    prompt = rng.integers(0, vocabulary, context).astype(np.int32)
    device = torch.device("cpu")
    targets = [
        Target(model, rows=1, capacity=context + 2 * max(sizes), device=device, compiles=each) for each in (False, True)
    ]
    figures = []
    with targets[0].serving():
        for target in targets:
            target.prefill([prompt])
        for size in sizes:
            tree = random_tree(rng, size, vocabulary)
            begin = time.perf_counter()
            compiled = likeliest(targets[1].score([tree]))
            first_s = time.perf_counter() - begin
            is_same = torch.equal(compiled, likeliest(targets[0].score([tree])))
            taken: list[list[float]] = [[], []]
            for _ in range(rounds):
                for target, seconds in zip(targets, taken, strict=True):
                    begin = time.thread_time()
                    likeliest(target.score([tree])).numpy()
                    seconds.append(time.thread_time() - begin)
            quartiles = [statistics.quantiles([1e3 * each for each in seconds], n=4) for seconds in taken]
            ratio = quartiles[0][1] / quartiles[1][1]
            figures.append({
                "nodes": size, "plain_ms": quartiles[0], "compiled_ms": quartiles[1], "speedup": ratio,
                "first_s": first_s, "argmax_equal": is_same,
            })  # fmt: skip
            print(
                f"{size:3} nodes: {quartiles[0][1]:6.2f} ms ({quartiles[0][0]:.2f}-{quartiles[0][2]:.2f}), compiled "
                f"{quartiles[1][1]:6.2f} ms ({quartiles[1][0]:.2f}-{quartiles[1][2]:.2f}), {ratio:.2f}x; "
                f"the first took {first_s:.1f} s; argmax {'equal' if is_same else 'DIFFERS'}",
                flush=True,
            )
    return figures


def compare_outputs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], rounds: int, max_new_tokens: int
) -> dict[str, Any]:
    """Tokens per second of decoding, prefill excluded, of every way, in turn on every prompt."""
    expected = [_generate(model, tokenizer, prompt, max_new_tokens) for prompt in prompts]
    states = {name: LearnedState() for name in WAYS}
    figures: dict[str, Any] = {name: {"tokens_per_s": []} for name in WAYS}
    for number in range(rounds + 1):
        decoded, spent, same, whole = (dict.fromkeys(WAYS, 0.0) for _ in range(4))
        for prompt, answer in zip(prompts, expected, strict=True):
            for name, config in WAYS.items():
                begin = time.perf_counter()
                with use_learned(model, states[name]):
                    tokens, seconds = _decode(model, tokenizer, prompt, config, max_new_tokens)
                whole[name] += time.perf_counter() - begin
                decoded[name] += len(tokens) - 1
                spent[name] += seconds
                same[name] += tokens == answer
        for name, each in figures.items():
            each["identical"] = int(same[name])
            if model.dtype == torch.float32 and same[name] < len(prompts):
                raise SystemExit(f"{name}: only {same[name]:.0f} of {len(prompts)} outputs are those of model.generate")
            if number == 0:
                each["first_round_s"] = round(whole[name], 2)
            else:
                each["tokens_per_s"].append(round(decoded[name] / spent[name], 1))
    for name, each in figures.items():
        each["median_tokens_per_s"] = statistics.median(each["tokens_per_s"])
        ratio = each["median_tokens_per_s"] / figures["plain"]["median_tokens_per_s"]
        print(
            f"{name:17} {each['median_tokens_per_s']:8.1f} tokens/s ({min(each['tokens_per_s'])}-"
            f"{max(each['tokens_per_s'])}), {ratio:.2f}x; {each['identical']} of {len(prompts)} as model.generate; "
            f"the first round took {each['first_round_s']} s"
        )
    return figures


def _decode(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, config: LookaheadConfig, limit: int
) -> tuple[list[int], float]:
    """The new tokens, and the seconds from the first of them to the last."""
    options = {"max_new_tokens": limit, "do_sample": False}
    engine = prepare_ids(model, tokenizer, [tokenizer(prompt)["input_ids"]], config, None, None, options)
    tokens: list[int] = []
    begin = 0.0
    with engine.serving():
        for step_outputs in engine.run():
            begin = begin or time.thread_time()
            tokens += step_outputs[0].tokens.tolist()
    return tokens, time.thread_time() - begin


def _generate(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> list[int]:
    """The new tokens that transformers gives."""
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    whole = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)
    tokens: list[int] = whole[0, ids.shape[1] :].tolist()
    return tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = parser_of(__doc__, model=SUMMARIZER, dtype="fp32")
    parser.add_argument("--text", type=Path, default=ROOT / "examples" / "dust_unto_dust.txt")
    parser.add_argument("--context", type=int, default=300, help="tokens before the steps")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--steps", type=int, default=200, help="steps of every size; 0 leaves them out")
    parser.add_argument("--rounds", type=int, default=5, help="over all prompts; 0 leaves whole outputs out")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    arguments = parser.parse_args(argv)
    use_one_thread()
    model, tokenizer = load(arguments.model, dtype=arguments.dtype, device="cpu")
    report: dict[str, Any] = {"dtype": arguments.dtype}
    report["steps"] = (
        compare_steps(model, arguments.context, arguments.sizes, arguments.steps) if arguments.steps else []
    )
    if arguments.rounds:
        texts = [arguments.text.read_text(encoding="utf-8")]
        try:
            cut = {"shortest": 200, "longest": 280}
            prompts = summary_prompts(iter(texts), tokenizer, limit=arguments.prompts, **cut)
        except ValueError:
            prompts = continuation_prompts(iter(texts[0].split("\n\n")), tokenizer, limit=arguments.prompts, longest=64)
        report["outputs"] = compare_outputs(model, tokenizer, prompts, arguments.rounds, arguments.max_new_tokens)
    publish(report, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
