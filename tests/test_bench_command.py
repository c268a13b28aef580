"""`lookahead bench`: transformers and lookahead in turn on a user's prompts, and whether tokens differ."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from lookahead import DecodingStats, LookaheadConfig
from lookahead.cli import bench
from lookahead.cli.app import app
from lookahead.decoding.comparison import PROMPTS, TRANSFORMERS, Score, compare, decode_plainly
from lookahead.kernels import block_product
from lookahead.loading.loading import LoadedModel
from lookahead.model.model_state import state_of
from tests.support.pass_recorder import counted_passes

METHODS = [TRANSFORMERS, "transformers' prompt lookup", "lookahead without drafts", "lookahead"]
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def run_bench(folder: Path, *arguments: str) -> Result:
    fixed = ("--device", "cpu", "--dtype", "fp32", "--max-new-tokens", "8")
    return CliRunner().invoke(app, ["bench", "--model", str(folder), *fixed, *arguments])


def test_every_method_decodes_every_prompt_with_the_tokens_of_transformers(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("abcabcabc\nin two lines")
    (tmp_path / "two.md").write_text("# A title\n\nabab")
    (tmp_path / "many.jsonl").write_text('{"question": "abc"}\n{"question": "xyz"}\n')
    files = [option for name in ("one.txt", "two.md", "many.jsonl") for option in ("--prompts", str(tmp_path / name))]
    result = run_bench(model_folder, *files, "--field", "question", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert list(found["methods"]) == METHODS and found["dtype"] == "float32"
    assert found["backend"].startswith("CpuBackend")
    for each in found["methods"].values():
        assert each["identical"] == each["prompts"] == 4
        assert each["ms_per_token"] > 0 and each["times"] > 0 and each["times_with_prompt"] > 0
    assert found["methods"][TRANSFORMERS]["times"] == found["methods"][TRANSFORMERS]["times_with_prompt"] == 1.0
    assert [found["methods"][name]["mean_acceptance_length"] for name in (METHODS[0], METHODS[2])] == [1.0, 1.0]


def test_without_files_a_few_prompts_are_measured_and_shown_in_a_table(model_folder: Path) -> None:
    result = run_bench(model_folder, "--raw")
    assert result.exit_code == 0, result.stderr
    assert not [name for name in METHODS if name not in result.stdout]
    assert result.stdout.count(f"{len(PROMPTS)}/{len(PROMPTS)}") == len(METHODS)


@pytest.mark.skipif(not block_product.is_supported(), reason="the CPU has no products of 4-bit weights")
def test_with_a_copy_that_drafts_it_is_told_whether_the_copy_pays(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("abcabcabc")
    result = run_bench(model_folder, "--prompts", str(tmp_path / "one.txt"), "--self-draft")
    assert result.exit_code == 0, result.stderr
    assert not [name for name in (*METHODS, "lookahead without the copy") if name not in result.stdout]
    assert re.search(r"with --self-draft \d+\.\d\d times as fast as without it", result.stdout)


class WithOwnLoop(LlamaForCausalLM):
    """A model whose `generate` returns another last token, and that notes its prompts."""

    def generate(self, *arguments: Any, **options: Any) -> Any:
        if "input_ids" in options:
            vars(self).setdefault("seen", []).append(options["input_ids"].tolist())
        output = super().generate(*arguments, **options)
        output[:, -1] += 1
        return output


@pytest.fixture
def other(tiny_llama: Any) -> WithOwnLoop:
    model = WithOwnLoop(tiny_llama.config).eval()
    model.load_state_dict(tiny_llama.state_dict())
    return model


def test_an_output_that_differs_is_told_and_is_a_failure(
    other: WithOwnLoop, tiny_tokenizer: Any, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "load", lambda *_, **__: LoadedModel(other, tiny_tokenizer))
    result = run_bench(model_folder, "--json")
    assert result.exit_code == 1
    said = "NOT IDENTICAL: lookahead without drafts and lookahead wrote other tokens than transformers\n"
    assert result.stderr.endswith(said)
    assert json.loads(result.stdout)["methods"]["lookahead"]["identical"] == 0


def test_no_prompt_is_decoded_before_it_is_measured(other: WithOwnLoop, tiny_tokenizer: Any) -> None:
    """What is learned from its output would draft it."""
    scores = compare(other, tiny_tokenizer, ["abcab", "xyz"], {"ours": LookaheadConfig()}, **GREEDY)
    assert scores["ours"].prompts == 2
    asked = [tiny_tokenizer(text)["input_ids"] for text in ("abcab", "xyz")]
    assert [vars(other)["seen"].count([each]) for each in asked] == [1, 1]


def test_transformers_ends_where_lookahead_does_at_the_end_of_the_context(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    limit = tiny_llama.config.max_position_embeddings
    prompt = (tiny_tokenizer("abc")["input_ids"] * limit)[: limit - 3]
    scores = compare(tiny_llama, tiny_tokenizer, [prompt], {"ours": None}, **GREEDY)
    assert {(each.identical, each.stats.emitted_tokens) for each in scores.values()} == {(1, 4)}


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 4}], ids=["plain", "prompt lookup"])
def test_passes_of_transformers_are_counted_with_its_drafts_and_without(
    looping_llama: Any, tiny_tokenizer: Any, options: dict[str, Any]
) -> None:
    ids = tiny_tokenizer("abcabcabcabc")["input_ids"]
    torch.manual_seed(0)
    with counted_passes(looping_llama) as passes:
        (tokens,), stats = decode_plainly(looping_llama, tiny_tokenizer, [ids], **{**GREEDY, **options})
    assert stats.target_forwards == len(passes) - 1
    assert stats.decoded_tokens == len(tokens) - 1 == stats.emitted_tokens - 1


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.txt", None, "none.txt: no such file"),
        ("empty.txt", " \n", "empty.txt: "),
        ("empty.jsonl", "", "empty.jsonl: no documents"),
        ("other.jsonl", '{"story": "abc"}\n', "other.jsonl:1: "),
        ("torn.jsonl", '{"text": "a', "torn.jsonl:1: not valid JSON"),
    ],
)
def test_a_file_without_a_prompt_is_one_line(
    name: str, text: str | None, said: str, model_folder: Path, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    result = run_bench(model_folder, "--prompts", str(tmp_path / name))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and said in result.stderr and result.stderr.count("\n") == 1


def test_outputs_that_loop_are_counted_and_the_speed_is_shown_without_them_too(
    float32_summarizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "two.jsonl").write_text('{"text": "Stop here."}\n{"text": "a a a a a a a a a a"}\n')
    arguments = ("--max-new-tokens", "100", "--prompts", str(tmp_path / "two.jsonl"))
    found = json.loads(run_bench(float32_summarizer, *arguments, "--json").stdout)["methods"]
    assert {each["loops"] for each in found.values()} == {1}
    assert found[TRANSFORMERS]["times_without_loops"] == 1.0
    assert "\n1 of 2 outputs loop, " in run_bench(float32_summarizer, *arguments).stdout


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
    first = DecodingStats(accepted_tokens=5, acceptance_histogram=Counter({2: 5}), decode_s=2.0, **passes)
    score.add(first, is_identical=True, is_loop=False)
    second = DecodingStats(accepted_tokens=10, acceptance_histogram=Counter({3: 5}), decode_s=3.0, **passes)
    score.add(second, is_identical=False, is_loop=True)
    assert score.stats_without_loops == first
    assert score.to_dict() == {
        "mean_acceptance_length": 2.5,
        "tokens_per_s": 5.0,
        "drafted_per_step": 4.0,
        "draft_acceptance_rate": 0.375,
        "identical": 1,
        "loops": 1,
        "prompts": 2,
    }


def test_there_are_prompts_for_those_who_bring_none() -> None:
    assert len(set(PROMPTS)) == len(PROMPTS) > 3
