"""The command line as a process of its own: how fast it starts, signals, pipes and full devices."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Where torchao is installed transformers imports it, and it complains on stderr of what it cannot load.
QUIET = "import sys; sys.modules['torchao'] = None; "
# And where nothing was compiled before, the command says that it compiles.
QUIET += "from lookahead.cli import terminal; terminal._SILENT_S = 1e9; "
MODEL = str(ROOT / "tests" / "models" / "summarizer")
COMMAND = [sys.executable, "-c", QUIET + "from lookahead.cli.app import main; main()"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with many short documents."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs.jsonl").write_text('{"text": "The cat sat on the mat."}\n' * 5000)
    (tmp_path / "a.txt").write_text("The cat sat on the mat.")
    return tmp_path


def start(*arguments, stdout=subprocess.PIPE):
    """Start the command as a terminal would, with SIGINT heard."""
    return subprocess.Popen(
        [*COMMAND, *arguments, "--model", MODEL, "--max-new-tokens", "4", "--threads", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=stdout,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


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
    process = start("summarize", "docs.jsonl", "-o", "out.jsonl")
    deadline = time.monotonic() + 120
    while not (output.exists() and output.stat().st_size > 1000):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output.read_text().endswith("\n")
    done = [json.loads(line)["id"] for line in output.read_text().splitlines()]
    assert done == [f"docs.jsonl:{i + 1}" for i in range(len(done))]
    assert re.fullmatch(rf"interrupted: {len(done)} finished summar(y|ies) in out\.jsonl; --resume goes on\n", stderr)


@pytest.mark.parametrize("option", ["--compare", pytest.param("--format=text", marks=pytest.mark.exhaustive)])
def test_ctrl_c_while_summaries_are_shown_says_what_there_is(folder, option):
    shown = folder / "shown"
    with shown.open("w") as file:
        process = start("summarize", "docs.jsonl", option, stdout=file)
        while not shown.stat().st_size:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    if option == "--compare":
        done = [json.loads(line)["id"] for line in shown.read_text().splitlines()]
        assert done == [f"docs.jsonl:{i + 1}" for i in range(len(done))]
    said = r"interrupted: \d+ finished summar(y|ies) in stdout; a job with --output can be resumed\n"
    assert re.fullmatch(said, stderr)


def test_a_reader_that_has_seen_enough_ends_the_job_quietly(folder):
    process = start("summarize", "docs.jsonl")
    assert json.loads(process.stdout.readline())["id"] == "docs.jsonl:1"
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_device_behind_stdout_is_told_in_one_line(folder):
    with open("/dev/full", "w") as full:
        process = start("summarize", "a.txt", stdout=full)
        _, stderr = process.communicate(timeout=120)
    message = "error: writing failed: No space left on device; 0 finished summaries in stdout; "
    message += "a job with --output can be resumed\n"
    assert (process.returncode, stderr) == (1, message)
