"""Texts whose keys and values a model keeps: prompts that begin as one of them read only the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lookahead
from lookahead.backend.read_prompt import prefixes_of
from lookahead.errors import ConfigError
from lookahead.model.model_state import state_of
from tests.support.families import FAMILIES, build

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
DOCUMENT = [*range(5, 85)]
QUESTIONS = [[*DOCUMENT, *range(at, at + 6)] for at in (20, 40, 60)] + [[9, 8, 7, 6]]
ROOM = 1 << 24


def outputs_of(model: Any, tokenizer: Any, prompts: Any, **options: Any) -> tuple[list[list[int]], list[int]]:
    """The tokens of every prompt, and how many of its own were reused."""
    done = list(lookahead.stream_many(model, tokenizer, prompts, **{**GREEDY, "rows": 2, **options}))
    done.sort(key=lambda each: each.index)
    assert not any(each.error for each in done)
    return [each.token_ids for each in done], [each.stats.reused_tokens for each in done]


@pytest.fixture
def llama() -> Any:
    """A model of its own for every test, as what is kept is the model's."""
    return build(FAMILIES["Llama"])


@pytest.mark.parametrize("rows", [1, 3])
def test_questions_about_one_document_read_it_once(rows, llama, tiny_tokenizer):
    expected, reused = outputs_of(llama, tiny_tokenizer, QUESTIONS, rows=rows)
    # Without texts that are kept, a prompt copies from one that runs.
    assert reused == ([0, 0, 0, 0] if rows == 1 else [0, len(DOCUMENT), len(DOCUMENT), 0])
    tokens, reused = outputs_of(llama, tiny_tokenizer, QUESTIONS, rows=rows, prefix_bytes=ROOM)
    assert tokens == expected and reused == [0, len(DOCUMENT), len(DOCUMENT), 0]
    # Another call of the model finds the texts of the first one.
    tokens, reused = outputs_of(llama, tiny_tokenizer, QUESTIONS[1:2], prefix_bytes=ROOM)
    assert tokens == expected[1:2] and reused == [len(QUESTIONS[1]) - 1]


def test_nothing_is_reused_once_the_weights_changed(llama, tiny_tokenizer):
    outputs_of(llama, tiny_tokenizer, QUESTIONS[:1], prefix_bytes=ROOM)
    with torch.no_grad():
        llama.model.layers[0].mlp.down_proj.weight.mul_(-1.5)
    tokens, reused = outputs_of(llama, tiny_tokenizer, QUESTIONS[:1], prefix_bytes=ROOM)
    assert reused == [0]
    assert tokens == outputs_of(llama, tiny_tokenizer, QUESTIONS[:1])[0]


def test_nothing_is_reused_once_a_hook_of_a_user_changes_what_is_read(llama, tiny_tokenizer):
    outputs_of(llama, tiny_tokenizer, QUESTIONS[:1], prefix_bytes=ROOM)
    hook = llama.model.layers[0].register_forward_hook(lambda module, given, out: out * 0.5)
    try:
        assert outputs_of(llama, tiny_tokenizer, QUESTIONS[:1], prefix_bytes=ROOM)[1] == [0]
    finally:
        hook.remove()


def test_the_texts_take_no_more_bytes_than_the_newest_call_allows(llama, tiny_tokenizer):
    outputs_of(llama, tiny_tokenizer, QUESTIONS, prefix_bytes=ROOM)
    held = prefixes_of(llama, ROOM).nbytes
    assert 0 < held <= ROOM
    tokens, _ = outputs_of(llama, tiny_tokenizer, QUESTIONS, prefix_bytes=held // 2)
    assert tokens == outputs_of(llama, tiny_tokenizer, QUESTIONS)[0]
    assert prefixes_of(llama, held // 2).nbytes <= held // 2
    outputs_of(llama, tiny_tokenizer, QUESTIONS[:1], prefix_bytes=16)
    assert prefixes_of(llama, 16).nbytes == 0


def test_a_model_whose_calls_keep_nothing_has_no_texts(llama, tiny_tokenizer):
    outputs_of(llama, tiny_tokenizer, QUESTIONS[:1])
    assert state_of(llama).plan.prefixes is None


@pytest.mark.parametrize("name", ["Gemma2", "Qwen3", "Mixtral", "Lfm2", "Qwen3_5", "Jamba"])
def test_outputs_are_the_same_whatever_a_model_keeps_of_a_text(name, tiny_tokenizer):
    model = build(FAMILIES[name])
    prompts = list(QUESTIONS)
    expected, _ = outputs_of(model, tiny_tokenizer, prompts)
    prompts += [[*QUESTIONS[0], *expected[0], 7, 8]]  # the next turn
    expected, _ = outputs_of(model, tiny_tokenizer, prompts)
    tokens, reused = outputs_of(model, tiny_tokenizer, prompts, rows=1, prefix_bytes=ROOM)
    assert tokens == expected
    assert (reused[-1] > 0) == (name != "Jamba")


@pytest.mark.parametrize("prefix_bytes", [-1, 0.5, "1"])
def test_a_number_of_bytes_out_of_range_is_refused_by_name(prefix_bytes, llama, tiny_tokenizer):
    with pytest.raises(ConfigError, match="prefix_bytes"):
        next(lookahead.stream_many(llama, tiny_tokenizer, QUESTIONS, prefix_bytes=prefix_bytes))
