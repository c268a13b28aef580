"""Chooses a draft model or heads for a target, if any, by measuring configurations side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.backend.calibration import pass_seconds
from lookahead.config import LookaheadConfig
from lookahead.decoding.comparison import PROMPTS, Score, compare
from lookahead.decoding.head_costs import KINDS, HeadCost, head_cost, untrained_cost
from lookahead.errors import HeadsError, UnsupportedModelError
from lookahead.loading.block_layers import weight_count
from lookahead.proposers.draft_model import DraftModel
from lookahead.proposers.heads import Heads

PLAIN = "no draft"
NAMES = "no draft model"
_MARGIN = 1.02  # minimum speedup over decoding without a draft model, to justify its memory


@dataclass(frozen=True, slots=True)
class Pick:
    """The measurements of plain decoding, of the default proposers, and of these with each draft; and the best.

    `heads` holds by kind the cost of untrained heads, or why the model does not support them.
    """

    candidates: dict[str, Score]
    target_pass_s: float
    best: str
    heads: dict[str, HeadCost | str]

    @property
    def without(self) -> Score:
        """The faster of plain decoding and the default proposers."""
        return max(self.candidates[PLAIN], self.candidates[NAMES], key=lambda each: each.stats.tokens_per_s)

    def to_dict(self) -> dict[str, Any]:
        """The figures, JSON-ready."""
        rate = self.without.stats.tokens_per_s
        return {
            "best": self.best,
            "target_pass_ms": round(1e3 * self.target_pass_s, 4),
            "heads": {
                kind: {"unsupported": cost} if isinstance(cost, str) else cost.to_dict(rate)
                for kind, cost in self.heads.items()
            },
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
    drafts: Mapping[str, DraftModel | Heads],
    prompts: Sequence[str] = PROMPTS,
    **generate_kwargs: Any,
) -> Pick:
    """Compare draft models and heads with the default proposers, and choose the best.

    Args:
        model: The target model.
        tokenizer: Its tokenizer.
        drafts: The draft models and heads by name; empty to measure only the cost of heads.
        prompts: The prompts to measure with.
        generate_kwargs: As in `compare`.

    Raises:
        HeadsError: Heads are damaged, or belong to another model.
        UnsupportedModelError: The target has an encoder.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} has an encoder, so it takes no heads; pick-draft is for models without one"
        )
    networks = {name: each.open(model)[1] for name, each in drafts.items() if isinstance(each, Heads)}
    default = LookaheadConfig(memory="request")
    configs = {PLAIN: LookaheadConfig(proposers=()), NAMES: default}
    configs |= {
        name: LookaheadConfig(proposers=(*default.proposers, draft), memory="request") for name, draft in drafts.items()
    }
    scores = compare(model, tokenizer, prompts, configs, **generate_kwargs)
    for name, draft in drafts.items():
        score = scores[name]
        if isinstance(draft, DraftModel):
            score.parameters, score.pass_s = weight_count(draft.model), pass_seconds(draft.model)
        else:
            score.parameters, score.pass_s = weight_count(networks[name]), head_cost(networks[name], model).level_s
    best = max(configs, key=lambda name: scores[name].stats.tokens_per_s * (1.0 if name in drafts else _MARGIN))
    heads = {kind: _untrained_cost(kind, model) for kind in KINDS}
    return Pick({name: scores[name] for name in configs}, pass_seconds(model), best, heads)


def _untrained_cost(kind: str, model: PreTrainedModel) -> HeadCost | str:
    try:
        return untrained_cost(kind, model)
    except HeadsError as error:
        return str(error)
