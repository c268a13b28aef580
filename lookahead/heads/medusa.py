"""Medusa heads: each head guesses one later token from the last hidden state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lookahead.heads.base_model import lm_head
from lookahead.heads.guess_tree import IndependentHeadsDrafter, Warp
from lookahead.ngram.acceptance import AcceptanceTable


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), which is x as long as W and b are zero."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., hidden]` to the same."""
        return hidden + nn.functional.silu(self.linear(hidden))


class MedusaHeads(nn.ModuleList):
    """Heads on the hidden state that the LM head reads; head k guesses the token k + 2 positions behind it.

    Each is some residual blocks and a projection to the vocabulary. The names of the weights are those of published
    checkpoints: `0.0.linear.weight` is the first block of head 0, `0.1.weight` its projection.

    Args:
        hidden_size: Of the model.
        vocab_size: Of the model.
        heads: How many.
        blocks: Residual blocks of each.

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
        self.blocks = blocks

    @classmethod
    @torch.no_grad()
    def fresh(cls, model: PreTrainedModel, *, heads: int, blocks: int = 1) -> MedusaHeads:
        """Untrained heads, which give the logits of the LM head: its projection behind blocks that change nothing."""
        weight = lm_head(model).weight
        made = cls(weight.shape[1], weight.shape[0], heads=heads, blocks=blocks)
        for parameter in made.parameters():
            parameter.zero_()
        for head in made:
            head[-1].weight.copy_(weight)  # type: ignore[index]
        return made.to(weight.device, weight.dtype)

    def guess(self, model: PreTrainedModel, head: int, states: Tensor, places: Tensor) -> Tensor:
        """Logits `[n, vocab]` of one head at places, int64 `[n]`, of flattened states `[batch, tokens, hidden]`."""
        logits: Tensor = self[head](states.flatten(0, 1)[places])
        return logits

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of every head, `[heads, ..., vocab]` of hidden states `[..., hidden]`."""
        return torch.stack([head(hidden) for head in self])


class MedusaDrafter(IndependentHeadsDrafter):
    """Drafts with Medusa heads, which remember the last hidden state of each row."""

    reads_all = False

    def __init__(self, heads: MedusaHeads, model: PreTrainedModel, rates: AcceptanceTable, warp: Warp | None) -> None:
        super().__init__(model, rates, warp)
        self._heads = heads

    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Keep the last hidden state of each row."""
        self._last.update((row, each[-1]) for row, each in zip(rows, states, strict=True))

    def _logits(self, rows: Sequence[int]) -> Tensor:
        logits: Tensor = self._heads(torch.stack([self._last[row] for row in rows]))
        return logits
