"""Mistakes that are told before anything slow is imported, and in words that say what to do."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lookahead.cli.app import app
from lookahead.documents.inputs import check_output
from lookahead.errors import ConfigError, PoolError, first_line, one_line
from lookahead.proposers.pool_files import changing

ROOT = Path(__file__).parent.parent
EARLY = [
    (["generate", "hi", "--dtype", "fp8"], "dtype must be auto, fp32, bf16, fp16, got 'fp8'"),
    (["generate", "hi", "--quantize", "int7"], "quantize must be int8, int4 or gguf, got 'int7'"),
    (["generate", "hi", "--json-schema", "bad.json"], "--json-schema: bad.json is not JSON: Expecting property name"),
    (["generate", "hi", "--json-schema", "type.json"], "--json-schema: type.json is not valid: type must be a string"),
    (["generate", "hi", "--grammar", "bad.json"], "--grammar: bad.json is not valid: "),
    (["generate", "hi", "--regex", "("], "--regex is not valid: "),
    (["generate", "hi", "--draft-model", "./gone"], "model './gone' does not exist"),
    (["generate", "hi", "--heads", "gone"], "gone: not a folder of heads, nor 'native'"),
    (["generate", "hi", "--pool", "gone.lkp"], "gone.lkp: No such file or directory"),
    (["generate", "hi", "--pool", "a.txt"], "a.txt: not a pool file"),
    (["generate", "hi", "--memory", "a.txt"], "a.txt: not a memory file"),
    (["generate", "hi", "--memory", "gone/m.lkm"], "gone/m.lkm: cannot be written: there is no folder "),
    (["generate", "hi", "--seed", str(1 << 64)], "seed must be a whole number from -2^63 to 2^64 - 1"),
    (["summarize", "a.txt", "--dtype", "fp8"], "dtype must be auto, fp32, bf16, fp16, got 'fp8'"),
    (["summarize", "a.txt", "--ray", "--quantize", "x"], "quantize must be int8, int4 or gguf, got 'x'"),
    (["summarize", "a.txt", "--ray", "--ray-address", "there"], "--ray-address must be HOST:PORT, auto or local"),
    (["chat", "--dtype", "x"], "dtype must be"),
    (["serve", "--quantize", "x"], "quantize must be"),
    (["serve", "--port", "PORT"], "cannot listen on port PORT of localhost: Address already in use"),
    (["train", "foo", "--data", "a.txt", "-o", "h"], "'medusa', 'eagle3'"),
    (["train", "medusa", "--data", "gone", "-o", "h"], "gone: No such file or directory"),
    (["train", "medusa", "--data", "a.txt", "-o", "h"], "a.txt:1: not valid JSON"),
    (["pool", "info", "a.txt"], "a.txt: not a pool file"),
    (["memory", "info", "a.txt"], "a.txt: not a memory file"),
    (["doctor", "--dtype", "x"], "dtype must be"),
    (["generate", "hi", "-m", "speech"], "model 'speech' reads sound: 'lookahead transcribe' transcribes it"),
    (["summarize", "a.txt", "-m", "speech"], "model 'speech' reads sound: 'lookahead transcribe' transcribes it"),
    (["transcribe", "a.txt", "-m", "./text"], "model './text' reads text: 'lookahead generate' answers a prompt with"),
    (["transcribe", "-", "-m", "speech"], "-: no such file; sounds are named by files and folders, not by URLs"),
    (["transcribe", "http://a/b.wav", "-m", "speech"], "b.wav: no such file; sounds are named by files and folders"),
    (["pick-draft"], "pick-draft was removed"),
]

RUN = """
import json, socket, sys
from typer.testing import CliRunner
from lookahead.cli.app import app
with socket.create_server(("localhost", 0)) as taken:
    port = str(taken.getsockname()[1])
    for arguments, message in json.load(sys.stdin):
        result = CliRunner().invoke(app, [port if each == "PORT" else each for each in arguments])
        said = " ".join(result.stderr.split())
        slow = [name for name in ("torch", "transformers", "ray") if name in sys.modules]
        print(json.dumps([result.exit_code, result.stdout, said, message.replace("port PORT", f"port {port}"), slow]))
"""


def test_mistakes_that_need_no_model_are_told_before_torch_is_imported(tmp_path):
    (tmp_path / "a.txt").write_text("A text.")
    (tmp_path / "bad.json").write_text("{bad")
    configs = {"speech": {"model_type": "whisper"}, "text": {"architectures": ["LlamaForCausalLM"]}}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "type.json").write_text('{"type": 5}')
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300", "TERM": "dumb"}
    pipes = {"input": json.dumps(EARLY), "capture_output": True, "text": True, "timeout": 120}
    ran = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, env=environment, **pipes)
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(told) == len(EARLY), ran.stderr
    for (arguments, _), (status, shown, said, message, slow) in zip(EARLY, told, strict=True):
        assert (status, shown, slow) == (2, "", []), arguments
        assert message in said, arguments


@pytest.mark.parametrize(
    ("mistake", "meant"), [("--modle", "--model"), ("--max-new-token", "--max-new-tokens"), ("--xyzzy", None)]
)
def test_the_nearest_option_is_the_one_that_is_suggested(mistake, meant):
    result = CliRunner().invoke(app, ["generate", "hi", mistake, "x"], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and f"No such option: {mistake}" in result.stderr
    assert result.stderr.count("--") == (1 if meant is None else 2)
    assert meant is None or f"; did you mean {meant}?" in result.stderr


def test_a_device_that_is_not_here_is_told_with_those_that_are():
    for name in ("gpu", "cuda:99"):
        result = CliRunner().invoke(app, ["doctor", "--device", name])
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: device '{name}' is not available: PyTorch finds cpu")


def test_the_number_of_an_error_of_the_system_is_not_shown():
    assert one_line(OSError(errno.ENOTDIR, "Not a directory", "a/b")) == "Not a directory: 'a/b'"
    assert first_line(ValueError("[Errno -2] Name or service not known\nmore")) == "Name or service not known"


def test_a_read_only_file_system_is_told_as_such(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (tmp_path / "old.jsonl").write_text("")
    with monkeypatch.context() as patched:  # no test can mount one
        patched.setattr(os, "open", refuse)
        patched.setattr(Path, "open", refuse)
        for name in ("new.jsonl", "old.jsonl"):
            with pytest.raises(ConfigError, match="cannot be written: Read-only file system"):
                check_output(tmp_path / name, [], overwrite=True)
        with pytest.raises(PoolError, match="Read-only file system"), changing(str(tmp_path / "a.lkp")):
            pass
