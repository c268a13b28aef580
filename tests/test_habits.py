"""What a user has kept between commands: the last chat, a log, and what stays of nothing."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from lookahead.cli import habits
from lookahead.cli.app import app

Run = Callable[..., Any]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what is kept."""
    monkeypatch.setattr(habits, "user_data_path", lambda name, **_: tmp_path / "data" / name)
    return tmp_path / "data" / "lookahead"


@pytest.fixture
def run(chat_folder: Path, cli_folder: Path, kept: Path) -> Run:
    """Runs a command with a tiny model that chats."""

    def invoke(*words: str, input: str | None = None) -> Any:
        options = ["--model", str(chat_folder), "--max-new-tokens", "8"] if words[0] in ("generate", "chat") else []
        return CliRunner().invoke(app, [*words, *options], input=input, env={"COLUMNS": "300"})

    return invoke


def test_a_chat_is_continued_and_nothing_is_kept_unasked(run: Run, kept: Path, cli_folder: Path) -> None:
    assert run("chat", input="abab\n").exit_code == 0 and not kept.exists()
    assert run("chat", "-c", input="abab\n").exit_code == 0
    assert len(json.loads((kept / "chat.json").read_text())) == 2
    assert run("chat", "--continue", input="what?\n").exit_code == 0
    assert len(json.loads((kept / "chat.json").read_text())) == 4
    run("chat", "--session", "mine.json", input="abab\n")
    run("chat", "-c", input="what?\n")
    assert len(json.loads((cli_folder / "mine.json").read_text())) == 4
    assert "pass one of them" in run("chat", "-c", "--session", "mine.json").stderr


def test_a_chat_of_any_name_is_continued_and_is_for_nobody_else(run: Run, kept: Path, cli_folder: Path) -> None:
    run("chat", "-c", input="abab\n")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    for name in ("a b ", "two\nlines.json", "\udcff.json"):
        assert run("chat", "--session", name, input="abab\n").exit_code == 0
        assert run("chat", "--session", "gone/x.json", input="abab\n").exit_code == 2  # which is not the last one
        assert run("chat", "-c", input="what?\n").exit_code == 0
        assert len(json.loads((cli_folder / name).read_text())) == 4 and not (cli_folder / "gone").exists()
    (note,) = kept.glob("last_chat*")
    for text in (b"\xff", b"[1]"):
        note.write_bytes(text)
        assert f"{note}: not the name of a chat" in run("chat", "-c", input="abab\n").stderr


def test_the_log_is_off_until_it_is_asked_for_and_says_where_it_is(run: Run, kept: Path) -> None:
    answer = run("generate", "abab", "--raw").stdout
    assert f"nothing is kept; 'lookahead log --on' keeps prompts and answers in {kept / 'log.db'}" in run("log").stderr
    assert not kept.exists()
    assert "are kept in" in run("log", "--on").stderr
    assert stat.S_IMODE((kept / "log.db").stat().st_mode) == 0o600
    run("generate", "abab", "--raw")
    run("chat", input="what?\nand xyz\n")
    first, *chats = map(json.loads, run("log", "--json").stdout.splitlines())
    assert (first["command"], first["prompt"], first["answer"] + "\n") == ("generate", "abab", answer)
    assert [each["prompt"] for each in chats] == ["what?", "and xyz"] and all(each["answer"] for each in chats)
    assert "> and xyz\n" in run("log", "-n", "1").stdout and "> abab" not in run("log", "-n", "1").stdout
    assert "no longer kept" in run("log", "--off").stderr
    run("generate", "abab", "--raw")
    assert len(run("log", "--json").stdout.splitlines()) == 3
    (kept / "log.db").write_text("no database at all, but a text that is long enough for the header of one " * 20)
    said = run("generate", "abab", "--raw")
    assert said.stdout == answer and "warning: the answer is not in the log" in said.stderr
    assert run("log").exit_code == 2


def test_a_file_goes_along_with_the_next_message_of_a_chat(run: Run, cli_folder: Path) -> None:
    (cli_folder / "note.txt").write_text("what?")
    lines = ["/file note.txt", "and xyz", "abab", "/file gone.txt", "/file"]
    said = run("chat", "--session", "s.json", input="\n".join(lines))
    first, _, second, _ = json.loads((cli_folder / "s.json").read_text())
    assert (first["content"], second["content"]) == ("what?\n\nand xyz", "abab")
    assert "note.txt: 5 characters, for the next message" in said.stderr
    assert "error: gone.txt: no such file" in said.stderr and "/file needs the name of a file" in said.stderr


def test_tokens_are_those_that_the_model_reads(chat_folder: Path, cli_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    (cli_folder / "a.txt").write_text("abab")
    words = ["tokens", "a.txt", "-m", str(chat_folder)]
    messages = [{"role": "user", "content": "abab"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert CliRunner().invoke(app, words).stdout == f"{len(ids)}\n"
    raw = json.loads(CliRunner().invoke(app, [*words, "--raw", "--json"]).stdout)
    assert raw["ids"] == tokenizer("abab")["input_ids"] and raw["tokens"] == len(raw["ids"]) == len(raw["texts"])
