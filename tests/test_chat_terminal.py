"""`lookahead chat` at a terminal: lines that are typed, keys that are pressed, and what is shown."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.chats import answers

if sys.platform == "win32":
    pytest.skip("there is no pseudo terminal", allow_module_level=True)

from tests.support.pseudo_terminal import CTRL_C, CTRL_D, at_terminal


@pytest.fixture
def chat(chat_folder, cli_folder, monkeypatch):
    """Chats with a tiny model at a terminal."""
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setenv("TERM", "xterm")

    def start(*arguments, columns=80, limit=12):
        options = ("--model", str(chat_folder), "--max-new-tokens", str(limit), "--threads", "1")
        return at_terminal("chat", *options, *arguments, columns=columns)

    return start


@pytest.fixture
def endless(chat_folder):
    """Gives the model a context that no answer fills while a test runs."""
    file = chat_folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 1 << 20}))


def contents(file):
    """What the messages of a session say."""
    return [message["content"] for message in json.loads(file.read_text())]


def test_ctrl_c_keeps_what_was_written_and_the_chat_goes_on(chat, endless, cli_folder):
    with chat("--session", "chat.json", "--proposers", "none", limit=1 << 19) as terminal:
        terminal.enter("abab")
        terminal.until(lambda shown: len(shown) > 40)
        terminal.type(CTRL_C)
        shown = terminal.until(", stopped\n> ")
        first = contents(cli_folder / "chat.json")
        terminal.enter("what?")
        terminal.until(lambda shown: len(shown) > 40)
        terminal.type(CTRL_C)
        terminal.until(", stopped\n")
        terminal.enter("/quit")
        assert terminal.wait() == 0
    question, answer = first
    assert (question, len(answer) > 10) == ("abab", True)
    assert "".join(answer.split()) in "".join(shown.replace("^C", "").split())
    assert contents(cli_folder / "chat.json")[:3] == [*first, "what?"]


def test_ctrl_c_at_the_prompt_says_what_ends_the_chat(chat):
    with chat() as terminal:
        terminal.until("\n> ")
        terminal.interrupt_prompt(lambda shown: shown.count("Ctrl-C stops an answer, Ctrl-D ends\n> ") == 2)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


def test_quotes_begin_and_end_a_message_of_several_lines(chat, cli_folder, tiny_llama, chat_tokenizer):
    with chat("--session", "chat.json") as terminal:
        for line in ('"""ab', "  /undo", 'c"""', '"""what?"""', '"""', "lost"):
            terminal.enter(line)
        terminal.until("\n... ")
        terminal.interrupt_prompt(lambda shown: shown.endswith("Ctrl-D ends\n> "))
        terminal.enter("/quit")
        assert terminal.wait() == 0
    first, second = answers(tiny_llama, chat_tokenizer, "ab\n  /undo\nc", "what?")
    assert contents(cli_folder / "chat.json") == ["ab\n  /undo\nc", first, "what?", second]


def test_a_session_is_continued_and_turns_are_taken_back(chat, cli_folder, tiny_llama, chat_tokenizer):
    first, second = answers(tiny_llama, chat_tokenizer, "abab", "what?")
    file = cli_folder / "chat.json"
    with chat("--session", "chat.json") as terminal:
        terminal.enter("abab")
        terminal.enter("/quit")
        assert terminal.wait() == 0
    assert contents(file) == ["abab", first]
    with chat("--session", "chat.json") as terminal:
        terminal.until("chat.json: 2 messages\n")
        for line in ("other", "/undo"):
            terminal.enter(line)
        terminal.until("taken back: other\n")
        terminal.enter("what?")
        terminal.enter("/save other.json")
        terminal.until("other.json: 4 messages\n")
        terminal.enter("/reset")
        terminal.enter("/quit")
        assert terminal.wait() == 0
    assert contents(cli_folder / "other.json") == ["abab", first, "what?", second] and not contents(file)


def test_an_error_is_wrapped_between_words_on_a_terminal_and_one_line_elsewhere(cli_folder, monkeypatch, capfd):
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setenv("TERM", "xterm")
    words = ("summarize", "x.txt", "--retry-rejects", "--model", "no folder of this name")
    with at_terminal(*words, columns=40) as terminal:
        assert terminal.wait() == 2
        shown = terminal.shown.splitlines()
    subprocess.run([sys.executable, "-m", "lookahead", *words], cwd=cli_folder, check=False)
    (line,) = capfd.readouterr().err.splitlines()
    assert len(shown) > 1 and max(map(len, shown)) <= 40 and " ".join(shown).split() == line.split()
