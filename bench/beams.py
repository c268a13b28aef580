"""Beam search: whether its sequences equal those of `model.generate`, and how long both take.

    python -m bench.beams --model DIR --prompts spec_bench.jsonl --dtype bf16

A model searches on one core, with transformers and lookahead in turn on every prompt, in rotating order. A difference
ends the run in fp32, and in bf16 if rows keep their bits. Seconds are of whole searches, prompts read too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import lookahead
from bench.command import in_turn, parser_of, publish, setting_of, stay_on_cores
from bench.llm_peers import read_clocks
from bench.prompts import as_chat, read_texts
from lookahead.loading.loading import DEFAULT_MODEL, load
from lookahead.plugins.beams.beam_search import has_bits_of_beams

THEIRS, OURS = "transformers", "lookahead"
SCORES = {"return_dict_in_generate": True, "output_scores": True}


def compare(
    model: PreTrainedModel, prompts: Sequence[torch.Tensor], ways: Mapping[str, Mapping[str, Any]], *, is_exact: bool
) -> list[dict[str, Any]]:
    """Search for every prompt in every way, in turn. If the searches are exact, a difference ends the run."""
    rows = list[dict[str, Any]]()
    for i, ids in enumerate(prompts):
        outputs, seconds = dict[str, Any](), dict[str, dict[str, float]]()
        for name in in_turn(list(ways), i):
            begin = read_clocks()
            outputs[name] = model.generate(ids, attention_mask=torch.ones_like(ids), **ways[name], **SCORES)
            seconds[name] = {clock: at - begin[clock] for clock, at in read_clocks().items()}
        ours, theirs = outputs[OURS], outputs[THEIRS]
        is_same = torch.equal(ours.sequences, theirs.sequences)
        if is_exact and not is_same:
            sys.exit(f"prompt {i}: lookahead found another sequence than transformers; nothing is reported")
        difference = float((ours.sequences_scores - theirs.sequences_scores).abs().max()) if is_same else None
        new = theirs.sequences.shape[1] - ids.shape[1]
        row = {"prompt_tokens": ids.shape[1], "new_tokens": new, "identical": is_same, "score_difference": difference}
        rows.append(row | seconds)
        speed = seconds[THEIRS]["cpu"] / seconds[OURS]["cpu"]
        print(f"{i + 1}/{len(prompts)}: {ids.shape[1]} tokens of prompt, {speed:.2f}x", file=sys.stderr, flush=True)
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Total speeds, the number of prompts with the same sequences, and the largest difference of scores."""
    total = {
        name: {clock: sum(row[name][clock] for row in rows) for clock in ("cpu", "wall")} for name in (THEIRS, OURS)
    }
    return {
        **{f"speedup_{clock}": round(seconds / total[OURS][clock], 3) for clock, seconds in total[THEIRS].items()},
        **{f"{name}_cpu_s": round(seconds["cpu"], 2) for name, seconds in total.items()},
        "identical": sum(row["identical"] for row in rows),
        "score_difference": max((row["score_difference"] or 0.0 for row in rows), default=0.0),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, model=DEFAULT_MODEL, dtype="fp32", core=True)
    parser.add_argument(
        "--prompts", type=Path, required=True, help="JSON lines with a category, as Spec-Bench has them"
    )
    parser.add_argument("--categories", default="summarization,rag", help="comma separated")
    parser.add_argument("--limit", type=int, default=3, help="prompts of a category")
    parser.add_argument("--offset", type=int, default=0, help="prompts of each category to leave out")
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args(argv)
    stay_on_cores(arguments.core)
    model, tokenizer = load(arguments.model, dtype=arguments.dtype, device="cpu")
    prompts = []
    for category in arguments.categories.split(","):
        texts = list(read_texts(arguments.prompts, "turns", category))[arguments.offset :]
        prompts += [as_chat(text, tokenizer) for text in texts[: arguments.limit]]
    if not prompts:
        parser.error(f"--categories {arguments.categories}: no prompt of {arguments.prompts} is of these")
    shared = {"num_beams": arguments.num_beams, "max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    ways = {THEIRS: shared, OURS: {**shared, "custom_generate": lookahead.decode}}
    for way in ways.values():  # probes and packed weights come first
        short = prompts[0][:, :40]
        model.generate(short, attention_mask=torch.ones_like(short), **{**way, "max_new_tokens": 16})
    is_exact = arguments.dtype == "fp32" or has_bits_of_beams(model, arguments.num_beams)
    rows = compare(model, prompts, ways, is_exact=is_exact)
    report = {**setting_of(arguments, "num_beams", "max_new_tokens"), "prompts": len(prompts)}
    publish({**report, "summary": summary(rows), "rows": rows}, arguments.output)


if __name__ == "__main__":
    main()
