"""One tiny random model of every architecture family: its tokens are those of `model.generate`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.errors import UnsupportedModelError

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
MIXED_LAYERS = ["sliding_attention", "full_attention"]
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.4,
}
# Head sizes differ from hidden_size / heads and windows are shorter than the texts, where a family has them.
TREES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 9},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 9},
    "Gemma3": {"head_dim": 16, "sliding_window": 9},
    "Phi": {},
    "Phi3": {},
    "GPTNeoX": {},
    "StableLm": {},
    "Starcoder2": {"sliding_window": 9},
    "Cohere": {},
    "Cohere2": {"sliding_window": 9, "layer_types": MIXED_LAYERS},
    "Granite": {},
    "Glm4": {"head_dim": 8},
    "SmolLM3": {},
    "Nemotron": {},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 9, "layer_types": MIXED_LAYERS},
    "Mixtral": {"num_local_experts": 4, "sliding_window": 9},
    "Qwen2Moe": EXPERTS,
    "Qwen3Moe": EXPERTS,
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": MLA,
    "GptOss": {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "layer_types": MIXED_LAYERS},
    "OPT": {"word_embed_proj_dim": 32, "ffn_dim": 64},
    "Falcon": {"alibi": False},
    "GPT2": GPT2_SIZES,
    "GPTJ": {**GPT2_SIZES, "rotary_dim": 4},
    "GPTBigCode": GPT2_SIZES,
}
PLAIN: dict[str, dict[str, Any]] = {
    "Bloom": {"vocab_size": 101, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.4},
    "GPTNeo": {
        "vocab_size": 101,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
    },
    "Mamba": {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2},
}
CLASSES = {
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
}
ONE = {"input_ids": torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])}
RAGGED = {
    "input_ids": torch.tensor([[0] * 8 + [5, 9, 31, 5], [5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]]),
    "attention_mask": torch.tensor([[0] * 8 + [1] * 4, [1] * 12]),
}
CONFIG = LookaheadConfig(proposers=("prompt", "jacobi"), window=3, ngram_size=4, guesses=3)


def build(family: str, options: dict[str, Any]) -> PreTrainedModel:
    config_class, model_class = CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    sizes = SIZES if family in TREES and not family.startswith("GPT") else {}
    if family in ("GPTNeoX", "GptOss"):
        sizes = SIZES
    config = getattr(transformers, config_class)(**{**sizes, **options}, bos_token_id=1, pad_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, model_class)(config).float().eval()
    model.generation_config.eos_token_id = None
    return model


def compare(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> None:
    torch.manual_seed(1)
    expected = model.generate(**inputs, max_new_tokens=30, **options)
    torch.manual_seed(1)
    got = model.generate(**inputs, max_new_tokens=30, **options, custom_generate=lookahead.decode)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("family", TREES)
def test_a_family_decoded_with_trees_gives_the_tokens_of_generate(family: str) -> None:
    model = build(family, TREES[family])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*decoded plainly")
        for inputs in (ONE, RAGGED):
            compare(model, inputs, do_sample=False)
            torch.manual_seed(1)
            expected = model.generate(**inputs, max_new_tokens=30, do_sample=True)
            torch.manual_seed(1)
            options: dict[str, Any] = {"custom_generate": lookahead.decode, "lookahead_config": CONFIG}
            got = model.generate(**inputs, max_new_tokens=30, do_sample=True, **options)
            assert torch.equal(got, expected)


@pytest.mark.parametrize("family", PLAIN)
def test_a_family_that_cannot_take_a_draft_back_is_decoded_plainly_and_says_so(family: str) -> None:
    model = build(family, PLAIN[family])
    for inputs in (ONE, RAGGED):
        with pytest.warns(UserWarning, match="decoded plainly"):
            compare(model, inputs, do_sample=True)


@pytest.mark.parametrize("family", PLAIN)
def test_demanding_drafts_of_such_a_family_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be decoded speculatively"):
        build(family, PLAIN[family]).generate(
            **ONE, max_new_tokens=5, custom_generate=lookahead.decode, lookahead_config=CONFIG
        )


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_position_embeddings_that_change_on_the_way_are_not_drafted_across(rope: str) -> None:
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 10000.0, "factor": 2.0}
    if rope == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    family = "Phi3" if rope == "longrope" else "Llama"
    options: dict[str, Any] = {"rope_parameters": parameters, "max_position_embeddings": 24}
    if rope == "longrope":
        options["original_max_position_embeddings"] = 24
    model = build(family, options)
    with pytest.warns(UserWarning, match=f"{rope} position embeddings"):
        compare(model, ONE, do_sample=False)


def test_an_encoder_decoder_is_refused() -> None:
    config = transformers.T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.generation_config.decoder_start_token_id = 0
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        model.generate(**ONE, max_new_tokens=5, custom_generate=lookahead.decode)
