"""What the command and the package show of themselves: help, versions, names, and that they compile."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import lookahead
from lookahead.cli import terminal
from lookahead.cli.app import app
from lookahead.cli.commands import REMOVED_COMMANDS
from lookahead.cli.job_options import JobOptions

ROOT = Path(__file__).resolve().parent.parent


def commands(command, name=""):
    """A command and those below it, by the words that call them."""
    yield name, command
    for word, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{name} {word}".strip())


COMMANDS = dict(commands(typer.main.get_command(app)))


def run(*arguments, **environment):
    """What `python -m lookahead` prints."""
    ran = subprocess.run(
        [sys.executable, "-m", "lookahead", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        text=True,
        capture_output=True,
        timeout=60,
        check=True,
    )
    return ran.stdout


def test_the_version_is_that_of_the_installed_package_for_the_module_too():
    version = metadata.version("lookahead-decoding")
    assert CliRunner().invoke(app, ["--version"]).stdout == run("--version") == f"lookahead {version}\n"
    assert lookahead.__version__ == version


def test_a_shell_is_told_how_a_command_may_go_on():
    words = {"_LOOKAHEAD_COMPLETE": "complete_bash"}
    assert run(COMP_WORDS="lookahead gen", COMP_CWORD="1", **words).split() == ["generate"]
    assert run(COMP_WORDS="lookahead generate --max-t", COMP_CWORD="2", **words).split() == ["--max-tokens"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_flag_has_no_type_in_the_help(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, [*name.split(), "--help"]).stdout
    assert "--help" in shown
    assert not re.search("<bool>|BOOLEAN", shown)


def test_help_paragraphs_are_wrapped_by_the_terminal_and_examples_fit_80_columns():
    texts = [paragraph for command in COMMANDS.values() for paragraph in command.help.split("\n\n")]
    examples = [line for text in texts for line in text.split("\n") if text.startswith("  lookahead ")]
    assert len(examples) > 40 and max(map(len, examples)) <= 78
    assert all(text.count("\n") == 0 for text in texts if not text.startswith("  "))


def test_every_command_that_limits_new_tokens_takes_the_short_name_too():
    named = [option.opts for command in COMMANDS.values() for option in command.params]
    limits = [names for names in named if "--max-new-tokens" in names]
    assert limits
    assert all({"--max-tokens", "-n"} <= {*names} for names in limits)


def test_every_command_that_names_a_model_takes_the_short_name_too():
    named = [option.opts for command in COMMANDS.values() for option in command.params]
    models = [names for names in named if "--model" in names]
    assert models
    assert all("-m" in names for names in models)


def test_every_option_of_a_summary_is_sent_to_workers(model_folder):
    options = JobOptions(model=str(model_folder), style="bullets", rows=3)
    sent = options.for_workers(options.settings())
    assert (sent.request.style, sent.rows, sent.max_new_tokens) == ("bullets", 3, JobOptions().max_new_tokens)


def test_dir_shows_the_public_names_and_none_but_those_of_every_module():
    assert [name for name in dir(lookahead) if not name.startswith("__")] == sorted(lookahead.__all__)


def test_what_is_said_beside_a_status_line_stands_above_it_in_one_piece(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    shown = terminal.console(sys.stderr)
    with shown.status("loading"):
        assert sys.stderr is not screen and terminal.console(sys.stderr) is shown
        terminal.say("warning", "word " * 60)
    lines = [line for line in screen.getvalue().splitlines() if "word" in line]
    assert sum(line.count("word ") for line in lines) == 60 and "loading" not in "".join(lines[1:])


@pytest.mark.parametrize("name", lookahead._REMOVED)
def test_a_removed_name_is_refused_with_what_to_do(name):
    with pytest.raises(AttributeError, match=re.escape(f"{name} was removed: {lookahead._REMOVED[name]}")):
        getattr(lookahead, name)


@pytest.mark.parametrize("command", REMOVED_COMMANDS)
@pytest.mark.parametrize("arguments", [[], ["--help"], ["--model", "nowhere", "--anything"]], ids=str)
def test_a_removed_command_is_refused_by_name_with_what_to_do(command, arguments):
    result = CliRunner().invoke(app, [*command.split(), *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {command} was removed: {REMOVED_COMMANDS[command]}\n"
    assert command not in COMMANDS
