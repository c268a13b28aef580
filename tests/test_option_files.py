"""Files of options: what `--save` keeps, what `-t` takes, and how a wrong one is refused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lookahead.cli import habits
from lookahead.cli.app import app

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Run = Callable[..., Any]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of options that are kept under a name."""
    monkeypatch.setattr(habits, "user_data_path", lambda name, **_: tmp_path / "data" / name)
    return tmp_path / "data" / "lookahead" / "options"


@pytest.fixture
def run(cli_folder: Path, kept: Path) -> Run:
    """Runs a command."""
    return lambda *words: CliRunner().invoke(app, words, env={"COLUMNS": "300"})


def told(result: Any) -> str:
    """What a command that wrote nothing else says on stderr, in one line."""
    assert (result.exit_code, result.stdout) == (2, "")
    return " ".join(result.stderr.split())


def test_options_that_are_saved_under_a_name_are_taken_by_it(run: Run, kept: Path, chat_folder: Path) -> None:
    model = ("--model", str(chat_folder), "--max-new-tokens", "8")
    plain = run("generate", "abab", "--raw", "--stop", "b", *model)
    said = run("generate", "--save", "short", "--raw", "--stop", "b", "--proposers", "prompt", *model)
    assert said.exit_code == 0 and said.stdout == "" and "-t short takes these options from" in said.stderr
    values = tomllib.loads((kept / "short.toml").read_text())
    assert values.keys() == {"raw", "stop", "proposers", "model", "max-new-tokens"}
    assert (values["raw"], values["stop"], values["proposers"]) == (True, ["b"], "prompt")
    assert run("generate", "abab", "-t", "short").stdout == plain.stdout
    (kept / "short.toml").write_text('raw = false\njson_schema = "gone.json"')
    assert "gone.json: No such file" in run("generate", "abab", "-t", "short").stderr


def test_options_of_another_command_or_name_are_refused(run: Run, kept: Path) -> None:
    assert run("chat", "--save", "talk", "--session", "s.json").exit_code == 0
    assert "'lookahead generate' has no session; its options are" in told(run("generate", "abab", "-t", "talk"))
    assert "'gone'; the names that are kept: talk" in told(run("generate", "abab", "-t", "gone"))
    assert "a name of letters, digits" in told(run("generate", "abab", "--save", "../x"))
    (kept / "talk.toml").write_text('save = "other"')  # it would keep options, and not chat
    assert "'lookahead chat' has no save" in told(run("chat", "-t", "talk"))


def test_a_file_holds_a_whole_job_and_the_command_line_goes_before_it(run: Run, cli_folder: Path) -> None:
    (cli_folder / "job.toml").write_text('inputs = "a.txt"\nlimit = 3\nmax_new_tokens = 5\nresume = true\nwindow = 7\n')
    words = ("summarize", "-t", "job.toml", "-n", "4", "--stop", "x", "--stop", "y")
    assert run(*words, "--save", "all.toml").exit_code == 0
    values = tomllib.loads((cli_folder / "all.toml").read_text())
    expected = {"inputs": ["a.txt"], "limit": 3, "max-new-tokens": 4, "resume": True, "window": "7", "stop": ["x", "y"]}
    assert values == expected
    assert run("summarize", "-t", "all.toml", "--save", "again.toml").exit_code == 0
    assert (cli_folder / "again.toml").read_bytes() == (cli_folder / "all.toml").read_bytes()


def test_a_file_of_options_holds_any_text(run: Run, cli_folder: Path) -> None:
    text = 'a"b\\c\n\t\x7f\u2028ü'
    assert run("generate", "--system", text, "--prediction", "\udcff", "--save", "any.toml").exit_code == 0
    values = tomllib.loads((cli_folder / "any.toml").read_text("utf-8"))
    assert values == {"system": text, "prediction": ["?"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-tokens = 3", "x.toml: 'lookahead summarize' has no max-tokens; its options are inputs,"),
        ("max-new-tokens = 3\nmax_new_tokens = 4", "x.toml: an option is given twice, with - and with _"),
        ("limit = [3, 4]", "'--limit'"),
        ("limit = 'many'", "'--limit': Input should be a valid integer"),
        ("limit = 0", "'--limit': Input should be greater than or equal to 1, got '0'"),
        ("limit = true", "'--limit': Input should be a valid integer"),
        ("seed = 1.7", "'--seed': Input should be a valid integer"),
        ("rows = 2000", "'--rows': Input should be less than or equal to 1024, got '2000'"),
        ("max-document-mb = inf", "'--max-document-mb': Input should be less than or equal to 1000000"),
        ("resume = 'perhaps'", "'--resume': Input should be a valid boolean"),
        ("style = ['bullets', 'x']\ninputs = 'a.txt'", "style must be bullets, paragraph, headline, got 'bullets x'"),
        ("inputs = 3", "3: no such file"),
        ("inputs = [", "x.toml: not valid TOML"),
        ("inputs = " + "[" * 100_000, "x.toml: not valid TOML"),
        ("output = 'x.jsonl'", "no input: name files, folders or URLs, or - for stdin"),
    ],
    ids=lambda value: value[:24],
)
def test_a_file_that_makes_no_sense_is_refused(run: Run, cli_folder: Path, text: str, message: str) -> None:
    (cli_folder / "x.toml").write_text(text)
    assert message in told(run("summarize", "-t", "x.toml")).replace("│ ", "")


def test_a_pipe_and_a_missing_file_are_refused(run: Run, cli_folder: Path) -> None:
    os.mkfifo(cli_folder / "pipe.toml")
    assert "pipe.toml: not a regular file" in told(run("summarize", "-t", "pipe.toml"))
    assert "no options are kept as 'gone.toml'" in told(run("summarize", "-t", "gone.toml"))
    assert json.loads(run("models", "--json").stdout.splitlines()[0])  # a command without these options
