"""Heads in training as modules of transformers' Trainer: their losses, and how many held-out tokens they guess."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lookahead.plugins.heads.eagle import EagleHead
from lookahead.plugins.heads.medusa import MedusaHeads
from lookahead.plugins.heads.target import gather_positions, hidden_states, unembed

DECAY = 0.8  # weight of a head's or step's loss relative to the previous one: later tokens are harder and matter less


class DraftStarts(NamedTuple):
    """The positions of a batch at which drafting may begin: positions whose next token is model output."""

    input_ids: Tensor  # int64 [batch, tokens]
    wanted: Tensor  # bool [batch, tokens]
    positions: Tensor  # int64 [batch, starts], ascending; 0 after the last
    is_start: Tensor  # bool [batch, starts], False after the last

    @classmethod
    def of(cls, input_ids: Tensor, wanted: Tensor) -> DraftStarts:
        """The starts of a batch, where `wanted` tells model output."""
        begins = wanted[:, 1:]
        order = begins.float().argsort(dim=1, descending=True, stable=True)
        most = int(begins.sum(1).max())
        is_start = begins.gather(1, order)[:, :most]
        return cls(input_ids, wanted, order[:, :most] * is_start, is_start)

    def labels(self, step: int) -> tuple[Tensor, Tensor]:
        """Which starts have a model-written token for this step to guess, and the tokens.

        Step 0 guesses the second token after a start, since the model itself chooses the first.
        """
        at = self.positions + 2 + step
        inside = at.clamp(max=self.input_ids.shape[1] - 1)
        kept = self.is_start & (at < self.input_ids.shape[1]) & self.wanted.gather(1, inside)
        return kept, self.input_ids.gather(1, inside)[kept]


class Learner(nn.Module, ABC):
    """Heads that learn from the hidden states of a model, which stays as it is and is no part of the checkpoints.

    They read the inputs of the decoder layers `layers`, or the input of the LM head if it is empty.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = layers
        self.__dict__["model"] = model  # past `nn.Module`, of which it is no submodule

    def forward(self, input_ids: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """The loss of a batch `[batch, tokens]`, and int64 `[1, depth, 2]`: hits and trials of each guessed token."""
        starts = DraftStarts.of(input_ids, wanted)
        loss, hits = torch.zeros((), device=input_ids.device), []
        with torch.no_grad():
            states = hidden_states(self.model, input_ids, self.layers).float()
        for step, (step_loss, logits) in enumerate(self.steps(states, starts)):
            loss = loss + DECAY**step * step_loss
            if not self.training:
                labels = starts.labels(step)[1]
                hits.append((int((self.token_ids(logits.argmax(-1)) == labels).sum()), len(labels)))
        return {"loss": loss} if self.training else {"loss": loss, "hits": torch.tensor([hits])}

    @abstractmethod
    def steps(self, states: Tensor, starts: DraftStarts) -> Iterator[tuple[Tensor, Tensor]]:
        """The loss of each guessed token in turn, and its logits `[n, tokens]`, from states `[batch, tokens, size]`."""

    def token_ids(self, indices: Tensor) -> Tensor:
        """The model's token ids for indices into the logits."""
        return indices


class MedusaLearner(Learner):
    """Cross-entropy of every head with its token.

    The logits of a head are computed again on the way back: with a vocabulary V and a hidden size d the peak memory per
    token is O(V + d), not O(heads · V + d).

    Source: Cai et al. 2024, "Medusa", §2.2.1 (the loss and its decay).
    """

    def __init__(self, heads: MedusaHeads, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.heads = heads

    def steps(self, states: Tensor, starts: DraftStarts) -> Iterator[tuple[Tensor, Tensor]]:
        at_starts = gather_positions(states, starts.positions)
        for step, head in enumerate(self.heads):
            kept, labels = starts.labels(step)
            yield checkpoint(_cross_entropy, head, at_starts[kept], labels, use_reentrant=False)


def _cross_entropy(head: nn.Module, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = head(states)
    return F.cross_entropy(logits.float(), labels, reduction="sum") / max(1, len(labels)), logits


class EagleLearner(Learner):
    """Cross-entropy of every step with the model's distribution over the tokens that the head can propose.

    A step counts only if the token of the text is one of these. All steps guess tokens after starts, so only the
    distributions at starts are needed, and each is computed once.

    Source: Li et al. 2025, "EAGLE-3", §3.2; the weight of a step decays as in its published training.
    """

    def __init__(self, head: EagleHead, model: PreTrainedModel, depth: int) -> None:
        super().__init__(model, (*head.hidden_layers, -1))  # the last one gives the model's distribution
        self.head, self.depth = head, depth

    def token_ids(self, indices: Tensor) -> Tensor:
        return self.head.token_ids(indices)

    def steps(self, states: Tensor, starts: DraftStarts) -> Iterator[tuple[Tensor, Tensor]]:
        read, last = states.tensor_split((-self.head.config.hidden_size,), -1)
        tokens = self.token_ids(torch.arange(len(self.head.d2t), device=states.device))
        begins = starts.wanted[:, 1:]
        with torch.no_grad():
            truth = unembed(self.model, last[:, :-1][begins], tokens).float().softmax(-1)
        row = begins.flatten().cumsum(0).view(begins.shape) - 1  # of the truth, by position
        for step, out in enumerate(self.unroll(read, starts)):
            kept, labels = starts.labels(step)
            at = (starts.positions + 1 + step).clamp(max=row.shape[1] - 1)
            probs, logits = truth[row.gather(1, at)[kept]], self.head.logits(out[kept])
            is_known = torch.isin(labels, tokens)
            surprise = -(probs * logits.float().log_softmax(-1)).sum(-1)[is_known]
            yield surprise.sum() / max(1, len(surprise)), logits

    def unroll(self, states: Tensor, starts: DraftStarts) -> Iterator[Tensor]:
        """Run the head as in drafting: the first step on the model's hidden states, later steps on its own output.

        The input tokens are the tokens of the text. In the first step a start attends to all pairs of states and token
        up to its own; in later steps also to its own later pairs. The steps of all starts run together.

        Source: Li et al. 2025, "EAGLE-3", §3.2 (training-time test).

        Yields:
            `[batch, starts, hidden]`: at step s, from 0, the output for the token s + 2 positions after each start,
            undefined beyond the text.
        """
        layer, rotation, (ids, _, positions, _) = self.head.midlayer, self.head.rotation, starts
        features = self.head.enter(states)
        with torch.no_grad():
            embeddings = self.model.get_input_embeddings()(ids).to(features.dtype)
        index = torch.arange(ids.shape[1] - 1, device=ids.device).expand(len(ids), -1)
        mask = index[:, None] <= positions[..., None]
        out, past = layer(features[:, :-1], embeddings[:, 1:], rotation, index, mask, positions)
        yield out
        own = torch.eye(mask.shape[1], dtype=torch.bool, device=ids.device).expand(len(ids), -1, -1)
        for step in range(1, self.depth):
            at = (positions + 1 + step).clamp(max=ids.shape[1] - 1)
            mask = torch.cat((mask, own), -1)
            out, past = layer(out, gather_positions(embeddings, at), rotation, positions + step, mask, past=past)
            yield cast(Tensor, out)
