"""A training run by transformers' Trainer, from a file of examples to a folder of heads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.decoding.api import stream_many
from lookahead.errors import TrainingError
from lookahead.loading.loading import LoadedModel
from lookahead.model.facts import vocabulary_size
from lookahead.plugins.heads.eagle import EagleHead
from lookahead.plugins.heads.head_files import TrainedHeads, read_object, write_heads
from lookahead.plugins.heads.medusa import MedusaHeads
from lookahead.plugins.heads.target import lm_head
from lookahead.plugins.heads.training.learners import EagleLearner, Learner, MedusaLearner
from lookahead.plugins.heads.training.train_inputs import Record, Settings, check_trainer, read_records
from lookahead.utils.atomic import write_atomically
from lookahead.utils.locks import locked

if TYPE_CHECKING:
    from transformers import Trainer

_ANSWERS = "answers.json"  # the model's answers to the prompts of the data
_DONE = "trainer_state.json"  # written last into a checkpoint
_SHOWN = ("loss", "eval_accuracy")
Say = Callable[[str], None]
"""Receives progress messages, one line each."""
Example = dict[str, Tensor]
"""`input_ids` int64 `[tokens]`, and `wanted` bool `[tokens]`: whether a token is model output, which heads guess."""


def train_heads(
    loaded: LoadedModel,
    data: Path,
    output: Path,
    settings: Settings,
    *,
    resume: bool = False,
    say: Say = lambda line: None,
) -> dict[str, float]:
    """Train heads for a model with the examples of a file (`read_records`), and write them.

    Args:
        loaded: The model, which stays as it is.
        data: The file of examples.
        output: The folder for the heads and the checkpoints.
        settings: The settings of the run.
        resume: Whether to continue the run in `output` from its last checkpoint; the other arguments must be the same.
        say: Receives progress messages.

    Returns:
        For each guessed token, the accuracy on held-out examples: `eval_accuracy_1` and so on.

    Raises:
        TrainingError: accelerate is missing, a line of the data is invalid, or the folder holds a run to resume.
        DocumentError: The data is not text.
        HeadsError: The model does not support heads.
        OSError: The data cannot be read, or another process trains into the folder.
    """
    check_trainer()
    records = read_records(data)
    lm_head(loaded.model)
    output.parent.mkdir(parents=True, exist_ok=True)
    with locked(output, timeout_s=0):
        checkpoints = [path for path in output.glob("checkpoints/checkpoint-*") if (path / _DONE).is_file()]
        if not resume and (checkpoints or any((output / name).exists() for name in (_ANSWERS, "config.json"))):
            raise TrainingError(f"{output} already holds a run: pass --resume, or choose another --output")
        output.mkdir(exist_ok=True)
        prompts = [prompt for prompt, text in records if text is None and prompt is not None]
        answers: dict[str, list[int]] = {}
        if prompts:
            say(f"{len(prompts):,} prompts without an output: the model answers them first")
            answers = answer_prompts(loaded, prompts, output / _ANSWERS, settings.max_new_tokens, say)
        examples = make_examples(records, loaded.tokenizer, answers, settings.max_length)
        last = max(checkpoints, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
        was_training = loaded.model.training
        try:
            trainer, heads = _prepare(loaded.model.eval(), examples, output, settings, say)
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
            metrics = {name: value for name, value in trainer.evaluate().items() if name.startswith(_SHOWN)}
        finally:
            loaded.model.train(was_training)
        write_heads(heads, output, loaded.model)
    return metrics


def _prepare(
    model: PreTrainedModel, examples: list[Example], output: Path, settings: Settings, say: Say
) -> tuple[Trainer, TrainedHeads]:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class LogLines(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
            shown = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith(_SHOWN)}
            if shown:
                figures = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
                say(f"step {state.global_step:,} of {state.max_steps:,}: {figures}")

    train, held_out = split_examples(examples, settings.hold_out_every)
    say(f"{len(train):,} examples to train on, {len(held_out):,} held out")
    torch.manual_seed(settings.seed)  # a resumed run begins with the same weights; Trainer sets the seed too
    learner, heads = untrained(model, train, settings)
    on_cpu = model.device.type == "cpu"
    arguments = TrainingArguments(
        output_dir=str(output / "checkpoints"),
        per_device_train_batch_size=1,  # an item is a batch of examples
        per_device_eval_batch_size=1,
        max_steps=settings.steps or -1,
        num_train_epochs=1,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,
        save_steps=0.05,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=0.25,
        logging_steps=0.01,
        # On a CPU only for a bfloat16 model: without bfloat16 instructions it is slower.
        bf16=model.dtype == torch.bfloat16 if on_cpu else torch.cuda.is_bf16_supported(),
        use_cpu=on_cpu,
        label_names=["wanted"],
        disable_tqdm=True,
        report_to=[],
        remove_unused_columns=False,
        seed=settings.seed,
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # else Trainer would split a batch among GPUs, and the model is on one
    trainer = Trainer(
        model=learner,
        args=arguments,
        data_collator=lambda items: items[0],
        train_dataset=make_batches(train, settings.batch_size),
        eval_dataset=make_batches(held_out, settings.batch_size),
        compute_metrics=_accuracies,
        callbacks=[LogLines()],
    )
    trainer.remove_callback(PrinterCallback)  # which would write to stdout
    return trainer, heads


def _accuracies(evaluated: Any) -> dict[str, float]:
    """The share of hits of each guessed token, of the counts `[batches, depth, 2]` of `Learner.forward`."""
    hits, trials = evaluated.predictions.sum(0).T
    shares = (hits / trials.clip(1)).round(4).tolist()
    return {f"accuracy_{place}": share for place, share in enumerate(shares, start=1)}


def untrained(model: PreTrainedModel, train: list[Example], settings: Settings) -> tuple[Learner, TrainedHeads]:
    """Untrained heads of a kind, float32 on the model's device, and their learner."""
    if settings.kind == "medusa":
        heads = MedusaHeads.fresh(model, heads=settings.heads).float()
        return MedusaLearner(heads, model), heads
    head = EagleHead.fresh(model, frequent_tokens(train, model, settings.draft_vocab)).float()
    return EagleLearner(head, model, settings.heads), head


def frequent_tokens(examples: list[Example], model: PreTrainedModel, most: int) -> list[int]:
    """The `most` most frequent output tokens of examples, ascending; at most the vocabulary."""
    written = torch.cat([example["input_ids"][example["wanted"]] for example in examples])
    counts = torch.bincount(written, minlength=len(lm_head(model).weight))
    chosen: list[int] = counts.argsort(descending=True, stable=True)[:most].sort().values.tolist()
    return chosen


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
