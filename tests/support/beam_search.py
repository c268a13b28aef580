"""Beam searches by transformers and by lookahead, and their comparison."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

import lookahead

ONE = {"input_ids": torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])}
RAGGED = {
    "input_ids": torch.tensor([[0] * 5 + [44, 17, 44, 17, 44], [5, 9, 31, 77, 5, 9, 31, 5, 9, 77]]),
    "attention_mask": torch.tensor([[0] * 5 + [1] * 5, [1] * 10]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "length penalty": {"length_penalty": 2.0, "early_stopping": "never"},
    "early stopping": {"early_stopping": True, "num_return_sequences": 2, "no_repeat_ngram_size": 3},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0},
    "minimum": {"min_new_tokens": 6, "repetition_penalty": 1.3, "output_logits": True},
}


def found(model: PreTrainedModel, **options: Any) -> Any:
    """The output of a search with all optional fields."""
    torch.manual_seed(3)
    shared = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": [5, 9]}
    returned = {"return_dict_in_generate": True, "output_scores": True}
    return model.generate(**copy.deepcopy({**shared, **returned, **options}))


def assert_same(model: PreTrainedModel, **options: Any) -> None:
    """Check that transformers and lookahead find the same."""
    expected = found(model, **options)
    got = found(model, **options, custom_generate=lookahead.decode)
    assert type(got) is type(expected)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert got.beam_indices.tolist() == expected.beam_indices.tolist()
    torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, rtol=0, atol=1e-5)
    for name in ("scores", "logits"):
        for mine, theirs in zip(getattr(got, name) or (), getattr(expected, name) or (), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
