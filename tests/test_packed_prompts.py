"""Several prompts read in one pass: each attends to itself only, and in half precision has the bits it has alone."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import lookahead
from lookahead.backend import torch_backend
from lookahead.backend.cpu.cpu_backend import CpuBackend
from lookahead.backend.cpu.cpu_pass import CpuPass, running
from lookahead.backend.cpu.exact_attention import MAX_ROWS
from lookahead.backend.cpu.linears import LinearScope
from lookahead.backend.cpu.product_bits import Kind, Layout, _cancelling, rows_of
from lookahead.backend.protocol import BitPolicy
from lookahead.backend.self_check import packs_prompts
from lookahead.backend.tree_pass import PackedPrompts
from lookahead.decoding.prompts import PromptReader
from lookahead.decoding.request import Completion, Request
from lookahead.decoding.scheduler import Scheduler
from lookahead.model.model_state import patched_attribute
from tests.support.families import ENCODER_DECODERS, FAMILIES, build
from tests.test_half_precision import made

SIZES = 5, 1, 23, 2, 11
SOLO = BitPolicy.SOLO
WIDTHS: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "eager": (LlamaForCausalLM, LlamaConfig, {"attn_implementation": "eager"}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, {}),
}  # fmt: skip


@cache
def wide(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A random model whose products are wide enough to be multiplied as those of real models; no test changes it."""
    kind, config, options = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return kind(config(**{**WIDTHS, **options})).to(dtype).eval()


def prompts_of(sizes: Any, vocabulary: int = 60, seed: int = 0) -> list[np.ndarray]:
    source = np.random.default_rng(seed)
    return [source.integers(3, vocabulary, size).astype(np.int32) for size in sizes]


def read(model: Any, prompts: list[np.ndarray], beginnings: Any = (), **options: Any) -> tuple[torch.Tensor, list[Any]]:
    """The logits after the prompts, `[prompts, 1, vocab]`, and their keys and values, by a backend with a spare row."""
    backend = CpuBackend(model, rows=len(prompts) + 1, capacity=16, **options)
    with backend.serving():
        for row, beginning in enumerate(beginnings, 1):
            backend.read([beginning], row)
            backend.cache.slots.lengths[row] = len(beginning)
        if options.get("packs_prompts"):
            logits = backend.read(prompts, 1)
        else:
            logits = torch.cat([backend.read([prompt], row) for row, prompt in enumerate(prompts, 1)])
    kv = [backend.cache.extract_row(row).kv for row in range(1, len(prompts) + 1)]
    return logits, [tensor for row in kv for at in sorted(row) for tensor in row[at]]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The new tokens of the prompts of every packed pass."""
    passes = list[list[int]]()

    class Noted(PackedPrompts):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            passes.append(self.sizes)

    monkeypatch.setattr(torch_backend, "PackedPrompts", Noted)
    return passes


@pytest.mark.parametrize("name", MODELS)
def test_packed_prompts_have_the_bits_of_each_alone(name, packed):
    model = wide(name)
    if not packs_prompts(model, SOLO):
        pytest.skip("this CPU's products change the bits of a row with the number of rows")
    prompts = prompts_of(SIZES)
    (logits, kv), (alone, kv_alone) = read(model, prompts, packs_prompts=True), read(model, prompts)
    assert [23, 2, 11] in packed  # a prompt of one token is read alone: its products are others
    assert torch.equal(logits, alone)
    assert all(map(torch.equal, kv, kv_alone)) and len(kv) == 2 * 3 * len(SIZES)


def test_the_last_tokens_of_packed_prompts_are_multiplied_as_each_alone():
    kind = Kind(torch.bfloat16, torch.Size((64, 64)), False, False, 1)
    if rows_of(kind, Layout()).solo == MAX_ROWS:
        pytest.skip("this CPU's products keep the bits of single rows")
    x, weight, _ = _cancelling(kind, 5)
    layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(weight)
    with torch.inference_mode():
        alone = torch.cat([layer(row) for row in x.split(1)])
        together = layer(x)
        scope = LinearScope(layer, packs=False)
        for rows, expected in ((5, alone), (0, together)):
            with (
                patched_attribute("forward", scope.forwards()),
                running(CpuPass(BitPolicy.BATCH, True, last_rows=rows)),
            ):
                assert torch.equal(layer(x), expected)
    assert not torch.equal(alone, together)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "Qwen2", "GPT2", "GptOss", "Qwen2Moe"])
def test_packed_float32_prompts_agree_with_each_alone(name, packed):
    model = build(FAMILIES[name])
    assert packs_prompts(model, BitPolicy.ROUNDED)
    prompts = prompts_of((30, 1, 44, 9))  # longer than the windows of these models
    (logits, kv), (alone, kv_alone) = read(model, prompts, packs_prompts=True), read(model, prompts)
    assert packed == [[30, 1, 44, 9]]
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)
    for some, others in zip(kv, kv_alone, strict=True):
        torch.testing.assert_close(some, others, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_prompts_follow_their_committed_beginnings(dtype, packed):
    model = wide("llama", dtype)
    if not packs_prompts(model, SOLO):
        pytest.skip("this CPU's products change the bits of a row with the number of rows")
    prompts, cuts = prompts_of((20, 9, 31)), (12, 0, 17)
    beginnings = [prompt[: max(1, cut)] for prompt, cut in zip(prompts, cuts, strict=True)]
    logits, kv = read(model, prompts, beginnings, packs_prompts=True)
    alone, kv_alone = read(model, prompts, beginnings)
    assert packed[-1] == [8, 8, 14]
    for some, others in zip([logits, *kv], [alone, *kv_alone], strict=True):
        torch.testing.assert_close(some, others, **({"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}))


def test_a_packed_pass_holds_no_more_tokens_than_a_part_of_a_prompt(monkeypatch, packed):
    monkeypatch.setattr(torch_backend, "PREFILL_CHUNK", 24)
    model = build(FAMILIES["Llama"])
    prompts = prompts_of((10, 14, 3, 40, 8, 8))
    logits, _ = read(model, prompts, packs_prompts=True)
    assert packed == [[10, 14], [8, 8]]
    torch.testing.assert_close(logits, read(model, prompts)[0], rtol=1e-4, atol=1e-4)


def test_prompts_are_read_whole_only_if_each_of_them_is(monkeypatch):
    monkeypatch.setattr(torch_backend, "PREFILL_CHUNK", 16)
    monkeypatch.setattr(torch_backend, "_MAX_WHOLE", 20)
    for sizes, is_whole in (((5, 30, 7), False), ((5, 15, 7), True)):
        backend = CpuBackend(wide("eager"), rows=3, capacity=16, packs_prompts=True)
        with backend.serving():
            backend.read(prompts_of(sizes))
        assert backend.is_read_whole is is_whole


def test_models_whose_rows_depend_on_one_another_are_not_packed():
    assert not packs_prompts(made("gpt-oss, sinks", torch.bfloat16), SOLO)  # experts take the rows routed to them
    assert not packs_prompts(made("mistral, its window", torch.bfloat16), SOLO)
    assert not packs_prompts(wide("llama"), BitPolicy.BATCH)
    assert not packs_prompts(build(FAMILIES["Mamba"]), BitPolicy.ROUNDED)
    assert not packs_prompts(build(ENCODER_DECODERS["T5"]), BitPolicy.ROUNDED)
    scaled = made("llama", torch.float32)
    scaled.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not packs_prompts(scaled, BitPolicy.ROUNDED)  # the longest text decides on the embeddings of all


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompts_decoded_together_are_read_together(dtype, packed, tiny_tokenizer):
    model = wide("llama", dtype)
    if not packs_prompts(model, SOLO):
        pytest.skip("this CPU's products change the bits of a row with the number of rows")
    prompts = [prompt.tolist() for prompt in prompts_of((12, 30, 7, 18))]
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    expected = [lookahead.generate(model, tiny_tokenizer, prompt, **options).token_ids[0] for prompt in prompts]
    packed.clear()
    done = sorted(lookahead.stream_many(model, tiny_tokenizer, prompts, rows=4, **options), key=lambda one: one.index)
    assert [one.token_ids for one in done] == expected
    assert packed == [[12, 30, 7, 18]]
    bits = {one.stats.exactness for one in done}
    assert bits == {"bitwise" if dtype == torch.bfloat16 else "tokens"}


def test_short_prompts_of_a_server_are_read_in_small_passes_the_shorter_ones_first(packed, tiny_tokenizer):
    model = build(FAMILIES["Llama"])
    reader = PromptReader(model, tiny_tokenizer, None, max_new_tokens=30, do_sample=False)
    scheduler = Scheduler(reader, rows=8, is_mixed=True)
    prompts = [prompt.tolist() for prompt in prompts_of((20, 50, 40, 64, 60, 50, 129), seed=3)]
    with closing(scheduler):
        scheduler.put(0, prompts[0])
        scheduler.step()
        for index, prompt in enumerate(prompts[1:6], 1):
            scheduler.put(index, prompt)
        # Each pass has the shortest one; the row that runs goes on after 128 tokens.
        assert turns_of(scheduler.steps()) == [[1, 2], [4, 5], [0, 1, 2, 4, 5]]
        assert packed == [[40, 50], [50, 60]]
        steps = scheduler.steps()
        assert turns_of(islice(steps, 2)) == [[3], [0, 1, 2, 3, 4, 5]]
        scheduler.put(6, prompts[6])
        done = list[Completion]()
        while not scheduler.is_idle:
            done += scheduler.step()
    assert packed == [[40, 50], [50, 60]]  # a thread reads 129 tokens
    for one in done:
        alone = lookahead.generate(model, tiny_tokenizer, prompts[one.index], max_new_tokens=30, do_sample=False)
        assert one.token_ids == alone.token_ids[0]


def test_running_outputs_of_a_server_go_on_between_waiting_prompts(packed, tiny_tokenizer):
    model = build(FAMILIES["Llama"])
    reader = PromptReader(model, tiny_tokenizer, None, max_new_tokens=30, do_sample=False)
    with closing(Scheduler(reader, rows=8, is_mixed=True)) as scheduler:
        scheduler.put(0, [5, 6, 7])
        scheduler.step()
        for index, prompt in enumerate(prompts_of([100] * 5, seed=4), 1):
            scheduler.put(index, prompt.tolist())
        # At most 128 tokens, and the last prompt whole.
        assert turns_of(scheduler.steps()) == [[1], [2], [0, 1, 2]]
        assert turns_of(scheduler.steps()) == [[3], [4], [0, 1, 2, 3, 4]]


def turns_of(steps: Iterable[list[Request]]) -> list[list[int]]:
    """The numbers of the requests that got tokens, turn by turn."""
    return [sorted(request.index for request in requests) for requests in steps]
