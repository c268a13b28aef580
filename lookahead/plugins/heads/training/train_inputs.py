"""The settings and the data of a training run, checked without torch, which takes seconds to import."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lookahead.documents.byte_sources import opened
from lookahead.documents.decode_text import decode_bytes
from lookahead.errors import DocumentError, TrainingError
from lookahead.utils.atomic import parse_json

DRAFT_VOCAB = 32_000  # maximum vocabulary of a new EAGLE head, as in published ones
KINDS = ("medusa", "eagle3")
_REMOVED_KINDS = {
    "eagle": "was removed: eagle3 replaces it",
    "mtp": "was removed: train eagle3, or use the layer of a checkpoint with --heads native",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a run, see `lookahead train --help`; TrainingError if a value is out of range."""

    kind: str
    heads: int = 4
    draft_vocab: int = DRAFT_VOCAB
    steps: int | None = None
    batch_size: int = 8
    learning_rate: float = 1e-3
    max_length: int = 1024
    max_new_tokens: int = 256
    hold_out_every: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            state = _REMOVED_KINDS.get(self.kind, "is unknown")
            raise TrainingError(f"the kind of heads must be {' or '.join(KINDS)}; {self.kind!r} {state}")
        ones = ("heads", "draft_vocab", "steps", "batch_size", "max_new_tokens")
        for name, least in {**dict.fromkeys(ones, 1), "max_length": 2, "hold_out_every": 2}.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise TrainingError(f"{name} must be at least {least}, got {value}")
        if not 0 <= self.seed < 1 << 32:
            raise TrainingError(f"seed must be from 0 to 2^32 - 1, got {self.seed}")
        if not self.learning_rate > 0:
            raise TrainingError(f"learning_rate must be more than 0, got {self.learning_rate}")


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

    TrainingError if the file cannot be read or a line is invalid; the message names the line.
    """
    try:
        with opened(str(path)) as file:  # with a timeout for pipes
            text = decode_bytes(file.read(), str(path))
    except (OSError, DocumentError) as error:
        told = error if isinstance(error, DocumentError) else f"{path}: {error.strerror or error}"
        raise TrainingError(str(told)) from error
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
    if not isinstance(values, dict) or not ("prompt" in values or "text" in values):
        raise TrainingError(f"{place}: must be an object with 'prompt', 'prompt' and 'output', or 'text'")
    prompt, output = values.get("prompt"), values.get("output" if "prompt" in values else "text")
    for name, value in (("prompt", prompt), ("output" if prompt is not None else "text", output)):
        if not isinstance(value, str | None) or value == "":
            raise TrainingError(f"{place}: {name!r} must be a string that is not empty, got {value!r:.40}")
    if prompt is None and output is None:
        raise TrainingError(f"{place}: 'prompt' or 'text' must be a string, got null")
    return Record(prompt, output)
