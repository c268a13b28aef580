"""Training of heads that guess side by side, each a place further on, from the same hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.heads.base_model import unembed
from lookahead.training.learner import Learner, count_hits, five_likeliest, targets

DECAY = 0.8
"""A head's loss counts so much of that of the head before: later tokens are guessed worse, and needed less often."""

HEADS_SHARE = 0.2
"""How much the heads' losses count beside the model's own where both are trained."""


class ParallelHeads(Protocol):
    """Heads that guess side by side."""

    def guess(self, model: PreTrainedModel, head: int, states: Tensor, places: Tensor) -> Tensor:
        """Logits `[n, vocab]` of one head at places, int64 `[n]`, of flattened states `[batch, tokens, size]`."""


class ParallelLearner(Learner):
    """Cross-entropy of every head with the token it has to guess, the later the less.

    One head's loss is sent backward before the next head's logits are computed, so that only one head's are ever
    there: with a vocabulary V and a hidden size d the peak is O(V + d) a token and not O(heads · V + d).

    Args:
        heads: The heads, a module.
        depth: How many.
        layers: The hidden states they read, what the LM head reads last; empty for that alone.
        is_joint: Whether the model is trained as well: its own loss then counts, and theirs `HEADS_SHARE` of it.

    Source: Cai et al. 2024, "Medusa", §2.2.1 (the loss and its decay) and §2.2.2 (joint training); Gloeckle et al.
        2024, "Better & Faster Large Language Models via Multi-token Prediction", §2 (one head after the other).
    """

    def __init__(
        self, heads: ParallelHeads, depth: int, *, layers: tuple[int, ...] = (), is_joint: bool = False
    ) -> None:
        super().__init__()
        self.heads = heads
        self.layers = layers
        self.depth = depth
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
