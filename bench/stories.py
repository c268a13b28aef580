"""All that drafts without a draft model, together: tokens per target pass on story openings.

    python -m bench.stories --model DIR --nodes 32 --tokens 160

Every opening is decoded greedily with at most `--nodes` draft nodes a step (no cost model, so that a figure does not
depend on the machine), first with memory fresh for each, then with memory shared by all. Every output must be that
of greedy `model.generate`, or nothing is printed but the openings that differ. "Before loops" is explained in
`bench.jacobi`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.jacobi import OPENINGS, Run, decode, loop_start, rate
from bench.prompts import read_texts
from lookahead import LookaheadConfig

SOURCES = ("prompt", "outputs", "recycled")


def decode_all(
    model: PreTrainedModel,
    prompts: Sequence[torch.Tensor],
    tokens: int,
    nodes: int,
    memory: Literal["shared", "request"],
) -> list[Run]:
    """Decode every prompt in turn."""
    config = LookaheadConfig(proposers=SOURCES, draft="fixed", max_nodes=nodes, min_probability=0.0, memory=memory)
    return [decode(model, ids, tokens, config) for ids in prompts]


def figures(runs: Sequence[Run]) -> dict[str, float]:
    """Tokens per pass, in all and before the loops, and draft nodes per pass."""
    return {
        "mean_acceptance_length": round(rate([run.before(len(run.tokens)) for run in runs]), 4),
        "mean_acceptance_length_before_loops": round(rate([run.before(loop_start(run.tokens)) for run in runs]), 4),
        "drafted_per_forward": round(sum(run.drafted for run in runs) / max(1, sum(len(run.steps) for run in runs)), 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Check, measure, print; 1 where an output differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a HuggingFace causal LM")
    parser.add_argument("--file", type=Path, default=OPENINGS, help="prompts, one a line")
    parser.add_argument("--nodes", type=int, default=32, help="most draft nodes a step (default 32)")
    parser.add_argument("--tokens", type=int, default=160, help="new tokens a prompt (default 160)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in read_texts(options.file, "prompt")]
    greedy = [
        model.generate(ids, max_new_tokens=options.tokens, do_sample=False)[0, ids.shape[1] :].tolist()
        for ids in prompts
    ]
    result: dict[str, object] = {"model": Path(options.model).name, "prompts": len(prompts), "nodes": options.nodes}
    modes: tuple[tuple[str, Literal["shared", "request"]], ...] = (("fresh", "request"), ("shared", "shared"))
    for name, memory in modes:
        runs = decode_all(model, prompts, options.tokens, options.nodes, memory)
        differing = [i for i, (run, tokens) in enumerate(zip(runs, greedy, strict=True), 1) if run.tokens != tokens]
        if differing:
            print(f"outputs differ from model.generate with {name} memory: {differing}")
            return 1
        result[name] = figures(runs)
        print(f"{name}: {result[name]}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
