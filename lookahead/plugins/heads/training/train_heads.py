"""A training run by transformers' Trainer, from a file of examples to a folder of heads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from lookahead.errors import TrainingError
from lookahead.loading.loading import LoadedModel
from lookahead.plugins.heads.eagle import EagleHead
from lookahead.plugins.heads.head_files import TrainedHeads, write_heads
from lookahead.plugins.heads.medusa import MedusaHeads
from lookahead.plugins.heads.target import lm_head
from lookahead.plugins.heads.training import examples as data_of
from lookahead.plugins.heads.training.examples import Example, Say
from lookahead.plugins.heads.training.learners import EagleLearner, Learner, MedusaLearner
from lookahead.plugins.heads.training.train_inputs import Settings, check_trainer, read_records
from lookahead.utils.locks import locked

if TYPE_CHECKING:
    from transformers import Trainer

_ANSWERS = "answers.json"  # the model's answers to the prompts of the data
_DONE = "trainer_state.json"  # written last into a checkpoint
_SHOWN = ("loss", "eval_accuracy")


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
            answers = data_of.answer_prompts(loaded, prompts, output / _ANSWERS, settings.max_new_tokens, say)
        examples = data_of.make_examples(records, loaded.tokenizer, answers, settings.max_length)
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

    train, held_out = data_of.split_examples(examples, settings.hold_out_every)
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
        train_dataset=data_of.make_batches(train, settings.batch_size),
        eval_dataset=data_of.make_batches(held_out, settings.batch_size),
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
