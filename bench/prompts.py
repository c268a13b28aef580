"""Texts and prompts for the benchmarks: documents cut into passages to summarize."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from lookahead.summarization.prompting import SUMMARIZE_TEMPLATE, Prompting
from lookahead.summarization.segmentation import split_sentences

OPENINGS = Path(__file__).with_name("openings.txt")
"""Story openings, one per line."""
REPEAT = 16
"""Number of repeated tokens at which an output counts as looping."""
SUMMARIZER = "tests/models/summarizer"
"""Folder of the small extractive summarizer of the tests, from the root of the repository."""


def read_texts(path: Path, field: str, category: str = "") -> Iterator[str]:
    """Yield the texts of a JSON lines file (of a list in `field`, the first string), or the lines of a text file.

    With `category`, only lines whose field `category` equals it.
    """
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if path.suffix != ".jsonl":
                yield line.strip()
                continue
            record = json.loads(line)
            value = record[field]
            if not category or record["category"] == category:
                yield value[0] if isinstance(value, list) else value


def read_tokens(path: Path, field: str, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The token ids of every text, without special tokens."""
    return [
        tokenizer(text.strip(), add_special_tokens=False, verbose=False)["input_ids"]
        for text in read_texts(path, field)
    ]


def cut(text: str, tokenizer: PreTrainedTokenizerBase, longest: int) -> str:
    """At most the first `longest` tokens of a text."""
    ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return text[: ends[min(longest, len(ends)) - 1][1]] if ends else ""


def passages(
    texts: Iterator[str], tokenizer: PreTrainedTokenizerBase, *, limit: int, shortest: int, longest: int
) -> list[list[str]]:
    """Cut texts into passages of `shortest` to `longest` tokens, each a list of sentences.

    Lengths are uniform, from a fixed seed. The texts give passages in turn until there are `limit`.
    """
    prompting = Prompting(tokenizer)
    rng = np.random.default_rng(0)
    streams = [iter(split_sentences(text.strip())) for text in texts]
    made: list[list[str]] = []
    while streams and len(made) < limit:
        for stream in list(streams):
            goal, sentences, tokens = int(rng.integers(shortest, longest + 1)), [], 0
            for sentence in stream:
                cleaned = prompting.clean(sentence)
                count = len(tokenizer(cleaned, add_special_tokens=False, verbose=False)["input_ids"])
                if tokens + count > longest:
                    break
                sentences.append(cleaned)
                tokens += count
                if tokens >= goal:
                    break
            if tokens < shortest:
                streams.remove(stream)
            elif len(made) < limit:
                made.append(sentences)
    return made


def summary_prompts(
    texts: Iterator[str], tokenizer: PreTrainedTokenizerBase, *, limit: int, shortest: int, longest: int
) -> list[str]:
    prompting = Prompting(tokenizer)
    if prompting.template != SUMMARIZE_TEMPLATE:
        raise ValueError("the model has no chat template named 'summarize': use --task continue")
    cut = passages(texts, tokenizer, limit=limit, shortest=shortest, longest=longest)
    return [prompting.render("".join(sentences).strip()) for sentences in cut]


def agreed(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The length of the common prefix of two outputs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))


def loop_start(tokens: Sequence[int]) -> int:
    """The first position whose next `REPEAT` tokens repeat earlier ones; the length if there is none."""
    seen: set[tuple[int, ...]] = set()
    for begin in range(len(tokens) - REPEAT + 1):
        run = tuple(tokens[begin : begin + REPEAT])
        if run in seen:
            return begin
        seen.add(run)
    return len(tokens)


def loops(tokens: Sequence[int]) -> bool:
    """Whether an output repeats `REPEAT` consecutive tokens of its own."""
    return loop_start(tokens) < len(tokens)
