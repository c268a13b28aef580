"""Tiny models that read images beside text, the same weights every time."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    SiglipVisionConfig,
)

IMAGE_TOKEN = 99
TEXT: dict[str, Any] = {
    **{"vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "eos_token_id": None},
}
EYES: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 8, "patch_size": 4},
}


def llava() -> PreTrainedModel:
    """Llama behind CLIP; an image of 8 × 8 pixels is four tokens."""
    parts: dict[str, Any] = {"text_config": LlamaConfig(**TEXT), "vision_config": CLIPVisionConfig(**EYES)}
    return _build(LlavaForConditionalGeneration, LlavaConfig(**parts, image_token_index=IMAGE_TOKEN))


def gemma3() -> PreTrainedModel:
    """Gemma 3 with windows in its first layer, behind SigLIP."""
    text = Gemma3TextConfig(**TEXT, sliding_window=9, layer_types=["sliding_attention", "full_attention"])
    parts: dict[str, Any] = {"text_config": text, "vision_config": SiglipVisionConfig(**EYES)}
    tokens: dict[str, Any] = {"boi_token_id": 97, "eoi_token_id": 98, "mm_tokens_per_image": 4}
    return _build(Gemma3ForConditionalGeneration, Gemma3Config(**parts, **tokens, image_token_id=IMAGE_TOKEN))


def _build(model_class: Any, config: Any) -> PreTrainedModel:
    """A model in fp32 on the CPU with no end of sequence."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: PreTrainedModel = model_class(config).float().eval()
    model.generation_config.eos_token_id = None
    return model
