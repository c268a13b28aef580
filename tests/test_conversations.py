"""Conversations in Python: answers that are still open, other ways to keep a cache, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lookahead
from lookahead.decoding.chat_messages import newest_turns
from lookahead.decoding.conversation import Conversation
from lookahead.decoding.session_file import SessionFile
from lookahead.errors import ConfigError, LookaheadError, PromptError, SessionError
from tests.support.families import FAMILIES, build

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def answer_of(model: Any, tokenizer: Any, messages: Any, **options: Any) -> str:
    """The answer of transformers' own `generate` to a whole history."""
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, **{**GREEDY, **options})
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


ENDINGS = {
    "a question": lambda chat: list(chat.ask("and now")),
    "undo": lambda chat: chat.undo(),
    "reset": lambda chat: chat.reset(),
    "restore": lambda chat: chat.restore([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("read", [0, 1, 3])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", ["Llama", "Lfm2", "Qwen3Next", "Gemma3", "Mamba"])
def test_an_open_answer_ends_where_the_conversation_goes_on(name, ending, read, chat_tokenizer):
    model = build(FAMILIES[name])
    chat = Conversation(model, chat_tokenizer, **GREEDY)
    list(chat.ask("one"))
    opened = chat.ask("a much longer question than the others")
    said = [piece for _, piece in zip(range(read), opened, strict=False)]
    ENDINGS[ending](chat)
    assert list(opened) == []
    roles = [message["role"] for message in chat.history]
    assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert ending != "a question" or not said or chat.history[-3]["content"] == "".join(said)
    asked = [*chat.messages, {"role": "user", "content": "four"}]
    assert "".join(chat.ask("four")) == answer_of(model, chat_tokenizer, asked)


def test_a_question_that_is_asked_inside_its_own_answer_is_refused(tiny_llama, chat_tokenizer):
    from transformers import LogitsProcessor

    class Asks(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            chat.ask("more")
            return scores

    chat = Conversation(tiny_llama, chat_tokenizer, logits_processor=[Asks()], **GREEDY)
    with pytest.raises(PromptError, match="the last answer is being written"):
        list(chat.ask("one"))


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"cache_implementation": "static"}, {"use_cache": False}], ids=lambda each: str(each)
)
def test_options_that_keep_keys_and_values_otherwise_are_followed(options, tiny_llama, chat_tokenizer):
    chat, messages = Conversation(tiny_llama, chat_tokenizer, **GREEDY, **options), []
    for question in ("abab", "and xyz"):
        messages = [*chat.messages, {"role": "user", "content": question}]
        assert "".join(chat.ask(question)) == answer_of(tiny_llama, chat_tokenizer, messages, **options)
    assert len(messages) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": None}, "max_new_tokens must be"),
        ({"max_new_tokens": "5"}, "max_new_tokens must be"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"past_key_values": object()}, "past_key_values is not an option of a conversation"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs must be a dict or None, got 'x'"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs cannot set tokenize"),
        ({"chat_template_kwargs": {"return_tensors": "pt", "padding": True}}, "cannot set padding, return_tensors"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, message, tiny_llama, chat_tokenizer):
    with pytest.raises(ConfigError, match=message):
        Conversation(tiny_llama, chat_tokenizer, **{**GREEDY, **options})


@pytest.mark.parametrize(
    "messages", ["hello", None, ["x"], [{"content": "x"}], [{"role": "user"}], [{"role": 3}], iter([])]
)
def test_only_messages_are_restored(messages, tiny_llama, chat_tokenizer):
    chat = Conversation(tiny_llama, chat_tokenizer, **GREEDY)
    list(chat.ask("one"))
    before = list(chat.history)
    with pytest.raises(PromptError, match="the conversation"):
        chat.restore(messages)
    assert chat.history == before


def test_values_outside_json_and_utf_8_are_escaped_or_refused_never_half_written(tmp_path):
    file = SessionFile(tmp_path / "chat.json")
    half = [{"role": "user", "content": "a half \ud800 and a whole \U0001f600"}]
    file.write(half)
    assert file.read() == half
    with pytest.raises(SessionError, match="holds a value that JSON does not have"):
        file.write([{"role": "user", "content": "x", "seen": {1, 2}}])
    assert file.read() == half
    with pytest.raises(SessionError, match="holds a null character"):
        SessionFile("a\0b")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(SessionError, match="symbolic links"):
        SessionFile(tmp_path / "loop").read()


ROLES = st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=24)


@given(ROLES, st.integers(0, 200), st.booleans(), st.randoms())
def test_the_fewest_oldest_turns_are_dropped(roles, room, is_long, source):
    messages = [{"role": role, "content": "x" * source.randint(0, 20)} for role in roles]

    def fits(kept: Any) -> bool:
        return sum(4 + len(each["content"]) for each in kept) <= room

    kept = list(messages)
    while not fits(kept):
        turn = next((i for i, message in enumerate(kept[:-1]) if message["role"] != "system"), None)
        if turn is None:
            break
        del kept[turn]
        while turn < len(kept) - 1 and kept[turn]["role"] not in ("user", "system"):
            del kept[turn]
    assert newest_turns(messages, fits, is_long=is_long) == kept


def test_the_work_for_a_question_does_not_grow_with_the_turns_that_are_dropped():
    read = []

    def fits(kept: Any) -> bool:
        read.append(len(kept))
        return len(kept) <= 50

    messages = [{"role": role, "content": "x"} for _ in range(50_000) for role in ("user", "assistant")]
    assert len(newest_turns([*messages, {"role": "user", "content": "?"}], fits, is_long=True)) == 49
    assert sum(read) < 50 * 20


def test_an_error_of_a_conversation_is_one_of_the_package(tiny_llama, chat_tokenizer):
    for wrong in ({"prefix_bytes": 1}, {"max_new_tokens": -1}, {"temprature": 1.0}):
        with pytest.raises(LookaheadError):
            list(lookahead.Conversation(tiny_llama, chat_tokenizer, **{**GREEDY, **wrong}).ask("x"))
