"""The cost of heads per step, measured before training, and the tokens per pass they must add to pay."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.backend.calibration import timed
from lookahead.drafting.budget import PassTimes
from lookahead.drafting.sizes import DEFAULT_NODES
from lookahead.errors import HeadsError
from lookahead.plugins.heads.eagle import DRAFT_VOCAB, FusedEagleHead, fused_layers
from lookahead.plugins.heads.guess_tree import GrowingDrafter, HeadDrafter
from lookahead.plugins.heads.head_files import (
    Maker,
    Network,
    TrainedHeads,
    blank_heads,
    depth_of,
    fill_heads,
    fresh_rates,
    make_drafter,
)
from lookahead.plugins.heads.independent_heads import MedusaHeads
from lookahead.plugins.heads.layers import layer_config, lm_head
from lookahead.proposers.heads import round_heads

KINDS = {"eagle3": "EAGLE-3", "medusa": "Medusa"}
MEDUSA_LEVELS = 4  # heads that `lookahead train medusa` makes
_CONTEXT = 64  # tokens in the context of the heads
_NEW_TOKENS = 2  # tokens the heads read in a step
_ROUNDS = 9
_SURE = 1e4  # a logit that gives its token all the probability
_STD = 0.02  # of random weights

Timer = Callable[[Callable[[], object]], float]
"""Returns the seconds of one call."""


@dataclass(frozen=True, slots=True)
class HeadCost:
    """The cost of heads in a step of one row.

    A level guesses one token further: another pass of EAGLE's layer over 8 guesses and its projection to the
    vocabulary, or another independent head.

    Attributes:
        first_s: Seconds of reading the newest tokens, and of the first level.
        level_s: Seconds of each further level.
        levels: Maximum number of levels.
    """

    first_s: float
    level_s: float
    levels: int

    def seconds(self, levels: int) -> float:
        """Seconds of `levels` levels, at least 1."""
        return self.first_s + (levels - 1) * self.level_s

    def tokens_to_pay(self, levels: int, tokens_per_s: float) -> float:
        """Tokens per pass that `levels` levels must add to be as fast as decoding without heads.

        These are the tokens decoded without heads in the seconds that the heads take.
        """
        return self.seconds(levels) * tokens_per_s

    def to_dict(self, tokens_per_s: float) -> dict[str, Any]:
        """The figures, JSON-ready."""
        return {
            "first_level_ms": round(1e3 * self.first_s, 4),
            "level_ms": round(1e3 * self.level_s, 4),
            "levels": self.levels,
            "tokens_to_pay": [round(self.tokens_to_pay(n + 1, tokens_per_s), 4) for n in range(self.levels)],
        }


def untrained_cost(
    kind: str, model: PreTrainedModel, *, draft_vocab: int = DRAFT_VOCAB, timer: Timer | None = None
) -> HeadCost:
    """The cost of untrained heads: one EAGLE layer, or one Medusa head, with random weights.

    Args:
        kind: One of `KINDS`.
        model: The target.
        draft_vocab: Maximum vocabulary of an EAGLE-3 head.
        timer: As in `head_cost`.

    Raises:
        HeadsError: The model does not support these heads.
    """
    if model.config.is_encoder_decoder:
        raise HeadsError(f"{type(model).__name__} has an encoder, and shows no hidden states to heads")
    heads = random_heads(kind, model, draft_vocab)
    round_heads(heads, model)
    return head_cost(heads, model, levels=MEDUSA_LEVELS, timer=timer)


def random_heads(kind: str, model: PreTrainedModel, draft_vocab: int = DRAFT_VOCAB) -> TrainedHeads:
    """An EAGLE-3 head or one Medusa head for a model, with random weights in the model's dtype.

    Global random states are untouched; HeadsError if the model does not support these heads.
    """
    vocab, hidden = (weight := lm_head(model).weight).shape
    make: Maker = partial(MedusaHeads, hidden, vocab, heads=1)
    if kind != MedusaHeads.kind:
        sizes, layers = layer_config(model), fused_layers(model)
        make = partial(FusedEagleHead, sizes, hidden_layers=layers, draft_vocab=min(draft_vocab, vocab))
    heads, source = blank_heads(make), torch.Generator(weight.device).manual_seed(0)
    tensors = {
        name: torch.empty_like(each, dtype=weight.dtype, device=weight.device).normal_(std=_STD, generator=source)
        if each.is_floating_point()
        else torch.zeros_like(each, device=weight.device)
        for name, each in heads.state_dict().items()
    }
    return fill_heads(heads, tensors, model)


def head_cost(
    heads: Network, model: PreTrainedModel, *, levels: int | None = None, timer: Timer | None = None
) -> HeadCost:
    """The cost of drafting with heads for one row of a model; a median of 9 rounds.

    Args:
        heads: The heads, rounded as for drafting.
        model: The target.
        levels: Number of independent heads to assume, all like the given ones; None means the given ones.
        timer: Measures seconds; None means wall time, with the device synchronized.
    """
    weight = lm_head(model).weight
    timer = timer or partial(timed, device=weight.device)
    # The first drafter has no timings yet, so it ends after one level.
    drafters = [make_drafter(heads, model, fresh_rates(heads), _be_sure, times=t) for t in (PassTimes(), None)]
    tokens = torch.zeros(_CONTEXT, dtype=torch.int64, device=weight.device)
    states = weight.new_ones(_CONTEXT, weight.shape[1] * len(drafters[0].hidden_layers))

    def step(drafter: HeadDrafter) -> None:
        drafter.read([0], [tokens[:_NEW_TOKENS]], [states[:_NEW_TOKENS]])
        for tree in drafter.draft([0], DEFAULT_NODES):
            tree.best(0, rates, DEFAULT_NODES)

    spent, rates = [], fresh_rates(heads)
    with torch.inference_mode():
        for drafter in drafters:
            drafter.read([0], [tokens], [states])
        for _ in range(1 + _ROUNDS):  # the first compiles
            spent.append([timer(partial(step, drafter)) for drafter in drafters])
    first_s, whole_s = (statistics.median(each) for each in zip(*spent[1:], strict=True))
    depth = depth_of(heads)
    if isinstance(drafters[0], GrowingDrafter):
        return HeadCost(first_s, max(0.0, whole_s - first_s) / (depth - 1), depth)
    return HeadCost(whole_s / depth, whole_s / depth, levels or depth)


def _be_sure(scores: Tensor) -> Tensor:
    """Make the logits of one guess certain, so that no level is too unlikely to continue."""
    scores[:, 0] = _SURE
    return scores
