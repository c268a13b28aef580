"""What trains heads: the losses of a kind of heads, and how often it guesses right."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lookahead.heads.base_model import unembed
from lookahead.heads.medusa import MedusaHeads
from lookahead.heads.mtp import MtpHeads

DECAY = 0.8
"""Weight of a head's loss relative to the head before: later tokens are guessed worse, and needed less often."""

HEADS_SHARE = 0.2
"""Weight of the heads' losses beside the model's own where both are trained."""


class Learner(nn.Module, ABC):
    """Heads that can be trained on the hidden states of a model.

    Attributes:
        layers: The decoder layers whose inputs it reads; empty for what the LM head reads.
        depth: How many tokens it guesses.
    """

    layers: tuple[int, ...] = ()
    depth: int

    @abstractmethod
    def losses(self, model: PreTrainedModel, states: Tensor, batch: dict[str, Tensor]) -> Iterator[Tensor]:
        """Scalars whose sum is the loss; the backward pass of each may run before the next is computed.

        Args:
            model: The model the heads are of.
            states: `[batch, tokens, size]`, its hidden states.
            batch: `input_ids` and `wanted`, `[batch, tokens]`, padded on the right.
        """

    @abstractmethod
    def hits(self, model: PreTrainedModel, states: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """How often guesses are right, int64 `[depth, 3]`, see `count_hits`."""


class IndependentHeadsLearner(Learner):
    """Cross-entropy of every head with the token it has to guess, the later the less.

    The backward pass of a head runs before the next head's logits are computed. With a vocabulary V and a hidden size d
    the peak memory is O(V + d) a token and not O(heads · V + d).

    Args:
        heads: The heads.
        is_joint: Whether the model is trained as well: its own loss then counts, and theirs `HEADS_SHARE` of it.

    Source: Cai et al. 2024, "Medusa", §2.2.1 (the loss and its decay) and §2.2.2 (joint training); Gloeckle et al.
        2024, "Better & Faster Large Language Models via Multi-token Prediction", §2 (one head after the other).
    """

    def __init__(self, heads: MedusaHeads | MtpHeads, *, is_joint: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.layers = heads.hidden_layers if isinstance(heads, MtpHeads) else ()
        self.depth = len(heads)
        self._is_joint = is_joint

    def losses(self, model: PreTrainedModel, states: Tensor, batch: dict[str, Tensor]) -> Iterator[Tensor]:
        """The model's own loss where it is trained, then that of every head."""
        if self._is_joint:
            places, labels = targets(batch, 1)
            last = states[..., -model.config.get_text_config().hidden_size :]
            yield F.cross_entropy(unembed(model, last.flatten(0, 1)[places]).float(), labels)
        for head in range(self.depth):
            places, labels = targets(batch, head + 2)
            if len(places) > 0:
                share = DECAY ** (head + 1) * (HEADS_SHARE if self._is_joint else 1.0)
                yield share * F.cross_entropy(self.heads.guess(model, head, states, places).float(), labels)

    def hits(self, model: PreTrainedModel, states: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """How often each head is right."""
        counts = []
        for head in range(self.depth):
            places, labels = targets(batch, head + 2)
            counts.append(count_hits(five_likeliest(self.heads.guess(model, head, states, places)), labels))
        return torch.stack(counts)


def targets(batch: dict[str, Tensor], ahead: int) -> tuple[Tensor, Tensor]:
    """Where the token `ahead` positions on is to be guessed, and what it is.

    Only places where drafting begins count: those whose next token, too, the model writes itself.

    Args:
        batch: `input_ids` and `wanted`, `[batch, tokens]`.
        ahead: At least 1; 1 is the token that the LM head gives.

    Returns:
        int64 `[n]`, places in the flattened batch, and int64 `[n]`, the tokens.
    """
    ids, wanted = batch["input_ids"], batch["wanted"]
    counts = torch.zeros_like(wanted)
    end = max(0, wanted.shape[1] - ahead)
    counts[:, :end] = wanted[:, 1 : 1 + end] & wanted[:, ahead:]
    places = counts.flatten().nonzero().squeeze(1)
    return places, ids.flatten()[places + ahead]


def five_likeliest(logits: Tensor) -> Tensor:
    """int64 `[n, 5]`, or fewer where there are no five, of logits `[n, vocab]`; the likeliest first."""
    return logits.topk(min(5, logits.shape[-1]), dim=-1).indices


def count_hits(guesses: Tensor, labels: Tensor) -> Tensor:
    """Right first guesses, right ones among five, and trials, int64 `[3]`, of int64 `[n, 5]` and labels `[n]`."""
    right = guesses == labels[:, None]
    return torch.stack([right[:, 0].sum(), right.any(1).sum(), torch.tensor(len(labels), device=labels.device)])
