"""Compiled passes: the tokens of `model.generate`, few compilations, and the plain model where there can be none."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LlamaForCausalLM, PreTrainedModel

import lookahead
from bench.families import FAMILIES, build
from lookahead import LookaheadConfig, compiled
from lookahead.attention import Reach, TreePass
from lookahead.cache import TreeSlots
from lookahead.config import PASSES
from lookahead.cost import StepCost, padded_nodes
from lookahead.errors import ConfigError
from lookahead.experience import experience_of
from lookahead.kernels import reference
from lookahead.pacing import Pacing
from lookahead.static import StaticPass, padded_rows, padded_slots
from lookahead.switch import Switch
from lookahead.target import Target
from lookahead.tree import TokenTree

CPU = torch.device("cpu")
CONFIG = LookaheadConfig(compile=True, draft="fixed", max_nodes=3, min_probability=0.0, memory="request")
GREEDY: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False}


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets Dynamo trace as ever, and leaves Inductor out, whose C++ compiler takes seconds a shape."""
    monkeypatch.setattr(compiled, "_BACKEND", "aot_eager")


def fresh(name: str = "Llama") -> PreTrainedModel:
    """A model nothing was compiled for yet."""
    model = build(FAMILIES[name])
    model.generation_config.eos_token_id = None
    return model


def decode(model: PreTrainedModel, config: LookaheadConfig = CONFIG, **options: Any) -> Tensor:
    return model.generate(**options, custom_generate=lookahead.decode, lookahead_config=config)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def text(seed: int, length: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(10, 100, (1, length)))


def random_tree(seed: int, nodes: int) -> TokenTree:
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(max(0, i - 3), max(1, i))) for i in range(nodes)]
    return TokenTree.from_parents(rng.permutation(100)[:nodes], parents)


def test_compiled_passes_give_the_tokens_of_generate(looping_llama: PreTrainedModel) -> None:
    ids = text(0, 12)
    expected = looping_llama.generate(ids, **GREEDY)
    before = graphs()
    assert torch.equal(decode(looping_llama, input_ids=ids, **GREEDY), expected)
    assert 1 <= graphs() - before <= 3, "one for each size of a tree: 1, 2 and 4 nodes"
    before = graphs()
    options = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.8}
    torch.manual_seed(1)
    expected = looping_llama.generate(ids, **options)
    torch.manual_seed(1)
    assert torch.equal(decode(looping_llama, input_ids=ids, **options), expected)
    assert graphs() - before <= 1, "what one call compiled serves the next"


def test_a_ragged_batch_whose_rows_end_one_by_one_gives_the_tokens_of_generate(traced_only: None) -> None:
    model = fresh()
    ids = torch.tensor([[0] * 8 + [5, 9, 31, 5], [5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31], [0] * 3 + [4] * 9])
    options = {**GREEDY, "attention_mask": (ids != 0).long(), "eos_token_id": list(range(7, 20)), "pad_token_id": 0}
    expected = model.generate(ids, **options)
    assert torch.equal(decode(model, input_ids=ids, **options), expected)


def test_a_text_that_outgrows_its_slots_is_compiled_for_twice_as_many(traced_only: None) -> None:
    model = fresh()
    config = LookaheadConfig(compile=True, proposers=())
    before = graphs()
    for length in (240, 243):  # the second one starts with 512 slots, and needs no others
        ids = text(length, length)
        expected = model.generate(ids, max_new_tokens=30, do_sample=False)
        engine = model.generate(
            ids, max_new_tokens=30, do_sample=False, custom_generate=lookahead.generation.prepare, lookahead_config=config
        )
        if length == 240:
            engine._target.cache.slots.capacity = 256
        assert [t for step in engine.run() for t in step[0].tokens.tolist()] == expected[0, length:].tolist()
    assert graphs() - before == 2


@pytest.mark.parametrize(
    "name", ["Mistral", "Gemma3", "GptOss", "Qwen2-windows", "DeepseekV3", "GPTJ", "OPT"]
)  # fmt: skip
def test_families_are_compiled_whole(
    name: str, traced_only: None, caplog: pytest.LogCaptureFixture
) -> None:
    # Windows, sinks, split heads, and prepared masks.
    model = fresh(name)
    prompts = [np.arange(3, 24, dtype=np.int32), np.arange(30, 43, dtype=np.int32)]
    fast, plain = (Target(model, rows=2, capacity=80, device=CPU, compiles=compiles) for compiles in (True, False))
    with fast.serving(), caplog.at_level(logging.WARNING, "lookahead"):
        fast.prefill(prompts)
        plain.prefill(prompts)
        for step in range(2):
            trees = [random_tree(step, 7), random_tree(step + 9, 5)]
            got, want = fast.score(trees), plain.score(trees)
            for row, tree in enumerate(trees):
                torch.testing.assert_close(got[row, : len(tree)], want[row, : len(tree)], rtol=1e-4, atol=1e-4)
                for target in (fast, plain):
                    target.commit(row, np.flatnonzero(tree.ancestor_mask()[-1]).astype(np.int32))
    assert not caplog.records
