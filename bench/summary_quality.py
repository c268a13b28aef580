"""Which prompt and which options let a small model write summaries that share most words with those of people.

    python -m bench.summary_quality --prompts spec_bench_even.jsonl --output summary_quality.json

Prompts and options are chosen on the first half of the documents and confirmed on the second one. Measured are the F1
of words and of pairs of words that a summary shares with its reference (ROUGE-1 and ROUGE-2 of Lin 2004, without
stemming), and how many summaries loop.
"""

from __future__ import annotations

import argparse
import json
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


def documents_of(path: Path) -> list[tuple[str, str]]:
    """Documents with their summaries: of Spec-Bench's category `summarization`, which are those of CNN/DailyMail."""
    entries = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    chosen = [each for each in entries if each.get("category") == "summarization"]
    return [(each["turns"][0].removeprefix("Summarize: ").strip(), " ".join(each["reference"])) for each in chosen]


def main() -> None:
    parser = parser_of(__doc__, dtype="fp32", threads=True)
    parser.add_argument("--model", help="a folder, or a name on the Hub (default smollm2)")
    parser.add_argument("--prompts", type=Path, required=True, help="the JSON lines of Spec-Bench")
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
        given = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "rows": 8, **OPTIONS[options]}
        kept = lookahead.stream_many(model, tokenizer, chats, prefix_bytes=KEPT_BYTES, **given)
        done = sorted(kept, key=lambda each: each.index)
        texts = [each.text for each in done]
        pairs = [(text, reference) for text, (_, reference) in zip(texts, halves[half], strict=True)]
        ones, twos = (mean(overlap(*pair, n) for pair in pairs) for n in (1, 2))
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
