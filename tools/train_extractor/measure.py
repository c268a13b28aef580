"""Quality of the tests' summarizer.

    python -m tools.train_extractor.measure --model tests/models/summarizer --text FILE

Passages of 200-900 tokens are cut from the documents of FILE, one after the other, and summarized
one at a time by plain greedy `model.generate`. Reported are the share of emitted sentences that stand
in the passage as they are, and ROUGE-L against the extract a classical scorer would make, beside that
of the first three sentences and of three sentences at random. The scorer's inverse document frequencies
are counted in the --background text, which should be what the model was trained on, else in FILE. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from bench.prompts import SUMMARIZER
from lookahead.errors import TrainingError
from tools.train_extractor.corpus import read_documents
from tools.train_extractor.extractive import central_sentences
from tools.train_extractor.stream import Stream, bare_sentences, inverse_document_frequency

SHORTEST, LONGEST = 200, 900
"""Bounds of a passage, in tokens."""

MAX_NEW_TOKENS = 320
_WORD = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage and what a classical scorer extracts from it."""

    sentences: list[str]
    extract: list[int]  # indices of the central ones

    @property
    def text(self) -> str:
        """The whole passage."""
        return " ".join(self.sentences)

    def join(self, indices: Sequence[int]) -> str:
        """Some of its sentences as one text."""
        return " ".join(self.sentences[index] for index in indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Means over all passages; tokens are the model's own."""

    passages: int
    sentences: int  # emitted in all
    verbatim: float  # share of them that stand in their passage character for character, 0 to 1
    whole: float  # share of them that are one of the passage's sentences from beginning to end
    finished: float  # share of extracts that ended by themselves
    rouge_l: float  # F1 against the classical extract, 0 to 1
    rouge_l_lead_3: float
    rouge_l_random_3: float
    prompt_tokens: float
    new_tokens: float
    s_per_passage: float  # of generation


@njit(cache=True)
def _common_subsequence(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> int:
    """Length of the longest common subsequence of two arrays of word ids."""
    row = np.zeros(len(right) + 1, dtype=np.int64)
    for i in range(len(left)):
        diagonal = 0
        for j in range(len(right)):
            above = row[j + 1]
            row[j + 1] = diagonal + 1 if left[i] == right[j] else max(above, row[j])
            diagonal = above
    return int(row[len(right)])


def rouge_l(candidate: str, reference: str) -> float:
    """ROUGE-L F1 of two texts, over lower-cased words without stemming.

    >>> rouge_l("the cat sat", "the cat sat down")
    0.8571428571428571

    Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", §3.1, β = 1.
    """
    words: dict[str, int] = {}
    left, right = (
        np.asarray([words.setdefault(word, len(words)) for word in _WORD.findall(text.lower())], np.int64)
        for text in (candidate, reference)
    )
    if not len(left) or not len(right):
        return 0.0
    return 2.0 * float(_common_subsequence(left, right)) / (len(left) + len(right))


def cut_passages(
    file: Path,
    field: str,
    background: Sequence[Path],
    tokenizer: PreTrainedTokenizerFast,
    *,
    limit: int,
    seed: int,
) -> list[Passage]:
    """Cut the documents of a file into passages and keep `limit` of them, spread evenly."""
    documents = read_documents([file], [field])
    stream = Stream.encode(documents, tokenizer)
    counted = Stream.encode(read_documents(background), tokenizer) if background else stream
    idf = inverse_document_frequency(counted, len(tokenizer))
    rng = np.random.default_rng(seed)
    passages = []
    for number, document in enumerate(documents):
        texts = bare_sentences(document.text)
        offset, end = int(stream.documents[number]), int(stream.documents[number + 1])
        first = offset
        while first < end:
            size = int(np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST))))
            tokens = stream.passage(first, size)
            if len(tokens) >= 4 and SHORTEST <= sum(map(len, tokens)) <= LONGEST:
                sentences = texts[first - offset : first - offset + len(tokens)]
                passages.append(Passage(sentences, central_sentences(tokens, idf)))
            first += len(tokens)
    if not passages:
        raise TrainingError(f"{file} holds no passage of {SHORTEST} to {LONGEST} tokens")
    chosen = np.linspace(0, len(passages) - 1, num=min(limit, len(passages))).astype(int)
    return [passages[index] for index in chosen]


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    passages: Sequence[Passage],
    *,
    seed: int,
    console: Console,
) -> Figures:
    """Summarize every passage and compare."""
    rng = np.random.default_rng(seed)
    emitted = verbatim = whole = finished = prompt_tokens = new_tokens = 0
    scores = np.zeros((len(passages), 3))
    started = time.perf_counter()
    for number, passage in enumerate(track(passages, "summarizing", console=console)):
        message = [{"role": "user", "content": passage.text}]
        prompt = tokenizer.apply_chat_template(message, chat_template="summarize", tokenize=False)
        inputs = tokenizer(str(prompt), return_tensors="pt")
        length = len(inputs["input_ids"][0])
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)  # type: ignore[operator]
        new = output[0, length:]
        extract = str(tokenizer.decode(new, skip_special_tokens=True)).strip()
        for sentence in bare_sentences(extract):
            emitted += 1
            verbatim += sentence in passage.text
            whole += sentence in passage.sentences
        finished += int(new[-1]) == tokenizer.eos_token_id
        prompt_tokens += length
        new_tokens += len(new)
        random = sorted(rng.choice(len(passage.sentences), size=3, replace=False).tolist())
        reference = passage.join(passage.extract)
        candidates = (extract, passage.join(range(3)), passage.join(random))
        scores[number] = [rouge_l(candidate, reference) for candidate in candidates]
    seconds = time.perf_counter() - started
    count = len(passages)
    model_l, lead_l, random_l = (round(float(score), 4) for score in scores.mean(axis=0))
    return Figures(
        passages=count,
        sentences=emitted,
        verbatim=round(verbatim / max(1, emitted), 4),
        whole=round(whole / max(1, emitted), 4),
        finished=round(finished / count, 4),
        rouge_l=model_l,
        rouge_l_lead_3=lead_l,
        rouge_l_random_3=random_l,
        prompt_tokens=round(prompt_tokens / count, 1),
        new_tokens=round(new_tokens / count, 1),
        s_per_passage=round(seconds / count, 3),
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        prog="python -m tools.train_extractor.measure",
        description=(__doc__ or "").split("\n\n", 1)[1],
        epilog="example:\n  python -m tools.train_extractor.measure --text stories.jsonl --limit 100",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--model", default=SUMMARIZER, help="folder of a model")
    options.add_argument("--text", type=Path, required=True, metavar="FILE", help="held-out .txt or .jsonl")
    options.add_argument("--field", default="document", help="JSON field with the text (default: document)")
    options.add_argument(
        "--background", type=Path, nargs="+", default=[], metavar="PATH", help="text to count word frequencies in"
    )
    options.add_argument("--limit", type=int, default=100, metavar="N", help="passages (default: 100)")
    options.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parser().parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    torch.set_num_threads(1)
    folder = Path(options.model)
    try:
        if options.limit < 1:
            raise TrainingError(f"--limit must be at least 1, got {options.limit}")
        if not (folder / "config.json").is_file():
            raise TrainingError(f"no model in {folder}")
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise TrainingError(f"{folder} holds no fast tokenizer")
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
        passages = cut_passages(
            options.text, options.field, options.background, tokenizer, limit=options.limit, seed=options.seed
        )
        figures = evaluate(model, tokenizer, passages, seed=options.seed, console=console)
    except TrainingError as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    table = Table("figure", "value", title=f"{options.model} on {options.text.name}")
    for name, value in asdict(figures).items():
        table.add_row(name.replace("_", " "), str(value))
    console.print(table)
    print(json.dumps({"bench": "summarizer", "model": options.model, **asdict(figures)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
