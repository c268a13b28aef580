"""What heads are trained on: texts, prompts with outputs, and prompts that the model answers itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from lookahead.documents.byte_sources import opened
from lookahead.documents.decode_text import decode_bytes
from lookahead.errors import DocumentError, TrainingError
from lookahead.utils.atomic import parse_json

_JSON = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a training file.

    Attributes:
        prompt: What an output answers; None where the whole is plain text.
        output: The answer, or the plain text; None where the model is to answer.
    """

    prompt: str | None
    output: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One training sequence.

    Attributes:
        ids: int64 `[tokens]`.
        wanted: bool `[tokens]`, which tokens the model would write itself; heads learn to guess these.
    """

    ids: npt.NDArray[np.int64]
    wanted: npt.NDArray[np.bool_]

    @classmethod
    def answered(cls, prompt: Sequence[int], output: Sequence[int], max_length: int) -> Example:
        """A prompt and its output, cut off after `max_length` tokens."""
        ids = np.array([*prompt, *output], np.int64)[:max_length]
        return cls(ids, np.arange(len(ids)) >= len(prompt))


class Examples(Dataset[dict[str, Tensor]]):
    """Examples as the loop reads them: `input_ids` int64 `[tokens]` and `wanted` bool `[tokens]`."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        example = self._examples[index]
        return {"input_ids": torch.from_numpy(example.ids), "wanted": torch.from_numpy(example.wanted)}


def collate(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows as one batch, padded on the right with tokens that are not wanted."""
    return {name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True) for name in rows[0]}


def read_records(path: Path) -> list[Record]:
    """Read a training file.

    Args:
        path: A text file, or JSON lines (`.jsonl`) of objects with `prompt` and `output`, with `prompt` alone, or
            with `text`.

    Raises:
        TrainingError: It cannot be read, or a line is none of these; the message names the line.
    """
    try:
        with opened(str(path)) as file:  # a pipe that nothing comes through is given up
            text = decode_bytes(file.read(), str(path))
    except OSError as error:
        raise TrainingError(f"{path}: {error.strerror or error}") from error
    except DocumentError as error:
        raise TrainingError(str(error)) from error
    if path.suffix.lower() not in _JSON:
        records = [Record(None, text)] if text.strip() else []
    else:
        lines = enumerate(text.split("\n"), start=1)  # splitlines would part a line at U+2028, which JSON allows
        records = [_record(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not records:
        raise TrainingError(f"{path}: nothing to train on")
    return records


def make_examples(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Iterator[Example]:
    """Examples of all records that have their output.

    Plain text becomes pieces of `max_length` tokens, all of them wanted but the first.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for record in records:
        if record.output is None:
            continue
        if record.prompt is not None:
            output = tokenizer(record.output, add_special_tokens=False, verbose=False)["input_ids"]
            yield Example.answered(encode_prompt(tokenizer, record.prompt), [*output, *end], max_length)
            continue
        ids = tokenizer(record.output, verbose=False)["input_ids"]
        for start in range(0, len(ids), max_length):
            yield Example.answered(ids[start : start + 1], ids[start + 1 : start + max_length], max_length)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """The ids of a prompt, as `lookahead.generate` makes them."""
    ids: list[int] = tokenizer(prompt, verbose=False)["input_ids"]
    return ids


def split_examples(examples: Sequence[Example], every: int) -> tuple[Examples, Examples]:
    """Those to train on, and one in `every` that is held out; examples with nothing to guess are left out.

    Raises:
        TrainingError: They are too few.
    """
    useful = [example for example in examples if example.wanted.sum() > 1]
    kept = useful[every // 2 :: every]
    train = [example for i, example in enumerate(useful) if i % every != every // 2]
    if not train or not kept:
        raise TrainingError(
            f"{len(useful)} examples with something to guess are too few: one in {every} is held out; give more data"
        )
    return Examples(train), Examples(kept)


def _record(line: str, place: str) -> Record:
    """One JSON line."""
    try:
        values: Any = parse_json(line)
    except ValueError as error:
        raise TrainingError(f"{place}: not valid JSON: {error}") from error
    if not isinstance(values, dict) or not ("prompt" in values or "text" in values):
        raise TrainingError(f"{place}: must be an object with 'prompt', 'prompt' and 'output', or 'text'")
    prompt, output = values.get("prompt"), values.get("output")
    if "prompt" not in values:
        output = values["text"]
    for name, value in (("prompt", prompt), ("output" if prompt is not None else "text", output)):
        if not isinstance(value, str | None) or value == "":
            raise TrainingError(f"{place}: {name!r} must be a string that is not empty, got {value!r:.40}")
    if prompt is None and output is None:
        raise TrainingError(f"{place}: 'prompt' or 'text' must be a string, got null")
    return Record(prompt, output)
