"""The training loop of heads, based on transformers' Trainer."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from lookahead.jobs.training.examples import Example, Say, collate
from lookahead.jobs.training.learners import Learner
from lookahead.plugins.heads.layers import hidden_states, lm_head

HEADS_RATE = 4.0  # learning rate of the heads relative to the learning rate of the model in joint training
HEAD_START = 0.25  # share of the steps that train only the heads in joint training
KEPT_IN_MEMORY = 2 << 30  # bytes of hidden states kept in memory; more go to a file


class EpochSampler(LengthGroupedSampler):
    """Seeds the order of an epoch by its number, so that a resumed run has the same order."""

    def __init__(self, trainer: Trainer, examples: Any) -> None:
        super().__init__(trainer.args.train_batch_size, examples)
        self._trainer = trainer

    def __iter__(self) -> Iterator[int]:
        epoch = int(self._trainer.state.epoch or 0)
        self.generator = torch.Generator().manual_seed(self._trainer.args.seed + epoch)
        order: Iterator[int] = super().__iter__()  # type: ignore[no-untyped-call]
        return order


class HeadTrainer(Trainer):
    """Trains heads, and the model with them if its parameters require gradients.

    A frozen model is not part of the checkpoints, and reads an example of several epochs once. In joint training the
    model starts after `HEAD_START` of the steps, when the heads no longer guess at random, at a lower learning rate.
    `say` receives a line for each log entry, since the callbacks of `Trainer` would write to stdout.

    Source: Cai et al. 2024, "Medusa", §2.2.2 (differential learning rates and heads warm-up).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        learner: Learner,
        args: TrainingArguments,
        train: list[Example],
        held_out: list[Example],
        say: Say,
    ) -> None:
        self._base, self._learner, self._say = model, learner, say
        self._is_joint = next(model.parameters()).requires_grad
        groups: list[dict[str, Any]] = [{"params": list(learner.parameters()), "lr": args.learning_rate}]
        if self._is_joint:
            groups.append({"params": list(model.parameters()), "lr": args.learning_rate / HEADS_RATE})
        # A parameter list holds each weight once: safetensors does not accept tied weights.
        both = nn.ModuleDict({"learner": learner, "weights": nn.ParameterList(model.parameters())})
        super().__init__(
            model=both if self._is_joint else learner,
            args=args,
            data_collator=collate,
            train_dataset=cast(Any, train),
            eval_dataset=cast(Any, held_out),
            optimizers=(torch.optim.AdamW(groups, weight_decay=0.0), None),
        )
        for own in (PrinterCallback, ProgressCallback):
            self.remove_callback(own)
        self._kept: Tensor | None = None
        if not self._is_joint:
            has_epochs = args.max_steps * args.train_batch_size > len(train)
            self._keep([*held_out, *(train if has_epochs else ())])

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run the model forward, each loss forward and backward in turn, and the model backward if it is trained."""
        self._learner.train()
        self._base.train(self._is_joint)
        batch = self._prepare_inputs(inputs)
        states = self._states(batch)
        leaf = states.detach().requires_grad_(self._is_joint)
        losses = self._learner.losses(self._base, leaf, batch)
        total = torch.zeros((), device=states.device)
        while True:
            with self.compute_loss_context_manager():  # the autocast of training
                loss = next(losses, None)
            if loss is None:
                break
            self.accelerator.backward(loss)
            total += loss.detach()
        if leaf.grad is not None:
            states.backward(leaf.grad)
        return total

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        self._learner.eval()
        self._base.eval()
        counts = torch.zeros(self._learner.depth, 3, dtype=torch.int64)
        with torch.inference_mode():
            for inputs in self.get_eval_dataloader(eval_dataset):
                batch = self._prepare_inputs(inputs)
                counts += self._learner.hits(self._base, self._states(batch), batch).cpu()
        metrics = {}
        for place, (*right, trials) in enumerate(counts.tolist(), start=1):
            for name, count in zip(("accuracy", "top_5"), right, strict=True):
                metrics[f"{metric_key_prefix}_{name}_{place}"] = round(count / max(1, trials), 4)
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        shown = [f"{name.removeprefix('eval_')} {logs[name]:.4g}" for name in logs if name.startswith("eval_")]
        if shown or "loss" in logs:
            figures = ", ".join(shown) or f"loss {logs['loss']:.4g}"
            self._say(f"step {self.state.global_step:,} of {self.state.max_steps:,}: {figures}")

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """The schedule of `rate_scale`. In joint training the model starts later than the heads."""
        if self.lr_scheduler is None:
            warm_up = max(1, int(self.args.get_warmup_steps(num_training_steps)))
            starts = (0, int(HEAD_START * num_training_steps)) if self._is_joint else (0,)
            scales = [partial(rate_scale, start=start, warm_up=warm_up, end=num_training_steps) for start in starts]
            self.lr_scheduler = LambdaLR(cast(torch.optim.Optimizer, optimizer or self.optimizer), cast(Any, scales))
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        return EpochSampler(self, train_dataset or self.train_dataset)

    def read(self, example: Mapping[str, Tensor]) -> Tensor:
        """The hidden states `[tokens, size]` of an example."""
        return self._states(self._prepare_inputs(collate([dict(example)])))[0]

    def _keep(self, examples: list[Example]) -> None:
        """Read examples and keep their hidden states in bfloat16 if memory or disk has room.

        The batches do not depend on the sampling, so that a resumed run has the same states.
        """
        tokens = sum(len(example["input_ids"]) for example in examples)
        size = lm_head(self._base).weight.shape[1] * max(1, len(self._learner.layers))
        kept = room_for(tokens, size, Path(str(self.args.output_dir)).parent)
        if kept is None:
            return
        self._say(f"the model reads {tokens:,} tokens")
        self._base.eval()
        examples, begin = sorted(examples, key=lambda example: len(example["input_ids"])), 0
        for first in range(0, len(examples), self.args.train_batch_size):
            group = examples[first : first + self.args.train_batch_size]
            for example, states in zip(group, self._states(self._prepare_inputs(collate(group))), strict=True):
                end = begin + len(example["input_ids"])
                kept[begin:end] = states[: end - begin]
                example["kept"] = torch.tensor([begin, end])
                begin = end
        self._kept = kept

    def _states(self, batch: dict[str, Tensor]) -> Tensor:
        if self._kept is not None and "kept" in batch:
            spans = [self._kept[begin:end] for begin, end in batch["kept"].tolist()]
            return pad_sequence(spans, batch_first=True).to(batch["input_ids"].device).float()
        with torch.set_grad_enabled(self._is_joint), self.compute_loss_context_manager():
            return hidden_states(self._base, batch["input_ids"], self._learner.layers).float()


def room_for(tokens: int, size: int, folder: Path) -> Tensor | None:
    """A bfloat16 tensor `[tokens, size]`: in memory up to `KEPT_IN_MEMORY` bytes, else in a temporary file.

    None if the file would take more than half of the free space on the disk of `folder`.
    """
    if (count := 2 * tokens * size) <= KEPT_IN_MEMORY:
        return torch.empty(tokens, size, dtype=torch.bfloat16)
    if count > shutil.disk_usage(folder).free // 2:
        return None
    with TemporaryFile(dir=folder) as file:  # it has no name, so that a killed process leaves nothing
        return torch.from_numpy(np.memmap(file, np.int16, "w+", shape=(tokens, size))).view(torch.bfloat16)


def rate_scale(step: int, *, start: int, warm_up: int, end: int) -> float:
    """Factor on the learning rate: 0 before `start`, a linear warm-up from there, and half a cosine up to `end`."""
    warmth = min(1.0, max(0.0, (step - start + 1) / warm_up))
    return warmth * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / end)))
