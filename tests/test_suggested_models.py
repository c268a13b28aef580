"""Which model to take: what fits the machine, the user's own default, short names, and downloads."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError
from typer.testing import CliRunner

import lookahead
from lookahead.cli import options
from lookahead.cli.app import app
from lookahead.errors import UnsupportedModelError
from lookahead.loading import suggested_models
from lookahead.loading.loading import locate_model
from lookahead.loading.suggested_models import choose_default, default_name, pull, suggestions

GB = 10**9
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of settings, a cache of the Hub, and a working directory."""
    monkeypatch.setattr(suggested_models, "user_config_path", lambda name, **_: tmp_path / "settings" / name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


@pytest.mark.parametrize("memory", [1 * GB, 4 * GB, 16 * GB, 64 * GB, 256 * GB])
@pytest.mark.parametrize("is_cpu", [True, False])
def test_what_is_suggested_fits_and_is_as_fast_as_memory_allows(memory: int, is_cpu: bool) -> None:
    found = list(suggestions(memory, 50e9, is_cpu=is_cpu))
    for each in found:
        weights = each.parameters * (2.0 if each.dtype == "bf16" else 0.7)
        assert weights <= each.bytes <= memory
        assert each.tokens_per_s == pytest.approx(50e9 / weights)
        assert is_cpu or each.dtype == "bf16"
    smaller = list(suggestions(memory // 2, 50e9, is_cpu=is_cpu))
    assert {each.name for each in smaller} <= {each.name for each in found}
    assert memory < 256 * GB or (len(found) == 8 and {each.dtype for each in found} == {"bf16"})


def test_suggestions_are_printed_as_an_estimate_and_as_json() -> None:
    shown = run("models", "--suggest", "--device", "cpu")
    assert shown.exit_code == 0 and "The speed is an estimate of plain decoding" in shown.stdout
    names = [
        json.loads(line)["name"] for line in run("models", "--suggest", "--device", "cpu", "--json").stdout.splitlines()
    ]
    assert names and all(name in shown.stdout for name in names[:1])


def test_a_default_of_ones_own_serves_commands_that_name_no_model(model_folder: Path, own_settings: Path) -> None:
    assert default_name() == "smollm2"
    said = run("models", "--default", str(model_folder))
    assert said.exit_code == 0 and f"commands without --model use {model_folder}" in said.stderr
    assert default_name() == str(model_folder)
    assert run("models", "--default", "./gone").exit_code == 2 and default_name() == str(model_folder)
    (own_settings / "here").symlink_to(model_folder)
    choose_default("here")
    assert default_name() == str(own_settings / "here")  # from every folder
    (own_settings / "settings" / "lookahead" / "default_model.txt").write_bytes(b"\xff")
    assert default_name() == "smollm2"


def test_the_default_of_the_options_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {field.name: field.default for field in options.ModelOptions.__dataclass_fields__.values()}["model"] == (
        options.default_name()
    )


def cached(folder: Path, name: str) -> None:
    """A model in the cache of the Hub."""
    place = folder / "hub" / f"models--{name.replace('/', '--')}"
    (place / "snapshots" / "0123abcd").mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0123abcd")
    (place / "snapshots" / "0123abcd" / "config.json").write_text("{}")


def test_a_model_of_the_cache_has_a_name_without_its_owner(own_settings: Path) -> None:
    cached(own_settings, "maker/Tiny-1B")
    cached(own_settings, "maker/small")
    cached(own_settings, "other/small")
    assert locate_model("tiny-1b") == ("maker/Tiny-1B", False)
    with pytest.raises(UnsupportedModelError, match="is one of maker/small, other/small: name it with its owner"):
        locate_model("small")
    cached(own_settings, "small")  # a name on the Hub of its own
    assert locate_model("small") == ("small", False)


TINY = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"weights", "a.gguf": b"GGUF" * 500}


@pytest.fixture
def hub(own_settings: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A simulated Hub with one model; changes of the result are what it sends."""
    sent = dict(TINY)

    def about(_: object, repository: str, **__: object) -> SimpleNamespace:
        if repository != "maker/tiny":
            raise RepositoryNotFoundError("404 Client Error.\nmore", response=Mock())
        siblings = [
            SimpleNamespace(
                rfilename=name,
                size=len(content),
                blob_id=hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
                lfs=None if name.endswith("json") else SimpleNamespace(sha256=hashlib.sha256(content).hexdigest()),
            )
            for name, content in TINY.items()
        ]
        return SimpleNamespace(card_data=SimpleNamespace(license="apache-2.0"), siblings=siblings)

    def download(repository: str, file: str) -> str:
        place = own_settings / "hub" / f"models--{repository.replace('/', '--')}" / "snapshots" / "0123abcd"
        if not place.exists():
            cached(own_settings, repository)
        (place / file).write_bytes(sent[file])
        return str(place / file)

    def download_all(repository: str, allow_patterns: list[str]) -> str:
        wanted = [name for name in sent if any(map(Path(name).match, allow_patterns))]
        return str(Path(next(iter([download(repository, name) for name in wanted]))).parent)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", about)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download_all)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return sent


def test_a_download_says_the_licence_and_the_size_and_takes_what_is_needed(hub: dict[str, bytes]) -> None:
    result = run("pull", "maker/tiny")
    assert result.exit_code == 0
    note, place = result.stderr.splitlines()
    assert note == "note: licence apache-2.0, 9 bytes" and place.startswith("maker/tiny: ")
    assert {path.name for path in Path(place.removeprefix("maker/tiny: ")).iterdir()} == {*TINY} - {
        "pytorch_model.bin",
        "a.gguf",
    }
    said: list[Any] = []
    assert pull("hf://maker/tiny/a.gguf", lambda *words: said.append(words)).endswith("/a.gguf")
    assert said == [("apache-2.0", 2000)]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_that_arrives_damaged_is_removed_and_told(hub: dict[str, bytes], file: str) -> None:
    hub[file] = TINY[file][::-1]  # of the same size
    result = run("pull", "maker/tiny")
    assert result.exit_code == 2
    assert f"model 'maker/tiny': {file} arrived damaged; the same command downloads it again" in result.stderr
    hub[file] = TINY[file]
    assert run("pull", "maker/tiny").exit_code == 0


def test_a_download_that_cannot_begin_says_why(hub: dict[str, bytes]) -> None:
    assert "cannot be downloaded: there is no such model on the Hugging Face Hub" in run("pull", "maker/tin").stderr
    said = run("pull", "hf://maker/tiny/b.gguf").stderr
    assert "error: model 'maker/tiny' has no b.gguf; its GGUF files: a.gguf" in said


def test_a_download_that_breaks_off_is_told_with_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("[Errno 104] reset by peer\nmore")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    result = run("pull", "maker/tiny")
    assert result.exit_code == 2
    said = "error: model 'maker/tiny' cannot be downloaded: reset by peer; the same command continues"
    assert result.stderr.strip() == said


OFFLINE = """
import sys
from lookahead.cli.app import app

for host in ("getaddrinfo", "create_connection"):  # no way to anywhere
    def fail(*words, **_):
        print("ASKED")
        raise OSError(-2, "Name or service not known")
    setattr(__import__("socket"), host, fail)
app(["generate", "abc", "-n", "4", "--raw", "-m", "maker/tiny", "--dtype", "fp32"], standalone_mode=False)
"""


def test_a_model_of_the_cache_is_loaded_at_once_where_the_hub_does_not_answer(
    tmp_path: Path, model_folder: Path
) -> None:
    repository = tmp_path / "hub" / "models--maker--tiny"
    shutil.copytree(model_folder, repository / "snapshots" / "0123abcd")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "XDG_CACHE_HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", OFFLINE], env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert ran.returncode == 0 and ran.stdout.count("ASKED") <= 2, ran.stderr  # a client that tries again asks dozens
    assert "Retrying" not in ran.stderr


def test_the_default_model_says_that_it_demonstrates(capsys: pytest.CaptureFixture[str]) -> None:
    from lookahead.cli.terminal import tell_if_demonstration

    tell_if_demonstration("smollm2")
    assert "is only for demonstration: -m names a better one" in " ".join(capsys.readouterr().err.split())
    tell_if_demonstration("maker/tiny")
    assert capsys.readouterr().err == "" and lookahead.load
