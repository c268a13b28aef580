"""Models that read images or sound in addition to text: one tiny random model of each family, and prompts for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

Options = dict[str, Any]
PLACE = 99
"""The placeholder token for a part of an image or of sound."""
TEXT: Options = {
    **{"vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "pad_token_id": 0},
    "eos_token_id": None,
}
EYES: Options = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 8, "patch_size": 4},
}
_MROPE: Options = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_THREE_AXES: Options = {**TEXT, "rope_parameters": _MROPE}
_STATES: Options = {
    **{**TEXT, "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
    "layer_types": ["linear_attention", "full_attention"],
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
_WINDOWS: Options = {**TEXT, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
_QWEN: Options = {
    **{"image_token_id": PLACE, "video_token_id": 98, "vision_start_token_id": 97, "vision_end_token_id": 96}
}
_PATCHES: Options = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "patch_size": 4}
_PATCHES |= {"intermediate_size": 16}
_GEMMA: Options = {"image_token_id": PLACE, "boi_token_id": 97, "eoi_token_id": 98, "tie_word_embeddings": False}


def _square() -> Options:
    return {"pixel_values": torch.randn(1, 3, 8, 8)}


def _grid() -> Options:
    """An image of 4 × 4 patches, with one placeholder per 2 × 2 patches."""
    return {"pixel_values": torch.randn(16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]])}


def _masked() -> Options:
    mask = torch.ones(1, 1, 8, 8, dtype=torch.long)
    return {"pixel_values": torch.randn(1, 1, 3, 8, 8), "pixel_attention_mask": mask}


def _placed_patches() -> Options:
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4))[None]
    return {"pixel_values": torch.randn(1, 16, 48), "image_position_ids": places}


def _tiled() -> Options:
    kinds = {"aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long)}
    return {
        **{"pixel_values": torch.randn(1, 1, 1, 3, 8, 8), **kinds},
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.long),
    }


@dataclass(frozen=True, slots=True)
class Seeing:
    """A family that reads more than text.

    Attributes:
        name: The architecture.
        model_class: Its class in transformers.
        options: Options of its configuration class.
        places: Number of placeholders for one image or piece of sound in a prompt.
        image: Makes the inputs of one image or piece of sound.
        encoder: The path of the encoder in the model.
        types: The input that marks placeholders with ones, if there is one.
        decoded: The drafts that one pass can verify after it.
        features: Its special features.
    """

    name: str
    model_class: str
    options: Options
    places: int
    image: Callable[[], Options]
    encoder: str
    types: str = ""
    decoded: str = "trees"
    features: str = "positions of text"


def _families() -> Iterator[Seeing]:
    three, grid = "positions of three axes", ("mm_token_type_ids", "trees")
    tower, visual = "model.vision_tower", "model.visual"
    old = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1}
    options: Options = {"text_config": _THREE_AXES, "vision_config": old, **_QWEN}
    yield Seeing("Qwen2VL", "Qwen2VLForConditionalGeneration", options, 4, _grid, visual, *grid, three)
    eyes: Options = {**_PATCHES, "window_size": 16, "fullatt_block_indexes": [0]}
    options = {"text_config": _THREE_AXES, "vision_config": eyes, **_QWEN}
    yield Seeing("Qwen2.5VL", "Qwen2_5_VLForConditionalGeneration", options, 4, _grid, visual, *grid, three)
    eyes = {**_PATCHES, "depth": 2, "num_position_embeddings": 16}
    options = {"text_config": _THREE_AXES, "vision_config": {**eyes, "deepstack_visual_indexes": [0]}, **_QWEN}
    features = f"{three}, features for several layers"
    yield Seeing("Qwen3VL", "Qwen3VLForConditionalGeneration", options, 4, _grid, visual, *grid, features)
    options = {"text_config": _STATES, "vision_config": eyes, **_QWEN}
    features = f"{three}, recurrent layers"
    yield Seeing("Qwen3.5", "Qwen3_5ForConditionalGeneration", options, 4, _grid, visual, *grid, features)
    ends = {f"{kind}_{end}_token_id": 90 + i for i, kind in enumerate(("image", "video")) for end in ("start", "end")}
    eyes = {**_PATCHES, "image_size": 16, "spatial_merge_size": 2}
    options = {"text_config": _THREE_AXES, "vision_config": eyes, "image_token_id": PLACE, "video_token_id": 98, **ends}
    yield Seeing("GLM-4V", "Glm4vForConditionalGeneration", options, 4, _grid, visual, *grid, three)

    options = {"text_config": _WINDOWS, "vision_config": EYES, "mm_tokens_per_image": 4, **_GEMMA}
    both = "an image attends to all of itself, windows"
    given = ("Gemma3ForConditionalGeneration", options, 4, _square, tower, "token_type_ids", "trees", both)
    yield Seeing("Gemma3", *given)
    sizes = {"global_head_dim": 8, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 101}
    text = {**_WINDOWS, **sizes, "num_kv_shared_layers": 0, "enable_moe_block": False}
    eyes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    eyes |= {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2}
    eyes |= {"default_output_length": 4, "position_embedding_size": 16}
    others = {"audio_token_id": 95, "boa_token_id": 94, "eoa_token_id": 93, "video_token_id": 92}
    options = {"text_config": text, "vision_config": eyes, "audio_config": None, **_GEMMA, **others}
    given = ("Gemma4ForConditionalGeneration", options, 4, _placed_patches, tower, "mm_token_type_ids", "trees", both)
    yield Seeing("Gemma4", *given)

    llama, qwen = {**TEXT, "model_type": "llama"}, {**TEXT, "model_type": "qwen2"}
    eyes = {**EYES, "model_type": "clip_vision_model"}
    options = {"text_config": llama, "vision_config": eyes, "image_token_index": PLACE}
    yield Seeing("Llava", "LlavaForConditionalGeneration", options, 4, _square, tower)
    options = {"text_config": qwen, "vision_config": {**EYES, "model_type": "siglip_vision_model"}}
    options |= {"image_token_index": PLACE, "video_token_index": 98, "image_grid_pinpoints": [[8, 8]]}
    options |= {"vision_feature_layer": -1}
    parts = lambda: {"pixel_values": torch.randn(1, 2, 3, 8, 8), "image_sizes": torch.tensor([[8, 8]])}  # noqa: E731
    yield Seeing("LlavaOnevision", "LlavaOnevisionForConditionalGeneration", options, 10, parts, tower)
    eyes = {**EYES, "model_type": "pixtral", "image_size": 16, "head_dim": 8}
    options = {"text_config": {**TEXT, "model_type": "mistral", "sliding_window": None}, "vision_config": eyes}
    options |= {"image_token_index": PLACE, "spatial_merge_size": 2}
    sized = lambda: {"pixel_values": torch.randn(1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])}  # noqa: E731
    yield Seeing("Mistral3", "Mistral3ForConditionalGeneration", options, 4, sized, tower)
    for name in ("Idefics3", "SmolVLM"):
        options = {"text_config": llama, "vision_config": EYES, "image_token_id": PLACE, "scale_factor": 2}
        options |= {"pad_token_id": 0}
        yield Seeing(name, f"{name}ForConditionalGeneration", options, 1, _masked, "model.vision_model")
    eyes = {**EYES, "image_size": [8, 8], "patch_size": [4, 4]}
    options = {"text_config": qwen, "vision_config": eyes, "image_token_id": PLACE, "downsample_ratio": 0.5}
    yield Seeing("InternVL", "InternVLForConditionalGeneration", options, 1, _square, tower)
    text = {**TEXT, "intermediate_size_mlp": 64, "num_local_experts": 2, "no_rope_layers": [1, 0]}
    sizes = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    eyes = {**EYES, **sizes, "intermediate_size": 64, "pixel_shuffle_ratio": 0.5}
    options = {"text_config": {**text, "attention_chunk_size": 16}, "vision_config": eyes, "image_token_index": PLACE}
    options |= {"boi_token_index": 97, "eoi_token_index": 98}
    features = "chunks, experts"
    yield Seeing("Llama4", "Llama4ForConditionalGeneration", options, 1, _square, "vision_model", features=features)
    eyes = {**EYES, "projection_dim": 32, "vision_use_head": False}
    options = {"text_config": {**TEXT, "model_type": "gemma"}, "vision_config": eyes, "projection_dim": 32}
    options |= {"hidden_size": 32, "image_token_index": PLACE, "tie_word_embeddings": False}
    prefix = ("token_type_ids", "trees", "a prompt attends to all of itself")
    yield Seeing("PaliGemma", "PaliGemmaForConditionalGeneration", options, 4, _square, tower, *prefix)
    eyes = {**EYES, "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 32, "max_num_tiles": 1}
    eyes |= {"num_hidden_layers": 2, "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}
    text = {**TEXT, "cross_attention_layers": [1], "num_hidden_layers": 3}
    options = {"text_config": text, "vision_config": eyes, "image_token_index": PLACE}
    every = ("", "plain", "every token attends to the image")
    yield Seeing("Mllama", "MllamaForConditionalGeneration", options, 1, _tiled, "model.vision_model", *every)

    ears: Options = {"num_mel_bins": 8, "max_source_positions": 8}
    sizes = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    options = {"text_config": qwen, "audio_config": {**ears, **sizes}, "audio_token_index": PLACE}
    heard = lambda: {  # noqa: E731
        "input_features": torch.randn(1, 8, 16), "feature_attention_mask": torch.ones(1, 16, dtype=torch.long)
    }  # fmt: skip
    features = "sound, positions of text"
    name = "Qwen2Audio"
    yield Seeing(name, f"{name}ForConditionalGeneration", options, 4, heard, "model.audio_tower", features=features)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    options = {"text_config": llama, "audio_config": {**ears, **sizes, "head_dim": 8}, "audio_token_id": PLACE}
    mel = lambda: {"input_features": torch.randn(1, 8, 16)}  # noqa: E731
    name = "Voxtral"
    yield Seeing(name, f"{name}ForConditionalGeneration", options, 2, mel, "model.audio_tower", features=features)
    ears = {"input_dim": 8, "num_layers": 1, "hidden_dim": 16, "num_heads": 2, "dim_head": 8, "output_dim": 8}
    ears |= {"context_size": 4, "max_pos_emb": 4, "conv_kernel_size": 3, "feedforward_mult": 1}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    joint = {"model_type": "blip_2_qformer", **sizes, "encoder_hidden_size": 16, "cross_attention_frequency": 1}
    options = {"text_config": {**TEXT, "model_type": "granite"}, "encoder_config": ears, "projector_config": joint}
    options |= {"audio_token_index": PLACE, "window_size": 4, "downsample_rate": 2, "has_lora_adapter": False}
    frames = lambda: {"input_features": torch.randn(1, 8, 8)}  # noqa: E731
    name = "GraniteSpeech"
    yield Seeing(name, f"{name}ForConditionalGeneration", options, 4, frames, "model.encoder", features=features)


SEEING: dict[str, Seeing] = {family.name: family for family in _families()}
_WELL_KNOWN = {"Llava", "Qwen2.5VL", "Gemma3", "Qwen3.5", "Qwen2Audio"}  # run by default


def cases(families: Iterable[Seeing]) -> list[Any]:
    """Test parameters. Families that the installed transformers lacks are skipped."""
    known, made = frozenset(transformers.__all__), []
    for family in families:
        marks = [] if family.name in _WELL_KNOWN else [pytest.mark.exhaustive]
        if family.model_class not in known:
            marks.append(pytest.mark.skip(f"transformers {transformers.__version__} has no {family.model_class}"))
        made.append(pytest.param(family, id=family.name, marks=marks))
    return made


def build(family: Seeing) -> PreTrainedModel:
    """A family's tiny model: fp32 on the CPU, with fixed weights and no end-of-sequence token."""
    model_class: Any = getattr(transformers, family.model_class)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: PreTrainedModel = model_class(model_class.config_class(**deepcopy(family.options))).float().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts(family: Seeing, rows: int = 1) -> dict[str, Tensor]:
    """One prompt, or two of different lengths, each with an image between two repetitive texts."""
    texts = [([5, 9, 31], [31, 7, 5, 9, 31, 7, 12, 5, 9]), ([41, 42], [43, 41, 42])][:rows]
    ids = [[*before, *[PLACE] * family.places, *behind] for before, behind in texts]
    longest = max(map(len, ids))
    padded = torch.tensor([[0] * (longest - len(each)) + each for each in ids])
    with torch.random.fork_rng():
        torch.manual_seed(5)
        images = [family.image() for _ in ids]
    given = {name: torch.cat([each[name] for each in images]) for name in images[0]}
    if "cross_attention_mask" in given:
        given["cross_attention_mask"] = given["cross_attention_mask"].repeat(1, longest, 1, 1)
    types = {family.types: (padded == PLACE).long()} if family.types else {}
    return {"input_ids": padded, "attention_mask": (padded != 0).long(), **types, **given}


def llava() -> PreTrainedModel:
    """Llama with CLIP. An image of 8 × 8 pixels is four tokens."""
    return build(SEEING["Llava"])


def gemma3() -> PreTrainedModel:
    """Gemma 3 with SigLIP, and a sliding window in its first layer."""
    return build(SEEING["Gemma3"])
