"""How far the lookahead branch alone sees: tokens per target pass on story openings.

    python -m bench.jacobi --model DIR --prompts 40 --tokens 160 --window 7 --ngram-size 5 --guesses 7
    python -m bench.jacobi --model DIR --prompts 40 --tokens 160 --window 20 --ngram-size 7 --guesses 20 \
        --pool-from-prompt

The losslessness gate comes first: every output must be that of greedy `model.generate`, or nothing is printed but
the prompts that differ. Prompts are decoded one by one, with every node the settings allow (no cost model), so
that a figure does not depend on the machine. What is learned about guesses goes on from prompt to prompt; the
n-gram pool starts anew with each.

Small models fall into loops, which flatter any method that copies. "Before loops" counts, of each output, the
tokens up to the place where it first repeats itself: where the next 16 tokens all stood earlier in the same output
in the same order (the two places may overlap), and the passes that began before it. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.prompts import read_texts
from lookahead import LookaheadConfig
from lookahead.generation.api import prepare

OPENINGS = Path(__file__).with_name("openings.txt")
REPEAT = 16  # tokens


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt decoded.

    Attributes:
        tokens: The output.
        first: How many tokens the prefill gave.
        steps: How many tokens each target pass emitted after that.
        drafted: Draft nodes of all passes.
    """

    tokens: list[int]
    first: int
    steps: list[int]
    drafted: int

    def before(self, end: int) -> tuple[int, int]:
        """Tokens up to `end`, and the passes that began before it; the prefill's tokens left out."""
        begin, passes = self.first, 0
        for step in self.steps:
            if begin >= end:
                break
            begin += step
            passes += 1
        return max(0, min(end, begin) - self.first), passes


def decode(model: PreTrainedModel, ids: torch.Tensor, max_new_tokens: int, config: LookaheadConfig) -> Run:
    """Decode one prompt greedily, noting what each pass emitted."""
    engine = model.generate(
        ids, max_new_tokens=max_new_tokens, do_sample=False, custom_generate=prepare, lookahead_config=config
    )
    emissions = [emission.tokens.tolist() for step in engine.run() for emission in step]
    stats = engine.stats[0]
    prefilled = len(emissions) - stats.target_forwards
    return Run(
        tokens=[token for tokens in emissions for token in tokens],
        first=sum(map(len, emissions[:prefilled])),
        steps=[len(tokens) for tokens in emissions[prefilled:]],
        drafted=stats.drafted_tokens,
    )


def loop_start(tokens: Sequence[int]) -> int:
    """Where the next `REPEAT` tokens first repeat earlier ones; the end where none do."""
    seen: set[tuple[int, ...]] = set()
    for begin in range(len(tokens) - REPEAT + 1):
        run = tuple(tokens[begin : begin + REPEAT])
        if run in seen:
            return begin
        seen.add(run)
    return len(tokens)


def rate(counts: Sequence[tuple[int, int]]) -> float:
    """Tokens per pass of several outputs together."""
    return sum(tokens for tokens, _ in counts) / max(1, sum(passes for _, passes in counts))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a HuggingFace causal LM")
    parser.add_argument("--prompts", type=int, default=40, help="how many prompts (default 40)")
    parser.add_argument("--file", type=Path, default=OPENINGS, help="prompts, one a line, or JSON lines")
    parser.add_argument("--field", default="prompt", help="field of the JSON lines that holds the prompt")
    parser.add_argument("--tokens", type=int, default=160, help="new tokens a prompt (default 160)")
    parser.add_argument("--window", type=int, default=7)
    parser.add_argument("--ngram-size", type=int, default=5)
    parser.add_argument("--guesses", type=int, default=7)
    parser.add_argument("--pool-from-prompt", action="store_true", help="the prompt enters the n-gram pool")
    parser.add_argument("--min-probability", type=float, default=0.0, help="of a guess that is verified (default 0)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Check, measure, print; 1 where an output differs."""
    options = parse(argv)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    config = LookaheadConfig(
        proposers=("jacobi",),
        draft="fixed",
        min_probability=options.min_probability,
        window=options.window,
        ngram_size=options.ngram_size,
        guesses=options.guesses,
        pool_from_prompt=options.pool_from_prompt,
    )
    runs, differing = [], []
    for number, prompt in enumerate(islice(read_texts(options.file, options.field), options.prompts), start=1):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.tokens, do_sample=False
        )
        runs.append(decode(model, ids, options.tokens, config))
        if runs[-1].tokens != expected[0, ids.shape[1] :].tolist():
            differing.append(number)
    if differing or not runs:
        print(f"no prompts in {options.file}" if not runs else f"outputs differ from model.generate: {differing}")
        return 1
    passes = sum(len(run.steps) for run in runs)
    result = {
        "model": options.model,
        "prompts": len(runs),
        "tokens": sum(len(run.tokens) for run in runs),
        "window": options.window,
        "ngram_size": options.ngram_size,
        "guesses": options.guesses,
        "pool_from_prompt": options.pool_from_prompt,
        "min_probability": options.min_probability,
        "target_forwards": passes,
        "drafted_per_forward": round(sum(run.drafted for run in runs) / max(1, passes), 2),
        "mean_acceptance_length": round(rate([run.before(len(run.tokens)) for run in runs]), 4),
        "mean_acceptance_length_before_loops": round(rate([run.before(loop_start(run.tokens)) for run in runs]), 4),
    }
    print(f"outputs identical to model.generate for all {len(runs)} prompts")
    for name in ("mean_acceptance_length", "mean_acceptance_length_before_loops", "drafted_per_forward"):
        print(f"{name}: {result[name]}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
