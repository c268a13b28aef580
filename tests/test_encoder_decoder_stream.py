"""Inputs of an encoder-decoder model join those that are being decoded; each has the tokens that it has alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import lookahead
from lookahead.backend.torch_backend import TorchBackend
from lookahead.decoding.plan import joins_alone
from lookahead.decoding.prompts import PromptReader
from lookahead.decoding.scheduler import Scheduler
from lookahead.drafting.proposal import Proposal
from lookahead.errors import LogitsError, PromptError
from tests.support.adversarial_proposers import Offer, among_decoys, drafting_by, random_trees
from tests.support.families import ENCODER_DECODERS, build, cases
from tests.test_encoder_decoder import DRAFTED, FIXED, NEW_TOKENS, READ, WANDERING, generate, model_of

ROWS = [READ, READ[:5], READ[3:14], [44, 17, 44, 17, 44, 90, 6, 8, 44], READ[::-1]]
OPTIONS = {**WANDERING, "eos_token_id": [31, 17]}
LIMIT = {"max_new_tokens": NEW_TOKENS}


def by_text(offer: Offer, texts: list[list[int]]) -> Offer:
    """Draft for the row of a text, whatever its place."""

    def offer_for(row: int, text: list[int], max_nodes: int) -> Proposal | None:
        return offer(next(i for i, each in enumerate(texts) if each[: len(text)] == text), text, max_nodes)

    return offer_for


@contextmanager
def rows_of_passes() -> Iterator[list[int]]:
    """The number of rows in every pass of a decoder that scores trees."""
    rows, own = list[int](), TorchBackend.score
    with patch.object(TorchBackend, "score", lambda *call: (rows.append(len(call[1])), own(*call))[1]):
        yield rows


def alone(model: PreTrainedModel, **options: Any) -> list[list[int]]:
    """What `model.generate` writes for each input alone, the decoder's start left out."""
    inputs = [{"input_ids": torch.tensor([row])} for row in ROWS]
    return [generate(model, each, **{**OPTIONS, **options})[0, 1:].tolist() for each in inputs]


@pytest.mark.filterwarnings("ignore:.*change its bits.*decoded plainly")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", cases(DRAFTED))
def test_inputs_that_join_others_have_the_tokens_that_they_have_alone(
    family: Any, dtype: torch.dtype, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = build(family).to(dtype)
    expected = alone(model)
    start = model.generation_config.decoder_start_token_id or model.config.decoder_start_token_id
    texts = [[*row, start, *answer] for row, answer in zip(ROWS, expected, strict=True)]
    for offer in (by_text(among_decoys(texts, 101), texts), random_trees(101)):
        with drafting_by(offer):
            done = list(lookahead.stream_many(model, tiny_tokenizer, ROWS, rows=3, config=FIXED, **LIMIT, **OPTIONS))
        assert {each.index: each.token_ids for each in done} == dict(enumerate(expected))
        assert {each.stats.exactness for each in done} == {"tokens" if dtype == torch.float32 else "bitwise"}


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_a_row_that_ends_makes_room_for_the_next_input(name: str, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model = model_of(name)
    texts = ["A boy met a dog.", "The dog met a cat, and the cat slept.", "", "The end of it!", "A boy met a cat."]
    options = {"max_new_tokens": 14, "do_sample": False, "no_repeat_ngram_size": 2, "eos_token_id": 31}
    each_alone = {i: lookahead.generate(model, tiny_tokenizer, text, **options) for i, text in enumerate(texts) if text}
    with rows_of_passes() as rows:
        done = list(lookahead.stream_many(model, tiny_tokenizer, texts, rows=3, config=FIXED, **options))
    assert rows == sorted(rows, reverse=True) and rows[0] == 3  # fewer only when no input is left
    for each in done:
        if each.index == 2:
            assert isinstance(each.error, PromptError)
            continue
        result = each_alone[each.index]
        assert each.token_ids == result.token_ids[0]
        assert each.finish_reason == result.finish_reasons[0]
        assert each.stats.prompt_tokens == result.stats.prompt_tokens


def test_inputs_are_read_in_batches_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joins_alone(model_of("Bart"), FIXED)
    monkeypatch.setattr("lookahead.decoding.plan.input_device", lambda model: torch.device("cuda"))
    assert not joins_alone(model_of("Bart"), FIXED)


def test_rows_are_as_many_as_the_cache_has_room_for_with_what_the_encoder_read(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    model, room = model_of("Bart"), 2 * (NEW_TOKENS + 1 + FIXED.node_budget + 1 + len(READ))
    most = {}
    for tokens in (room, room - 1):
        with rows_of_passes() as rows:
            options: dict[str, Any] = {**LIMIT, **OPTIONS, "eos_token_id": 2, "cache_tokens": tokens}
            done = list(lookahead.stream_many(model, tiny_tokenizer, [READ] * 4, config=FIXED, **options))
        assert len({tuple(each.token_ids) for each in done}) == 1
        most[tokens] = max(rows)
    assert most == {room: 2, room - 1: 1}


def test_a_batch_holds_as_many_inputs_as_the_cache_has_room_for(
    tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lookahead.decoding.scheduler.joins_alone", lambda *_: False)  # as on a GPU
    reader = PromptReader(model_of("Bart"), tiny_tokenizer, FIXED, **LIMIT, **OPTIONS)
    for inputs in (1, 2):
        scheduler, most = Scheduler(reader, cache_tokens=-(-inputs * 4 * len(READ) // 3)), 0
        for index in range(4):
            scheduler.put(index, READ)
        while not scheduler.is_idle:
            for _ in scheduler.steps():
                most = max(most, len(scheduler.running))
        assert most == inputs


@pytest.mark.parametrize("options", [{"do_sample": True}, {"num_beams": 2}], ids=["sampled", "beams"])
def test_draws_and_beams_are_those_of_a_call_of_its_own(
    options: dict[str, Any], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    options = {"max_new_tokens": 14, "do_sample": False, **options}
    torch.manual_seed(0)
    (many,) = lookahead.stream_many(model_of("T5"), tiny_tokenizer, ["A boy met a dog."], rows=3, **options)
    torch.manual_seed(0)
    assert (
        many.token_ids == lookahead.generate(model_of("T5"), tiny_tokenizer, "A boy met a dog.", **options).token_ids[0]
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_an_input_without_numbers_fails_alone(tiny_tokenizer: PreTrainedTokenizerFast, rows: int) -> None:
    model = copy.deepcopy(model_of("T5"))
    poison = tiny_tokenizer("#")["input_ids"][0]
    with torch.no_grad():
        model.get_encoder().set_input_embeddings(copy.deepcopy(model.get_input_embeddings()))
        model.get_encoder().get_input_embeddings().weight[poison] = torch.nan
    # What is left in the place of the second input is behind the shorter third one, and the first one is as long.
    texts = ["A boy met a dog, and the dog met a cat.", "A boy met a #at, and went home.", "A dog met a cat."]
    options = {"max_new_tokens": 14, "do_sample": False}
    done = list(lookahead.stream_many(model, tiny_tokenizer, texts, rows=rows, config=FIXED, **options))
    assert sorted(each.index for each in done) == [0, 1, 2]
    for each in done:
        if each.index == 1:
            assert isinstance(each.error, LogitsError)
        else:
            result = lookahead.generate(model, tiny_tokenizer, texts[each.index], **options)
            assert each.token_ids == result.token_ids[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_two_streams_of_one_model_at_once_have_the_tokens_of_each(
    dtype: torch.dtype, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = build(ENCODER_DECODERS["T5"]).to(dtype)
    expected = alone(model)
    orders = [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]]

    def stream(order: list[int]) -> dict[int, list[int]]:
        inputs = [ROWS[i] for i in order]
        done = lookahead.stream_many(model, tiny_tokenizer, inputs, rows=2, config=FIXED, **LIMIT, **OPTIONS)
        return {order[each.index]: each.token_ids for each in done}

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(stream, orders)) == [dict(enumerate(expected))] * 2


@pytest.mark.filterwarnings("ignore:.*decoded plainly")
def test_a_prompt_for_the_decoder_keeps_its_padding(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model, found = model_of("Bart"), []
    begin: int = model.generation_config.decoder_start_token_id
    for mask in ([1, 1, 1], [0, 0, 1]):
        options: dict[str, Any] = {**OPTIONS, "decoder_input_ids": torch.tensor([[begin, begin, 5]])}
        options["decoder_attention_mask"] = torch.tensor([mask])
        found.append([generate(model, {"input_ids": torch.tensor([row])}, **options)[0, 3:].tolist() for row in ROWS])
        done = list(lookahead.stream_many(model, tiny_tokenizer, ROWS, rows=2, **LIMIT, **options))
        assert [each.token_ids for each in sorted(done, key=lambda each: each.index)] == found[-1]
    assert found[0] != found[1]
