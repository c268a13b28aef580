"""Models that read images or sound and whose decoder is of a declared family: passes as one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import lookahead
from tests.support.declared import has_kernels
from tests.support.small_layers import HALF, SINGLE, on_x86
from tests.support.vision_models import PLACE, SEEING, build, prompts

pytestmark = [on_x86, has_kernels]
WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "global_head_dim": 64, "initializer_range": 0.15, "hidden_size_per_layer_input": 256, "sliding_window": 64,
}  # fmt: skip
NAMES = ["Gemma3", "Gemma4", "Llava", "Mistral3", "Idefics3", "SmolVLM", "InternVL", "Qwen2Audio", "Voxtral"]


def wide(name: str, dtype: torch.dtype) -> Any:
    """A model whose text decoder is wide enough for packed weights."""
    family = SEEING[name]
    if not hasattr(transformers, family.model_class):
        pytest.skip(f"transformers {transformers.__version__} has no {family.model_class}")
    sizes = {key: size for key, size in WIDE.items() if key in family.options["text_config"] or key == "head_dim"}
    return build(replace(family, options={**family.options, "text_config": {**family.options["text_config"], **sizes}}))


def both(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> list[Any]:
    options = {"max_new_tokens": 24, "output_logits": True, "return_dict_in_generate": True, **options}
    outputs = list[Any]()
    for ours in ({}, {"custom_generate": lookahead.decode}):
        torch.manual_seed(3)
        outputs.append(model.generate(**inputs, **options, **ours))
    return outputs


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("name", NAMES)
def test_text_behind_an_image_or_sound_is_verified_in_one_call_with_the_tokens_of_generate(name, dtype, calls):
    model, inputs = wide(name, dtype).to(dtype), prompts(SEEING[name])
    inputs = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in inputs.items()}
    own, ours = both(model, inputs, do_sample=False)
    assert torch.equal(own.sequences, ours.sequences)
    if dtype == HALF:
        assert all(map(torch.equal, own.logits, ours.logits))
    assert calls, lookahead.backend_report(model)


@pytest.mark.parametrize("name", ["Gemma4", "Llava"])
def test_a_drafted_placeholder_is_embedded_as_the_model_embeds_it(name, calls):
    model, inputs = wide(name, SINGLE), prompts(SEEING[name])
    bias = {(PLACE,): 4.0}
    own, ours = both(model, inputs, do_sample=False, sequence_bias=bias)
    assert torch.equal(own.sequences, ours.sequences)
    for expected, logits in zip(own.logits, ours.logits, strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=2e-3)
    assert (own.sequences[0, inputs["input_ids"].shape[1] :] == PLACE).any()
