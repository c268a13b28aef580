"""The summarizer's Llama architecture and the weights it starts from."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tools.train_extractor.rows import EOS_ID, PAD_ID

HEAD_DIM = 64
GROUP = 2  # query heads to a key/value head
ROPE_THETA = 500_000.0

_EMBEDDING_STD = 0.25
_CONSTANT = 6 * _EMBEDDING_STD  # what every embedding holds in dimension 0
_NORMED_CONSTANT = 5.63  # the same after RMSNorm: 6 / sqrt((36 + 255) / 256)
_SHARPNESS = 9.0  # length of each wired query and key pair
_WIRED_PAIRS = 5  # the fastest rotary pairs; slower ones hardly tell neighbours apart


def llama_config(*, vocab_size: int, hidden_size: int = 256, layers: int = 4, positions: int = 2048) -> LlamaConfig:
    """Heads of 64 dimensions, two query heads to a key/value head, tied embeddings.

    The large `rope_theta` keeps half of each head's rotary pairs nearly still over 1,000 positions, so
    that tokens can be matched by content at any distance.
    """
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=11 * hidden_size // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // HEAD_DIM,
        num_key_value_heads=hidden_size // (GROUP * HEAD_DIM),
        head_dim=HEAD_DIM,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
    )


@torch.no_grad()
def build(config: LlamaConfig, *, seed: int) -> LlamaForCausalLM:
    """A model with random weights whose first layer already looks at the tokens just before.

    Copying needs two steps: a head that moves each token's *previous* tokens to it, and a later head
    that finds where the present context stood before (Olsson et al. 2022, "In-context learning and
    induction heads"). The first step is slow to emerge in a small model, so it is wired: every
    embedding shares one constant dimension, from which head h of layer 0 makes queries and keys that
    differ by a rotation of h + 1 positions. Several offsets let later heads match whole n-grams. All of
    it stays trainable. The constant shifts all tied output logits alike, which changes nothing.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    embedding = model.model.embed_tokens.weight
    embedding.normal_(std=_EMBEDDING_STD)
    embedding[:, 0] = _CONSTANT
    model.model.norm.weight.fill_(0.15)
    for layer in model.model.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.normal_(std=0.02 / math.sqrt(2 * len(model.model.layers)))
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.weight.normal_(std=projection.in_features**-0.5)
    _wire_previous_tokens(model)
    return model


def _wire_previous_tokens(model: LlamaForCausalLM) -> None:
    """Set layer 0 so that head h attends to the token h + 1 positions back."""
    attention = model.model.layers[0].self_attn
    frequency = ROPE_THETA ** (-torch.arange(_WIRED_PAIRS) / (HEAD_DIM // 2))
    first = slice(0, _WIRED_PAIRS)  # a rotary pair is dimensions i and i + HEAD_DIM / 2
    second = slice(HEAD_DIM // 2, HEAD_DIM // 2 + _WIRED_PAIRS)
    gain = _SHARPNESS / _NORMED_CONSTANT
    query: Tensor = attention.q_proj.weight.unflatten(0, (-1, HEAD_DIM))
    key: Tensor = attention.k_proj.weight.unflatten(0, (-1, HEAD_DIM))
    for head in range(len(query)):
        angle = -(head + 1) * frequency
        query[head, first] = query[head, second] = 0.0
        query[head, first, 0] = gain * torch.cos(angle)
        query[head, second, 0] = gain * torch.sin(angle)
    key[:, first] = key[:, second] = 0.0
    key[:, first, 0] = gain
    torch.nn.init.orthogonal_(attention.o_proj.weight, gain=_EMBEDDING_STD)
