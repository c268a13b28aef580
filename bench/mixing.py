"""Whether mixing the sources ever loses: tokens a pass of all together against each alone, on the copying summarizer.

    python -m bench.mixing --prompts squality_dev.jsonl --field document --output bench/results/mixing.json

Every prompt is decoded greedily, in turn, with at most so many draft nodes a step and no cost model, so that a figure
does not depend on the machine; memory is shared by all prompts of a run, and no run learns of another. Every output
must be that of plain decoding, or nothing is printed but the prompts that differ. `calibration` is how many tokens the
drafts of the mixture promised over those accepted, after the first 2,000 tokens. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from bench.prompts import SUMMARIZER, read_texts, summary_prompts
from bench.replay import LEARNED
from bench.report import publish
from lookahead import LookaheadConfig
from lookahead.engine.model_state import ModelExperience, lent_experience
from lookahead.generation.api import prepare
from lookahead.models.loading import load
from lookahead.stats import DecodingStats

SOURCES = ("prompt", "outputs", "recycled")
Run = list[tuple[list[int], DecodingStats]]


def decode_all(
    model: PreTrainedModel, prompts: Sequence[torch.Tensor], sources: Sequence[str], nodes: int, max_new_tokens: int
) -> Run:
    """Decode every prompt in turn with memory of their own: the tokens, and what was counted."""
    config = LookaheadConfig(
        proposers=sources, draft="fixed", max_nodes=nodes if sources else None, min_probability=0.0
    )
    run = []
    with lent_experience(model, ModelExperience()):
        for ids in prompts:
            engine = model.generate(
                ids, max_new_tokens=max_new_tokens, do_sample=False, custom_generate=prepare, lookahead_config=config
            )
            tokens = [token for step in engine.run() for emission in step for token in emission.tokens.tolist()]
            run.append((tokens, engine.stats[0]))
    return run


def tokens_per_pass(run: Run) -> float:
    """Of all outputs together, the prefills and the tokens they gave left out."""
    return sum(stats.decoded_tokens for _, stats in run) / max(1, sum(stats.target_forwards for _, stats in run))


def calibration(run: Run) -> float | None:
    """Tokens promised over tokens accepted, of outputs that began after the first 2,000 tokens; None without any."""
    seen, promised, accepted = 0, 0.0, 0
    for tokens, stats in run:
        if seen >= LEARNED:
            promised += stats.expected_tokens
            accepted += stats.accepted_tokens
        seen += len(tokens)
    return round(promised / accepted, 4) if accepted else None


def measure(
    model: PreTrainedModel, prompts: Sequence[torch.Tensor], budgets: Sequence[int], max_new_tokens: int
) -> list[dict[str, Any]]:
    """The figures of every budget.

    Raises:
        ValueError: An output is not that of plain decoding.
    """
    plain = [tokens for tokens, _ in decode_all(model, prompts, (), 0, max_new_tokens)]
    figures = []
    for nodes in budgets:
        rates: dict[str, float] = {}
        runs = {"mixture": SOURCES, **{name: (name,) for name in SOURCES}}
        promised = None
        for name, sources in runs.items():
            run = decode_all(model, prompts, sources, nodes, max_new_tokens)
            differing = [i for i, (tokens, _) in enumerate(run, 1) if tokens != plain[i - 1]]
            if differing:
                raise ValueError(f"outputs of {name} at {nodes} nodes differ from plain decoding: {differing}")
            rates[name] = round(tokens_per_pass(run), 4)
            promised = calibration(run) if name == "mixture" else promised
        best = max(SOURCES, key=lambda name: rates[name])
        row = {"nodes": nodes, **rates, "best_single": best, "over_best": round(rates["mixture"] / rates[best], 4)}
        figures.append({**row, "calibration": promised})
        print(" ".join(f"{key} {value}" for key, value in figures[-1].items()), flush=True)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Check, measure, print; 1 where an output differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SUMMARIZER, help="a folder, or a name on the Hub")
    parser.add_argument("--prompts", type=Path, required=True, help="a .jsonl file, or a text file of one text a line")
    parser.add_argument("--field", default="text", help="the field of each JSON line")
    parser.add_argument("--limit", type=int, default=40, help="how many prompts (default 40)")
    parser.add_argument("--budgets", default="8,16,32,64", help="draft nodes a step (default 8,16,32,64)")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--output", type=Path, help="a file for the figures")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    model, tokenizer = load(options.model, dtype="fp32", device="cpu")
    texts = read_texts(options.prompts, options.field)
    written = summary_prompts(texts, tokenizer, limit=options.limit, shortest=200, longest=900)
    prompts = [torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]]) for text in written]
    budgets = [int(each) for each in options.budgets.split(",")]
    try:
        figures = measure(model, prompts, budgets, options.max_new_tokens)
    except ValueError as error:
        print(error)
        return 1
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    report = {"model": options.model, "dtype": "fp32", "device": "cpu", "versions": versions, "prompts": len(prompts)}
    publish(report | {"worst": min(row["over_best"] for row in figures), "budgets": figures}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
