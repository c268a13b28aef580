"""The type that commands decode in: on a CPU the checkpoint's own bfloat16 where that is faster, else as by "auto"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import lookahead
from lookahead.backend.cpu.product_choice import bfloat16_gain
from lookahead.cli.app import app
from lookahead.cli.options import ModelOptions
from lookahead.cli.terminal import load
from lookahead.errors import ConfigError
from lookahead.utils.kept_values import keep, kept_file
from lookahead.utils.machine import machine_fingerprint

HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.fixture
def half_folder(tmp_path: Path, tiny_llama: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> str:
    """A model whose checkpoint is in bfloat16."""
    model: Any = LlamaForCausalLM(tiny_llama.config).to(HALF)
    model.save_pretrained(tmp_path / "half")
    tiny_tokenizer.save_pretrained(tmp_path / "half")
    return str(tmp_path / "half")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder in which nothing is measured yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def measured(gain: Any) -> None:
    """Keep a gain, as a process before this one would have measured it."""
    keep(kept_file("products", machine_fingerprint()), "gain of bfloat16", gain, lambda value: value)


def loaded_type(**options: Any) -> torch.dtype:
    return load(ModelOptions(device="cpu", **options), measures_costs=False).model.dtype


@pytest.mark.parametrize(("gain", "dtype"), [(0.4, SINGLE), (1.05, SINGLE), (1.2, HALF), (5.0, HALF)])
def test_the_checkpoints_own_bfloat16_is_taken_where_it_is_faster_and_told(gain, dtype, half_folder, capsys):
    measured(gain)
    assert loaded_type(model=half_folder) == dtype
    told = capsys.readouterr().err
    assert told.count("\n") == (dtype == HALF)
    assert dtype == SINGLE or (f"{gain:.1f} times as fast" in told and "--dtype fp32" in told)


@pytest.mark.parametrize(("asked", "dtype"), [("fp32", SINGLE), ("auto", SINGLE), ("bf16", HALF)])
def test_a_type_that_is_asked_for_is_taken_without_a_word(asked, dtype, half_folder, capsys):
    measured(5.0)
    assert loaded_type(model=half_folder, dtype=asked) == dtype
    assert not capsys.readouterr().err


def test_weights_of_another_type_are_never_rounded(model_folder, capsys):
    measured(5.0)
    assert loaded_type(model=str(model_folder)) == SINGLE
    assert not capsys.readouterr().err


def test_a_model_whose_bits_cannot_be_kept_is_not_loaded_in_bfloat16(tmp_path, tiny_tokenizer, capsys):
    config = MixtralConfig(
        vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    MixtralForCausalLM(config).to(HALF).save_pretrained(tmp_path / "experts")
    tiny_tokenizer.save_pretrained(tmp_path / "experts")
    measured(5.0)
    assert loaded_type(model=str(tmp_path / "experts")) == SINGLE
    assert not capsys.readouterr().err


def test_the_tokens_are_those_of_transformers_in_that_type(half_folder):
    measured(5.0)
    options = ["--model", half_folder, "--device", "cpu", "--raw", "--max-new-tokens", "24", "--threads", "1"]
    ran = CliRunner().invoke(app, ["generate", "The cat", *options])
    assert ran.exit_code == 0, ran.output
    model, tokenizer = lookahead.load(half_folder, dtype="bf16", device="cpu")
    ids = tokenizer("The cat", return_tensors="pt").input_ids
    expected: Any = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True) in ran.stdout


def test_python_and_training_keep_the_type_that_they_name(half_folder):
    measured(5.0)
    assert lookahead.load(half_folder, device="cpu").model.dtype == SINGLE
    with pytest.raises(ConfigError, match="dtype must be auto, fp32, bf16, fp16, got 'fastest'"):
        lookahead.load(half_folder, device="cpu", dtype="fastest")


@pytest.mark.parametrize("gain", ["2", float("nan"), -1.0])
def test_a_gain_that_is_none_is_measured_anew(gain):
    file = kept_file("products", machine_fingerprint())
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"values": {"gain of bfloat16": gain}}))
    found = bfloat16_gain()
    assert 0 < found < 1000
    assert json.loads(file.read_text())["values"]["gain of bfloat16"] == found
