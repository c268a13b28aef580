"""A real vLLM with lookahead's drafts writes what it writes without them: offline, streamed, sampled, aborted.

`make test-vllm` installs it; elsewhere these tests are left out.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

# vLLM reads these from its environment alone.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "0"),
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

DRAFTS = {
    "method": "custom_class",
    "model": "lookahead.plugins.vllm.LookaheadProposer",
    "num_speculative_tokens": 8,
}
PROMPTS = [{"prompt_token_ids": [5 + i, 7, 9, 11, 5 + i, 7, 9][: 1 + i]} for i in range(7)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random Llama; it soon repeats itself."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, initializer_range=0.2, eos_token_id=0,
    )  # fmt: skip
    path: Path = tmp_path_factory.mktemp("vllm") / "model"
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def options(folder: str) -> dict[str, Any]:
    """Of every engine."""
    return {
        "model": folder, "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4,
        "enforce_eager": True, "disable_log_stats": True, "seed": 0,
    }  # fmt: skip


@pytest.fixture(scope="module")
def expected(options: dict[str, Any]) -> list[list[int]]:
    """What vLLM writes without drafts."""
    return tokens_of(LLM(**options).generate(PROMPTS, GREEDY, use_tqdm=False))


@pytest.fixture(scope="module")
def drafting(options: dict[str, Any], expected: object) -> Iterator[LLM]:
    """An engine with drafts and a cache too small for four requests; one for all tests, as vLLM starts before Numba."""
    gc.collect()
    yield LLM(**options, speculative_config=DRAFTS, num_gpu_blocks_override=10, block_size=32)


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def proposer_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter


def count_calls(proposer: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and drafted tokens of every call from now on."""
    calls, propose = [], proposer.propose

    def counted(sampled: list[list[int]], *given: Any, **named: Any) -> list[list[int]]:
        drafts: list[list[int]] = propose(sampled, *given, **named)
        calls.append((len(sampled), sum(map(len, drafts))))
        return drafts

    monkeypatch.setattr(proposer, "propose", counted)
    return calls


def test_greedy_outputs_are_those_without_drafts_in_fewer_steps(
    drafting: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(proposer_of(drafting), monkeypatch)
    for _ in range(2):
        assert tokens_of(drafting.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert sum(drafted for _, drafted in calls) > 0
    assert sum(rows for rows, _ in calls) < 0.8 * 2 * sum(map(len, expected))
    assert not proposer_of(drafting)._told


def test_one_prompt_at_a_time_gives_the_same(drafting: LLM, expected: list[list[int]]) -> None:
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert tokens_of(drafting.generate([prompt], GREEDY, use_tqdm=False)) == [tokens]


def test_sampling_and_limits_of_all_kinds_are_served(drafting: LLM) -> None:
    kinds = [
        SamplingParams(temperature=0.8, seed=1, max_tokens=50, detokenize=False),
        SamplingParams(temperature=1.0, n=2, max_tokens=30, detokenize=False),
        SamplingParams(temperature=0.0, max_tokens=255, ignore_eos=True, detokenize=False),
        SamplingParams(temperature=0.0, max_tokens=1, detokenize=False),
        SamplingParams(temperature=0.0, max_tokens=60, repetition_penalty=1.3, detokenize=False),
    ]
    for kind in kinds:
        outputs = drafting.generate(PROMPTS[:4], [kind] * 4, use_tqdm=False)
        assert all(1 <= len(each.token_ids) <= kind.max_tokens for output in outputs for each in output.outputs)
    assert not proposer_of(drafting)._told


def test_requests_that_are_aborted_leave_the_others_their_tokens(drafting: LLM, expected: list[list[int]]) -> None:
    engine = drafting.llm_engine
    names = [f"aborted {i}" for i in range(7)]
    ids = {}
    for name, prompt in zip(names, PROMPTS, strict=True):
        ids[name] = engine.add_request(name, prompt, GREEDY) or name
    written: dict[str, list[int]] = {}
    for step in range(500):
        if not engine.has_unfinished_requests():
            break
        if step in (5, 9):
            engine.abort_request([names[step % 4]])
        for output in engine.step():
            written[output.request_id] = list(output.outputs[0].token_ids)
    finished = [i for i in range(7) if len(written.get(names[i], [])) == 100]
    assert len(finished) >= 5
    assert all(written[names[i]] == expected[i] for i in finished)
    assert not proposer_of(drafting)._told


def test_preempted_requests_give_the_same(
    drafting: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = drafting.llm_engine.engine_core.engine_core.scheduler
    preempted, preempt = [], scheduler._preempt_request

    def counted(*given: Any, **named: Any) -> None:
        preempted.append(preempt(*given, **named))

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    assert tokens_of(drafting.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert preempted
    assert not proposer_of(drafting)._told


def test_streams_of_a_server_process_are_those_without_drafts(
    options: dict[str, Any], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options, speculative_config=DRAFTS))

    async def stream(name: int) -> list[int]:
        tokens: list[int] = []
        async for output in engine.generate(PROMPTS[name], GREEDY, str(name)):
            now = list(output.outputs[0].token_ids)
            assert now[: len(tokens)] == tokens
            tokens = now
        return tokens

    async def all_streams(make: Callable[[int], Any]) -> list[list[int]]:
        return await asyncio.gather(*map(make, range(7)))

    try:
        assert asyncio.run(all_streams(stream)) == expected
    finally:
        engine.shutdown()
