"""The encoder-decoder rows of `tests.support.families`: tiny configurations, by the drafts that they can verify."""

from __future__ import annotations

from tests.support.architectures import Options, Rows

TOKENS: Options = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "tie_word_embeddings": False}
# Sizes of BART and its descendants.
BART_SIZES: Options = {
    **TOKENS,
    "eos_token_id": 2,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 2,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 256,
    "init_std": 0.4,
}
T5_SIZES: Options = {
    **TOKENS,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "initializer_factor": 3.0,
}
GEMMA_SIDE: Options = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER_DECODER_SIZES: dict[str, Options] = {
    "T5": T5_SIZES,
    "MT5": T5_SIZES,
    "UMT5": T5_SIZES,
    "LongT5": T5_SIZES,
    "SwitchTransformers": {**T5_SIZES, "num_experts": 4},
    "T5Gemma": {**TOKENS, "initializer_range": 0.4, "eos_token_id": 2, "decoder_start_token_id": 2},
    "LED": {
        **BART_SIZES,
        "max_encoder_position_embeddings": 256,
        "max_decoder_position_embeddings": 256,
        "attention_window": 8,
    },
    "FSMT": {
        **{name: value for name, value in BART_SIZES.items() if name not in ("vocab_size", "tie_word_embeddings")},
        "langs": ["en", "de"],
        "src_vocab_size": 101,
        "tgt_vocab_size": 101,
        "num_beams": 1,
    },
    "ProphetNet": {
        **TOKENS,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "hidden_size": 32,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 256,
        "init_std": 0.4,
    },
}
ENCODER_DECODER_CLASSES = {"Marian": "MarianMTModel"}

LEARNED = "learned positions, MHA"
SINUSOIDAL = "sinusoidal positions, MHA"
RELATIVE = "relative bias, MHA, unscaled"

DECODER_TREES: Rows = {
    "Bart": (LEARNED, {}),
    "Bart-scaled": (f"{LEARNED}, scaled embeddings", {"scale_embedding": True}),
    "BigBirdPegasus": (LEARNED, {"attention_type": "original_full"}),
    "Blenderbot": (LEARNED, {}),
    "BlenderbotSmall": (LEARNED, {}),
    "LED": (f"{LEARNED}; the encoder's windows", {}),
    "LongT5": (f"{RELATIVE}; the encoder's windows", {"local_radius": 4}),
    "LongT5-global": (
        f"{RELATIVE}; the encoder's windows and blocks",
        {"local_radius": 4, "encoder_attention_type": "transient-global", "global_block_size": 4},
    ),
    "Marian": (SINUSOIDAL, {}),
    "MBart": (LEARNED, {}),
    "MT5": (f"{RELATIVE}, gated", {}),
    "Mvp": (LEARNED, {}),
    "Pegasus": (SINUSOIDAL, {}),
    "PegasusX": (f"{SINUSOIDAL}; the encoder's blocks", {"block_size": 8}),
    "PLBart": (LEARNED, {}),
    "T5": (RELATIVE, {}),
    "T5-gated": (f"{RELATIVE}, gated (FLAN-T5)", {"feed_forward_proj": "gated-gelu"}),
    "T5Gemma": (
        "RoPE, GQA, softcap, windows in every other layer",
        {"encoder": GEMMA_SIDE, "decoder": GEMMA_SIDE},
    ),
    "UMT5": (f"{RELATIVE} in every layer, gated", {}),
}
DECODER_PLAIN: Rows = {
    "FSMT": ("sinusoidal positions, MHA, no croppable cache", {}),
    "M2M100": ("sinusoidal positions that skip padding, MHA", {}),
    "NllbMoe": ("sinusoidal positions, MHA, MoE with a capacity", {"num_experts": 4}),
    "ProphetNet": ("learned positions, several streams", {}),
    "SwitchTransformers": ("relative bias, MHA, MoE with a capacity", {}),
}
