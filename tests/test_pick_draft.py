"""Choosing a draft model: each is measured on the same prompts, and none has to be taken."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from lookahead import DecodingStats, DraftModel, LookaheadConfig
from lookahead.backend.calibration import pass_seconds
from lookahead.cli.app import app
from lookahead.generation.comparison import PROMPTS, Score, compare
from lookahead.generation.draft_selection import NAMES, PLAIN, pick_draft
from lookahead.hf.model_state import state_of


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, looping_llama: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> dict[str, Path]:
    """A target, a draft model, and one of another vocabulary."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = looping_llama.config
    models = {
        "target": looping_llama,
        "draft": LlamaForCausalLM(type(config)(**{**config.to_dict(), "num_hidden_layers": 1})),
        "stranger": LlamaForCausalLM(type(config)(**{**config.to_dict(), "vocab_size": 300, "num_hidden_layers": 1})),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
        tiny_tokenizer.save_pretrained(root / name)
    other = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer, unk_token="<unk>")
    other.add_tokens(["<new>"])
    other.save_pretrained(root / "stranger")
    return {name: root / name for name in models}


def test_every_way_decodes_every_prompt_and_learns_for_itself_alone(
    looping_llama: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    before = state_of(looping_llama).learned
    configs = {
        "plain": LookaheadConfig(proposers=()),
        "first": LookaheadConfig(proposers=("outputs",), draft="fixed"),
        "second": LookaheadConfig(proposers=("outputs",), draft="fixed"),
    }
    scores = compare(
        looping_llama,
        tiny_tokenizer,
        ["abcab", "xyz"],
        configs,
        max_new_tokens=20,
        do_sample=True,
    )
    assert state_of(looping_llama).learned is before
    assert {(score.prompts, score.identical) for score in scores.values()} == {(2, 2)}
    assert scores["plain"].stats.mean_acceptance_length == 1.0
    assert scores["first"].stats.drafted_tokens == scores["second"].stats.drafted_tokens > 0


def test_a_score_adds_up() -> None:
    score = Score()
    assert (score.drafted_per_step, score.stats.tokens_per_s) == (0.0, 0.0)
    assert score.to_dict()["draft_acceptance_rate"] == 0.0
    passes = {"target_forwards": 5, "drafted_tokens": 20}
    score.add(DecodingStats(accepted_tokens=5, acceptance_histogram=Counter({2: 5}), decode_s=2.0, **passes), True)
    score.add(DecodingStats(accepted_tokens=10, acceptance_histogram=Counter({3: 5}), decode_s=3.0, **passes), False)
    assert score.to_dict() == {
        "mean_acceptance_length": 2.5,
        "tokens_per_s": 5.0,
        "drafted_per_step": 4.0,
        "draft_acceptance_rate": 0.375,
        "identical": 1,
        "prompts": 2,
    }


def picked(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], model: Any, tokenizer: Any) -> Any:
    """What is picked where decoding takes so many seconds."""

    def told(*arguments: Any, **options: Any) -> dict[str, Score]:
        return {
            name: Score(stats=DecodingStats(acceptance_histogram=Counter({1: 100}), decode_s=seconds[name]))
            for name in arguments[3]
        }

    monkeypatch.setattr("lookahead.generation.draft_selection.compare", told)
    return pick_draft(model, tokenizer, {"a": DraftModel(model), "b": DraftModel(model)})


def test_the_fastest_is_picked_and_none_unless_one_is_faster_than_none(
    tiny_llama: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def best(plain: float, names: float, a: float, b: float) -> str:
        seconds = {PLAIN: plain, NAMES: names, "a": a, "b": b}
        return picked(monkeypatch, seconds, tiny_llama, tiny_tokenizer).best

    assert best(4.0, 3.0, 2.0, 1.0) == "b"
    assert best(4.0, 3.0, 1.0, 2.0) == "a"
    assert best(4.0, 3.0, 2.99, 5.0) == NAMES
    assert best(1.0, 3.0, 2.0, 5.0) == PLAIN


def test_a_pass_takes_time(tiny_llama: PreTrainedModel) -> None:
    assert pass_seconds(tiny_llama) > 0.0


def test_the_command_measures_and_recommends(folders: dict[str, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcab\n\nxyz\n")
    options = ["--model", str(folders["target"]), "--candidates", str(folders["draft"]), "--prompts", str(prompts)]
    run = CliRunner().invoke(app, ["pick-draft", *options, "--max-new-tokens", "12", "--threads", "1", "--json"])
    assert run.exit_code == 0, run.output
    told = json.loads(run.stdout)
    assert set(told["candidates"]) == {PLAIN, NAMES, str(folders["draft"])}
    assert told["best"] in told["candidates"] and told["target_pass_ms"] > 0
    for name, candidate in told["candidates"].items():
        assert candidate["identical"] == candidate["prompts"] == 2
        assert (candidate["parameters"] > 0) == (candidate["cost"] > 0) == (name == str(folders["draft"]))
    run = CliRunner().invoke(app, ["pick-draft", *options, "--max-new-tokens", "12", "--temperature", "0.8"])
    assert run.exit_code == 0, run.output
    assert "fastest: " in run.stdout and "2/2" in run.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--candidates", " , "], "candidates must be models, each named once"),
        (["--candidates", "a,b,a"], "each named once, got 'a,b,a'"),
        (["--candidates", "./nowhere"], "does not exist"),
        (["--candidates", "DRAFT", "--prompts", "./nowhere.txt"], "nowhere.txt"),
        (["--candidates", "DRAFT", "--prompts", "EMPTY"], "holds no prompt"),
        (["--candidates", "STRANGER"], "stranger' gives other ids than the target's"),
    ],
)
def test_the_command_says_what_is_wrong(
    folders: dict[str, Path], tmp_path: Path, options: list[str], message: str
) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    places = {"DRAFT": folders["draft"], "STRANGER": folders["stranger"], "EMPTY": tmp_path / "empty.txt"}
    arguments = [str(places.get(option, option)) for option in options]
    run = CliRunner().invoke(app, ["pick-draft", "--model", str(folders["target"]), *arguments])
    assert run.exit_code == 2
    assert message in " ".join(run.stderr.split())


def test_a_prompt_that_is_too_long_names_no_option_that_the_command_lacks(
    folders: dict[str, Path], tmp_path: Path, looping_llama: PreTrainedModel
) -> None:
    (tmp_path / "long.txt").write_text("abc " * looping_llama.config.max_position_embeddings)
    options = ["--model", str(folders["target"]), "--candidates", str(folders["draft"])]
    run = CliRunner().invoke(app, ["pick-draft", *options, "--prompts", str(tmp_path / "long.txt")])
    assert run.exit_code == 2
    assert " ".join(run.stderr.split()).endswith("; shorten it")


def test_generate_drafts_with_the_model_that_is_named(folders: dict[str, Path]) -> None:
    options = ["generate", "abcab", "--model", str(folders["target"]), "--max-new-tokens", "20", "--threads", "1"]
    draft = ["--draft-model", str(folders["draft"]), "--stats"]
    plain, drafted, alone = (
        CliRunner().invoke(app, [*options, *more]) for more in ([], draft, [*draft, "--proposers", "none"])
    )
    assert plain.exit_code == drafted.exit_code == alone.exit_code == 0, drafted.output
    assert plain.stdout == drafted.stdout == alone.stdout
    refused = CliRunner().invoke(app, [*options, "--draft-model", str(folders["stranger"])])
    assert refused.exit_code == 2 and "gives other ids than the target's" in " ".join(refused.stderr.split())


@pytest.mark.filterwarnings("default")
def test_a_draft_model_larger_than_its_target_is_told_of_in_one_line(folders: dict[str, Path]) -> None:
    options = ["generate", "abcab", "--model", str(folders["draft"]), "--max-new-tokens", "4", "--threads", "1"]
    run = CliRunner().invoke(app, [*options, "--draft-model", str(folders["target"])])
    assert run.exit_code == 0, run.output
    told = [line for line in run.stderr.splitlines() if "hardly pay" in line]
    assert len(told) == 1 and told[0].startswith("warning: the draft model has ") and " ms, " in told[0]
    assert ".py:" not in told[0]


def test_there_are_prompts_for_those_who_bring_none() -> None:
    assert len(set(PROMPTS)) == len(PROMPTS) > 3
