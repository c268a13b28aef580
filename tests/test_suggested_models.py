"""Which model to take: what fits the machine, the user's own default, short names, and downloads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from typer.testing import CliRunner

import lookahead
from lookahead.cli import options
from lookahead.cli.app import app
from lookahead.errors import UnsupportedModelError
from lookahead.loading import suggested_models
from lookahead.loading.loading import locate_model
from lookahead.loading.suggested_models import choose_default, default_name, pull, suggestions

GB = 10**9


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
    assert said.exit_code == 0 and f"commands that name no model take {model_folder}" in said.stderr
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


def test_a_download_says_the_licence_and_the_size_and_takes_what_is_needed(
    own_settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub is simulated: a model with weights in two formats."""
    sizes = {"model.safetensors": 3 * GB, "pytorch_model.bin": 3 * GB, "config.json": 100, "a.gguf": GB}
    about = SimpleNamespace(
        card_data=SimpleNamespace(license="apache-2.0"),
        siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()],
    )
    asked: list[Any] = []

    def download(repository: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        cached(own_settings, repository)
        return "folder"

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: about)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *words: "/".join(words))
    result = run("pull", "maker/tiny")
    assert result.exit_code == 0
    assert result.stderr.splitlines() == ["note: maker/tiny: licence apache-2.0, 3.0 GB", "maker/tiny: folder"]
    assert "*.safetensors" in asked[0] and not any("bin" in each for each in asked[0])
    said: list[str] = []
    assert pull("hf://maker/tiny/a.gguf", said.append) == "maker/tiny/a.gguf"
    assert said == ["maker/tiny: licence apache-2.0, 1.0 GB"]


def test_a_download_that_breaks_off_is_told_with_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("reset by peer\nmore")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    result = run("pull", "maker/tiny")
    assert result.exit_code == 2
    said = "error: model 'maker/tiny' cannot be downloaded: reset by peer; the same command continues"
    assert result.stderr.strip() == said


def test_the_default_model_says_that_it_demonstrates(capsys: pytest.CaptureFixture[str]) -> None:
    from lookahead.cli.terminal import tell_if_demonstration

    tell_if_demonstration("smollm2")
    assert "demonstrates only: -m names a better one" in " ".join(capsys.readouterr().err.split())
    tell_if_demonstration("maker/tiny")
    assert capsys.readouterr().err == "" and lookahead.load
