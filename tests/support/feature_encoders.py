"""Encoder-decoder models whose encoder reads sound or images: tiny configurations, and inputs for two rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.architectures import Options, Rows
from tests.support.speech import SIZES as WHISPER_SIZES

TOKENS: Options = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
STARTED: Options = {**TOKENS, "decoder_start_token_id": 3}
LAYERS: Options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SMALL: Options = {**LAYERS, "num_hidden_layers": 1}
GROUPED: Options = {**LAYERS, "num_key_value_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.4}
BART_LAYERS: Options = {
    **{"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 64},
    **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "init_std": 0.4},
    "max_position_embeddings": 64,
}
WAVE_ENCODER: Options = {
    **{"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4)},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
}
CONFORMER: Options = {**SMALL, "num_mel_bins": 16, "subsampling_conv_channels": 8, "conv_kernel_size": 3}
SEAMLESS: Options = {
    **{name: value for name, value in BART_LAYERS.items() if name not in ("d_model", "init_std")},
    **{"hidden_size": 32, "initializer_range": 0.4, "feature_projection_input_dim": 16, "num_adapter_layers": 1},
    **{"speech_encoder_layers": 1, "speech_encoder_attention_heads": 4, "speech_encoder_intermediate_size": 64},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "speech_encoder_hidden_act": "relu"},
    **{"t2u_encoder_layers": 1, "t2u_decoder_layers": 1, "t2u_vocab_size": 50, "unit_hifi_gan_vocab_size": 50},
}
VIT: Options = {"model_type": "vit", **SMALL, "image_size": 16, "patch_size": 4}
DECODER: Options = {"is_decoder": True, "add_cross_attention": True}
SIZES: dict[str, Options] = {
    "Whisper": {**WHISPER_SIZES, "pad_token_id": 0, "init_std": 0.8},
    "Speech2Text": {
        **STARTED,
        **{name: value for name, value in BART_LAYERS.items() if name != "max_position_embeddings"},
        **{"max_source_positions": 128, "max_target_positions": 64, "conv_channels": 32, "input_feat_per_channel": 8},
    },
    "Moonshine": {
        **STARTED,
        **{"hidden_size": 32, "intermediate_size": 64, "encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 2},
        **{"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4, "initializer_range": 0.4},
    },
    "MoonshineStreaming": {**STARTED, **GROUPED, "encoder_config": {**SMALL, "num_key_value_heads": 4}},
    "Canary": {**STARTED, "encoder_config": CONFORMER, "decoder_config": {**TOKENS, **GROUPED}},
    "CohereAsr": {**STARTED, **GROUPED, "encoder_config": CONFORMER},
    "SeamlessM4T": {**STARTED, **SEAMLESS},
    "SeamlessM4Tv2": {**STARTED, **SEAMLESS},
    "SpeechT5": {
        **STARTED,
        **{name: value for name, value in BART_LAYERS.items() if name not in ("d_model", "init_std")},
        **{**WAVE_ENCODER, "hidden_size": 32, "initializer_range": 0.4, "max_text_positions": 64},
    },
    "SpeechEncoderDecoder": {
        **STARTED,
        "encoder": {"model_type": "wav2vec2", **SMALL, **WAVE_ENCODER, "vocab_size": 40},
        "decoder": {"model_type": "bert", **TOKENS, **LAYERS, **DECODER, "initializer_range": 0.4},
    },
    "Pix2Struct": {
        "text_config": {
            **STARTED,
            **{"hidden_size": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "initializer_factor": 3.0},
        },
        "vision_config": {**SMALL, "patch_embed_hidden_size": 12, "d_ff": 64, "d_kv": 8, "seq_len": 16},
    },
    "PPFormulaNet": {
        "text_config": {**STARTED, **BART_LAYERS},
        "vision_config": {
            **{
                **SMALL,
                "hidden_size": 16,
                "output_channels": 16,
                "image_size": 64,
                "patch_size": 16,
                "mlp_dim": 64,
                "window_size": 2,
            },
            **{"global_attn_indexes": [0], "post_conv_in_channels": 16, "post_conv_mid_channels": 24},
            **{"post_conv_out_channels": 32, "decoder_hidden_size": 32},
        },
    },
    "Florence2": {
        "text_config": {"model_type": "bart", **STARTED, **BART_LAYERS, "forced_eos_token_id": None},
        "vision_config": {
            **{"embed_dim": [8, 16], "num_heads": [2, 2], "num_groups": [2, 2], "depths": [1, 1]},
            **{"patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False, True]},
            **{"window_size": 4, "projection_dim": 32, "max_temporal_embeddings": 10, "max_position_embeddings": 20},
        },
        "image_token_id": 100,
    },
    "VisionEncoderDecoder": {**STARTED, "encoder": VIT},
}
CLASSES = {
    "SeamlessM4T": "SeamlessM4TForSpeechToText",
    "SeamlessM4Tv2": "SeamlessM4Tv2ForSpeechToText",
    "SpeechT5": "SpeechT5ForSpeechToText",
    "SpeechEncoderDecoder": "SpeechEncoderDecoderModel",
    "VisionEncoderDecoder": "VisionEncoderDecoderModel",
}

LEARNED = "learned positions, MHA"
SKIPPING = "sinusoidal positions that skip padding, MHA"
FEATURE_TREES: Rows = {
    "Whisper": (f"{LEARNED}; mel features", {}),
    "Moonshine": ("partial RoPE, MHA; waves", {}),
    "MoonshineStreaming": ("partial RoPE, MHA; waves", {}),
    "Canary": ("sinusoidal positions, MHA; mel features", {}),
    "CohereAsr": ("learned positions, GQA; mel features", {}),
    "SpeechEncoderDecoder": (f"{LEARNED}; waves (Wav2Vec2 and BERT)", {}),
    "Florence2": (f"{LEARNED}; images and text", {}),
    "Pix2Struct": ("relative bias, MHA, unscaled; patches", {}),
    "PPFormulaNet": (f"{LEARNED}; images", {}),
    "VisionEncoderDecoder-TrOCR": (
        f"{LEARNED}; images (ViT and TrOCR)",
        {"decoder": {"model_type": "trocr", **TOKENS, **BART_LAYERS, **DECODER, "cross_attention_hidden_size": 32}},
    ),
    "VisionEncoderDecoder-Donut": (
        f"{LEARNED}; images (Donut's Swin and MBart)",
        {
            "encoder": {
                **{"model_type": "donut-swin", "image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1]},
                **{"num_heads": [2, 4], "window_size": 4},
            },
            "decoder": {"model_type": "mbart", **TOKENS, **BART_LAYERS, **DECODER, "encoder_layers": 3},
        },
    ),
    "VisionEncoderDecoder-GPT2": (
        f"{LEARNED}; images (ViT and GPT-2)",
        {
            "decoder": {
                **{"model_type": "gpt2", **TOKENS, **DECODER, "n_embd": 32, "n_layer": 2, "n_head": 4},
                **{"n_positions": 64, "initializer_range": 0.3},
            },
        },
    ),
}
FEATURE_PLAIN: Rows = {
    "Speech2Text": (f"{SKIPPING}; mel features", {}),
    "SeamlessM4T": (f"{SKIPPING}; mel features", {"position_embeddings_type": "relative"}),
    "SeamlessM4Tv2": (f"{SKIPPING}; mel features", {"position_embeddings_type": "relative_key"}),
    "SpeechT5": (f"{SKIPPING}; waves", {}),
}

# The name and shape of an architecture's encoder input, and the length of its mask, if it has one.
_READ: dict[str, tuple[str, tuple[int, ...], int]] = {
    "Whisper": ("input_features", (8, 60), 0),
    "Speech2Text": ("input_features", (40, 8), 40),
    "Moonshine": ("input_values", (3000,), 3000),
    "MoonshineStreaming": ("input_values", (3200,), 3200),
    "Canary": ("input_features", (80, 16), 80),
    "CohereAsr": ("input_features", (80, 16), 80),
    "SeamlessM4T": ("input_features", (40, 16), 40),
    "SeamlessM4Tv2": ("input_features", (40, 16), 40),
    "SpeechT5": ("input_values", (800,), 800),
    "SpeechEncoderDecoder": ("inputs", (800,), 800),
    "Pix2Struct": ("flattened_patches", (16, 14), 16),
    "PPFormulaNet": ("pixel_values", (3, 64, 64), 0),
    "Florence2": ("pixel_values", (3, 32, 32), 23),
    "VisionEncoderDecoder": ("pixel_values", (3, 16, 16), 0),
}


def features(architecture: str, rows: int) -> dict[str, Tensor]:
    """The inputs of a tiny model for one or two rows. The second sound is shorter and padded."""
    name, shape, places = _READ[architecture]
    source = torch.Generator().manual_seed(7)
    inputs = {name: torch.randn(2, *shape, generator=source)}
    if architecture == "Pix2Struct":  # patches begin with their row and column, counted from 1
        at = torch.arange(16)
        inputs[name][:, :, 0], inputs[name][:, :, 1] = 1 + at // 4, 1 + at % 4
    if architecture == "Florence2":
        text = torch.randint(4, 99, (2, places - 17), generator=source)
        inputs["input_ids"] = torch.cat([torch.full((2, 17), 100), text], 1)  # an image takes 17 tokens
    if places:
        ends = torch.tensor([places, places * 9 // 16 if architecture != "Florence2" else places])
        inputs["attention_mask"] = (torch.arange(places) < ends[:, None]).long()
    return {key: each[:rows].clone() for key, each in inputs.items()}
