"""Draft models for the tests and the benchmarks: close to a target, and unrelated to any."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel


def like(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """A copy of a model with some noise."""
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        for weights in other.parameters():
            weights += noise * weights.std() * torch.randn_like(weights)
    return other


def small(vocab_size: int = 101, **options: Any) -> LlamaForCausalLM:
    """A model unrelated to the target."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        **options,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()
