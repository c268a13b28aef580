"""Training of EAGLE heads: to predict the next feature, or to go on from their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.heads.base_model import unembed
from lookahead.heads.eagle import EagleHead, FusedEagleHead
from lookahead.heads.layers import take
from lookahead.training.learner import DECAY, Learner, count_hits, five_likeliest

TOKEN_SHARE = 0.1
"""How much guessing the token counts beside predicting the feature."""

NOISE = 0.1
"""Features are moved by up to so much of their size, as those a head predicts itself are not exact either."""


class Places(NamedTuple):
    """Where drafting may begin in a batch: behind pairs of a feature and the token after it that the model wrote.

    Attributes:
        at: int64 `[batch, places]`, the position of each pair's feature; 0 beyond the last.
        is_place: bool `[batch, places]`, False beyond the last.
    """

    at: Tensor
    is_place: Tensor

    @classmethod
    def of(cls, batch: dict[str, Tensor]) -> Places:
        """Those of a batch, in the order of the text."""
        begins = batch["wanted"][:, 1:]
        order = begins.float().argsort(dim=1, descending=True, stable=True)
        most = int(begins.sum(1).max())
        is_place = begins.gather(1, order)[:, :most]
        return cls(order[:, :most] * is_place, is_place)


def unroll(
    head: EagleHead, model: PreTrainedModel, features: Tensor, batch: dict[str, Tensor], places: Places, steps: int
) -> Iterator[Tensor]:
    """Run a head as drafting does: one step on the model's features, further ones on its own.

    The tokens are those of the text. At its first step a place attends to all pairs before and its own; at later steps
    to its own later pairs besides, so that the steps of all places run together.

    Args:
        head: The head.
        model: Its model.
        features: `[batch, tokens, hidden]`, of the model's hidden states.
        batch: `input_ids` and `wanted`.
        places: Where drafting begins.
        steps: How many.

    Yields:
        `[batch, places, hidden]`: what step s says stands s + 2 positions behind the feature of each place, counting
        from 0; without meaning where the text ends before.

    Source: Li et al. 2025, "EAGLE-3", §3.2 (training-time test).
    """
    layer, ids = head.layer, batch["input_ids"]
    embeddings = model.get_input_embeddings()(ids).to(features.dtype)
    position = torch.arange(ids.shape[1] - 1, device=ids.device).expand(len(ids), -1)
    read, residual = head.pair(features[:, :-1], embeddings[:, 1:])
    keys, values = layer.keys_values(read, head.rotation(features, position))
    visible = position[:, None] <= places.at[..., None]
    read, residual = take(read, places.at), take(residual, places.at)
    out = residual
    later: list[tuple[Tensor, Tensor]] = []
    for step in range(steps):
        rotation = head.rotation(features, places.at + step)
        if step > 0:
            token = (places.at + 1 + step).clamp(max=ids.shape[1] - 1)
            read, residual = head.pair(out, take(embeddings, token))
            later.append(layer.keys_values(read, rotation))
        context = _attend(layer.query(read, rotation), keys, values, visible, later)
        out = layer.finish(residual, context)
        yield out


class EagleLearner(Learner):
    """Smooth L1 of the predicted feature with the model's, and a little cross-entropy of the tokens they stand for.

    Args:
        head: The head.
        depth: How many steps are measured on held-out text; one is trained.

    Source: Li et al. 2024, "EAGLE", §3.2 (both losses, their weights, and noise on the features).
    """

    def __init__(self, head: EagleHead, depth: int) -> None:
        super().__init__()
        self.head = head
        self.layers = () if head.hidden_layers == (-1,) else (*head.hidden_layers, -1)
        self.depth = depth

    def losses(self, model: PreTrainedModel, states: Tensor, batch: dict[str, Tensor]) -> Iterator[Tensor]:
        """One loss."""
        places = Places.of(batch)
        size = states.square().mean().sqrt()
        noisy = states + (torch.rand_like(states) * 2 - 1) * NOISE * size
        (predicted,) = unroll(self.head, model, noisy, batch, places, 1)
        kept, _ = _labels(batch, places, 0)
        truth = take(states, (places.at + 1).clamp(max=states.shape[1] - 1))[kept]
        guess = predicted[kept]
        chances = unembed(model, truth).float().softmax(-1)
        token_loss = -(chances * self.head.logits(model, guess).float().log_softmax(-1)).sum(-1).mean()
        yield F.smooth_l1_loss(guess, truth) + TOKEN_SHARE * token_loss

    def hits(self, model: PreTrainedModel, states: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """How often each step is right, its input the true tokens and the head's own features."""
        places, counts = Places.of(batch), []
        features = self.head.enter(self._read(states))
        for step, out in enumerate(unroll(self.head, model, features, batch, places, self.depth)):
            kept, labels = _labels(batch, places, step)
            guesses = self.head.token_ids(five_likeliest(self.head.logits(model, out[kept])))
            counts.append(count_hits(guesses, labels))
        return torch.stack(counts)

    def _read(self, states: Tensor) -> Tensor:
        """The hidden states that the head reads."""
        return states


class FusedEagleLearner(EagleLearner):
    """Cross-entropy of every step with what the model thinks likely there, among the tokens the head can propose.

    Args:
        head: The head.
        depth: How many steps are trained.

    Source: Li et al. 2025, "EAGLE-3", §3.2; the weight of a step falls as in its published training.
    """

    head: FusedEagleHead

    def losses(self, model: PreTrainedModel, states: Tensor, batch: dict[str, Tensor]) -> Iterator[Tensor]:
        """One loss, since every step goes on from the one before."""
        places = Places.of(batch)
        last = states[..., -self.head.config.hidden_size :]
        tokens = self.head.token_ids(torch.arange(len(self.head.d2t), device=states.device))
        total = torch.zeros((), device=states.device)
        features = self.head.enter(self._read(states))
        for step, out in enumerate(unroll(self.head, model, features, batch, places, self.depth)):
            kept, _ = _labels(batch, places, step)
            with torch.no_grad():
                index = (places.at + 1 + step).clamp(max=states.shape[1] - 1)
                truth = unembed(model, take(last, index)[kept]).float()
                can_say = torch.isin(truth.argmax(-1), tokens)
                chances = truth[can_say][:, tokens].softmax(-1)
            if len(chances) > 0:
                says = self.head.logits(model, out[kept][can_say]).float().log_softmax(-1)
                total = total - DECAY**step * (chances * says).sum(-1).mean()
        yield total

    def _read(self, states: Tensor) -> Tensor:
        """Those of the fused layers; what the LM head reads stands behind them."""
        return states[..., : -self.head.config.hidden_size]


def _labels(batch: dict[str, Tensor], places: Places, step: int) -> tuple[Tensor, Tensor]:
    """Which places have a token for this step to guess that the model wrote, and which token."""
    ids, at = batch["input_ids"], places.at + 2 + step
    inside = at.clamp(max=ids.shape[1] - 1)
    kept = places.is_place & (at < ids.shape[1]) & batch["wanted"].gather(1, inside)
    return kept, ids.gather(1, inside)[kept]


def _attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, later: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention to the pairs of the text, and of each place to its own later pairs.

    Args:
        query: `[batch, heads, places, dim]`.
        keys: `[batch, kv heads, tokens, dim]`.
        values: As the keys.
        visible: bool `[batch, places, tokens]`.
        later: Keys and values `[batch, kv heads, places, dim]`.
    """
    kv_heads = keys.shape[1]
    grouped = query.reshape(len(query), kv_heads, -1, *query.shape[2:]) * query.shape[-1] ** -0.5
    text = torch.einsum("bkgpd,bktd->bkgpt", grouped, keys).masked_fill(~visible[:, None, None], float("-inf"))
    own = [(grouped * key[:, :, None]).sum(-1, keepdim=True) for key, _ in later]
    weights = torch.cat((text, *own), dim=-1).softmax(-1, dtype=torch.float32).to(values.dtype)
    context = torch.einsum("bkgpt,bktd->bkgpd", weights[..., : keys.shape[2]], values)
    for i, (_, value) in enumerate(later):
        context = context + weights[..., keys.shape[2] + i, None] * value[:, :, None]
    return context.reshape(query.shape)
