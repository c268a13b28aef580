"""What a model answers to prompts: the very text its heads will have to guess."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.errors import TrainingError
from lookahead.generation.api import generate
from lookahead.models.validate import vocabulary_size
from lookahead.utils.atomic import parse_json, read_regular, write_atomically


def answer_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    file: Path,
    *,
    max_new_tokens: int,
    on_answer: Callable[[int], None] = lambda answered: None,
) -> list[list[int]]:
    """Let a model answer prompts greedily, and keep the answers in a file, so that a second start goes on from there.

    Heads learn most from the model's own outputs: only there is what comes next what the model would write.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        prompts: As `lookahead.generate` takes them.
        file: One answer a line; the first line tells what they are answers of.
        max_new_tokens: Most tokens of an answer.
        on_answer: Is told how many are there.

    Returns:
        The tokens of every answer, an end-of-sequence token included.

    Raises:
        TrainingError: The file cannot be read, is damaged, or holds answers to other prompts.

    Source: Cai et al. 2024, "Medusa", §2.3.2 (self-distillation).
    """
    asked = xxhash.xxh3_64_hexdigest(json.dumps(prompts).encode())
    first = {"answers_to": asked, "max_new_tokens": max_new_tokens}
    answers = _read(file, first, len(prompts), vocabulary_size(model))
    on_answer(len(answers))
    with file.open("a" if answers else "w", encoding="utf-8") as lines:
        if not answers:
            lines.write(json.dumps(first) + "\n")
        for prompt in prompts[len(answers) :]:
            result = generate(model, tokenizer, prompt, max_new_tokens=max_new_tokens, do_sample=False)
            answers.append(result.token_ids[0])
            lines.write(json.dumps(answers[-1]) + "\n")
            lines.flush()
            on_answer(len(answers))
    return answers


def _read(file: Path, first: object, most: int, vocabulary: int) -> list[list[int]]:
    """The answers that are there; a last line that was cut off goes."""
    if not file.exists():
        return []
    try:
        whole, _, torn = read_regular(file).rpartition(b"\n")
    except OSError as error:
        raise TrainingError(f"{file}: cannot be read: {error.strerror or error}") from error
    lines = [_parse(line, f"{file}:{number}") for number, line in enumerate(whole.splitlines(), start=1)]
    if (lines and lines[0] != first) or len(lines) > 1 + most:
        raise TrainingError(f"{file}: holds answers of another run; remove it, or choose another --output")
    for number, answer in enumerate(lines[1:], start=2):
        if not isinstance(answer, list) or not all(type(each) is int and 0 <= each < vocabulary for each in answer):
            raise TrainingError(f"{file}:{number}: must be a list of token ids from 0 to {vocabulary - 1}")
    if torn:
        write_atomically(file, "".join(json.dumps(line) + "\n" for line in lines))
    return lines[1:]


def _parse(line: bytes, place: str) -> Any:
    """The value of one line."""
    try:
        return parse_json(line.decode("utf-8"))
    except ValueError as error:
        raise TrainingError(f"{place}: not valid JSON: {error}") from error
