"""The command line as a process of its own: how fast it starts, signals, pipes and full devices."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args
from unittest.mock import MagicMock, Mock

import pytest
from typer.models import ArgumentInfo
from typer.testing import CliRunner

from lookahead.cli.app import app, main
from lookahead.cli.terminal import raise_on_signals
from lookahead.documents.inputs import find_inputs
from lookahead.documents.readers import read_documents
from tests.support.forked import command, heed_ctrl_c

ROOT = Path(__file__).resolve().parent.parent
MODEL = ["--model", str(ROOT / "tests" / "models" / "summarizer"), "--dtype", "fp32"]
OPTIONS = [*MODEL, "--max-new-tokens", "4", "--threads", "1"]


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch has another OpenMP")
@pytest.mark.parametrize(("own", "used"), [(None, "3000"), ("77", "77")])
def test_threads_of_torch_soon_sleep_while_they_wait_unless_the_user_says_how_long(own, used):
    environment = {**os.environ, "OMP_DISPLAY_ENV": "verbose"}
    environment.pop("GOMP_SPINCOUNT", None)
    if own:
        environment["GOMP_SPINCOUNT"] = own
    command = [sys.executable, "-c", "import lookahead.cli.app, torch"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert f"GOMP_SPINCOUNT = '{used}'" in ran.stderr


def test_a_text_model_is_decoded_without_packages_that_it_does_not_need(model_folder):
    """They take seconds to import where they are installed; transformers itself imports accelerate, torchao, PIL."""
    unused = {
        *("datasets", "deepspeed", "docx", "fastapi", "gguf", "jax", "pandas", "peft", "pyarrow", "pypdf"),
        *("ray", "scipy", "sklearn", "tensorflow", "torchvision", "trafilatura", "uvicorn", "vllm"),
        *("lookahead.plugins", "lookahead.reporting", "lookahead.summarization", "lookahead.plugins.heads.training"),
    }
    script = (
        "import sys\n"
        "from lookahead.cli.app import app\n"
        f"options = ['--model', {str(model_folder)!r}, '--raw', '--max-new-tokens', '4', '--threads', '1']\n"
        "app(['generate', 'The cat', *options], standalone_mode=False)\n"
        f"print(*sorted({unused!r} & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=300, capture_output=True)
    assert not ran.stdout.splitlines()[-1]


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
    said = rf"interrupted: {len(done)} finished summar(y|ies) in out\.jsonl; --resume continues\n"
    assert re.fullmatch(said, process.stderr)


# Sends what Ctrl-C sends when a module is about to be imported, and runs the command line.
INTERRUPTED = """
import os, signal, sys
module = sys.argv.pop(1)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from lookahead.__main__ import run
run()
"""


@pytest.mark.parametrize("module", ["lookahead.cli.app", "typer", "torch", "transformers.generation.utils"])
def test_ctrl_c_while_the_command_loads_says_so_in_a_line(folder, module):
    words = [sys.executable, "-c", INTERRUPTED, module, "summarize", "docs.jsonl", "-o", "out.jsonl", *OPTIONS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = {"capture_output": True, "text": True, "preexec_fn": heed_ctrl_c}
    ran = subprocess.run(words, env=environment, timeout=300, **started)
    assert (ran.returncode, ran.stdout) == (130, "")
    assert ran.stderr.splitlines()[-1] == "interrupted: stopped before it was finished"
    assert "Traceback" not in ran.stderr and not (folder / "out.jsonl").exists()


@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_while_a_long_document_is_read_ends_the_job_with_its_closing_line(folder, how, status):
    (folder / "long.txt").write_text("The cat sat on the mat, and the dog saw it. " * 20_000)
    words = [sys.executable, "-m", "lookahead", "summarize", "long.txt", "-o", "out.jsonl", *OPTIONS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, env=environment, preexec_fn=heed_ctrl_c, **pipes)
    try:
        deadline = time.monotonic() + 300
        while not (folder / "out.jsonl.manifest.json").exists():  # from then on it reads
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(how)
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, stdout) == (status, "")
    assert stderr.splitlines()[-1] == "interrupted: 0 finished summaries in out.jsonl; --resume continues"
    assert "Traceback" not in stderr


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["pool"]], ids=" ".join)
def test_a_full_device_behind_a_help_text_is_told_in_one_line(words):
    run = [sys.executable, "-m", "lookahead", *words]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(run, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (1, "error: writing failed: No space left on device\n")


def test_a_closed_terminal_ends_a_command_unless_nohup_has_it_go_on():
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise_on_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        raise_on_signals()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


def test_a_closed_standard_input_is_told(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    (reject,) = read_documents(find_inputs(["-"]))
    assert reject.error == "-: standard input is closed"
    for words in (["chat"], ["generate"], ["tokens"]):
        with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
            patched.setattr(sys, "argv", ["lookahead", *words])
            main()
        assert ended.value.code == 2 and "standard input is closed" in capsys.readouterr().err


# Bytes that are no text


UNDECODED = os.fsdecode(b"n\xe9e")
NAMES_OF_FILES = ("FILE", "FILE.lkm", "FILES", "DIR", "INPUTS", "PAGE", "RESULTS", "PATH")


def commands_of(group, *words):
    """The words that call a command, and its parameters with their types and what typer is told of them."""
    for each in group.registered_commands:
        parameters = [*inspect.signature(each.callback).parameters.values()][1:]
        yield (*words, each.name), [(each, *get_args(each.annotation)) for each in parameters]
    for child in group.registered_groups:
        yield from commands_of(child.typer_instance, *words, child.name)


def name_of(parameter, details):
    """How the command line calls a parameter."""
    is_argument = isinstance(details, ArgumentInfo)
    flags = [each for each in (details.default, f"--{parameter.name.replace('_', '-')}") if str(each).startswith("--")]
    return details.metavar if is_argument else flags[0]


TEXTS = {
    (" ".join(words), name_of(parameter, details)): parameters
    for words, parameters in commands_of(app)
    for parameter, hint, details in parameters
    if hint in (str, str | None, list[str]) and details.metavar not in NAMES_OF_FILES
}


@pytest.mark.parametrize(("words", "name"), TEXTS)
def test_a_text_that_is_none_in_the_encoding_of_the_locale_is_refused(words, name, cli_folder):
    given = []
    for parameter, _, details in TEXTS[words, name]:
        other = name_of(parameter, details)
        if other == name or parameter.default is inspect.Parameter.empty:
            value = UNDECODED if other == name else "medusa"
            given += [other, value] if other.startswith("--") else [value]
    result = CliRunner().invoke(app, [*words.split(), *given])
    assert (result.exit_code, result.stdout) == (2, "") and result.stderr.count("\n") == 1, result.output
    assert f"argument {name} is not valid text in the locale's encoding (" in result.stderr
    assert f"got {UNDECODED!a}; pass UTF-8" in result.stderr


def test_texts_and_names_of_models_are_checked_in_all_commands_that_take_any():
    some = {("generate", "PROMPT"), ("chat", "--system"), ("serve", "MODELS"), ("pool add", "--model")}
    assert some | {("summarize", "--field"), ("memory build", "--model")} <= {*TEXTS}


def test_the_locale_that_cannot_decode_a_text_is_named():
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lookahead", "generate", "n\u00e9e"]
    ran = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (2, b"")
    assert ran.stderr.decode("ascii") == (
        "error: argument PROMPT is not valid text in the locale's encoding (ascii): got 'n\\udcc3\\udca9e'; "
        "set a UTF-8 locale such as C.UTF-8\n"
    )


def test_files_may_have_names_that_are_no_text(cli_folder, model_folder):
    def run(*words):
        options = () if words[0] == "report" else ("--model", str(model_folder))
        result = CliRunner().invoke(app, [*words, *options])
        assert result.exit_code == 0, result.output

    text, pool = f"{UNDECODED}.txt", f"{UNDECODED}.lkp"
    os.rename("a.txt", text)
    files = ("--pool", pool, "--memory", f"{UNDECODED}.lkm", "--prompt-file", f"{UNDECODED}.prompt")
    Path(f"{UNDECODED}.prompt").write_text("Say it shortly: {document}")
    run("pool", "build", text, "-o", pool)
    for suffix in (".jsonl", ".parquet"):
        for option in ("--overwrite", "--resume"):
            run("summarize", text, "-o", f"{UNDECODED}{suffix}", option, "--max-new-tokens", "4", *files)
        run("report", f"{UNDECODED}{suffix}")
    run("pool", "build", text, f"{UNDECODED}.parquet", "--field", "summary", "-o", pool, "--overwrite")
    run("pool", "add", pool, text)
