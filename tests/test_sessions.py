"""Conversations that are kept in files, and taken back turn by turn."""

from __future__ import annotations

import json
import threading

import pytest

import lookahead
from lookahead.decoding.session_file import SessionFile
from lookahead.errors import SessionError
from tests.support.chats import GREEDY, answers

USER, BOT = {"role": "user", "content": "abab"}, {"role": "assistant", "content": "xyz"}


@pytest.fixture
def chat(tiny_llama, chat_tokenizer):
    """Makes conversations with a tiny model."""

    def make(**options):
        return lookahead.Conversation(tiny_llama, chat_tokenizer, **{"max_new_tokens": 12, **GREEDY, **options})

    return make


def said(conversation, question):
    """The whole answer to a question."""
    return "".join(conversation.ask(question))


def test_a_saved_conversation_goes_on_as_if_it_had_not_ended(chat, tmp_path, tiny_llama, chat_tokenizer):
    questions = ["abab", "what?", "and xyz"]
    expected = answers(tiny_llama, chat_tokenizer, *questions, system="so")
    first = chat(system="so")
    assert [said(first, each) for each in questions[:2]] == expected[:2]
    first.save(tmp_path / "chat.json")
    second = chat()
    second.load(tmp_path / "chat.json")
    assert second.history == first.history == json.loads((tmp_path / "chat.json").read_text())
    assert said(second, questions[2]) == expected[2]


def test_a_session_is_a_prompt_of_generate(chat, tmp_path, tiny_llama, chat_tokenizer):
    conversation = chat()
    said(conversation, "abab")
    conversation.save(tmp_path / "chat.json")
    messages = [*json.loads((tmp_path / "chat.json").read_text()), {"role": "user", "content": "what?"}]
    result = lookahead.generate(tiny_llama, chat_tokenizer, messages, max_new_tokens=12, **GREEDY)
    assert result.texts == [said(conversation, "what?")]


def test_a_system_message_of_the_conversation_takes_the_place_of_that_of_the_file(chat):
    conversation = chat(system="so")
    conversation.restore([{"role": "system", "content": "other"}, USER, BOT])
    assert [message["content"] for message in conversation.history] == ["so", "abab", "xyz"]
    conversation = chat()
    conversation.restore([{"role": "system", "content": "other"}, USER, BOT])
    conversation.reset()
    assert conversation.history == [{"role": "system", "content": "other"}]


def test_the_last_turn_is_taken_back_as_if_it_had_not_been(chat, tiny_llama, chat_tokenizer):
    conversation = chat(system="so")
    said(conversation, "abab")
    said(conversation, "and xyz")
    assert conversation.undo() == {"role": "user", "content": "and xyz"}
    assert said(conversation, "what?") == answers(tiny_llama, chat_tokenizer, "abab", "what?", system="so")[1]
    assert conversation.undo() and conversation.undo() and conversation.undo() is None
    assert conversation.history == [{"role": "system", "content": "so"}]


def test_turns_that_the_context_has_no_room_for_stay_in_the_history(chat, tmp_path):
    conversation = chat(system="so")
    for turn in range(6):
        said(conversation, f"{turn}" * 120)
    assert len(conversation.messages) < len(conversation.history) == 13
    conversation.undo()
    conversation.save(tmp_path / "chat.json")
    assert len(json.loads((tmp_path / "chat.json").read_text())) == 11
    assert said(conversation, "5" * 120)
    assert conversation.dropped and len(conversation.history) == 13


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "is not a session file: it is not JSON"),
        ("", "is not a session file: it is not JSON"),
        ('{"role": "user"}', "is not a session file: expected a list of messages, got dict"),
        ('[{"role": "user", "content": "a"}, {"role": 5}]', "message 1 is not an object with 'role' and 'content'"),
        ('[{"role": "user", "content": 5}]', "message 0 is not an object with 'role' and 'content'"),
        ("[" * 100_000, "is not a session file: it is not JSON"),
    ],
    ids=["text", "empty", "object", "no role", "no content", "deep"],
)
def test_a_file_that_is_no_session_is_refused_and_not_replaced(chat, tmp_path, text, message):
    file = tmp_path / "chat.json"
    file.write_text(text)
    conversation = chat()
    conversation.restore([USER, BOT])
    for use in (conversation.load, conversation.save, lambda path: SessionFile(path).read()):
        with pytest.raises(SessionError, match=message):
            use(file)
    assert file.read_text() == text
    assert conversation.history == [USER, BOT]


def test_what_another_process_wrote_is_not_replaced(tmp_path):
    ours, theirs = SessionFile(tmp_path / "chat.json"), SessionFile(tmp_path / "chat.json")
    assert ours.read() is theirs.read() is None
    theirs.write([USER, BOT])
    with pytest.raises(SessionError, match=r"chat\.json was changed by another process"):
        ours.write([USER])
    theirs.write([USER, BOT, USER, BOT])
    assert ours.read() == [USER, BOT, USER, BOT]
    ours.write([USER, BOT])
    assert json.loads((tmp_path / "chat.json").read_text()) == [USER, BOT]


def test_of_several_that_write_at_once_each_but_one_is_refused(tmp_path):
    files = [SessionFile(tmp_path / "chat.json") for _ in range(8)]
    refused = []

    def write(number):
        try:
            files[number].write([{"role": "user", "content": str(number)}])
        except SessionError:
            refused.append(number)

    assert [file.read() for file in files] == [None] * 8
    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (kept,) = json.loads((tmp_path / "chat.json").read_text())
    assert sorted([*refused, int(kept["content"])]) == list(range(8))


def test_a_folder_that_is_not_there_is_told(tmp_path):
    for use in (lambda file: file.read(), lambda file: file.write([])):
        with pytest.raises(SessionError, match=r"gone.chat\.json: No such file or directory"):
            use(SessionFile(tmp_path / "gone" / "chat.json"))
