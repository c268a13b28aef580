"""The command line as a process of its own: how fast it starts, signals, pipes and full devices."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest
from typer.testing import CliRunner

from lookahead.cli.app import app, main
from lookahead.documents.inputs import find_inputs
from lookahead.documents.readers import read_documents
from tests.support.forked import command

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = ["--model", str(ROOT / "tests" / "models" / "summarizer"), "--max-new-tokens", "4", "--threads", "1"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with many short documents."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs.jsonl").write_text('{"text": "The cat sat on the mat."}\n' * 5000)
    (tmp_path / "a.txt").write_text("The cat sat on the mat.")
    return tmp_path


def test_help_comes_at_once_without_loading_torch():
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from lookahead.cli.app import app\n"
        "assert CliRunner().invoke(app, ['summarize', '--help']).exit_code == 0\n"
        "assert not {'torch', 'transformers', 'numba'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)


def test_ctrl_c_leaves_whole_lines_and_status_130(folder):
    output = folder / "out.jsonl"
    with command("summarize", "docs.jsonl", "-o", "out.jsonl", *OPTIONS, folder=folder) as process:
        # The last line may still be on its way to the disk, and is then taken back.
        process.until(lambda: output.exists() and output.read_bytes().count(b"\n") > 1)
        process.interrupt()
        assert process.wait() == 130
    assert output.read_text().endswith("\n")
    done = [json.loads(line)["id"] for line in output.read_text().splitlines()]
    assert done == [f"docs.jsonl:{i + 1}" for i in range(len(done))]
    said = rf"interrupted: {len(done)} finished summar(y|ies) in out\.jsonl; --resume goes on\n"
    assert re.fullmatch(said, process.stderr)


@pytest.mark.parametrize("option", ["--compare", "--format=text"])
def test_ctrl_c_while_summaries_are_shown_says_what_there_is(folder, option):
    shown = folder / "shown"
    with shown.open("w") as file:
        words = ("summarize", "docs.jsonl", option, *OPTIONS)
        with command(*words, folder=folder, stdout=file.fileno()) as process:
            process.until(lambda: shown.stat().st_size)
            process.interrupt()
            assert process.wait() == 130
    if option == "--compare":
        done = [json.loads(line)["id"] for line in shown.read_text().splitlines()]
        assert done == [f"docs.jsonl:{i + 1}" for i in range(len(done))]
    said = r"interrupted: \d+ finished summar(y|ies) in stdout; a job with --output can be resumed\n"
    assert re.fullmatch(said, process.stderr)


def test_an_interrupted_text_ends_with_its_line(model_folder, monkeypatch):
    def pieces():
        yield "Once upon"
        raise KeyboardInterrupt

    text = MagicMock()
    text.__iter__.side_effect = pieces
    monkeypatch.setattr("lookahead.stream", Mock(return_value=text))
    result = CliRunner().invoke(app, ["generate", "Once", "--model", str(model_folder)])
    assert (result.exit_code, result.stdout) == (130, "Once upon\n")
    assert result.stderr == "interrupted: stopped before it was finished\n"


def test_a_reader_that_has_seen_enough_ends_the_job_quietly(folder):
    reading, writing = os.pipe()
    with command("summarize", "docs.jsonl", *OPTIONS, folder=folder, stdout=writing, closes=reading) as process:
        os.close(writing)
        with os.fdopen(reading) as lines:
            assert json.loads(lines.readline())["id"] == "docs.jsonl:1"
        assert process.wait() == 1
    assert process.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_device_behind_stdout_is_told_in_one_line(folder):
    words = ("summarize", "a.txt", *OPTIONS)
    with open("/dev/full", "w") as full, command(*words, folder=folder, stdout=full.fileno()) as process:
        assert process.wait() == 1
    message = "error: writing failed: No space left on device; 0 finished summaries in stdout; "
    message += "a job with --output can be resumed\n"
    assert process.stderr == message


@pytest.mark.parametrize("output", [(), ("-o", "out.jsonl")], ids=["shown", "to a file"])
def test_a_closed_standard_output_loses_no_summary_in_silence(cli_folder, model_folder, monkeypatch, capsys, output):
    arguments = ["lookahead", "summarize", "a.txt", *output, "--model", str(model_folder), "--max-new-tokens", "4"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    if output:
        assert ended.value.code == 0 and (cli_folder / "out.jsonl").read_text().count("\n") == 1
    else:
        assert ended.value.code == 1 and "error: writing failed: " in said and "0 finished summaries in stdout" in said


def test_a_closed_standard_input_is_told(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    (reject,) = read_documents(find_inputs(["-"]))
    assert reject.error == "-: standard input is closed"
