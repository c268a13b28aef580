"""The command that trains heads, and the one that drafts with them, as a user meets them."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from lookahead import Heads, LookaheadConfig, generate
from lookahead.cli.app import app
from lookahead.errors import TrainingError
from lookahead.loading.loading import load

OPTIONS = ["--heads", "2", "--batch-size", "4", "--max-new-tokens", "16", "--threads", "1"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, looping_llama, tiny_tokenizer):
    """A tiny random model, saved as any other."""
    folder = tmp_path_factory.mktemp("model")
    looping_llama.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path, workplace):
    """A working directory with prompts."""
    lines = [json.dumps({"prompt": chr(97 + i % 16) * (1 + i // 16)}) for i in range(24)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.fixture
def lookahead(folder, model_folder):
    """Runs a command with the tiny model."""
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments), "--model", str(model_folder)])


def test_heads_are_trained_measured_and_drafted_with(lookahead, folder, model_folder):
    trained = lookahead("train", "medusa", "--data", "data.jsonl", "-o", "heads", "--steps", 6, *OPTIONS)
    assert trained.exit_code == 0, trained.stderr
    assert "24 prompts without an output: the model answers them first" in trained.stderr
    assert "step 6 of 6: loss" in trained.stderr and "written to heads" in trained.stderr
    rows = [line.split() for line in trained.stdout.splitlines() if "%" in line]
    assert [row[0] for row in rows] == ["1", "2"] and all(len(row) == 2 for row in rows)
    plain = lookahead("generate", "abc", "--proposers", "none", "--max-new-tokens", 30)
    drafted = lookahead("generate", "abc", "--heads", "heads", "--max-new-tokens", 30)
    assert drafted.exit_code == 0, drafted.stderr
    assert drafted.stdout == plain.stdout
    # Whether that command drafts depends on what steps cost; with a fixed draft they always do.
    config = LookaheadConfig(proposers=(Heads("heads"),), draft="fixed", min_probability=0.0)
    stats = generate(*load(str(model_folder), device="cpu"), "abc", config=config, max_new_tokens=30).stats
    assert stats.drafted_by_source["medusa"] > 0


def test_json_is_one_object_and_nothing_else(lookahead):
    trained = lookahead("train", "eagle3", "--data", "data.jsonl", "-o", "heads", "--steps", 2, "--json", *OPTIONS)
    figures = json.loads(trained.stdout)
    assert figures["heads"] == "heads"
    assert set(figures) == {"heads", "eval_accuracy_1", "eval_accuracy_2"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["hydra", "--data", "data.jsonl"], "'medusa', 'eagle3'"),
        (["mtp", "--data", "data.jsonl"], "'medusa', 'eagle3'"),
        (["medusa", "--data", "none.jsonl"], "none.jsonl: No such file or directory"),
        (["medusa", "--data", "data.jsonl", "--heads", "0"], "'--heads': Input should be greater than or equal to 1"),
        (["medusa", "--data", "data.jsonl", "--steps", "0"], "'--steps': Input should be greater than or equal to 1"),
        (["medusa", "--data", "data.jsonl", "--max-length", "1"], "'--max-length': Input should be greater than"),
        (["medusa", "--data", "data.jsonl", "--seed", "-1"], "'--seed': Input should be greater than or equal to 0"),
        (["medusa", "--data", "data.jsonl", "--learning-rate", "0"], "'--learning-rate': Input should be greater than"),
        (["eagle3", "--data", "data.jsonl", "--joint"], "joint was removed: training heads leaves the model as it is"),
    ],
)
def test_a_wrong_argument_is_named_and_status_2(lookahead, arguments, says):
    result = lookahead("train", *arguments, "-o", "heads")
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.replace("│", "").split())
    assert not Path("heads").exists()


@pytest.mark.parametrize("error", [TrainingError("too few examples"), RuntimeError("out of memory")])
@pytest.mark.parametrize("has_outputs", [True, False])
def test_a_run_that_fails_before_a_checkpoint_is_begun_anew_unless_it_has_answers(
    lookahead, folder, monkeypatch, error, has_outputs
):
    line = {"prompt": "abc", **({"output": "def"} if has_outputs else {})}
    (folder / "data.jsonl").write_text("\n".join([json.dumps(line)] * 40))
    command = ["train", "medusa", "--data", "data.jsonl", "-o", "heads", "--steps", 1, *OPTIONS]
    with monkeypatch.context() as patched:
        patched.setattr("lookahead.plugins.heads.training.train_heads._prepare", Mock(side_effect=error))
        assert lookahead(*command).exit_code != 0
    again = lookahead(*command)
    if not has_outputs:  # answers take their time
        assert again.exit_code == 2 and "already holds a run: pass --resume" in again.stderr
        again = lookahead(*command, "--resume")
    assert again.exit_code == 0, again.stderr


def test_missing_accelerate_is_told_before_the_model_is_loaded(lookahead, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "accelerate" else find(name, *a))
    monkeypatch.setattr("lookahead.cli.measure.load", lambda *_: pytest.fail("it was loaded"))
    result = lookahead("train", "medusa", "--data", "data.jsonl", "-o", "heads")
    assert result.exit_code == 2
    assert "pip install 'lookahead-decoding[train]'" in result.stderr


def test_heads_of_another_model_are_one_line_and_status_2(lookahead, tiny_llama, folder):
    from lookahead.plugins.heads.head_files import write_heads
    from lookahead.plugins.heads.medusa import MedusaHeads

    write_heads(MedusaHeads.fresh(tiny_llama, heads=1), folder / "other", tiny_llama)
    result = lookahead("generate", "abc", "--heads", "other", "--max-new-tokens", 5)
    assert result.exit_code == 2
    assert "heads of another model" in result.stderr


DIES_AFTER_THREE = """
import os, signal
from transformers import Trainer
from lookahead.cli.app import main

save = Trainer._save_checkpoint

def dies(self, *rest):
    save(self, *rest)
    if self.state.global_step == 3:
        os.kill(os.getpid(), signal.SIGKILL)

Trainer._save_checkpoint = dies
main()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_process_goes_on_with_resume_to_the_same_heads(lookahead, folder, model_folder):
    def command(output):
        return ["train", "eagle3", "--data", "data.jsonl", "-o", output, "--steps", 6, *OPTIONS]

    assert lookahead(*command("whole")).exit_code == 0
    words = [*map(str, command("cut")), "--model", str(model_folder)]
    # No fork: where torch was built for GPUs, it computes no gradients after others before.
    cut = subprocess.run([sys.executable, "-c", DIES_AFTER_THREE, *words], capture_output=True, text=True, check=False)
    assert cut.returncode == -signal.SIGKILL, cut.stderr
    assert not (folder / "cut" / "config.json").exists()
    assert lookahead(*command("cut")).exit_code == 2  # without --resume
    resumed = lookahead(*command("cut"), "--resume")
    assert resumed.exit_code == 0, resumed.stderr
    assert "step 4 of 6" in resumed.stderr and "step 3 of 6" not in resumed.stderr
    whole, resumed = (load_file(folder / each / "model.safetensors") for each in ("whole", "cut"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
