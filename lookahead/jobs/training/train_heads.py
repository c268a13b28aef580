"""A training run, from a file of examples to a folder of heads."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from transformers import PreTrainedModel

from lookahead.errors import LookaheadError, TrainingError
from lookahead.jobs.training.examples import Example, Say, answer_prompts, make_examples, read_records, split_examples
from lookahead.jobs.training.learners import EagleLearner, FusedEagleLearner, IndependentHeadsLearner, Learner
from lookahead.loading.loading import LoadedModel
from lookahead.plugins.heads.eagle import DRAFT_VOCAB, EagleHead, FusedEagleHead
from lookahead.plugins.heads.head_files import TrainedHeads, read_object, write_heads
from lookahead.plugins.heads.independent_heads import MedusaHeads, MtpHeads
from lookahead.plugins.heads.induction_init import begin_fused, begin_mtp, fresh_fused
from lookahead.plugins.heads.layers import body_of, layer_config, lm_head
from lookahead.utils.atomic import write_atomically
from lookahead.utils.fingerprints import model_fingerprint
from lookahead.utils.locks import locked

if TYPE_CHECKING:
    from lookahead.jobs.training.heads_trainer import HeadTrainer

KINDS = ("medusa", "eagle", "eagle3", "mtp")
_JOINT = ("medusa", "mtp")
_SETTINGS = "run.json"
_ANSWERS = "answers.jsonl"  # the model's answers to the prompts of the data
_RATE, _RATE_OF_MAPS = 1e-3, 1e-4  # peak learning rates; a higher one undoes a head that begins as a linear map
_DONE = "trainer_state.json"  # written last into a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a run, see `lookahead train --help`; TrainingError if a value is out of range."""

    kind: str
    heads: int = 4
    is_joint: bool = False
    draft_vocab: int = DRAFT_VOCAB
    steps: int | None = None
    batch_size: int = 8
    learning_rate: float | None = None  # `None`: the default of the kind
    max_length: int = 1024
    max_new_tokens: int = 256
    hold_out_every: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TrainingError(f"the kind of heads must be {', '.join(KINDS)}, got {self.kind!r}")
        if self.is_joint and self.kind not in _JOINT:
            raise TrainingError(f"only heads of {' and '.join(_JOINT)} are trained with their model, not {self.kind!r}")
        least = {"heads": 1, "draft_vocab": 1, "steps": 1, "batch_size": 1, "max_new_tokens": 1}
        for name, minimum in {**least, "max_length": 2, "hold_out_every": 2}.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise TrainingError(f"{name} must be at least {minimum}, got {value}")
        if not 0 <= self.seed < 1 << 32:
            raise TrainingError(f"seed must be from 0 to 2^32 - 1, got {self.seed}")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise TrainingError(f"learning_rate must be more than 0, got {self.learning_rate}")


def check_trainer() -> None:
    """Raise a TrainingError if accelerate is missing, which transformers' Trainer needs."""
    if importlib.util.find_spec("accelerate") is None:
        raise TrainingError(
            "training needs accelerate, which is not installed; pip install 'lookahead-decoding[train]'"
        )


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
        loaded: The model.
        data: The file of examples.
        output: The folder for the heads, the checkpoints, and in joint training the model (`model`).
        settings: The settings of the run.
        resume: Whether to continue the run in `output` from its last checkpoint.
        say: Receives progress messages.

    Returns:
        For each guessed token, the top-1 accuracy on held-out examples, `eval_accuracy_1` and so on, and the top-5
        accuracy, `eval_top_5_1` and so on.

    Raises:
        TrainingError: accelerate is missing, the data is unusable, or the folder belongs to another run.
        HeadsError: The model does not support heads.
    """
    check_trainer()
    records = read_records(data)
    lm_head(loaded.model)
    digest = xxhash.xxh3_64_hexdigest(json.dumps(records).encode())
    fingerprint = model_fingerprint(loaded.model, body_of(loaded.model))
    run = {**asdict(settings), "model": fingerprint, "data": digest}
    with _entered(output, run, resume=resume), _cleaning_up(loaded.model, output):
        prompts = [prompt for prompt, text in records if text is None and prompt is not None]
        answers: dict[str, list[int]] = {}
        if prompts:
            say(f"{len(prompts):,} prompts without an output: the model answers them first")
            file, most = output / _ANSWERS, settings.max_new_tokens
            written = answer_prompts(loaded, prompts, file, max_new_tokens=most, say=say)
            answers = dict(zip(prompts, written, strict=True))
        examples = make_examples(records, loaded.tokenizer, answers, settings.max_length)
        trainer, heads = _prepare(loaded.model, examples, output, settings, say)
        last = _last_checkpoint(output)
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
        metrics: dict[str, float] = trainer.evaluate()
        write_heads(heads, output, loaded.model)
        if settings.is_joint:
            loaded.model.save_pretrained(output / "model")
            loaded.tokenizer.save_pretrained(output / "model")
    return metrics


@contextmanager
def _cleaning_up(model: PreTrainedModel, output: Path) -> Iterator[None]:
    """Restore `requires_grad` of the parameters and the training mode of the model at the end.

    If a run fails before its first checkpoint, its files are removed, unless it has answers and was not refused.
    """
    took, was_training = [parameter.requires_grad for parameter in model.parameters()], model.training
    try:
        yield
    except Exception as error:
        is_refused = isinstance(error, LookaheadError) or not (output / _ANSWERS).exists()
        if is_refused and _last_checkpoint(output) is None:
            for name in (_SETTINGS, _ANSWERS):
                (output / name).unlink(missing_ok=True)
            with suppress(OSError):  # the folder holds other files
                output.rmdir()
        raise
    finally:
        model.train(was_training)
        for parameter, takes in zip(model.parameters(), took, strict=True):
            parameter.requires_grad_(takes)


def _last_checkpoint(output: Path) -> Path | None:
    whole = [path for path in output.glob("checkpoints/checkpoint-*") if (path / _DONE).is_file()]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


@contextmanager
def _entered(output: Path, run: dict[str, Any], *, resume: bool) -> Iterator[None]:
    """Lock the folder of a run, and create it. TrainingError if it holds another run or another process uses it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    path = output / _SETTINGS
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(output, timeout_s=0))
        except TimeoutError as error:
            what = "is being written by another process; wait for it, stop it, or choose another --output"
            raise TrainingError(f"{output} {what}") from error
        if path.exists() and not resume:
            raise TrainingError(f"{output} already holds a run: pass --resume, or choose another --output")
        before = read_object(path, TrainingError) if path.exists() else run
        for name, value in run.items():
            if before.get(name) != value:
                raise TrainingError(
                    f"{output} holds a run with {name} = {before.get(name)}, not {value}: repeat its options, its "
                    "model and its data, or choose another --output"
                )
        if not path.exists():
            output.mkdir(exist_ok=True)
            write_atomically(path, json.dumps(run, indent=2) + "\n")
        yield


def _prepare(
    model: PreTrainedModel, examples: list[Example], output: Path, settings: Settings, say: Say
) -> tuple[HeadTrainer, TrainedHeads]:
    from transformers import TrainingArguments

    from lookahead.jobs.training.heads_trainer import HeadTrainer

    train, held_out = split_examples(examples, settings.hold_out_every)
    say(f"{len(train):,} examples to train on, {len(held_out):,} held out")
    model.requires_grad_(settings.is_joint)
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)  # a resumed run begins with the same weights
        learner, heads = untrained(model, train, settings)
    is_mapped = isinstance(heads, FusedEagleHead) and heads.hidden_layers[0] != 0
    on_cpu = model.device.type == "cpu"
    arguments = TrainingArguments(
        output_dir=str(output / "checkpoints"),
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        max_steps=settings.steps or -1,
        num_train_epochs=1,
        learning_rate=settings.learning_rate or (_RATE_OF_MAPS if is_mapped else _RATE),
        warmup_steps=0.03,
        save_steps=0.05,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=0.25,
        logging_steps=0.01,
        # On a CPU only for a bfloat16 model: without bfloat16 instructions it is slower.
        bf16=model.dtype == torch.bfloat16 if on_cpu else torch.cuda.is_bf16_supported(),
        use_cpu=on_cpu,
        report_to=[],
        remove_unused_columns=False,
        seed=settings.seed,
    )
    trainer = HeadTrainer(model, learner, arguments, train, held_out, say)  # also sets the seed
    if isinstance(heads, MtpHeads):
        begin_mtp(heads, model, train, trainer.read)
    elif isinstance(heads, FusedEagleHead) and is_mapped:
        begin_fused(heads, model, train, trainer.read)
    return trainer, heads


def untrained(model: PreTrainedModel, train: list[Example], settings: Settings) -> tuple[Learner, TrainedHeads]:
    """Untrained heads of a kind, float32 on the model's device, and their learner."""
    count, device = settings.heads, lm_head(model).weight.device
    if settings.kind in _JOINT:
        kind = MedusaHeads if settings.kind == "medusa" else MtpHeads
        heads = kind.fresh(model, heads=count).float()
        return IndependentHeadsLearner(heads), heads
    if settings.kind == "eagle":
        head = EagleHead(layer_config(model)).float().to(device)
        return EagleLearner(head, count), head
    fused = fresh_fused(model, frequent_tokens(train, model, settings.draft_vocab)).float().to(device)
    return FusedEagleLearner(fused, count), fused


def frequent_tokens(examples: list[Example], model: PreTrainedModel, most: int) -> list[int]:
    """The `most` most frequent output tokens of examples, ascending; at most the vocabulary."""
    written = torch.cat([each["input_ids"][each["wanted"]] for each in examples])
    counts = torch.bincount(written, minlength=len(lm_head(model).weight))
    chosen: list[int] = counts.argsort(descending=True, stable=True)[:most].sort().values.tolist()
    return chosen
