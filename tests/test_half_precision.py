"""Half precision: plain steps, and drafts of separate prompts on a CPU, have the bits of `model.generate`."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
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
from lookahead import DecodingStats, LookaheadConfig
from lookahead.backend.choice import backend_for
from lookahead.backend.cpu import product_bits
from lookahead.backend.cpu.linears import LinearScope
from lookahead.backend.self_check import keeps_solo_bits
from lookahead.backend.support import support_of
from lookahead.model.cache import TreeCache
from tests.support.adversarial_proposers import always_wrong, drafting_by, perfect, random_trees
from tests.support.engines import engine_of
from tests.support.families import FAMILIES, build, for_cpus
from tests.support.products import kept_choice, run

PLAIN = LookaheadConfig(proposers=())
DRAFTED = LookaheadConfig(draft="fixed", min_probability=0.0, max_nodes=16)  # each attends alone
LARGE = LookaheadConfig(draft="fixed", min_probability=0.0, window=15, max_nodes=120)
SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
WINDOW = {"sliding_window": 16}
HEADS = {"head_dim": 8}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "gpt2, transposed weights": (GPT2LMHeadModel, GPT2Config, {}),
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


@cache
def shared(name: str, dtype: torch.dtype) -> Any:
    """A random model of a family, which no test changes: its bits are compared once."""
    return made(name, dtype)


def made(name: str, dtype: torch.dtype) -> Any:
    """The same for one test alone."""
    kind, config, options = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return for_cpus(kind(config(**SIZES, **options))).to(dtype).eval()


def compare(model: Any, prompts: torch.Tensor, config: LookaheadConfig = PLAIN, **options: Any) -> None:
    """Tokens and logits of lookahead and of transformers."""
    kwargs = {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0, **options}
    torch.manual_seed(5)
    expected = model.generate(prompts, **kwargs)
    torch.manual_seed(5)
    got = model.generate(prompts, **kwargs, custom_generate=lookahead.decode, lookahead_config=config)
    assert torch.equal(got.sequences, expected.sequences)
    assert len(got.logits) == len(expected.logits)
    assert all(map(torch.equal, got.logits, expected.logits))


def prompts(seed: int, rows: int = 1, length: int = 12) -> torch.Tensor:
    return torch.randint(3, 100, (rows, length + seed), generator=torch.Generator().manual_seed(seed))


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_plain_steps_give_the_tokens_and_logits_of_generate(name: str, dtype: torch.dtype) -> None:
    model = shared(name, dtype)
    compare(model, prompts(0), max_new_tokens=20, do_sample=False)
    compare(model, prompts(3), max_new_tokens=12, do_sample=True, temperature=1.3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [name for name in MODELS if "sinks" not in name])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_drafts_of_one_prompt_give_the_tokens_and_logits_of_generate(name: str, dtype: torch.dtype) -> None:
    model = shared(name, dtype)
    assert keeps_solo_bits(model)
    compare(model, prompts(1).repeat(1, 2), DRAFTED, max_new_tokens=16, do_sample=False)
    compare(model, prompts(3).repeat(1, 2), DRAFTED, max_new_tokens=10, do_sample=True, temperature=1.3)
    compare(model, prompts(4), LARGE, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("config", [PLAIN, DRAFTED], ids=["plain", "drafted"])
@pytest.mark.parametrize("name", ["llama", "gemma2, softcapping"])
def test_sampled_rows_share_the_draws_of_generate_though_each_prompt_is_read_alone(name: str, config: Any) -> None:
    model, ids = shared(name, torch.bfloat16), prompts(1, rows=3).repeat(1, 2)
    options, outputs = {"max_new_tokens": 16, "do_sample": True, "pad_token_id": 0}, []
    for ours in ({}, {"custom_generate": lookahead.decode, "lookahead_config": config}):
        torch.manual_seed(5)
        outputs.append(model.generate(ids, **options, **ours))
    assert torch.equal(*outputs)


def test_no_bits_are_promised_under_autocast_and_what_was_found_there_is_not_kept() -> None:
    model = made("llama", torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        assert not keeps_solo_bits(model)
    assert keeps_solo_bits(model)
    compare(model, prompts(1).repeat(1, 2), DRAFTED, max_new_tokens=24, do_sample=False)


@pytest.mark.parametrize("packs", [True, False])
def test_under_autocast_products_have_the_type_that_it_chooses(
    packs: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(product_bits, "FEWEST_WEIGHTS", 1)
    model, x = torch.nn.Sequential(torch.nn.Linear(24, 19)), torch.randn(40, 24)
    with kept_choice(tmp_path, "onednn"), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        assert torch.equal(run(LinearScope(model, packs=packs), model, x), expected)
    assert expected.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["Gemma3n", "Gemma4"])
def test_layers_that_read_the_window_of_another_layer_keep_the_bits_of_generate(name: str) -> None:
    model = build(FAMILIES[name]).to(torch.bfloat16)
    assert keeps_solo_bits(model)
    compare(model, prompts(0).repeat(1, 2), DRAFTED, max_new_tokens=16, do_sample=False)


@pytest.mark.parametrize("name", ["llama", "mistral, its window", "gemma2, softcapping"])
def test_drafts_that_are_always_wrong_or_right_give_the_logits_of_generate(name: str) -> None:
    model, prompt = shared(name, torch.bfloat16), prompts(5)
    answers = model.generate(prompt, max_new_tokens=16, do_sample=False).tolist()
    for offer in (perfect(answers), always_wrong(answers, 101), random_trees(101)):
        with drafting_by(offer):
            compare(model, prompt, DRAFTED, max_new_tokens=16, do_sample=False)


@pytest.mark.parametrize("name", ["llama", "eager", "mistral, its window", "gemma2, softcapping"])
def test_prompts_that_are_decoded_together_have_the_tokens_that_each_has_alone(name: str, tiny_tokenizer: Any) -> None:
    """Rows of different lengths that end and join at different times, with drafts that are accepted and random ones."""
    model = shared(name, torch.bfloat16)
    texts = [prompts(seed).repeat(1, 1 + seed % 3) for seed in range(5)]
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    options["eos_token_id"] = [int(model.generate(texts[row], **options)[0, -10]) for row in (0, 4)]
    expected = [model.generate(each, **options)[0, each.shape[1] :].tolist() for each in texts]
    assert len({len(each) for each in expected}) > 1
    asked = [each[0].tolist() for each in texts]
    for offer in (None, random_trees(101)):
        with drafting_by(offer) if offer is not None else nullcontext():
            done = list(lookahead.stream_many(model, tiny_tokenizer, asked, rows=2, config=DRAFTED, **options))
        assert [each.token_ids for each in sorted(done, key=lambda each: each.index)] == expected
        assert {each.stats.exactness for each in done if each.stats.target_forwards} == {"bitwise"}
        assert sum(each.stats.drafted_tokens for each in done) > 0


@pytest.mark.parametrize("name", ["llama", "eager", "mistral, its window", "gemma2, softcapping"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_a_padded_batch_have_the_logits_that_each_has_alone(name: str, dtype: torch.dtype) -> None:
    model, texts = shared(name, dtype), [prompts(seed).repeat(1, 1 + seed % 2) for seed in range(3)]
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = [model.generate(text, **options) for text in texts]
    longest = max(text.shape[1] for text in texts)
    padded, mask = (
        torch.cat([torch.nn.functional.pad(part(text), (longest - text.shape[1], 0)) for text in texts])
        for part in (torch.clone, torch.ones_like)
    )
    answers = [alone.sequences[0].tolist() for alone in expected]
    for offer in (None, perfect(answers), always_wrong(answers, 101), random_trees(101)):
        with drafting_by(offer) if offer is not None else nullcontext():
            got = model.generate(
                padded, attention_mask=mask, **options, custom_generate=lookahead.decode, lookahead_config=DRAFTED
            )
        for row, alone in enumerate(expected):
            assert torch.equal(got.sequences[row, longest:], alone.sequences[0, -12:])
            for ours, own in zip(got.logits, alone.logits, strict=True):
                assert torch.equal(ours[row], own[0])


def stats_of(model: Any, prompts: torch.Tensor, cache: str | None = None, **options: Any) -> list[DecodingStats]:
    """Stats of the rows of a decoding."""
    kwargs: dict[str, Any] = {"max_new_tokens": 12, "pad_token_id": 0, "cache_implementation": cache}
    config = LookaheadConfig(draft="fixed", **options)
    engine = engine_of(model, prompts, **kwargs, lookahead_config=config)
    for _ in engine.run():
        pass
    stats: list[DecodingStats] = engine.stats
    return stats


def test_stats_tell_whether_the_bits_are_those_of_generate() -> None:
    half, single = shared("llama", torch.bfloat16), shared("llama", torch.float32)
    experts = shared("gpt-oss, sinks", torch.bfloat16)
    (stats,) = stats_of(half, prompts(1))
    assert stats.exactness == "bitwise" and stats.to_dict()["exactness"] == "bitwise"
    assert stats.bitwise_forwards == stats.target_forwards
    assert [each.exactness for each in stats_of(half, prompts(1, rows=2))] == ["bitwise"] * 2
    assert [each.exactness for each in stats_of(single, prompts(1))] == ["tokens"]
    static = stats_of(half, prompts(1), cache="static")
    assert [each.exactness for each in static] == ["rounding"], "transformers attends to its slots under a mask"
    assert not keeps_solo_bits(experts), "the products of an expert depend on the rows that chose it"


def test_a_model_whose_rows_depend_on_each_other_is_found_out() -> None:
    model = made("llama", torch.bfloat16)
    layer = model.model.layers[1].mlp.down_proj
    layer.register_forward_hook(lambda module, inputs, output: output * (1 + 0.01 * (output.shape[1] > 1)))
    assert not keeps_solo_bits(model)
    assert support_of(model, shortest=4, max_length=30).shape == "none"


def test_paths_whose_keys_are_lost_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama", torch.bfloat16)
    expected = [model.generate(ids, max_new_tokens=16, do_sample=False) for ids in (prompts(1), prompts(1, rows=2))]

    def commit(cache: TreeCache, row: int, path: Any, live: int = 0) -> None:
        cache.slots.lengths[row] += len(path) - live

    monkeypatch.setattr(TreeCache, "commit", commit)
    lengths = {"shortest": 4, "max_length": 30}
    assert not keeps_solo_bits(model)
    assert support_of(model, **lengths, is_alone=True).shape != "trees"
    assert support_of(model, **lengths).shape != "trees"
    for each in expected:
        ids = each[:, :13]
        with drafting_by(random_trees(101)):
            got = model.generate(
                ids, max_new_tokens=16, do_sample=False, custom_generate=lookahead.decode, lookahead_config=DRAFTED
            )
        assert torch.equal(got, each)


def test_a_model_with_products_that_are_no_linear_layers_is_said_to_round() -> None:
    model = made("llama", torch.bfloat16)
    model.model.layers[1].mlp.down_proj.__class__ = type("Other", (torch.nn.Linear,), {"__module__": "torch.other"})
    assert not keeps_solo_bits(model), "its rows are multiplied all at once"
    assert [each.exactness for each in stats_of(model, prompts(1))] == ["rounding"]


def test_a_batch_of_prompts_of_one_length_is_that_of_generate_as_well() -> None:
    compare(shared("llama", torch.bfloat16), prompts(1, rows=3), max_new_tokens=32, do_sample=False)


def passes_of(model: Any, prompts: torch.Tensor, mask: torch.Tensor | None = None) -> list[tuple[int, int]]:
    """What is told of how a prompt is read."""
    told: list[tuple[int, int]] = []
    backend = backend_for(model, rows=len(prompts), capacity=64)
    lengths = mask.sum(1).tolist() if mask is not None else [prompts.shape[1]] * len(prompts)
    texts = [row[-n:].int().numpy() for row, n in zip(prompts, lengths, strict=True)]
    with backend.serving():
        backend.read(texts, on_prefill=lambda *now: told.append(now))
    return told


def test_how_far_a_prompt_is_read_is_told_before_and_behind_its_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookahead.backend.torch_backend.PREFILL_CHUNK", 5)
    assert passes_of(shared("llama", torch.bfloat16), prompts(1, rows=2)) == [(0, 13), (13, 13)]
    assert passes_of(shared("llama", torch.float32), prompts(1, rows=2)) == [(0, 13), (5, 13), (10, 13), (13, 13)]


def test_what_generate_would_read_with_masks_is_read_in_parts_where_it_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lookahead.backend.torch_backend.PREFILL_CHUNK", 5)
    ragged = torch.tensor([[1] * 13, [0] * 4 + [1] * 9])
    assert len(passes_of(shared("llama", torch.bfloat16), prompts(1, rows=2), ragged)) == 4
    monkeypatch.setattr("lookahead.backend.torch_backend._MAX_WHOLE", 12)
    for name, passes in {"llama": 1, "eager": 3, "mistral, its window": 3}.items():
        assert len(passes_of(shared(name, torch.bfloat16), prompts(1))) == passes + 1


def test_a_long_prompt_is_read_at_once_as_generate_reads_it() -> None:
    compare(shared("llama", torch.bfloat16), prompts(0, length=1100), max_new_tokens=6, do_sample=False)
