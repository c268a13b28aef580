"""What a model answers to prompts: the very text its heads will have to guess."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.errors import TrainingError
from lookahead.generation.api import generate


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
        TrainingError: The file holds answers to other prompts.

    Source: Cai et al. 2024, "Medusa", §2.3.2 (self-distillation).
    """
    asked = xxhash.xxh3_64_hexdigest(json.dumps(prompts).encode())
    first = {"answers_to": asked, "max_new_tokens": max_new_tokens}
    answers = _read(file, first)
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


def _read(file: Path, first: object) -> list[list[int]]:
    """The answers that are there; a last line that was cut off goes."""
    if not file.exists():
        return []
    whole, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
    lines = [json.loads(line) for line in whole.splitlines()]
    if lines and lines[0] != first:
        raise TrainingError(f"{file}: holds answers of another run; remove it, or choose another --output")
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return lines[1:]
