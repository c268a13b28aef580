"""Medusa and MTP heads: head k guesses the token k + 2 positions after a hidden state, independently of the others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from lookahead.plugins.heads.guess_tree import GuessTree, HeadDrafter, independent_heads_tree
from lookahead.plugins.heads.layers import DraftLayer, gather_positions, layer_config, lm_head, unembed

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

    def guess(self, model: PreTrainedModel, head: int, states: Tensor, at: Tensor, kept: Tensor) -> Tensor:
        """Logits `[n, vocab]` of one head at given positions.

        Args:
            model: The target.
            head: The head, from 0.
            states: Hidden states `[batch, tokens, size]`, where size is `hidden`, for `MtpHeads` `2 · hidden`.
            at: int64 `[batch, positions]`, indices of tokens.
            kept: bool `[batch, positions]`, true for the n requested positions.
        """
        logits: Tensor = self[head](gather_positions(states, at)[kept])
        return logits

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of every head, `[heads, ..., vocab]` of hidden states `[..., hidden]`."""
        return torch.stack([head(hidden) for head in self])


class MtpHead(DraftLayer):
    """A decoder layer that reads the hidden states of a low layer and the last one, with the last as residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.low_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.kept = nn.Parameter(torch.ones(config.hidden_size))  # scales the last hidden states

    def enter(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The input of attention, `[..., 2 · hidden]`, and the residual, `[..., hidden]`."""
        low, last = states.chunk(2, dim=-1)
        return torch.cat((self.low_layernorm(low), self.input_layernorm(last)), dim=-1), last * self.kept


class MtpHeads(nn.Module):
    """Heads before the model's LM head. Each attends to all earlier hidden states.

    They read the last layer, which keeps little of the tokens themselves, and a low one.

    Source: Gloeckle et al. 2024, "Better & Faster Large Language Models via Multi-token Prediction", §2. There heads
    and model are trained together from the start. Here heads are added to a trained model that may stay unchanged, so
    each starts as the identity.
    """

    kind = "mtp"

    def __init__(self, config: LlamaConfig, *, heads: int, low_layer: int) -> None:
        super().__init__()
        self.config = config
        self.hidden_layers = (low_layer, -1)
        self.depth = self.cached_layers = heads
        self.heads = nn.ModuleList(MtpHead(config) for _ in range(heads))
        self.rotation = LlamaRotaryEmbedding(config)

    def head(self, index: int) -> MtpHead:
        """One of the heads."""
        return cast(MtpHead, self.heads[index])

    @classmethod
    @torch.no_grad()
    def fresh(cls, model: PreTrainedModel, *, heads: int) -> MtpHeads:
        """Untrained heads with layers like the model's and the logits of its LM head."""
        is_small = model.config.get_text_config().num_hidden_layers < 8
        made = cls(layer_config(model), heads=heads, low_layer=1 if is_small else 2)
        for index in range(heads):
            made.head(index).self_attn.o_proj.weight.zero_()
            made.head(index).mlp.down_proj.weight.zero_()
        return made.to(lm_head(model).weight.device)

    def guess(self, model: PreTrainedModel, head: int, states: Tensor, at: Tensor, kept: Tensor) -> Tensor:
        layer, index = self.head(head), torch.arange(states.shape[1], device=states.device).expand(len(states), -1)
        out, _ = layer(*layer.enter(states), self.rotation, index, index[:, None] <= at[..., None], at)
        return unembed(model, out[kept])


class IndependentHeadsDrafter(HeadDrafter):
    """Combines the guesses of independent heads into one tree per row."""

    def draft(self, rows: Sequence[int], max_nodes: int) -> list[GuessTree]:
        draft_probs, tokens = self._guess(self._logits(rows), _GUESSES)
        # One copy from the device: [heads, rows, guesses], tokens and the bits of their probabilities.
        packed = torch.stack((tokens.int(), draft_probs.view(torch.int32))).cpu().numpy()
        return [
            independent_heads_tree(packed[0, :, i], packed[1, :, i].view(np.float32), self._rates, max_nodes)
            for i in range(len(rows))
        ]

    @abstractmethod
    def _logits(self, rows: Sequence[int]) -> Tensor:
        """Logits of every head after the last token of each row, `[heads, rows, vocab]`."""


class MedusaDrafter(IndependentHeadsDrafter):
    """Drafts with Medusa heads from the last hidden state of each row."""

    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        self._last.update((row, each[-1]) for row, each in zip(rows, states, strict=True))

    def _logits(self, rows: Sequence[int]) -> Tensor:
        logits: Tensor = self._heads(torch.stack([self._last[row] for row in rows]))
        return logits


class MtpDrafter(IndependentHeadsDrafter):
    """Drafts with MTP heads, each with keys and values of every token."""

    _heads: MtpHeads

    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        padded, new = pad_sequence(list(states), batch_first=True), [len(each) for each in states]
        outs = []
        for index, cache in enumerate(self._caches):
            layer = self._heads.head(index)
            outs.append(cache.extend(layer, self._heads.rotation, rows, new, *layer.enter(padded)))
        self._last.update(zip(rows, torch.cat(outs, 1), strict=True))

    def _logits(self, rows: Sequence[int]) -> Tensor:
        return unembed(self._model, torch.stack([self._last[row] for row in rows], 1))
