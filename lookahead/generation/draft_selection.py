"""Which draft model to take for a target, if any: each is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.config import LookaheadConfig
from lookahead.generation.draft_comparison import Score, compare
from lookahead.models.timing import pass_seconds
from lookahead.proposers.draft_model import DraftModel

PLAIN = "no draft"
NAMES = "no draft model"
_MARGIN = 1.02  # times the speed without it: what a draft model must reach to be worth its memory

# For those who bring none: some of what language models are asked to continue.
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way of drafting, measured.

    Attributes:
        name: The draft model's, or what is drafted by without one.
        parameters: The draft model's, 0 without one.
        pass_s: A pass of it over one token, 0 without one.
        score: What it did.
    """

    name: str
    parameters: int
    pass_s: float
    score: Score


@dataclass(frozen=True, slots=True)
class Pick:
    """What was measured, and what follows.

    Attributes:
        candidates: Plain decoding, the sources that need no draft model, then these with each draft model.
        target_pass_s: A pass of the target over one token.
        best: The name of the one to take.
    """

    candidates: list[Candidate]
    target_pass_s: float
    best: str

    def to_dict(self) -> dict[str, Any]:
        """The figures, JSON-ready."""
        return {
            "best": self.best,
            "target_pass_ms": round(1e3 * self.target_pass_s, 4),
            "candidates": {
                each.name: {
                    "parameters": each.parameters,
                    "pass_ms": round(1e3 * each.pass_s, 4),
                    "cost": round(each.pass_s / self.target_pass_s, 4),
                    **each.score.to_dict(),
                }
                for each in self.candidates
            },
        }


def pick_draft(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafts: Mapping[str, DraftModel],
    prompts: Sequence[str] = PROMPTS,
    *,
    told: Callable[[], None] = lambda: None,
    **generate_kwargs: Any,
) -> Pick:
    """Measure draft models beside the sources that need none, and say which one to take.

    Args:
        model: The target.
        tokenizer: Its tokenizer.
        drafts: The draft models by what to call them.
        prompts: What to continue.
        told: Called after every prompt.
        **generate_kwargs: As for `model.generate`.

    Raises:
        ProposerError: One of them cannot draft for the target.
    """
    default = LookaheadConfig(memory="request")
    configs = {PLAIN: LookaheadConfig(proposers=()), NAMES: default}
    configs |= {
        name: LookaheadConfig(proposers=(*default.proposers, draft), memory="request") for name, draft in drafts.items()
    }
    scores = compare(model, tokenizer, prompts, configs, told=told, **generate_kwargs)
    candidates = []
    for name, score in scores.items():
        draft = drafts.get(name)
        size = 0 if draft is None else sum(p.numel() for p in draft.model.parameters())
        candidates.append(Candidate(name, size, 0.0 if draft is None else pass_seconds(draft.model), score))
    best = max(scores, key=lambda name: scores[name].tokens_per_s * (1.0 if name in drafts else _MARGIN))
    return Pick(candidates, pass_seconds(model), best)
