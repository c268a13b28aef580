"""Declared families with weights of 8 and 4 bits, and with LoRA: the tokens of `model.generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import lookahead
from lookahead.backend.cpu import fused_layers
from lookahead.loading.quantized import Int4Config, Int8Config
from tests.support.declared import both, has_kernels, made, prompt
from tests.support.small_layers import HALF, SINGLE, on_x86

pytestmark = [on_x86, has_kernels]
NAMES = ["Qwen2Moe", "Glm", "Lfm2", "Gemma4", "GPTNeoX", "Starcoder2"]


@pytest.fixture(scope="module", params=NAMES)
def saved(request: Any, tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    made(request.param).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_of_few_bits_give_the_tokens_of_the_same_models_generate(saved, bits, calls):
    config = {8: Int8Config, 4: Int4Config}[bits]()
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=HALF, quantization_config=config).eval()
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 1.3}):
        own, ours = both(model, prompt(), **sampling)
        assert torch.equal(own.sequences, ours.sequences)
        assert all(map(torch.equal, own.logits, ours.logits))
    assert calls, lookahead.backend_report(model)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("name", NAMES)
def test_layers_with_lora_give_the_tokens_of_generate_and_are_named(name, dtype):
    peft = pytest.importorskip("peft")
    model = made(name, dtype)
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(6)
        wrapped = peft.get_peft_model(model, config).eval()
    own, ours = both(wrapped, prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences)
    assert "base_layer is not declared" in fused_layers.find_fused(model).reason
