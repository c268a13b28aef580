"""Summaries of long stories: one prompt for a whole story, or its parts and then a summary of their summaries.

    python -m bench.long_summaries --stories squality_dev.jsonl --dtype bf16
    python -m bench.long_summaries --stories squality_dev.jsonl --limit 1 --part 1024

Ways are "whole" and "parts", whose prompts have at most `--part` tokens with their output. They take turns; a way
decodes as `lookahead summarize` does. Seconds are CPU time with one thread. The prompt of the last summary holds those
of the parts, so it drafts from them; it is decoded again without such drafts, beside the time.

The scores are the F1 of words and of pairs of words that a summary shares with the best of four summaries by people
(ROUGE-1 and ROUGE-2 of Lin 2004, without stemming).
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import lookahead
from bench.command import in_turn, parser_of, publish, setting_of, stay_on_cores
from lookahead import LookaheadConfig
from lookahead.loading.loading import DEFAULT_MODEL
from lookahead.stats import total
from lookahead.summarization.pipeline import SummaryPipeline
from lookahead.summarization.prompting import DEFAULT_SAMPLING, PromptFitter, SummaryRequest

NEW_TOKENS = 96
WAYS = "whole", "parts"


def overlap(text: str, reference: str, n: int) -> float:
    """The F1 of the n-grams of words that two texts share."""
    ours, theirs = (_grams(each, n) for each in (text, reference))
    shared = (ours & theirs).total()
    return 2 * shared / (ours.total() + theirs.total()) if shared else 0.0


def _grams(text: str, n: int) -> Counter[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return Counter(zip(*(words[i:] for i in range(n)), strict=False))


def stories_of(path: Path) -> list[tuple[str, list[str]]]:
    """The stories of SQuALITY with the answers to their first question, which asks for the plot."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    plots = [[each["response_text"] for each in entry["questions"][0]["responses"]] for entry in entries]
    return [(entry["document"], plot) for entry, plot in zip(entries, plots, strict=True)]


def summarize(model: Any, tokenizer: Any, story: str, part: int | None) -> list[dict[str, Any]]:
    """The rounds of a summary; the last one has its text."""
    rounds, request = list[dict[str, Any]](), SummaryRequest(part_tokens=part)
    pipeline = SummaryPipeline(story, PromptFitter(model, tokenizer, NEW_TOKENS, request))
    while pipeline.summary is None:
        prompts = pipeline.prompts
        begun = time.process_time()
        done = _decode(model, tokenizer, prompts, pipeline.limit, LookaheadConfig(memory="request"))
        stats = total(each.stats for each in done)
        figures = {"s": time.process_time() - begun, "prompts": len(prompts), "read": stats.prompt_tokens}
        passes = sum(each.stats.target_forwards for each in done)
        rounds.append({**figures, "tokens": stats.emitted_tokens, "passes": passes})
        pipeline.take([each.text for each in done], stats, done[-1].finish_reason or "stop")
    if part:
        others = LookaheadConfig(proposers=("recycled",), memory="request")
        (last,) = _decode(model, tokenizer, prompts, NEW_TOKENS, others)
        passes = last.stats.target_forwards
    rounds[-1] |= {"text": pipeline.summary.text, "passes_without": passes}
    return rounds


def _decode(model: Any, tokenizer: Any, prompts: list[str], limit: int, config: LookaheadConfig) -> list[Any]:
    """Decode prompts together, each with the bits that it has alone."""
    asked = {"max_new_tokens": limit, "do_sample": False, "add_special_tokens": False, **DEFAULT_SAMPLING}
    done = lookahead.stream_many(model, tokenizer, prompts, rows=len(prompts), config=config, **asked)
    return sorted(done, key=lambda each: each.index)


def main() -> None:
    parser = parser_of(__doc__, model=DEFAULT_MODEL, dtype="bf16", core=True)
    parser.add_argument("--stories", type=Path, required=True, help="the JSON lines of SQuALITY")
    parser.add_argument("--limit", type=int, default=10, help="stories (default 10)")
    parser.add_argument("--part", type=int, default=2048, help="tokens of a prompt and its output (default 2048)")
    parser.add_argument("--longest", type=int, default=7900, help="tokens of a story (default at most 7900)")
    arguments = parser.parse_args()
    stay_on_cores(arguments.core)
    model, tokenizer = lookahead.load(arguments.model, dtype=arguments.dtype, device="cpu")
    stories = [
        (story, plot, len(tokenizer(story, verbose=False)["input_ids"]))
        for story, plot in stories_of(arguments.stories)
    ]
    chosen = [each for each in stories if arguments.longest // 2 < each[2] <= arguments.longest][: arguments.limit]
    if not chosen:
        sys.exit(f"--longest {arguments.longest}: no story has so many tokens, or half of them")
    done: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for at, (story, plot, _) in enumerate(chosen):
        for way in in_turn(WAYS, at):
            rounds = summarize(model, tokenizer, story, None if way == "whole" else arguments.part)
            text = rounds[-1]["text"]
            words, pairs = (max(overlap(text, each, n) for each in plot) for n in (1, 2))
            done[way].append({"words": words, "pairs": pairs, "rounds": rounds})
            print(json.dumps({"way": way, **done[way][-1]}), file=sys.stderr, flush=True)
        ways = {way: _figures(each) for way, each in done.items()}
        sizes = {"stories": at + 1, "story_tokens": mean(tokens for _, _, tokens in chosen[: at + 1])}
        publish({**setting_of(arguments, "part"), **sizes, "ways": ways}, arguments.output)  # of the stories so far


def _figures(stories: list[dict[str, Any]]) -> dict[str, float]:
    """The means of some stories, and the tokens a pass of all rounds and of the last one."""
    last, every = [each["rounds"][-1] for each in stories], [part for each in stories for part in each["rounds"]]
    figures = {name: mean(each[name] for each in stories) for name in ("words", "pairs")}
    figures |= {name: sum(each[name] for each in every) / len(stories) for name in ("s", "prompts", "read")}
    for name, some, passes in (
        ("tokens_per_pass", every, "passes"),
        ("of_the_last", last, "passes"),
        ("of_the_last_without", last, "passes_without"),
    ):
        figures[name] = sum(each["tokens"] for each in some) / sum(each[passes] for each in some)
    return {name: round(value, 4) for name, value in figures.items()}


if __name__ == "__main__":
    main()
