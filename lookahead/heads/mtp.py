"""MTP heads: each head is a decoder layer on the model's hidden states and guesses one later token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, PreTrainedModel

from lookahead.heads.base_model import lm_head, unembed
from lookahead.heads.guess_tree import IndependentHeadsDrafter, Warp
from lookahead.heads.layers import DraftCache, DraftLayer, Norm, Rotation, attend, layer_config, take
from lookahead.ngram.acceptance import AcceptanceTable


class MtpHead(DraftLayer):
    """A decoder layer that reads a low layer's hidden states beside the last ones, each through a norm.

    Its output is added to the last ones, each dimension of which has a learned weight.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.low_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.kept = nn.Parameter(torch.ones(config.hidden_size))

    def enter(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, `[..., 2 · hidden]`, and what it is added to, `[..., hidden]`, of both states."""
        low, last = states.chunk(2, dim=-1)
        return torch.cat((self.low_layernorm(low), self.input_layernorm(last)), dim=-1), last * self.kept


class MtpHeads(nn.Module):
    """Independent heads on the same hidden states, in front of the model's own LM head.

    Head k guesses the token k + 2 positions behind a hidden state, and attends to all earlier hidden states.

    Args:
        config: Sizes of a layer, as of a Llama.
        heads: How many.
        low_layer: The layer they read beside the last one, whose states keep little of the tokens that were read.

    Attributes:
        hidden_layers: Both, numbered as by `output_hidden_states`.

    Source: Gloeckle et al. 2024, "Better & Faster Large Language Models via Multi-token Prediction", §2. There heads
        and model are trained together from the beginning. Here they are added to a trained model, which may stay as
        it is, so each begins as one that changes nothing.
    """

    kind = "mtp"

    def __init__(self, config: LlamaConfig, *, heads: int, low_layer: int) -> None:
        super().__init__()
        self.config = config
        self.hidden_layers = (low_layer, -1)
        self.heads = nn.ModuleList(MtpHead(config) for _ in range(heads))
        self.rotation = Rotation(config)

    def __len__(self) -> int:
        return len(self.heads)

    def head(self, index: int) -> MtpHead:
        """One of them."""
        head = self.heads[index]
        assert isinstance(head, MtpHead)
        return head

    @classmethod
    @torch.no_grad()
    def fresh(cls, model: PreTrainedModel, *, heads: int) -> MtpHeads:
        """Untrained heads with layers like those of the model, which give the logits of its LM head.

        The low layer is one whose hidden states still tell the tokens, and the ones before them.
        """
        is_small = model.config.get_text_config().num_hidden_layers < 8
        made = cls(layer_config(model), heads=heads, low_layer=1 if is_small else 2)
        for index in range(heads):
            made.head(index).self_attn.o_proj.weight.zero_()
            made.head(index).mlp.down_proj.weight.zero_()
        return made.to(lm_head(model).weight.device)

    def guess(self, model: PreTrainedModel, head: int, states: Tensor, places: Tensor) -> Tensor:
        """Logits `[n, vocab]` of one head at places, int64 `[n]`, of flattened states `[batch, tokens, 2 · hidden]`.

        Keys and values are made of all states, queries of those at the places alone.
        """
        layer, (batch, tokens) = self.head(head), states.shape[:2]
        position = torch.arange(tokens, device=states.device).expand(batch, -1)
        read, kept = layer.enter(states)
        keys, values = layer.keys_values(read, self.rotation(states, position))
        counts = torch.bincount(places // tokens, minlength=batch).tolist()
        at = pad_sequence((places % tokens).split(counts), batch_first=True)
        query = layer.query(take(read, at), self.rotation(states, at))
        out = layer.finish(take(kept, at), attend(query, keys, values, position[:, None] <= at[..., None]))
        return unembed(model, torch.cat([row[:count] for row, count in zip(out, counts, strict=True)]))


class MtpDrafter(IndependentHeadsDrafter):
    """Drafts with MTP heads, each with keys and values of every token of at most `rows` rows."""

    def __init__(
        self, heads: MtpHeads, model: PreTrainedModel, rates: AcceptanceTable, warp: Warp | None, rows: int
    ) -> None:
        super().__init__(model, rates, warp)
        self.hidden_layers = heads.hidden_layers
        self._heads = heads
        self._caches = [DraftCache(rows) for _ in range(len(heads))]

    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Run every head over the new hidden states."""
        padded, new = pad_sequence(list(states), batch_first=True), [len(each) for each in states]
        outs = []
        for index, cache in enumerate(self._caches):
            layer = self._heads.head(index)
            outs.append(cache.extend(layer, self._heads.rotation, rows, new, *layer.enter(padded)))
        self._last.update(zip(rows, torch.stack(outs, 1), strict=True))

    def forget(self, row: int) -> None:
        """Forget a row."""
        super().forget(row)
        for cache in self._caches:
            cache.lengths[row] = 0

    def _logits(self, rows: Sequence[int]) -> Tensor:
        return unembed(self._model, torch.stack([self._last[row] for row in rows], 1))
