"""Chooses a draft model for a target, if any, by measuring configurations side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.backend.calibration import pass_seconds
from lookahead.config import LookaheadConfig
from lookahead.generation.api import generate
from lookahead.generation.prompts import pad_token_of
from lookahead.hf.facts import input_device
from lookahead.hf.model_state import LearnedState, use_learned
from lookahead.proposers.draft_model import DraftModel
from lookahead.stats import DecodingStats, total_in_sequence

PLAIN = "no draft"
NAMES = "no draft model"
_MARGIN = 1.02  # speedup over decoding without it that a draft model must reach, for the memory it takes

# The default prompts.
PROMPTS = (
    "Once upon a time, there was a little girl named Lily.",
    "The history of the steam engine begins",
    "Dear Sir or Madam, I am writing to you because",
    "def fibonacci(n):\n    ",
    "Question: A train leaves at 9 o'clock and travels 120 miles in two hours. How fast is it?\nAnswer:",
    "To make a good soup, first",
    "In this paper we show that",
    "The three most important things to know about gardening are",
)


@dataclass(slots=True)
class Score:
    """The results of one configuration over all prompts, and its draft model if there is one."""

    prompts: int = 0
    identical: int = 0
    stats: DecodingStats = field(default_factory=DecodingStats)
    parameters: int = 0  # of the draft model
    pass_s: float = 0.0  # of its pass over one token

    @property
    def drafted_per_step(self) -> float:
        """Draft nodes per pass of the target."""
        return self.stats.drafted_tokens / max(1, self.stats.target_forwards)

    def add(self, stats: DecodingStats, is_identical: bool) -> None:
        """Count one prompt."""
        self.prompts += 1
        self.identical += is_identical
        self.stats = total_in_sequence((self.stats, stats))

    def to_dict(self) -> dict[str, Any]:
        """The figures, JSON-ready; the divergence from the target's distribution only where there is one."""
        lossy = {"divergence": round(self.stats.divergence, 4)} if self.stats.total_variation else {}
        return {
            **lossy,
            "mean_acceptance_length": round(self.stats.mean_acceptance_length, 4),
            "tokens_per_s": round(self.stats.tokens_per_s, 2),
            "drafted_per_step": round(self.drafted_per_step, 2),
            "draft_acceptance_rate": round(self.stats.draft_acceptance_rate, 4),
            "identical": self.identical,
            "prompts": self.prompts,
        }


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    configs: Mapping[str, LookaheadConfig],
    *,
    warm_up: int = 1,
    **generate_kwargs: Any,
) -> dict[str, Score]:
    """Decode every prompt with every configuration, in rotating order; each has a learned state of its own.

    Every prompt has a seed of its own.

    Args:
        model: The target model.
        tokenizer: Its tokenizer.
        prompts: The prompts.
        configs: The configurations by name.
        warm_up: How many first prompts are decoded once before and not counted.
        generate_kwargs: Options of both `model.generate` and `lookahead.generate`.

    Returns:
        The results by the name of the configuration.
    """
    causal_lm: Any = model
    scores, learned = {name: Score() for name in configs}, {name: LearnedState() for name in configs}
    for number, prompt in enumerate([*prompts[:warm_up], *prompts]):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(input_device(model))
        torch.manual_seed(number)
        output = causal_lm.generate(**inputs, **{"pad_token_id": pad_token_of(tokenizer), **generate_kwargs})
        expected = output[0, inputs["input_ids"].shape[1] :].tolist()
        names = list(configs)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with use_learned(model, learned[name]):
                result = generate(model, tokenizer, prompt, config=configs[name], seed=number, **generate_kwargs)
            if number >= warm_up:
                scores[name].add(result.stats, result.token_ids[0] == expected)
    return scores


@dataclass(frozen=True, slots=True)
class Pick:
    """The measurements: plain decoding, the sources that need no draft model, then these with each; and the best."""

    candidates: dict[str, Score]
    target_pass_s: float
    best: str

    def to_dict(self) -> dict[str, Any]:
        """The figures, JSON-ready."""
        return {
            "best": self.best,
            "target_pass_ms": round(1e3 * self.target_pass_s, 4),
            "candidates": {
                name: {
                    "parameters": each.parameters,
                    "pass_ms": round(1e3 * each.pass_s, 4),
                    "cost": round(each.pass_s / self.target_pass_s, 4),
                    **each.to_dict(),
                }
                for name, each in self.candidates.items()
            },
        }


def pick_draft(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafts: Mapping[str, DraftModel],
    prompts: Sequence[str] = PROMPTS,
    **generate_kwargs: Any,
) -> Pick:
    """Measure draft models beside the sources that need none, and choose the best.

    Args:
        model: The target model.
        tokenizer: Its tokenizer.
        drafts: The draft models by name.
        prompts: The prompts to measure with.
        generate_kwargs: As of `compare`.
    """
    default = LookaheadConfig(memory="request")
    configs = {PLAIN: LookaheadConfig(proposers=()), NAMES: default}
    configs |= {
        name: LookaheadConfig(proposers=(*default.proposers, draft), memory="request") for name, draft in drafts.items()
    }
    scores = compare(model, tokenizer, prompts, configs, **generate_kwargs)
    for name, draft in drafts.items():
        scores[name].parameters = sum(p.numel() for p in draft.model.parameters())
        scores[name].pass_s = pass_seconds(draft.model)
    best = max(scores, key=lambda name: scores[name].stats.tokens_per_s * (1.0 if name in drafts else _MARGIN))
    return Pick(scores, pass_seconds(model), best)
