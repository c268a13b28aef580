"""A tiny random Whisper and sounds for it: 30 seconds are 60 frames of 8 mel bins, which its encoder halves."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizerFast,
    pipeline,
)

FRAMES = 60
VOCABULARY = 101
END, START, NO_TIMESTAMPS, PREVIOUS = 2, 3, 60, 12  # the tokens after NO_TIMESTAMPS are times
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": 8,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 64,
    "init_std": 0.5,
    "pad_token_id": END,
    "bos_token_id": END,
    "eos_token_id": END,
    "decoder_start_token_id": START,
}


def tiny_whisper(seed: int = 3, **sizes: Any) -> Any:
    """A multilingual Whisper in float32 with the generation configuration of a published model."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = WhisperForConditionalGeneration(WhisperConfig(**{**SIZES, **sizes})).eval()
        for name, parameter in model.model.decoder.named_parameters():
            if name.endswith("q_proj.weight"):  # attention focuses on single tokens, so that texts vary
                parameter.mul_(4.0)
        model.proj_out.weight = torch.nn.Parameter(torch.randn_like(model.proj_out.weight) * 0.6)
    options: dict[str, Any] = {
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "prev_sot_token_id": PREVIOUS,
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": 4, "<|de|>": 5},
        "task_to_id": {"transcribe": 6, "translate": 7},
        "max_initial_timestamp_index": 30,
        "alignment_heads": [[0, 0], [1, 1]],
        "return_timestamps": False,
        "max_length": 60,
        "suppress_tokens": [START, 4, 5, 6, 7, PREVIOUS],
        "begin_suppress_tokens": [END, 9],
    }
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    return model


def sounds(count: int = 1, frames: int = FRAMES) -> torch.Tensor:
    """Mel features, `[count, bins, frames]`."""
    return torch.randn(count, 8, frames, generator=torch.Generator().manual_seed(5))


def tiny_recognizer(model: Any) -> Any:
    """A pipeline of speech recognition with its own tokenizer and feature extractor, in chunks of 30 seconds."""
    marks = {END: "<|endoftext|>", START: "<|startoftranscript|>", 4: "<|en|>", 5: "<|de|>", 6: "<|transcribe|>"}
    marks |= {7: "<|translate|>", PREVIOUS: "<|startofprev|>", NO_TIMESTAMPS: "<|notimestamps|>"}
    words = [marks.get(token) or chr(ord("A") + token) for token in range(NO_TIMESTAMPS + 1)]
    words += [f"<|{time * 0.02:.2f}|>" for time in range(VOCABULARY - len(words))]
    vocabulary = {word: token for token, word in enumerate(words)}
    tokenizer = WhisperTokenizerFast(vocab=vocabulary, merges=[], pad_token=marks[END])
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks.values())})
    features = WhisperFeatureExtractor(feature_size=8, sampling_rate=6000, hop_length=100, chunk_length=1, n_fft=400)
    parts = {"model": model, "tokenizer": tokenizer, "feature_extractor": features}
    return pipeline("automatic-speech-recognition", **parts)
