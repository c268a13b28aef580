"""Training examples for heads: texts, prompts with outputs, and prompts that the model answers itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from lookahead.decoding.api import stream_many
from lookahead.errors import TrainingError
from lookahead.loading.loading import LoadedModel
from lookahead.model.facts import vocabulary_size
from lookahead.plugins.heads.head_files import read_object
from lookahead.plugins.heads.training.train_inputs import Record
from lookahead.utils.atomic import write_atomically

Say = Callable[[str], None]
"""Receives progress messages, one line each."""
Example = dict[str, Tensor]
"""`input_ids` int64 `[tokens]`, and `wanted` bool `[tokens]`: whether a token is model output, which heads guess."""


def answer_prompts(
    loaded: LoadedModel, prompts: Sequence[str], file: Path, max_new_tokens: int, say: Say = lambda line: None
) -> dict[str, list[int]]:
    """Answer prompts greedily in batches. Heads learn most from the model's own outputs.

    Source: Cai et al. 2024, "Medusa", §2.3.2 (self-distillation).

    Args:
        loaded: The model.
        prompts: The prompts.
        file: Keeps every 100 answers for a resumed run, as JSON.
        max_new_tokens: Maximum number of tokens of an answer, at least 1.
        say: Receives a line for every 100 answers.

    Returns:
        The token ids of the answer to each prompt, including an end-of-sequence token.

    Raises:
        TrainingError: The file is damaged.
        LookaheadError: A prompt cannot be answered.
    """
    vocabulary = range(vocabulary_size(loaded.model))
    answers = read_object(file, TrainingError) if file.exists() else {}
    for ids in answers.values():
        if not isinstance(ids, list) or not all(type(token) is int and token in vocabulary for token in ids):
            raise TrainingError(f"{file}: must hold lists of token ids from 0 to {vocabulary[-1]}, got {ids!r:.40}")
    left = [prompt for prompt in dict.fromkeys(prompts) if prompt not in answers]
    for number, done in enumerate(stream_many(*loaded, left, max_new_tokens=max_new_tokens, do_sample=False), start=1):
        if done.error is not None:
            raise done.error
        answers[left[done.index]] = done.token_ids
        if number % 100 == 0 or number == len(left):
            write_atomically(file, json.dumps(answers))
            say(f"{number:,} of {len(left):,} answered")
    return answers


def make_examples(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, answers: Mapping[str, list[int]], max_length: int
) -> list[Example]:
    """Make examples of at most `max_length` tokens, in the order of the records.

    `answers` holds the model's answers by prompt. Plain text is split into pieces of `max_length`; all tokens of a
    piece but the first are wanted.
    """
    encode: Any = partial(tokenizer.encode, verbose=False)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    examples = []
    for prompt, output in records:
        if prompt is not None:
            written = answers[prompt] if output is None else [*encode(output, add_special_tokens=False), *end]
            examples.append(make_example(encode(prompt), written, max_length))
        elif output is not None:
            ids = encode(output)
            pieces = [ids[start : start + max_length] for start in range(0, len(ids), max_length)]
            examples += [make_example(piece[:1], piece[1:], max_length) for piece in pieces]
    return examples


def make_example(prompt: Sequence[int], output: Sequence[int], max_length: int) -> Example:
    """The example of a prompt and its output, truncated to `max_length` tokens."""
    ids = torch.tensor([*prompt, *output], dtype=torch.int64)[:max_length]
    return {"input_ids": ids, "wanted": torch.arange(len(ids)) >= len(prompt)}


def split_examples(examples: Sequence[Example], every: int) -> tuple[list[Example], list[Example]]:
    """Split examples into training and held-out ones, one in `every`. Examples with nothing to guess are dropped."""
    useful = [example for example in examples if example["wanted"].sum() > 1]
    held_out = useful[every // 2 :: every]
    train = [example for i, example in enumerate(useful) if i % every != every // 2]
    if not train or not held_out:
        raise TrainingError(
            f"{len(useful)} examples with something to guess are too few: one in {every} is held out; give more data"
        )
    return train, held_out


def make_batches(examples: Sequence[Example], size: int) -> list[dict[str, Tensor]]:
    """Batches of examples of similar length."""
    ordered = sorted(examples, key=lambda example: len(example["input_ids"]))
    return [collate(ordered[begin : begin + size]) for begin in range(0, len(ordered), size)]


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """A batch `[batch, tokens]` of examples, padded on the right with tokens that are not wanted."""
    return {name: pad_sequence([example[name] for example in examples], batch_first=True) for name in examples[0]}
