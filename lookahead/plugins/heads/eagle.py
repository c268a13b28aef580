"""EAGLE-3 heads: one decoder layer that predicts token after token, and its drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from lookahead.plugins.heads.guess_tree import WIDTH, GrowingDrafter, GuessTree
from lookahead.plugins.heads.target import gather_positions, layer_config, lm_head

DEPTH = 6  # maximum number of tokens guessed in a row
ROOT_WIDTH = 32  # guesses after the root


class DraftLayer(nn.Module):
    """A decoder layer that reads an embedding and features, each normalized; the caller keeps the keys and values."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.head_dim: int = config.head_dim or hidden // heads
        self.kv_heads: int = config.num_key_value_heads or heads
        sizes = {"q_proj": heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        self.self_attn: Any = nn.ModuleDict(
            {name: nn.Linear(2 * hidden, n * self.head_dim, config.attention_bias) for name, n in sizes.items()}
        )
        self.self_attn["o_proj"] = nn.Linear(heads * self.head_dim, hidden, bias=False)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        rotation: LlamaRotaryEmbedding,
        positions: Tensor,
        mask: Tensor,
        at: Tensor | None = None,
        past: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output `[batch, n, hidden]`, and the keys and values of the earlier tokens and the new ones.

        Args:
            features: `[batch, new, hidden]`, which are the residual too.
            embeddings: `[batch, new, hidden]`, of the tokens sampled from the features.
            rotation: The rotary embedding.
            positions: int64 `[batch, new]`.
            mask: bool `[batch, n, tokens + new]`, true if a token is attended to.
            at: int64 `[batch, n]`, the new tokens that attend; all when None.
            past: Keys and values of earlier tokens, `[batch, tokens, 2, kv heads, dim]`.
        """
        attention, dim = self.self_attn, self.head_dim
        read = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(features)), dim=-1)
        keys, values = (project(read).unflatten(-1, (-1, dim)) for project in (attention.k_proj, attention.v_proj))
        states = torch.stack((_rotated(keys, rotation(read, positions)), values), 2)
        states = states if past is None else torch.cat((past, states), 1)
        if at is not None:
            read, features = gather_positions(read, at), gather_positions(features, at)
            positions = positions.gather(1, at)
        query = _rotated(attention.q_proj(read).unflatten(-1, (-1, dim)), rotation(read, positions)).transpose(1, 2)
        keys, values = states.permute(2, 0, 3, 1, 4)
        # Query heads that share keys are stacked as further queries, so keys are not copied. On a CPU this is several
        # times as fast as `enable_gqa`.
        packed = query.reshape(len(query), keys.shape[1], -1, dim)
        seen = mask.repeat(1, query.shape[1] // keys.shape[1], 1)[:, None]
        context = F.scaled_dot_product_attention(packed, keys, values, seen).view(query.shape)
        hidden = features + attention.o_proj(context.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), states


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate `[batch, tokens, heads, dim]` by cosines and sines `[batch, tokens, dim]`."""
    cosine, sine = (part[:, :, None] for part in rotation)
    return cast(Tensor, x * cosine + rotate_half(x) * sine)


class EagleHead(nn.Module):
    """Predicts the next token from hidden states of several layers, and further tokens from its own output.

    It attends to all earlier pairs of features and the token sampled from them. The embedding is the model's. Its
    vocabulary is the most frequent part of the model's. The weights have the names of published checkpoints.

    Source: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
        Test", §3.
    """

    kind = "eagle"
    depth = DEPTH

    def __init__(self, config: LlamaConfig, *, hidden_layers: tuple[int, ...], draft_vocab: int) -> None:
        super().__init__()
        self.config = config
        self.hidden_layers = hidden_layers  # its inputs, numbered as in `output_hidden_states`
        hidden = config.hidden_size
        self.fc = nn.Linear(len(hidden_layers) * hidden, hidden, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, draft_vocab, bias=False)
        self.rotation = LlamaRotaryEmbedding(config)
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64))

    @classmethod
    @torch.no_grad()
    def fresh(cls, model: PreTrainedModel, tokens: Sequence[int]) -> EagleHead:
        """An untrained head that proposes the token ids in `tokens`, ascending, by the rows of the model's LM head."""
        weight, chosen = lm_head(model).weight, torch.tensor(tokens)
        head = cls(layer_config(model), hidden_layers=fused_layers(model), draft_vocab=len(tokens))
        head.d2t.copy_(chosen - torch.arange(len(tokens)))
        head.lm_head.weight.copy_(weight[chosen.to(weight.device)])
        # Logits start near 1, since wrong certainty takes longer to unlearn.
        head.norm.weight.fill_(1.0 / float(head.lm_head.weight.norm(dim=-1).mean()))
        return head.to(weight.device)

    def enter(self, states: Tensor) -> Tensor:
        """Features `[..., hidden]` of the model's concatenated hidden states, `[..., layers · hidden]`."""
        features: Tensor = self.fc(states)
        return features

    def logits(self, features: Tensor) -> Tensor:
        """Logits over the tokens it can propose, `[..., tokens]`, of features `[..., hidden]`."""
        out: Tensor = self.lm_head(self.norm(features))
        return out

    def token_ids(self, guesses: Tensor) -> Tensor:
        """The model's token ids of indices into the logits."""
        return guesses + self.d2t[guesses]


def fused_layers(model: PreTrainedModel) -> tuple[int, int, int]:
    """The layers that a head reads: a low, a middle and a high one, as published.

    For a small model: the embeddings, the first layer and the last. Its later layers keep little of the tokens
    themselves, which a head looks up.
    """
    layers: int = model.config.get_text_config().num_hidden_layers
    return (2, layers // 2, layers - 3) if layers >= 8 else (0, 1, layers)


class EagleDrafter(GrowingDrafter):
    """Drafts with an EAGLE-3 head: a tree grown level by level from the most likely nodes, then cut to the best ones.

    Source: Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", §4.1 (expansion)
        and §4.2 (reranking), the latter by probabilities that are calibrated while decoding.
    """

    _heads: EagleHead
    _past: dict[int, Tensor]  # keys and values of the committed tokens, `[tokens, 2, kv heads, dim]`

    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        head, features = self._heads, self._heads.enter(pad_sequence(list(states), batch_first=True))
        embeddings = self._embed(pad_sequence(list(tokens), batch_first=True))
        past, lengths, is_past = self._padded(rows)
        index = torch.arange(features.shape[1], device=features.device)
        last = torch.tensor([[len(new) - 1] for new in tokens], device=features.device)
        mask = torch.cat((is_past, index <= last), 1)[:, None]
        out, kv = head.midlayer(features, embeddings, head.rotation, lengths + index, mask, last, past)
        for row, new, own in zip(rows, tokens, kv, strict=True):
            before = own[: len(self._past.get(row, ()))]
            self._past[row] = torch.cat((before, own[past.shape[1] : past.shape[1] + len(new)]))
        self._last.update(zip(rows, out, strict=True))

    def draft(self, rows: Sequence[int], max_nodes: int) -> list[GuessTree]:
        head, out = self._heads, torch.stack([self._last[row] for row in rows])
        past, lengths, seen = self._padded(rows)
        seen = seen[:, None]  # by the root

        def run(level: int, tokens: Tensor, features: Tensor, parents: Tensor) -> Tensor:
            nonlocal past, seen
            own = torch.eye(tokens.shape[1], dtype=torch.bool, device=out.device).expand(len(rows), -1, -1)
            seen = torch.cat((gather_positions(seen, parents), own), -1)
            positions = (lengths + level).expand_as(tokens)
            grown, past = head.midlayer(features, self._embed(tokens), head.rotation, positions, seen, past=past)
            return cast(Tensor, grown)

        return self._grow(out, run, depth=DEPTH, width=WIDTH, root_width=ROOT_WIDTH)

    def _guesses(self, out: Tensor, most: int) -> tuple[Tensor, Tensor]:
        probs, indices = self._guess(self._heads.logits(out), most)
        return probs, self._heads.token_ids(indices)

    def _padded(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """KV of rows, `[rows, most, 2, kv heads, dim]`; their lengths, `[rows, 1]`; their mask, `[rows, most]`."""
        layer = self._heads.midlayer
        nothing = self._heads.norm.weight.new_zeros(0, 2, layer.kv_heads, layer.head_dim)
        kv = [self._past.get(row, nothing) for row in rows]
        past = pad_sequence(kv, batch_first=True)
        lengths = torch.tensor([[len(own)] for own in kv], device=past.device)
        return past, lengths, torch.arange(past.shape[1], device=past.device) < lengths

    def _embed(self, tokens: Tensor) -> Tensor:
        table: Any = self._model.get_input_embeddings()
        embedded: Tensor = table(tokens.to(table.weight.device)).to(tokens.device)
        return embedded
