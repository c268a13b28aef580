"""EAGLE heads: one decoder layer that goes on from the model's hidden states, token by token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from lookahead.heads.base_model import unembed
from lookahead.heads.layers import DraftLayer, Norm, Rotation


class WideLayer(DraftLayer):
    """A layer whose attention reads the embedding beside the features, each with a norm of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)


class EagleHead(nn.Module):
    """Predicts the next feature, that is, what the LM head will read, from the last one and the token that followed.

    It sees the token that was sampled from a feature, which the feature alone does not say, and attends to all pairs
    before. The LM head and the embedding are the model's. The names of the weights are those of published checkpoints.

    Args:
        config: Sizes of the layer, as of a Llama.
        bias: Whether the projection of the pair has a bias.

    Attributes:
        hidden_layers: The hidden states of the model it reads, numbered as by `output_hidden_states`.

    Source: Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", §3.1.
    """

    hidden_layers: tuple[int, ...] = (-1,)

    def __init__(self, config: LlamaConfig, *, bias: bool = True) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=bias)
        self.layers = nn.ModuleList([DraftLayer(config, hidden)])
        self.rotation = Rotation(config)

    @property
    def layer(self) -> DraftLayer:
        """The decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, DraftLayer)
        return layer

    def enter(self, states: Tensor) -> Tensor:
        """Features `[..., hidden]` of the model's hidden states `[..., size]`."""
        return states

    def pair(self, features: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, `[..., reads]`, and what it is added to, `[..., hidden]`."""
        both: Tensor = self.fc(torch.cat((embeddings, features), dim=-1))
        return both, both

    def logits(self, model: PreTrainedModel, features: Tensor) -> Tensor:
        """Logits over the tokens it can propose, `[..., tokens]`, of features `[..., hidden]`."""
        return unembed(model, features)

    def token_ids(self, guesses: Tensor) -> Tensor:
        """The model's token ids of places in the logits."""
        return guesses


class FusedEagleHead(EagleHead):
    """Predicts the next token, from hidden states of several layers and its own output where those are not there yet.

    The head no longer has to imitate the model's features, and was trained on its own. Its vocabulary is a part of the
    model's: the most frequent tokens.

    Args:
        config: Sizes of the layer, as of a Llama.
        hidden_layers: The hidden states of the model it reads.
        draft_vocab: Tokens it can propose.

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
        self.norm = Norm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, draft_vocab, bias=False)
        self.rotation = Rotation(config)
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64))

    @property
    def layer(self) -> DraftLayer:
        """The decoder layer."""
        return self.midlayer

    def enter(self, states: Tensor) -> Tensor:
        """Features `[..., hidden]` of the model's hidden states side by side, `[..., layers · hidden]`."""
        features: Tensor = self.fc(states)
        return features

    def pair(self, features: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, `[..., 2 · hidden]`, and what it is added to, `[..., hidden]`."""
        read = torch.cat((self.midlayer.input_layernorm(embeddings), self.midlayer.hidden_norm(features)), dim=-1)
        return read, features

    def logits(self, model: PreTrainedModel, features: Tensor) -> Tensor:
        """Logits over the tokens it can propose, `[..., tokens]`."""
        out: Tensor = self.lm_head(self.norm(features))
        return out

    def token_ids(self, guesses: Tensor) -> Tensor:
        """The model's token ids of places in the logits."""
        return guesses + self.d2t[guesses]
