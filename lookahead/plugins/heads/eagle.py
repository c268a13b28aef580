"""EAGLE heads: one decoder layer that predicts the model's hidden states token by token, and its drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from lookahead.plugins.heads.guess_tree import WIDTH, GrowingDrafter, GuessTree
from lookahead.plugins.heads.layers import DraftLayer, gather_positions, unembed

DEPTH = 6  # maximum number of tokens guessed in a row
ROOT_WIDTH = 32  # guesses after the root
DRAFT_VOCAB = 32_000  # maximum vocabulary of a new EAGLE-3 head, as in published ones


class WideLayer(DraftLayer):
    """A layer whose attention reads the embedding and the features, each normalized."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


class EagleHead(nn.Module):
    """Predicts the next feature (the input of the LM head) from the last feature and the token sampled from it.

    It attends to all earlier pairs of feature and token. The LM head and the embedding are the model's. The weights
    have the names of published checkpoints.

    Source: Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", §3.1.
    """

    kind = "eagle"
    hidden_layers: tuple[int, ...] = (-1,)  # its inputs, numbered as in `output_hidden_states`
    cached_layers = 1  # number of its attention layers
    depth = DEPTH

    def __init__(self, config: LlamaConfig, *, bias: bool = True) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=bias)
        self.layers = nn.ModuleList([DraftLayer(config, hidden)])
        self.rotation = LlamaRotaryEmbedding(config)

    @property
    def layer(self) -> DraftLayer:
        """The decoder layer."""
        return cast(DraftLayer, self.layers[0])

    def enter(self, states: Tensor) -> Tensor:
        """Features `[..., hidden]` of the model's hidden states `[..., size]`."""
        return states

    def pair(self, features: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """The input of attention, `[..., reads]`, and the residual, `[..., hidden]`."""
        both: Tensor = self.fc(torch.cat((embeddings, features), dim=-1))
        return both, both

    def logits(self, model: PreTrainedModel, features: Tensor) -> Tensor:
        """Logits over the tokens it can propose, `[..., tokens]`, of features `[..., hidden]`."""
        return unembed(model, features)

    def token_ids(self, guesses: Tensor) -> Tensor:
        """The model's token ids of indices into the logits."""
        return guesses


class FusedEagleHead(EagleHead):
    """Predicts the next token from hidden states of several layers, and further tokens from its own output.

    Its features may differ from the model's. Its vocabulary is the most frequent part of the model's.

    Source: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
        Test", §3.
    """

    def __init__(self, config: LlamaConfig, *, hidden_layers: tuple[int, ...], draft_vocab: int) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.hidden_layers = hidden_layers
        hidden = config.hidden_size
        self.fc = nn.Linear(len(hidden_layers) * hidden, hidden, bias=False)
        self.midlayer = WideLayer(config)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, draft_vocab, bias=False)
        self.rotation = LlamaRotaryEmbedding(config)
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64))

    @property
    def layer(self) -> DraftLayer:
        return self.midlayer

    def enter(self, states: Tensor) -> Tensor:
        """Features `[..., hidden]` of the model's concatenated hidden states, `[..., layers · hidden]`."""
        features: Tensor = self.fc(states)
        return features

    def pair(self, features: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """The input of attention, `[..., 2 · hidden]`, and the residual, `[..., hidden]`."""
        read = torch.cat((self.midlayer.input_layernorm(embeddings), self.midlayer.hidden_norm(features)), dim=-1)
        return read, features

    def logits(self, model: PreTrainedModel, features: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.norm(features))
        return out

    def token_ids(self, guesses: Tensor) -> Tensor:
        return guesses + self.d2t[guesses]


def fused_layers(model: PreTrainedModel) -> tuple[int, int, int]:
    """The layers that an EAGLE-3 head reads: a low, a middle and a high one, as published.

    For a small model: the embeddings, the first layer and the last. Its later layers keep little of the tokens
    themselves, which a head looks up.
    """
    layers: int = model.config.get_text_config().num_hidden_layers
    return (2, layers // 2, layers - 3) if layers >= 8 else (0, 1, layers)


class EagleDrafter(GrowingDrafter):
    """Drafts with an EAGLE head: a tree grown level by level from the most likely nodes, then cut to the best ones.

    Source: Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", §4.1 (expansion)
        and §4.2 (reranking), the latter by probabilities that are calibrated while decoding.
    """

    _heads: EagleHead

    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        features = self._heads.enter(pad_sequence(list(states), batch_first=True))
        read, add = self._heads.pair(features, self._embed(pad_sequence(list(tokens), batch_first=True)))
        new = [len(each) for each in tokens]
        out = self._caches[0].extend(self._heads.layer, self._heads.rotation, rows, new, read, add)
        self._last.update(zip(rows, out, strict=True))

    def draft(self, rows: Sequence[int], max_nodes: int) -> list[GuessTree]:
        head, out = self._heads, torch.stack([self._last[row] for row in rows])
        past, lengths, seen = self._caches[0].padded(head.layer, rows)
        seen = seen[:, None]  # by the root

        def run(level: int, tokens: Tensor, features: Tensor, parents: Tensor) -> Tensor:
            nonlocal past, seen
            own = torch.eye(tokens.shape[1], dtype=torch.bool, device=out.device).expand(len(rows), -1, -1)
            seen = torch.cat((gather_positions(seen, parents), own), -1)
            read, add = head.pair(features, self._embed(tokens))
            positions = (lengths + level).expand_as(tokens)
            grown, past = head.layer(read, add, head.rotation, positions, seen, past=past)
            return cast(Tensor, grown)

        return self._grow(out, run, depth=DEPTH, width=WIDTH, root_width=ROOT_WIDTH)

    def _guesses(self, out: Tensor, most: int) -> tuple[Tensor, Tensor]:
        probs, indices = self._guess(self._heads.logits(self._model, out), most)
        return probs, self._heads.token_ids(indices)

    def _embed(self, tokens: Tensor) -> Tensor:
        table: Any = self._model.get_input_embeddings()
        embedded: Tensor = table(tokens.to(table.weight.device)).to(tokens.device)
        return embedded
