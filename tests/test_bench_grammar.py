"""The benchmark of grammars, on a tiny model that writes by small schemas."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from bench import grammar
from tests.support.grammars import json_model, json_tokenizer

CALL = {
    "type": "object",
    "properties": {"tool": {"const": "a_tool"}, "day": {"enum": ["one", "two"]}},
    "required": ["tool", "day"],
    "additionalProperties": False,
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}: {% endfor %}"


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of a small run; the process of the tests may run on any core afterwards."""
    monkeypatch.setattr(grammar, "stay_on_cores", lambda core, threads: None)
    monkeypatch.setattr(grammar, "SCHEMAS", {"any object": ({"type": "object"}, ["x"]), "call": (CALL, ["a", "bc"])})
    tokenizer = json_tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    json_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return ["--model", str(tmp_path), "--batch", "3", "--max-new-tokens", "40"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_ways_are_measured_alone_and_together_and_outputs_are_checked(
    dtype: str, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    pytest.importorskip("jsonschema")
    grammar.main([*given, "--dtype", dtype])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    for kind, rows in (("one prompt", 2), ("batch of 3", 3)):
        assert list(result[kind]) == ["any object", "call", "all"]
        call: dict[str, Any] = result[kind]["call"]
        assert call["valid"] == f"{rows} of {rows} that ended"
        assert call["passes"]["forced drafts"] < call["passes"]["no forced drafts"] <= call["passes"]["plain"]
        if dtype == "fp32" or rows == 2:
            assert call["identical"] == f"{rows} of {rows}"
        assert result[kind]["all"]["over_plain"] > 0


def test_what_is_not_installed_is_named(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="needs llguidance and jsonschema: pip install llguidance jsonschema"):
        grammar.main(given)


def test_every_schema_has_as_many_prompts_as_a_batch() -> None:
    assert {len(prompts) for _, prompts in grammar.SCHEMAS.values()} == {8}
