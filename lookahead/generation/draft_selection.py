"""Chooses a draft model for a target, if any, by measuring configurations side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.backend.calibration import pass_seconds
from lookahead.config import LookaheadConfig
from lookahead.generation.comparison import PROMPTS, Score, compare
from lookahead.hf.block_layers import weight_count
from lookahead.proposers.draft_model import DraftModel

PLAIN = "no draft"
NAMES = "no draft model"
_MARGIN = 1.02  # speedup over decoding without it that a draft model must reach, for the memory it takes


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
        scores[name].parameters = weight_count(draft.model)
        scores[name].pass_s = pass_seconds(draft.model)
    best = max(configs, key=lambda name: scores[name].stats.tokens_per_s * (1.0 if name in drafts else _MARGIN))
    return Pick({name: scores[name] for name in configs}, pass_seconds(model), best)
