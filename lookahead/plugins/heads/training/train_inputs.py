"""The settings and the data of a training run, read without torch, which takes seconds to import."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lookahead.documents.byte_sources import opened
from lookahead.documents.decode_text import decode_bytes
from lookahead.errors import TrainingError
from lookahead.utils.atomic import parse_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a run, see `lookahead train --help`, which has their ranges and defaults."""

    kind: str
    heads: int = 4
    draft_vocab: int = 32_000  # as in published heads
    steps: int | None = None
    batch_size: int = 8
    learning_rate: float = 1e-3
    max_length: int = 1024
    max_new_tokens: int = 256
    hold_out_every: int = 20
    seed: int = 0


def check_trainer() -> None:
    """Raise a TrainingError if accelerate is missing, which transformers' Trainer needs."""
    if importlib.util.find_spec("accelerate") is None:
        raise TrainingError(
            "training needs accelerate, which is not installed; pip install 'lookahead-decoding[train]'"
        )


class Record(NamedTuple):
    """One line of a training file."""

    prompt: str | None  # None for plain text
    output: str | None  # the output or the plain text; None if the model answers the prompt


def read_records(path: Path) -> list[Record]:
    """Read JSON lines with `prompt` and `output`, with `prompt` alone, or with `text`.

    Raises:
        TrainingError: A line is invalid, which the message names, or there is none.
        DocumentError: The file is not text, or a pipe that stays empty.
        OSError: The file cannot be read.
    """
    with opened(str(path)) as file:  # with a timeout for pipes
        text = decode_bytes(file.read(), str(path))
    lines = enumerate(text.split("\n"), start=1)  # splitlines splits at U+2028, which JSON strings may contain
    records = [_record(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not records:
        raise TrainingError(f"{path}: nothing to train on")
    return records


def _record(line: str, place: str) -> Record:
    try:
        values: Any = parse_json(line)
    except ValueError as error:
        raise TrainingError(f"{place}: not valid JSON, and the data must be JSON lines: {error}") from error
    texts = {}
    if isinstance(values, dict):
        texts = {name: values[name] for name in ("prompt", "output", "text") if values.get(name) is not None}
    if not {"prompt", "text"} & texts.keys():
        raise TrainingError(f"{place}: must be an object with 'prompt', 'prompt' and 'output', or 'text'")
    for name, value in texts.items():
        if not isinstance(value, str) or not value:
            raise TrainingError(f"{place}: {name!r} must be a string that is not empty, got {value!r:.40}")
    return Record(texts.get("prompt"), texts.get("output" if "prompt" in texts else "text"))
