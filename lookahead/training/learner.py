"""What a kind of heads has to say to be trained: its losses, and how often it is right."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


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
        """Scalars whose sum is the loss; each may be sent backward, and forgotten, before the next is asked for.

        Args:
            model: The model the heads are of.
            states: `[batch, tokens, size]`, its hidden states.
            batch: `input_ids` and `wanted`, `[batch, tokens]`, padded on the right.
        """

    @abstractmethod
    def hits(self, model: PreTrainedModel, states: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """How often guesses are right, int64 `[depth, 3]`: first guesses, one of the first five, and of how many."""


def targets(batch: dict[str, Tensor], ahead: int) -> tuple[Tensor, Tensor]:
    """Where the token `ahead` places on is to be guessed, and what it is.

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
    """First guesses that are right, right ones among five, and how many there were, int64 `[3]`.

    Args:
        guesses: int64 `[n, 5]`.
        labels: int64 `[n]`.
    """
    right = guesses == labels[:, None]
    return torch.stack([right[:, 0].sum(), right.any(1).sum(), torch.tensor(len(labels), device=labels.device)])
