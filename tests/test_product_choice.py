"""Which product is faster is measured once for a machine: every process adds in the same order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lookahead.backend.cpu import product_choice
from lookahead.backend.cpu.product_choice import measured_backends
from lookahead.utils.machine import machine_fingerprint

CASE = torch.float32, (7,)  # rows of no other test


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Forget what this process measured, and keep it in a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured_backends.cache_clear()
    yield
    measured_backends.cache_clear()


def measured(monkeypatch: pytest.MonkeyPatch, *ways: str) -> list[Any]:
    """Let the next measurement find certain ways; returns what was measured."""
    calls: list[Any] = []
    monkeypatch.setattr(product_choice, "measure", lambda *case: (calls.append(case), ways)[1])
    return calls


def kept_in(folder: Path) -> Path:
    return next(folder.glob("lookahead/products/*.json"))


def test_a_later_process_makes_the_choice_of_the_first(monkeypatch, tmp_path):
    first = measured(monkeypatch, "onednn", "packed")
    assert measured_backends(*CASE) == ("onednn", "packed") and len(first) == 1
    measured_backends.cache_clear()
    second = measured(monkeypatch)
    assert measured_backends(*CASE) == ("onednn", "packed") and not second
    assert measured_backends(torch.bfloat16, (7,)) == () and len(second) == 1
    assert len(json.loads(kept_in(tmp_path).read_text())["values"]) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"values": 3}', '{"values": {"a": 3}}'])
def test_a_file_that_holds_something_else_is_written_anew(text, monkeypatch, tmp_path):
    measured(monkeypatch, "packed")
    measured_backends(*CASE)
    kept_in(tmp_path).write_text(text)
    measured_backends.cache_clear()
    assert measured_backends(*CASE) == ("packed",)
    assert ["packed"] in json.loads(kept_in(tmp_path).read_text())["values"].values()


def test_ways_that_this_version_does_not_know_are_left_out(monkeypatch, tmp_path):
    measured(monkeypatch, "packed")
    measured_backends(*CASE)
    kept_in(tmp_path).write_text(kept_in(tmp_path).read_text().replace('"packed"', '"another", "packed"'))
    measured_backends.cache_clear()
    assert measured_backends(*CASE) == ("packed",)


def test_without_a_folder_to_write_to_every_process_measures(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("no folder")
    calls = measured(monkeypatch, "packed")
    assert measured_backends(*CASE) == ("packed",) and len(calls) == 1


@pytest.mark.parametrize("cpu", ["model name : one", "model name : another"])
def test_another_cpu_has_choices_of_its_own(cpu, monkeypatch, tmp_path):
    own = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, **kwargs: cpu if str(path) == "/proc/cpuinfo" else own(path, **kwargs)
    )
    here, (one, another) = machine_fingerprint.__wrapped__(), ("model name : one", "model name : another")
    monkeypatch.setattr(Path, "read_text", lambda path, **kwargs: another if cpu == one else one)
    assert machine_fingerprint.__wrapped__() != here
