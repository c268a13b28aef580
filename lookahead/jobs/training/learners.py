"""The training losses and the accuracy of each kind of heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lookahead.plugins.heads.eagle import EagleHead, FusedEagleHead
from lookahead.plugins.heads.independent_heads import MedusaHeads, MtpHeads
from lookahead.plugins.heads.layers import gather_positions, unembed

DECAY = 0.8  # weight of a head's or step's loss relative to the previous one: later tokens are harder and matter less
HEADS_SHARE = 0.2  # weight of the heads' losses relative to the model's loss in joint training
TOKEN_SHARE = 0.1  # weight of the token loss relative to the feature loss of EAGLE
NOISE = 0.1  # maximum noise on features relative to their size: in drafting they are predicted, not exact


class Learner(nn.Module, ABC):
    """Heads in training on the hidden states `[batch, tokens, size]` of a model."""

    layers: tuple[int, ...] = ()  # the decoder layers whose inputs are read; empty for the input of the LM head
    depth: int  # number of tokens to guess

    @abstractmethod
    def losses(self, model: PreTrainedModel, states: Tensor, batch: dict[str, Tensor]) -> Iterator[Tensor]:
        """Scalars that sum to the loss. The backward pass of each may run before the next is computed."""

    @abstractmethod
    def logits(self, model: PreTrainedModel, states: Tensor, starts: DraftStarts) -> Iterator[Tensor]:
        """Logits `[n, tokens]` of each guessed token in turn, at the `n` starts that have this token."""

    def token_ids(self, guesses: Tensor) -> Tensor:
        """The model's token ids for indices into the logits."""
        return guesses

    def hits(self, model: PreTrainedModel, states: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """int64 `[depth, 3]`: for each guessed token the top-1 hits, top-5 hits and trials."""
        starts, counts = DraftStarts.of(batch), []
        for step, logits in enumerate(self.logits(model, states, starts)):
            labels = starts.labels(step)[1]
            guesses = self.token_ids(logits.topk(min(5, logits.shape[-1])).indices)
            right = guesses == labels[:, None]
            counts.append([int(right[:, 0].sum()), int(right.any(1).sum()), len(labels)])
        return torch.tensor(counts)


class IndependentHeadsLearner(Learner):
    """Cross-entropy of every head with its token.

    The backward pass of a head runs before the next head's logits are computed: with a vocabulary V and a hidden size d
    the peak memory per token is O(V + d), not O(heads · V + d). In joint training (the states require gradients) the
    loss is the model's own loss and `HEADS_SHARE` times the losses of the heads.

    Source: Cai et al. 2024, "Medusa", §2.2.1 (the loss and its decay) and §2.2.2 (joint training); Gloeckle et al.
        2024, "Better & Faster Large Language Models via Multi-token Prediction", §2 (one head after the other).
    """

    def __init__(self, heads: MedusaHeads | MtpHeads) -> None:
        super().__init__()
        self.heads = heads
        self.layers = heads.hidden_layers if isinstance(heads, MtpHeads) else ()
        self.depth = heads.depth

    def losses(self, model: PreTrainedModel, states: Tensor, batch: dict[str, Tensor]) -> Iterator[Tensor]:
        starts, share = DraftStarts.of(batch), HEADS_SHARE if states.requires_grad else 1.0
        if states.requires_grad:
            kept, labels = starts.labels(-1)
            last = gather_positions(states[..., -model.config.get_text_config().hidden_size :], starts.positions)
            yield F.cross_entropy(unembed(model, last[kept]).float(), labels)
        for head, logits in enumerate(self.logits(model, states, starts)):
            if len(logits) > 0:
                labels = starts.labels(head)[1]
                yield share * DECAY ** (head + 1) * F.cross_entropy(logits.float(), labels)

    def logits(self, model: PreTrainedModel, states: Tensor, starts: DraftStarts) -> Iterator[Tensor]:
        for head in range(self.depth):
            yield self.heads.guess(model, head, states, starts.positions, starts.labels(head)[0])


class DraftStarts(NamedTuple):
    """The positions of a batch at which drafting may begin: positions whose next token is model output."""

    batch: dict[str, Tensor]  # `input_ids` and `wanted`, [batch, tokens]
    positions: Tensor  # int64 [batch, starts], ascending; 0 after the last
    is_start: Tensor  # bool [batch, starts], False after the last

    @classmethod
    def of(cls, batch: dict[str, Tensor]) -> DraftStarts:
        """The starts of a batch of `input_ids` and `wanted`."""
        begins = batch["wanted"][:, 1:]
        order = begins.float().argsort(dim=1, descending=True, stable=True)
        most = int(begins.sum(1).max())
        is_start = begins.gather(1, order)[:, :most]
        return cls(batch, order[:, :most] * is_start, is_start)

    def labels(self, step: int) -> tuple[Tensor, Tensor]:
        """Which starts have a model-written token for this step to guess, and the tokens.

        Step 0 guesses the second token after a start, since the model itself chooses the first.
        """
        ids, at = self.batch["input_ids"], self.positions + 2 + step
        inside = at.clamp(max=ids.shape[1] - 1)
        kept = self.is_start & (at < ids.shape[1]) & self.batch["wanted"].gather(1, inside)
        return kept, ids.gather(1, inside)[kept]


class EagleLearner(Learner):
    """Smooth L1 loss of predicted features, and a share of the cross-entropy of their token distributions.

    One step is trained. `depth` steps are measured on held-out text.

    Source: Li et al. 2024, "EAGLE", §3.2 (both losses, their weights, and noise on the features).
    """

    def __init__(self, head: EagleHead, depth: int) -> None:
        super().__init__()
        self.head = head
        self.layers = () if head.hidden_layers == (-1,) else (*head.hidden_layers, -1)
        self.depth = depth

    def losses(self, model: PreTrainedModel, states: Tensor, batch: dict[str, Tensor]) -> Iterator[Tensor]:
        starts = DraftStarts.of(batch)
        size = states.square().mean().sqrt()
        noisy = states + (torch.rand_like(states) * 2 - 1) * NOISE * size
        (out,) = unroll(self.head, model, noisy, starts, 1)
        kept, _ = starts.labels(0)
        truth = gather_positions(states, (starts.positions + 1).clamp(max=states.shape[1] - 1))[kept]
        predicted = out[kept]
        probs = unembed(model, truth).float().softmax(-1)
        token_loss = -(probs * self.head.logits(model, predicted).float().log_softmax(-1)).sum(-1).mean()
        yield F.smooth_l1_loss(predicted, truth) + TOKEN_SHARE * token_loss

    def logits(self, model: PreTrainedModel, states: Tensor, starts: DraftStarts) -> Iterator[Tensor]:
        features = self.head.enter(self._inputs(states))
        for step, out in enumerate(unroll(self.head, model, features, starts, self.depth)):
            yield self.head.logits(model, out[starts.labels(step)[0]])

    def token_ids(self, guesses: Tensor) -> Tensor:
        return self.head.token_ids(guesses)

    def _inputs(self, states: Tensor) -> Tensor:
        """The hidden states that the head reads. With `layers`, the states of the last layer come after them."""
        return states[..., : -self.head.config.hidden_size] if self.layers else states


class FusedEagleLearner(EagleLearner):
    """Cross-entropy of every step with the model's distribution over the tokens that the head can propose.

    A step counts only if the token of the text is one of these. All steps guess tokens after starts, so only the
    distributions at starts are needed, and each is computed once.

    Source: Li et al. 2025, "EAGLE-3", §3.2; the weight of a step decays as in its published training.
    """

    head: FusedEagleHead

    def losses(self, model: PreTrainedModel, states: Tensor, batch: dict[str, Tensor]) -> Iterator[Tensor]:
        starts, begins = DraftStarts.of(batch), batch["wanted"][:, 1:]
        tokens = self.head.token_ids(torch.arange(len(self.head.d2t), device=states.device))
        with torch.no_grad():
            last = states[:, :-1, -self.head.config.hidden_size :][begins]
            truth = unembed(model, last, tokens).float().softmax(-1)
        row = begins.flatten().cumsum(0).view(begins.shape) - 1  # of the truth, by position
        total = torch.zeros((), device=states.device)
        features = self.head.enter(self._inputs(states))
        for step, out in enumerate(unroll(self.head, model, features, starts, self.depth)):
            kept, labels = starts.labels(step)
            is_known = torch.isin(labels, tokens)
            if is_known.any():
                index = (starts.positions + 1 + step).clamp(max=row.shape[1] - 1)
                probs = truth[row.gather(1, index)[kept][is_known]]
                log_probs = self.head.logits(model, out[kept][is_known]).float().log_softmax(-1)
                total = total - DECAY**step * (probs * log_probs).sum(-1).mean()
        yield total


def unroll(
    head: EagleHead, model: PreTrainedModel, features: Tensor, starts: DraftStarts, steps: int
) -> Iterator[Tensor]:
    """Run a head as in drafting: the first step on the model's features, later steps on its own output.

    The input tokens are the tokens of the text. In the first step a start attends to all pairs of feature and token up
    to its own; in later steps also to its own later pairs. The steps of all starts run together.

    Source: Li et al. 2025, "EAGLE-3", §3.2 (training-time test).

    Args:
        head: The head.
        model: The model, for its embedding.
        features: `[batch, tokens, size]`, the features of the model that the head reads.
        starts: The positions where drafting begins, and the tokens.
        steps: Number of steps, at least 1.

    Yields:
        `[batch, starts, hidden]`: at step s, from 0, the output for the token s + 2 positions after each start,
        undefined beyond the text.
    """
    layer, ids = head.layer, starts.batch["input_ids"]
    embeddings = model.get_input_embeddings()(ids).to(features.dtype)
    index = torch.arange(ids.shape[1] - 1, device=ids.device).expand(len(ids), -1)
    mask = index[:, None] <= starts.positions[..., None]
    read, add = head.pair(features[:, :-1], embeddings[:, 1:])
    out, past = layer(read, add, head.rotation, index, mask, starts.positions)
    yield out
    own = torch.eye(mask.shape[1], dtype=torch.bool, device=ids.device).expand(len(ids), -1, -1)
    for step in range(1, steps):
        read, add = head.pair(
            out, gather_positions(embeddings, (starts.positions + 1 + step).clamp(max=ids.shape[1] - 1))
        )
        mask = torch.cat((mask, own), -1)
        out, past = layer(read, add, head.rotation, starts.positions + step, mask, past=past)
        yield out
