"""Kept texts in half precision: a prompt that begins as an earlier text keeps the bits that it has alone."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import lookahead
from lookahead.backend.cpu.exact_attention import has_bits_of_prompts
from lookahead.backend.read_prompt import PrefixStore, ReadingAhead, prefixes_of
from lookahead.kernels.prompt_attention import tokens_alike
from lookahead.serving.requests import GenerationRequest
from tests.support.families import FAMILIES, build
from tests.test_decoding_loop import Client, held, serving
from tests.test_packed_prompts import prompts_of, wide

__all__ = ["serving"]  # a fixture
ROOM = 1 << 28
NEW = 8
TEXT = prompts_of((1700,))[0].tolist()
# Tokens that a prompt shares with the text, and its own after them.
RAGGED = [(90, 40), (300, 2), (512, 1), (512, 2), (514, 100), (760, 300), (1023, 9), (1024, 1), (1100, 130)]
RAGGED += [(1540, 7), (1600, 1)]
has_kernel = pytest.mark.usefixtures("prompt_kernel")


def questions() -> list[list[int]]:
    """Prompts that share ragged beginnings, each once more after the others, and the next turn of some."""
    asked = [[*TEXT[:shared], *prompts_of((own,), seed=shared)[0].tolist()] for shared, own in RAGGED]
    return [*asked, *asked[::4]]


@cache
def expected_of(name: str, prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """The tokens of `generate` and their log-probabilities, whose last bits show those of the logits."""
    given = torch.tensor([prompt])
    out = wide(name).generate(
        given, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0
    )
    tokens = out.sequences[0, len(prompt) :].tolist()
    logs = [torch.log_softmax(logits[0].float(), -1)[token] for token, logits in zip(tokens, out.logits, strict=True)]
    return tokens, [float(log) for log in logs]


def answered(loop: Any, prompt: list[int]) -> tuple[list[int], list[float], Any]:
    """The tokens of the server, their log-probabilities and its counters."""
    options = {"max_new_tokens": NEW, "do_sample": False}
    client = Client(loop, GenerationRequest(ids=prompt, options=options, top_logprobs=0))
    stats = client.wait().stats
    return client.tokens, [one.logprob for update in client.updates for one in update.logprobs], stats


@pytest.mark.parametrize(("name", "rows"), [("llama", 1), ("llama", 4), ("qwen2", 4), ("eager", 4)])
def test_the_server_gives_the_bits_of_generate_whatever_it_has_read_before(name, rows, serving, tiny_tokenizer):
    model = wide(name)
    prefixes_of(model, 0)
    loop, reused = serving(model, tiny_tokenizer, rows=rows), list[int]()
    # Attention that is not SDPA's takes long for long texts, and copies nothing.
    asked = [prompt for prompt in questions() if name != "eager" or len(prompt) < 800]
    for at, prompt in enumerate(asked):
        tokens, logs, stats = answered(loop, prompt)
        assert (at, tokens, logs) == (at, *expected_of(name, tuple(prompt)))
        reused.append(stats.reused_tokens)
        if at % 4 == 3:  # the next turn of a chat
            turn = [*prompt, *tokens, 7, 8, 9]
            tokens, logs, _ = answered(loop, turn)
            assert (at, tokens, logs) == (at, *expected_of(name, tuple(turn)))
    assert any(reused) == (has_bits_of_prompts(64) and name in ("llama", "qwen2"))


def test_outputs_of_a_server_that_run_together_keep_the_bits_of_generate(serving, tiny_tokenizer):
    model, prompts = wide("llama"), questions()
    prefixes_of(model, 0)
    loop, options = serving(model, tiny_tokenizer, rows=6), {"max_new_tokens": NEW, "do_sample": False}
    clients = [Client(loop, GenerationRequest(ids=prompt, options=options)) for prompt in prompts]
    for client, prompt in zip(clients, prompts, strict=True):
        assert client.wait().stats.exactness == "bitwise"
        assert client.tokens == expected_of("llama", tuple(prompt))[0]


def test_a_server_copies_as_much_as_is_shared_where_it_may_round(serving, tiny_tokenizer):
    loop, prompt = serving(wide("llama"), tiny_tokenizer, rows=2, rounds_prefixes=True), TEXT[:90]
    answered(loop, prompt)
    assert answered(loop, [*prompt, 5, 6])[2].reused_tokens == 90


@pytest.mark.parametrize("name", ["Lfm2", "Qwen3_5", "Gemma2", "GptOss"])
def test_half_precision_keeps_no_text_where_copies_change_bits(name, tiny_tokenizer):
    model = build(FAMILIES[name]).to(torch.bfloat16)
    prompts = [[*range(5, 95), last] for last in (3, 4, 3)]
    options: dict[str, Any] = {"rows": 1, "max_new_tokens": 8, "do_sample": False}
    done = list(lookahead.stream_many(model, tiny_tokenizer, prompts, prefix_bytes=ROOM, **options))
    plain = list(lookahead.stream_many(model, tiny_tokenizer, prompts, **options))
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert [one.stats.reused_tokens for one in done] == [0, 0, 0] and prefixes_of(model, ROOM).nbytes == 0


@has_kernel
def test_a_text_that_was_copied_in_part_is_kept_with_the_bits_of_a_whole_one():
    model, store, text = wide("llama"), PrefixStore(ROOM, keeps_bits=True), np.array(TEXT, np.int32)
    reader = ReadingAhead(model, store, {})
    for before, end in pairwise((0, 90, 300, 420, 600, 1100, 1700)):
        read = reader.read(text[:end])
        alone = ReadingAhead(model, PrefixStore(0), {}).read(text[:end])
        assert read.reused == tokens_alike(before, before, end) and read.is_whole
        assert torch.equal(read.logits, alone.logits)
        assert all(map(torch.equal, *(sum(one.kv().kv.values(), ()) for one in (read, alone))))


@pytest.mark.parametrize(
    ("text", "prompt", "tokens"), [(1200, 1201, 1199), (512, 513, 511), (300, 520, 150), (450, 520, 448), (40, 90, 32)]
)
def test_a_text_kept_for_its_bits_is_copied_up_to_the_first_that_differs(text, prompt, tokens):
    store = PrefixStore(ROOM, keeps_bits=True)
    store.put(np.arange(text, dtype=np.int32), held(text))
    assert store.longest(np.arange(prompt, dtype=np.int32)).tokens == tokens
