"""Half precision: a step without drafts is that of `model.generate` to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import lookahead
from lookahead import LookaheadConfig
from lookahead.models.target import Target

PLAIN = LookaheadConfig(proposers=())
SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
WINDOW = {"sliding_window": 16}
HEADS = {"head_dim": 8}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "eager": (LlamaForCausalLM, LlamaConfig, {"attn_implementation": "eager"}),
    "mistral, its window": (MistralForCausalLM, MistralConfig, WINDOW),
    "qwen2, full and sliding layers": (
        Qwen2ForCausalLM, Qwen2Config, {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "gemma2, softcapping": (Gemma2ForCausalLM, Gemma2Config, {**WINDOW, **HEADS}),
    "gpt-oss, sinks": (
        GptOssForCausalLM, GptOssConfig, {**WINDOW, **HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}  # fmt: skip


def made(name: str, dtype: torch.dtype) -> Any:
    """A random model of a family."""
    kind, config, options = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return kind(config(**SIZES, **options)).to(dtype).eval()


def compare(model: Any, prompts: torch.Tensor, **options: Any) -> None:
    """Tokens and logits of `proposers=()` and of transformers."""
    kwargs = {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0, **options}
    torch.manual_seed(5)
    expected = model.generate(prompts, **kwargs)
    torch.manual_seed(5)
    got = model.generate(prompts, **kwargs, custom_generate=lookahead.decode, lookahead_config=PLAIN)
    assert torch.equal(got.sequences, expected.sequences)
    assert len(got.logits) == len(expected.logits)
    assert all(map(torch.equal, got.logits, expected.logits))


def prompts(seed: int, rows: int = 1, length: int = 12) -> torch.Tensor:
    return torch.randint(3, 100, (rows, length + seed), generator=torch.Generator().manual_seed(seed))


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_plain_steps_give_the_tokens_and_logits_of_generate(name: str, dtype: torch.dtype) -> None:
    model = made(name, dtype)
    for seed in range(3):
        compare(model, prompts(seed), max_new_tokens=64, do_sample=False)
    compare(model, prompts(3), max_new_tokens=24, do_sample=True, temperature=1.3)


def test_a_batch_of_prompts_of_one_length_is_that_of_generate_as_well() -> None:
    compare(made("llama", torch.bfloat16), prompts(1, rows=3), max_new_tokens=48, do_sample=False)


def passes_of(model: Any, prompts: torch.Tensor, mask: torch.Tensor | None = None) -> list[tuple[int, int]]:
    """What is told of how a prompt is read."""
    told: list[tuple[int, int]] = []
    target = Target(model, rows=len(prompts), capacity=64, device=torch.device("cpu"), prefill_chunk=5)
    target.on_prefill = lambda *now: told.append(now)
    lengths = mask.sum(1).tolist() if mask is not None else [prompts.shape[1]] * len(prompts)
    with target.serving():
        target.prefill([row[-n:].int().numpy() for row, n in zip(prompts, lengths, strict=True)])
    return told


def test_how_far_a_prompt_is_read_is_told_before_and_behind_its_one_pass() -> None:
    assert passes_of(made("llama", torch.bfloat16), prompts(1, rows=2)) == [(0, 13), (13, 13)]
    assert passes_of(made("llama", torch.float32), prompts(1, rows=2)) == [(0, 13), (5, 13), (10, 13), (13, 13)]


def test_what_generate_would_read_with_masks_is_read_in_parts_where_it_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ragged = torch.tensor([[1] * 13, [0] * 4 + [1] * 9])
    assert len(passes_of(made("llama", torch.bfloat16), prompts(1, rows=2), ragged)) == 4
    monkeypatch.setattr("lookahead.models.target._MAX_WHOLE", 12)
    for name, passes in {"llama": 1, "eager": 3, "mistral, its window": 3}.items():
        assert len(passes_of(made(name, torch.bfloat16), prompts(1))) == passes + 1


def test_a_long_prompt_is_read_at_once_as_generate_reads_it() -> None:
    compare(made("llama", torch.bfloat16), prompts(0, length=1100), max_new_tokens=6, do_sample=False)
