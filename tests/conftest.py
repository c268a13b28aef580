"""What many tests share: one thread, a tiny model, the bundled model's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama() -> LlamaForCausalLM:
    """A random fp32 Llama on the CPU, seconds small, whose greedy output wanders.

    Weights are drawn wide (0.4), so that logits are far from flat and argmax has no ties. It is shared by the
    whole session: a test that changes it must put it back.
    """
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(20)
        return LlamaForCausalLM(config).float().eval()


@pytest.fixture(scope="session")
def bundled_path() -> Path:
    """The folder of the model that comes with the package."""
    return ROOT / "lookahead" / "bundled"
