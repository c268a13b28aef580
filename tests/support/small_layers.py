"""Small models with fused decoder layers, and the logits that a target computes with them."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lookahead.backend.choice import backend_for
from lookahead.backend.cpu import cpu_backend, cpu_pass, fused_layers, layer_checks, layer_jobs, linears, product_bits
from lookahead.backend.cpu.pass_table import PassTable
from lookahead.backend.protocol import BitPolicy
from lookahead.drafting.tree import TokenTree
from lookahead.kernels import packed_product, row_attention
from lookahead.model.model_state import patched_attribute, plan_of

HALF, SINGLE = torch.bfloat16, torch.float32
SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama with biases, eager": (
        LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True, "attn_implementation": "eager"},
    ),
    "mistral with a window": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
    "qwen2 with some windows": (
        Qwen2ForCausalLM, Qwen2Config, {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
}  # fmt: skip

on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch sums in another order")
WIDE = {"head_dim": 32}  # torch sums products with fewer outputs in another order
if not packed_product.is_supported(torch.zeros(2, 2, dtype=HALF)):  # it needs multiples of 64 inputs on this CPU
    WIDE |= {"hidden_size": 192, "intermediate_size": 256}

PACKED = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64
}  # fmt: skip
"""Sizes of the smallest layers whose weights are packed."""


def attends(dtype: torch.dtype) -> bool:
    """Whether this CPU has an attention kernel for a dtype; without one, a pass is not a single call."""
    return row_attention.is_supported(*(torch.zeros(1, 1, 1, 64, dtype=dtype) for _ in range(3)))


def made(name: str = "llama", dtype: torch.dtype = HALF, **options: Any) -> Any:
    """A random model of a family, including random norms and biases."""
    kind, config, own = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = kind(config(**{**SIZES, **own, **options}))
        for weight in model.parameters():
            if weight.dim() == 1:
                nn.init.normal_(weight, 1.0, 0.3)
        return model.to(dtype).eval()


def serving(model: Any) -> AbstractContextManager[None]:
    """A block in which the layers of a model may be fused."""
    with torch.inference_mode():
        return patched_attribute("forward", fused_layers.find_fused(model).forwards)


def running() -> AbstractContextManager[None]:
    """A pass on this thread without packed weights."""
    return cpu_pass.running(cpu_pass.CpuPass(BitPolicy.ROUNDED))


@pytest.fixture
def fused(monkeypatch) -> Iterator[list[int]]:
    """The thread ids of all runs of fused layers."""
    threads: list[int] = []
    own = fused_layers._fused

    def recorded(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.get_ident())
        return own(*args, **kwargs)

    layer_checks._probed.clear()
    monkeypatch.setattr(fused_layers, "_fused", recorded)
    with serving(made()):  # layers are checked now, so that later only passes are recorded
        threads.clear()
    yield threads
    layer_checks._probed.clear()


def trees_of(rows: int, nodes: int, seed: int) -> list[TokenTree]:
    source = np.random.default_rng(seed)
    parents = [[0, *(int(source.integers(max(0, i - 3), i)) for i in range(1, nodes))] for _ in range(rows)]
    return [TokenTree.from_parents(source.permutation(np.arange(3, 100))[:nodes], each) for each in parents]


def logits_of(model: Any, rows: int, nodes: int, *, retired: int = 0, **options: Any) -> list[torch.Tensor]:
    """Logits of prompts and of two steps on one cache, for the rows that are not retired."""
    target = backend_for(model, rows=rows, capacity=64, **options)
    policy = BitPolicy.SOLO if rows == 1 else BitPolicy.ROUNDED
    prompts = [np.arange(3, 14, dtype=np.int32) + row for row in range(rows)]
    with target.serving():
        outputs = [target.read(prompts)]
        for _ in range(retired):
            target.retire(0)
        for seed in range(2):
            outputs.append(target.score(trees_of(rows - retired, nodes, seed), policy))
            outputs += target.hidden.values()
            for row in range(rows - retired):
                target.cache.commit(row, np.arange(min(nodes, 2), dtype=np.int32))
    return outputs


@pytest.fixture
def own_code(monkeypatch) -> Any:
    """`logits_of` with a target that does not fuse layers."""

    def logits(model: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(cpu_backend, "find_fused", lambda model: fused_layers.FusedLayers([], [], []))
            plan_of(model).rest()  # what was found before
            try:
                return logits_of(model, *args, **kwargs)
            finally:
                plan_of(model).rest()

    return logits


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The number of jobs of each kernel call. Small weights are packed for this package's kernels too."""
    if not all(packed_product.is_supported(torch.zeros(2, 64, dtype=dtype)) for dtype in (HALF, SINGLE)):
        pytest.skip("there is no kernel for products on this CPU")
    jobs: list[int] = []
    own = layer_jobs.run

    def counted(*each: Any) -> None:
        jobs.extend([len(each)] * bool(each))
        own(*each)

    monkeypatch.setattr(layer_jobs, "run", counted)
    monkeypatch.setattr(product_bits, "FEWEST_WEIGHTS", 1)
    monkeypatch.setattr(linears, "measured_backends", lambda *kind: ("packed",))
    return jobs


@pytest.fixture
def tables(monkeypatch) -> list[int]:
    """The numbers of tokens of passes whose layers were a single call."""
    tokens: list[int] = []
    own = PassTable.run

    def counted(self: PassTable, hidden: Any, *rest: Any) -> Any:
        tokens.append(hidden.shape[1])
        return own(self, hidden, *rest)

    monkeypatch.setattr(PassTable, "run", counted)
    return tokens
