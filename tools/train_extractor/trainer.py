"""The training loop: batches in, checkpoints and a log out."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from lookahead.errors import TrainingError
from tools.train_extractor import blockwise
from tools.train_extractor.optimizer import MasterOptimizer, rate_scale
from tools.train_extractor.phases import Phase, phase_at
from tools.train_extractor.rows import IGNORED, Batch, RowMaker, make_batches

_TORN = (OSError, LookupError, RuntimeError, TypeError, ValueError, SafetensorError)
"""What reading a checkpoint that is no checkpoint of this run may raise."""

_POOL_BATCHES = 12  # batches that are drawn, sorted by length and shuffled together


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands; stored in its checkpoint."""

    step: int = 0  # optimizer steps taken
    tokens: int = 0  # training tokens seen, padding left out
    pool: int = 0  # pools of batches drawn
    pool_tokens: int = 0  # training tokens seen when the present pool was drawn; they decide its phase
    used: int = 0  # batches of the present pool already trained on
    phase_tokens: dict[str, int]  # seen, by the name of the phase


@dataclass(frozen=True, slots=True)
class Report:
    """One line of the log."""

    step: int
    tokens: int
    phase: str
    loss: float  # mean over the wanted tokens since the last report, nats
    tokens_per_s: float  # since the last report


class Trainer:
    """Trains one model on one text up to a token budget, with checkpoints to resume from."""

    def __init__(self, model: LlamaForCausalLM, maker: RowMaker, *, budget: int, seed: int, checkpoint: Path) -> None:
        self.model = model.bfloat16().train()
        self.model.set_attn_implementation(blockwise.NAME)
        self.maker = maker
        self.budget = budget
        self.seed = seed
        self.checkpoint = checkpoint
        self.optimizer = MasterOptimizer(self.model)
        self.progress = Progress(phase_tokens={})

    def resume(self) -> None:
        """Continue from the checkpoint file."""
        try:
            with safe_open(self.checkpoint, "pt") as stored:
                progress = Progress(**json.loads(stored.metadata()["progress"]))
                self.optimizer.load_state_dict({name: stored.get_tensor(name) for name in stored.keys()})  # noqa: SIM118
            self.progress = progress
        except _TORN as error:
            raise TrainingError(f"cannot resume from {self.checkpoint}: {error}") from error

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        partial = self.checkpoint.with_suffix(".partial")
        save_file(self.optimizer.state_dict(), partial, metadata={"progress": json.dumps(asdict(self.progress))})
        os.replace(partial, self.checkpoint)

    def run(self, report: Callable[[Report], None], *, report_steps: int = 20, save_s: float = 60.0) -> None:
        """Train until the budget is spent, saving every `save_s` seconds and at the end."""
        saved = since = time.monotonic()
        losses: list[float] = []
        tokens_before = self.progress.tokens
        while self.progress.tokens < self.budget:
            phase = phase_at(self.progress.pool_tokens, self.budget)
            for batch in self._batches(phase):
                losses.append(self._step(batch, phase))
                now = time.monotonic()
                if self.progress.step % report_steps == 0 or self.progress.tokens >= self.budget:
                    rate = (self.progress.tokens - tokens_before) / max(now - since, 1e-9)
                    mean = float(np.mean(losses))
                    report(Report(self.progress.step, self.progress.tokens, phase.name, mean, rate))
                    losses, tokens_before, since = [], self.progress.tokens, time.monotonic()
                if now - saved > save_s:
                    self.save()
                    saved = time.monotonic()
                if self.progress.tokens >= self.budget:
                    break
        self.save()

    def _batches(self, phase: Phase) -> Iterator[Batch]:
        """The unused batches of the present pool, drawn again from its seed after a resume."""
        rng = np.random.default_rng((self.seed, self.progress.pool))
        kinds = list(phase.mixture)
        shares = np.asarray([phase.mixture[kind] for kind in kinds])
        rows, size = [], 0
        while size < _POOL_BATCHES * phase.batch_tokens:
            kind = kinds[int(rng.choice(len(kinds), p=shares / shares.sum()))]
            wanted = int(np.exp(rng.uniform(np.log(phase.shortest), np.log(phase.longest))))
            rows.append(self.maker.make(kind, wanted, rng))
            size += len(rows[-1].ids)
        for batch in make_batches(rows, phase.batch_tokens, rng)[self.progress.used :]:
            self.progress = replace(self.progress, used=self.progress.used + 1)
            yield batch
        progress = self.progress
        self.progress = replace(progress, pool=progress.pool + 1, pool_tokens=progress.tokens, used=0)

    def _step(self, batch: Batch, phase: Phase) -> float:
        """One forward, backward and update; returns the mean loss in nats."""
        loss = wanted_loss(self.model, batch)
        loss.backward()
        progress = self.progress
        self.optimizer.step(rate_scale(progress.step, progress.tokens, self.budget))
        seen = int((batch.ids != 0).sum())
        counts = progress.phase_tokens | {phase.name: progress.phase_tokens.get(phase.name, 0) + seen}
        self.progress = replace(progress, step=progress.step + 1, tokens=progress.tokens + seen, phase_tokens=counts)
        return float(loss.detach())


def wanted_logits(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits and labels at the wanted positions alone: (wanted, vocabulary) and (wanted,).

    Rows are right-padded and attention is causal, so no attention mask is needed.
    """
    hidden = model.model(input_ids=torch.from_numpy(batch.ids), use_cache=False).last_hidden_state
    labels = torch.from_numpy(batch.labels).flatten()
    wanted = (labels != IGNORED).nonzero().squeeze(1)
    return model.lm_head(hidden.flatten(0, 1)[wanted]).float(), labels[wanted]


def wanted_loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Mean cross-entropy over the wanted positions, nats."""
    logits, labels = wanted_logits(model, batch)
    return F.cross_entropy(logits, labels)


def append_log(file: Path, entry: dict[str, object]) -> None:
    """Add one JSON object as a line."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")
