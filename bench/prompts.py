"""Texts and prompts for the benchmarks, and what is asked of outputs: where they part, and where they loop."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from lookahead.summarization.segmentation import split_sentences

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


def as_chat(text: str | list[int], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The token ids of one turn, `[1, length]`: with the tokenizer's chat template if there is one, or as given."""
    if not isinstance(text, str):
        return torch.tensor([text])
    if tokenizer.chat_template is None:
        return torch.tensor([tokenizer(text)["input_ids"]])
    message = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return torch.tensor([tokenizer(rendered, add_special_tokens=False)["input_ids"]])


def begin_of(text: str, tokenizer: PreTrainedTokenizerBase, longest: int) -> str:
    """At most the first `longest` tokens of a text."""
    ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return text[: ends[min(longest, len(ends)) - 1][1]] if ends else ""


def cut_documents(
    texts: Sequence[str], tokenizer: Any, *, limit: int, shortest: int, longest: int, overlap: bool = False
) -> list[str]:
    """Documents of `shortest` to `longest` tokens, cut at the ends of sentences.

    The lengths are log-uniform, from a fixed seed. The texts give documents in turn until there are `limit`, or until
    they are used up. With `overlap` each document begins at a random sentence, so that texts are never used up.
    """
    rng = np.random.default_rng(0)
    stories = [list(split_sentences(text.strip())) for text in texts]
    sizes = [[len(ids) for ids in tokenizer(story, add_special_tokens=False)["input_ids"]] for story in stories]
    begins = dict.fromkeys(range(len(stories)), 0)  # of stories that are not used up
    documents: list[str] = []
    while begins and len(documents) < limit:
        for story in list(begins):
            if overlap:
                begins[story] = int(rng.integers(len(stories[story])))
            goal = np.exp(rng.uniform(np.log(shortest), np.log(longest)))
            ends = np.flatnonzero(np.cumsum(sizes[story][begins[story] :]) >= goal)
            if ends.size:
                end = begins[story] + int(ends[0]) + 1
                documents.append("".join(stories[story][begins[story] : end]).strip())
                begins[story] = end
            elif not overlap:
                del begins[story]
    return documents[:limit]


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
