"""Prompts that begin alike: the beginning is read once, and the others copy its keys and values.

In half precision they copy what has the bits of each prompt alone.
"""

from __future__ import annotations

import copy
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor

import lookahead
from lookahead.backend import pass_attention, self_check
from lookahead.backend.cpu.cpu_backend import CpuBackend
from lookahead.backend.prompt_groups import PromptGroup, groups_of
from lookahead.decoding.prompts import PromptReader
from lookahead.decoding.request import Completion
from lookahead.decoding.scheduler import Scheduler
from lookahead.kernels.prompt_attention import tokens_alike
from lookahead.verification.per_row import PerRow
from tests.support.families import FAMILIES, build
from tests.test_half_precision import made
from tests.test_packed_prompts import packed, prompts_of, wide

__all__ = ["packed"]  # a fixture
OPTIONS: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
DOCUMENT = [*range(5, 65)]
QUESTIONS = [[*DOCUMENT, *range(at, at + 4 + at // 20)] for at in (20, 40, 60)]
OTHER = [9, 8, 7, 6, 5]


def alone(model: Any, tokenizer: Any, prompts: Any) -> list[list[int]]:
    """The tokens of `generate` for each prompt alone."""
    return [lookahead.generate(model, tokenizer, prompt, **OPTIONS).token_ids[0] for prompt in prompts]


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GPT2"])
def test_prompts_of_one_call_read_their_common_beginning_once(name, packed, tiny_tokenizer):
    model = build(FAMILIES[name])
    prompts = [QUESTIONS[0], OTHER, *QUESTIONS[1:]]
    result = lookahead.generate(model, tiny_tokenizer, prompts, **OPTIONS)
    assert result.token_ids == alone(model, tiny_tokenizer, prompts)
    assert [each.reused_tokens for each in result.row_stats] == [0, 0, len(DOCUMENT), len(DOCUMENT)]
    assert packed == [[65, 5], [6, 7]]


def decoded_beside(
    model: Any, tokenizer: Any, beside: Any, prompts: Any, then: Any = None, **options: Any
) -> list[Any]:
    """The results of prompts that join rows which still run, after `then` was called."""
    reader = PromptReader(model, tokenizer, None, **{**OPTIONS, **options})
    scheduler, done = Scheduler(reader, rows=8), list[Completion]()
    for index, prompt in enumerate(beside):
        scheduler.put(index, prompt, 60)
    next(scheduler.steps())
    assert len(scheduler.running) == len(beside)
    if then is not None:
        then()
    for index, prompt in enumerate(prompts, 10):
        scheduler.put(index, prompt)
    while not scheduler.is_idle:
        done += scheduler.step()
    return sorted((one for one in done if one.index >= 10), key=lambda one: one.index)


def test_a_prompt_copies_from_the_running_row_that_shares_most(tiny_tokenizer):
    model = build(FAMILIES["Llama"])
    prompts = [QUESTIONS[1], QUESTIONS[0][:45], [*OTHER, 3]]
    done = decoded_beside(model, tiny_tokenizer, [QUESTIONS[0][:40], OTHER, QUESTIONS[0]], prompts)
    assert [one.token_ids for one in done] == alone(model, tiny_tokenizer, prompts)
    assert [one.stats.reused_tokens for one in done] == [len(DOCUMENT), 44, 0]


def test_half_precision_copies_nothing_where_no_kernel_has_the_bits_of_the_whole_text(tiny_tokenizer):
    model = made("llama", torch.bfloat16)
    done = list(lookahead.stream_many(model, tiny_tokenizer, QUESTIONS, rows=3, **OPTIONS))
    assert [one.stats.reused_tokens for one in done] == [0, 0, 0]


has_kernel = pytest.mark.usefixtures("prompt_kernel")
LONG = prompts_of((1600,))[0]


def long_prompts(*sizes: int) -> list[np.ndarray]:
    """Prompts of these lengths that share all tokens but the last."""
    return [np.append(LONG[: size - 1], np.int32(3 + size % 50)) for size in sizes]


@has_kernel
@pytest.mark.parametrize(
    "sizes",
    [(1140, 1100, 1026, 1030), (1281, 1283, 1500), (517, 530, 1025, 1290), (600, 514, 513), (90, 130, 410, 480)],
)
def test_half_precision_copies_what_keeps_the_bits_of_each_prompt_alone(sizes):
    model, prompts = wide("llama"), long_prompts(*sizes)
    alone = CpuBackend(model, rows=len(prompts), capacity=1600)
    with alone.serving():
        expected = torch.cat([alone.read([prompt], row) for row, prompt in enumerate(prompts)])
    backend = CpuBackend(model, rows=len(prompts), capacity=1600, packs_prompts=True, shares_beginnings=lambda: True)
    with backend.serving():
        logits = backend.read(prompts, texts=[])
    assert torch.equal(logits, expected)
    longest = [
        max((min(size - 2, tokens_alike(min(size, other) - 1, other, size)) for other in sizes[:at]), default=0)
        for at, size in enumerate(sizes)
    ]
    assert all(0 <= most - copied < 16 for most, copied in zip(longest, backend.reused_tokens, strict=True))
    assert all(backend.reused_tokens[1:])
    for row in range(len(prompts)):
        ours, theirs = (some.cache.extract_row(row).kv for some in (backend, alone))
        assert all(map(torch.equal, sum(ours.values(), ()), sum(theirs.values(), ())))


@has_kernel
@pytest.mark.parametrize("fault", ["", "products", "attention"])
def test_long_prompts_of_many_share_blocks_if_a_comparison_allows_it(fault, tiny_tokenizer, monkeypatch):
    model, prompts = copy.deepcopy(wide("llama")), [prompt.tolist() for prompt in long_prompts(1100, 1060, 1080)]
    with torch.no_grad():
        model.lm_head.weight.mul_(1 + len(fault))  # another model, which has no verdict yet
    if fault == "products":
        monkeypatch.setattr(self_check, "keeps_bits_of_long_texts", lambda model: False)
    if fault == "attention":
        monkeypatch.setattr(pass_attention, "attend_prompts", lambda *given, **options: None)
    expected = alone(model, tiny_tokenizer, prompts)
    done = list(lookahead.stream_many(model, tiny_tokenizer, prompts, rows=3, **OPTIONS))
    done.sort(key=lambda one: one.index)
    assert [one.token_ids for one in done] == expected
    assert [one.stats.exactness for one in done] == ["bitwise"] * 3
    assert sorted(one.stats.reused_tokens for one in done) == ([0, 0, 0] if fault else [0, 1056, 1072])


def test_nothing_is_copied_from_a_row_that_other_weights_have_read(tiny_tokenizer):
    model = build(FAMILIES["Llama"])

    def change() -> None:
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(-1.5)

    (one,) = decoded_beside(model, tiny_tokenizer, [QUESTIONS[0]], [QUESTIONS[1]], change)
    assert one.stats.reused_tokens == 0
    assert [one.token_ids] == alone(model, tiny_tokenizer, [QUESTIONS[1]])


class Rewriting(LogitsProcessor):
    """Writes another token over the beginning of the ids."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        input_ids[:, 0] = 77
        return scores


def test_a_beginning_that_a_processor_rewrote_is_not_copied(tiny_tokenizer):
    model = build(FAMILIES["Llama"])
    rewritten = [77, *QUESTIONS[1][1:]]
    given: dict[str, Any] = {"logits_processor": [PerRow(Rewriting)]}
    (one,) = decoded_beside(model, tiny_tokenizer, [QUESTIONS[0]], [rewritten], **given)
    assert one.stats.reused_tokens == 0  # they begin with different tokens, whatever was written over one
    expected = lookahead.generate(model, tiny_tokenizer, rewritten, per_row=Rewriting, **OPTIONS)
    assert [one.token_ids] == expected.token_ids


def test_rows_of_a_server_never_copy_from_one_another_whatever_their_salts(tiny_tokenizer):
    model = build(FAMILIES["Llama"])
    reader = PromptReader(model, tiny_tokenizer, None, **OPTIONS)
    scheduler, requests = Scheduler(reader, rows=8, is_mixed=True), list[Any]()
    with closing(scheduler):
        for index, prompt in enumerate([OTHER, *([*DOCUMENT[:40], last] for last in (1, 3, 4))]):
            requests.append(scheduler.put(index, prompt, 40))
            requests[-1].salt = str(index)
            if index < 2:
                next(scheduler.steps())  # the others join together, beside running rows
        while not scheduler.is_idle:
            scheduler.step()
    assert [each.stats.reused_tokens for each in requests] == [0, 0, 0, 0]


def test_groups_are_split_where_a_pass_is_full_or_a_beginning_is_still_to_be_read():
    long, short = np.arange(40, dtype=np.int32), np.arange(100, 110, dtype=np.int32)
    prompts = [long, short, np.append(long, [1]), np.append(long[:30], short), short[:1]]

    def copies(*options: Any) -> list[PromptGroup]:
        return groups_of(prompts, [0] * 5, *options)

    assert copies([], 100, 1) == [
        PromptGroup(0, [(-1, 0), (-1, 0)], 50), PromptGroup(2, [(0, 40), (0, 30), (-1, 0)], 12),
    ]  # fmt: skip
    assert [(each.prompts, each.tokens) for each in copies(None, 100, 2)] == [
        (range(3), 91), (range(3, 4), 40), (range(4, 5), 100),
    ]  # fmt: skip
    assert [each.prompts for each in copies(None, 0, 1)] == [range(at, at + 1) for at in range(5)]
    assert copies([prompts[2]], 100, 1)[0].copies == [(0, 39), (-1, 0), (0, 40), (0, 30), (-1, 0)]
    assert groups_of([long], [30], [long[:39]], 100, 1) == [PromptGroup(0, [(-1, 30)], 10)]  # 9 are not worth copying


def test_prompts_of_one_text_copy_all_but_the_last_token(packed, tiny_tokenizer):
    model = build(FAMILIES["Llama"])
    prompts = [prompt.tolist() for prompt in prompts_of((30,))] * 3
    result = lookahead.generate(model, tiny_tokenizer, prompts, **OPTIONS)
    assert result.token_ids == alone(model, tiny_tokenizer, prompts)
    assert [each.reused_tokens for each in result.row_stats] == [0, 29, 29]
