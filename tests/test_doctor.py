"""`lookahead doctor`: what serves a user on this machine, and what is broken."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner, Result

import lookahead
from lookahead.cli.app import app
from lookahead.decoding.diagnosis import EXTRAS, cache_facts, faults, model_facts
from lookahead.loading.loading import LoadedModel
from lookahead.model import private_names
from lookahead.model.private_names import PrivateName

ROOT = Path(__file__).resolve().parent.parent


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def facts_of(*arguments: str) -> dict[str, Any]:
    """What `--json` prints."""
    result = doctor(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_without_a_model_it_tells_of_the_machine_the_packages_and_the_caches() -> None:
    facts = facts_of("--threads", "1")
    assert "model" not in facts and facts["faults"] == facts["missing_names"] == []
    machine = facts["machine"]
    assert machine["threads"] == 1 <= machine["cores"]
    assert machine["device"] == ("cuda" if machine["gpus"] else "cpu")
    assert machine["flops"] > 0 and machine["bytes_per_s"] > 0
    assert facts["versions"]["torch"] == metadata.version("torch") and facts["versions"]["numba"] == numba.__version__
    assert {"products", "kernels", "costs", "models"} < facts["caches"].keys()


def test_it_shows_a_reader_the_facts_of_the_json_object() -> None:
    facts, shown = facts_of(), doctor().stdout
    assert [line for line in shown.splitlines() if not line.startswith(" ")] == ["machine", "packages", "caches"]
    told = [facts["machine"]["cpu"], *facts["machine"]["features"], *facts["versions"].values()]
    told += [each["folder"] for each in facts["caches"].values()]
    told += [name for packages in facts["missing_extras"].values() for name in packages]
    assert not [each for each in told if each not in shown]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_machine_is_measured_in_the_dtype_that_is_asked_for(dtype: str) -> None:
    asked = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    assert facts_of("--dtype", dtype, "--device", "cpu")["machine"]["dtype"] == asked


def test_with_a_model_it_tells_what_serves_it_and_whether_tokens_are_equal(model_folder: Path) -> None:
    model = facts_of("--model", str(model_folder), "--device", "cpu")["model"]
    loaded = lookahead.load(model_folder, device="cpu").model
    report = lookahead.backend_report(loaded)
    assert (model["report"]["model"], model["dtype"]) == ("LlamaForCausalLM", "float32")
    assert model["parameters"] == loaded.num_parameters() and model["weights"] == 4 * model["parameters"]
    assert model["report"] == json.loads(json.dumps(asdict(report)))
    assert model["speed"]["counters"]["backend"] == report.summary
    assert model["problems"] == {}
    speed = model["speed"]
    assert speed["same_tokens"] == speed["prompts"] > 0
    assert speed["plain_ms"] > 0 and speed["lookahead_ms"] > 0


def test_a_reader_is_shown_every_path_with_its_reason(model_folder: Path) -> None:
    result = doctor("--model", str(model_folder), "--device", "cpu")
    assert result.exit_code == 0
    report = lookahead.backend_report(lookahead.load(model_folder, device="cpu").model)
    assert not [line for line in str(report).splitlines()[1:] if line.strip() not in result.stdout]
    assert re.search(r"same tokens: (\d+) of \1 texts", result.stdout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "no-such/folder/model"], "error: model 'no-such/folder/model' does not exist"),
        (["--dtype", "fp99"], "error: dtype must be auto, fp32, bf16, fp16, got 'fp99'"),
        (["--device", "abacus"], "error: device 'abacus' is not available"),
        (["--quantize", "int8"], "error: quantize is for a model: name one with --model, got --quantize int8 alone"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_a_mistake_is_one_line(arguments: list[str], said: str) -> None:
    result = doctor(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(said) and result.stderr.count("\n") == 1


def test_a_name_that_the_libraries_lack_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(private_names.TORCH, "_of_another_release", PrivateName("torch.nn.Module", "9.9"))
    private_names.missing_names.cache_clear()
    try:
        result = doctor("--json")
    finally:
        monkeypatch.undo()
        private_names.missing_names.cache_clear()
    facts = json.loads(result.stdout)
    assert result.exit_code == 1 and facts["missing_names"] == ["torch.nn.Module._of_another_release"]
    assert result.stderr == f"broken: {facts['faults'][0]}\n" and "_of_another_release" in result.stderr


class WithOwnLoop(LlamaForCausalLM):
    """A model whose `generate` returns another last token."""

    def generate(self, *arguments: Any, **options: Any) -> Any:
        output = super().generate(*arguments, **options)
        output[:, -1] += 1
        return output


def test_tokens_that_are_not_those_of_generate_are_counted(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    model = WithOwnLoop(tiny_llama.config).eval()
    model.load_state_dict(tiny_llama.state_dict())
    found = model_facts(LoadedModel(model, tiny_tokenizer))
    assert found["speed"]["same_tokens"] == 0 < found["speed"]["prompts"]
    assert "float32" in faults({"missing_names": [], "model": found})[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("same", [0, 2, 3])
def test_other_tokens_are_a_fault_in_float32_alone(dtype: torch.dtype, same: int) -> None:
    """In half precision rounding may decide between two tokens that are about equally likely."""
    model = {"dtype": str(dtype).removeprefix("torch."), "speed": {"same_tokens": same, "prompts": 3}}
    found = faults({"missing_names": [], "model": model})
    assert len(found) == (dtype is torch.float32 and same < 3)


def test_a_cache_has_the_size_of_its_files_and_says_whether_it_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tmp_path / "lookahead" / "models" / "a-model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"x" * 1234)
    (tmp_path / "lookahead" / "costs").write_text("no folder")
    found = cache_facts()
    assert (found["models"]["bytes"], found["models"]["is_writable"]) == (1234, True)
    assert (found["kernels"]["bytes"], found["kernels"]["is_writable"]) == (0, True)
    assert not (tmp_path / "lookahead" / "kernels").exists(), "looking makes no folder"
    assert not found["costs"]["is_writable"]
    compiled = Path(found["numba, indexes"]["folder"])
    assert found["numba, indexes"]["bytes"] == sum(each.stat().st_size for each in compiled.glob("*.nb[ci]"))


def test_every_extra_for_users_says_what_needs_it() -> None:
    extras = {*(metadata.metadata("lookahead-decoding").get_all("Provides-Extra") or ())}
    assert extras - EXTRAS.keys() == {"dev", "plot", "test"}
    assert extras >= EXTRAS.keys()
