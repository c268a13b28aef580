"""Which prompt and which options let a small model write summaries that share most words with those of people.

    python -m bench.summary_quality --prompts spec_bench_even.jsonl --output summary_quality.json
    python -m bench.summary_quality --prompts squality_train.jsonl.xz --limit 3

Prompts and options are chosen on the first half of the documents and confirmed on the second one. The scores are the F1
of words and of pairs of words that a summary shares with its reference, or with the best of several (ROUGE-1 and
ROUGE-2 of Lin 2004, without stemming). Summaries that loop are counted. A text longer than the context loses its end.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import lookahead
from bench.command import parser_of, publish, setting_of, stay_on_cores
from bench.prompts import loops
from lookahead.summarization.prompting import INSTRUCTION

PROMPTS = {
    "around": INSTRUCTION,
    "around a text": "Summarize this text:\n\n{document}\n\nSummary of the text in two sentences:",
    "behind": "{document}\n\nSummarize the text above in two sentences.",
    "question": "{document}\n\nWhat is the text above about? Answer with its main facts in two sentences.",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "no 8-gram twice": {"no_repeat_ngram_size": 8},
}
NEW_TOKENS = 96
KEPT_BYTES = 2 << 30  # prompts begin with one document each


def grams(text: str, n: int) -> Counter[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return Counter(zip(*(words[i:] for i in range(n)), strict=False))


def overlap(text: str, reference: str, n: int) -> float:
    """The F1 of the n-grams of words that two texts share."""
    ours, theirs = grams(text, n), grams(reference, n)
    shared = (ours & theirs).total()
    return 2 * shared / (ours.total() + theirs.total()) if shared else 0.0


def documents_of(path: Path) -> list[tuple[str, list[str]]]:
    """Documents with their reference summaries.

    They are the texts of CNN/DailyMail in Spec-Bench's category `summarization`, or stories of SQuALITY, whose first
    question asks for the plot.
    """
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    if "questions" in entries[0]:
        plots = [[each["response_text"] for each in entry["questions"][0]["responses"]] for entry in entries]
        return [(entry["document"], plot) for entry, plot in zip(entries, plots, strict=True)]
    chosen = [each for each in entries if each.get("category") == "summarization"]
    return [(each["turns"][0].removeprefix("Summarize: ").strip(), [" ".join(each["reference"])]) for each in chosen]


def main() -> None:
    parser = parser_of(__doc__, dtype="fp32", threads=True)
    parser.add_argument("--model", help="a folder, or a name on the Hub (default smollm2)")
    parser.add_argument(
        "--prompts", type=Path, required=True, help="the JSON lines of Spec-Bench or SQuALITY, .xz or not"
    )
    parser.add_argument("--limit", type=int, help="documents of each half")
    arguments = parser.parse_args()
    stay_on_cores(None, arguments.threads)
    model, tokenizer = lookahead.load(arguments.model, dtype=arguments.dtype, device="cpu")
    documents = documents_of(arguments.prompts)
    middle = len(documents) // 2
    halves = {"chosen on": documents[:middle][: arguments.limit], "confirmed on": documents[middle:][: arguments.limit]}
    found = list[dict[str, Any]]()

    def measure(half: str, prompt: str, options: str) -> float:
        chats = [[{"role": "user", "content": PROMPTS[prompt].replace("{document}", text)}] for text, _ in halves[half]]
        given = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "truncate": "right", "rows": 8, **OPTIONS[options]}
        kept = lookahead.stream_many(model, tokenizer, chats, prefix_bytes=KEPT_BYTES, **given)
        done = sorted(kept, key=lambda each: each.index)
        texts = [each.text for each in done]
        references = [each for _, each in halves[half]]
        ones, twos = (
            mean(max(overlap(text, each, n) for each in those) for text, those in zip(texts, references, strict=True))
            for n in (1, 2)
        )
        entry = {"half": half, "prompt": prompt, "options": options, "words": ones, "pairs": twos}
        entry |= {"loop": sum(loops(each.token_ids) for each in done), "documents": len(texts), "example": texts[0]}
        entry["cut"] = sum(each.finish_reason == "length" for each in done)
        print(json.dumps(entry), file=sys.stderr, flush=True)
        found.append(entry)
        return float(ones + twos)

    scores = {pair: measure("chosen on", *pair) for pair in product(PROMPTS, OPTIONS)}
    best = max(scores, key=scores.__getitem__)
    for pair in dict.fromkeys([best, *product(("around", "behind"), OPTIONS)]):
        measure("confirmed on", *pair)
    setting = setting_of(argparse.Namespace(**{**vars(arguments), "model": arguments.model or "smollm2"}))
    publish({**setting, "best": best, "found": found}, arguments.output)


if __name__ == "__main__":
    main()
