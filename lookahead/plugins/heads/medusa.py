"""Medusa heads: head k guesses the token k + 2 positions after a hidden state, independently of the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lookahead.ngram.chains import IntArray
from lookahead.ngram.hit_rates import AcceptanceTable
from lookahead.plugins.heads.guess_tree import FloatArray, GuessTree, HeadDrafter
from lookahead.plugins.heads.target import lm_head

_GUESSES = 32  # per head; drafts rarely use lower ranks


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); with W and b zero it is the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., hidden]` to the same."""
        return hidden + nn.functional.silu(self.linear(hidden))


class MedusaHeads(nn.ModuleList):
    """Heads on the LM head's input, each with residual blocks and a projection to the vocabulary.

    The weights have the names of published checkpoints: `0.0.linear.weight` is the first block of head 0, `0.1.weight`
    its projection.

    Source: Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
        §2.1.1.
    """

    kind = "medusa"

    def __init__(self, hidden_size: int, vocab_size: int, *, heads: int, blocks: int = 1) -> None:
        super().__init__(
            nn.Sequential(
                *(ResidualBlock(hidden_size) for _ in range(blocks)), nn.Linear(hidden_size, vocab_size, bias=False)
            )
            for _ in range(heads)
        )
        self.depth, self.blocks = heads, blocks

    @classmethod
    @torch.no_grad()
    def fresh(cls, model: PreTrainedModel, *, heads: int, blocks: int = 1) -> MedusaHeads:
        """Untrained heads with the logits of the LM head: its projection after identity blocks."""
        weight = lm_head(model).weight
        made = cls(weight.shape[1], weight.shape[0], heads=heads, blocks=blocks)
        for parameter in made.parameters():
            parameter.zero_()
        for head in made:
            head[-1].weight.copy_(weight)  # type: ignore[index]
        return made.to(weight.device, weight.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of every head, `[heads, ..., vocab]` of hidden states `[..., hidden]`."""
        return torch.stack([head(hidden) for head in self])


def independent_heads_tree(
    tokens: IntArray, draft_probs: FloatArray, rates: AcceptanceTable, max_nodes: int
) -> GuessTree:
    """Combine the guesses of independent heads: each guess of a head may follow each guess of the previous head.

    Published trees of this kind are fixed, chosen by the average accuracy of every rank of every head. Here each step
    takes the nodes with the highest product of probabilities along their path. The guesses and their probabilities are
    `[heads, k]`; the guesses of one head are distinct.

    Source: Cai et al. 2024, "Medusa", §2.3.3 (sparse trees), there greedy over measured accuracies.
    """
    heads, width = tokens.shape
    kinds = np.indices((heads, width), np.int32).transpose(1, 2, 0)
    probabilities = rates.calibrate(kinds, draft_probs)
    # The best nodes of a level follow the best nodes of the previous level, so no other node needs children.
    chosen, parents, path_probs, first = [], [], np.ones(1, np.float32), 0
    for head in range(heads):
        paths = (path_probs[:, None] * probabilities[head]).ravel()
        best = np.argsort(-paths, kind="stable")[:max_nodes]
        chosen.append(head * width + best % width)
        parents.append(first + best // width)
        path_probs, first = paths[best], 1 + sum(map(len, chosen[:-1]))
    index, earlier = np.concatenate(chosen), np.concatenate(parents).astype(np.int32)
    return GuessTree.of(tokens.ravel()[index], earlier, kinds.reshape(-1, 2)[index], draft_probs.ravel()[index])


class MedusaDrafter(HeadDrafter):
    """Drafts with Medusa heads from the last hidden state of each row: their guesses combined into one tree."""

    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        self._last.update((row, new[-1]) for row, new in zip(rows, states, strict=True))

    def draft(self, rows: Sequence[int], max_nodes: int) -> list[GuessTree]:
        logits = self._heads(torch.stack([self._last[row] for row in rows]))
        draft_probs, tokens = self._guess(logits, _GUESSES)
        # One copy from the device: [heads, rows, guesses], tokens and the bits of their probabilities.
        packed = torch.stack((tokens.int(), draft_probs.view(torch.int32))).cpu().numpy()
        return [
            independent_heads_tree(packed[0, :, i], packed[1, :, i].view(np.float32), self._rates, max_nodes)
            for i in range(len(rows))
        ]
