"""The benchmarks of a real model, run on a tiny one."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from bench import llm, llm_peers
from bench.llm_figures import Prompt, Run, check_lossless, differences, figures_of

METHODS = "prompt lookup 3,lookahead,no drafts"
# Before, transformers looked nothing up for a model without an end token, as the tests' is.
looks_up = pytest.mark.skipif(Version(transformers.__version__) < Version("5.13"), reason="needs transformers 5.13")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Prompts of four categories, two of which are chat, and stories."""
    folder = tmp_path_factory.mktemp("prompts")
    categories = ("writing", "coding", "qa", "rag")
    lines = [{"category": each, "turns": [f"{each} {i}. " * 3, "no"]} for each in categories for i in range(3)]
    stories = [{"document": f"Story {i}. " * 20} for i in range(3)]
    for name, some in (("prompts", lines), ("stories", stories)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)), encoding="utf-8")
    return ["--prompts", str(folder / "prompts.jsonl"), "--stories", str(folder / "stories.jsonl"), "--longest", "50"]


@pytest.fixture(autouse=True)
def no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the tests may run on any core afterwards."""
    monkeypatch.setattr(llm, "stay_on_cores", lambda core, threads: torch.set_num_threads(1))


@pytest.fixture
def given(files: list[str], model_folder: Path) -> list[str]:
    """The command line of a small run."""
    sizes = ["--per-category", "1", "--warmup", "1", "--max-new-tokens", "12", "--cold", "0"]
    return ["--model", str(model_folder), *files, *sizes, "--methods", METHODS]


@looks_up
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_method_is_measured_on_every_category(
    dtype: str, given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "llm.json"
    llm.main([*given, "--dtype", dtype, "--peer", f"stub:{sys.executable}", "-o", str(output)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads(output.read_text(encoding="utf-8"))
    assert result["categories"] == {"chat": 1, "qa": 1, "rag": 1, "stories": 1} and result["prompts"] == 4
    assert list(result["methods"]) == ["greedy", *METHODS.split(","), "stub"]
    for each in result["methods"].values():
        assert list(each["by_category"]) == list(result["categories"])
        assert each["ms_per_token"]["wall"] >= 0 and each["tokens_per_pass"] >= 1
        assert each["identical"] + len(each["parted"]) == 4
    assert result["methods"]["greedy"]["tokens_per_pass"] == 1 == result["methods"]["no drafts"]["tokens_per_pass"]
    if dtype == "fp32":
        assert result["lookahead"]["identical"] == 4


def test_sampled_tokens_are_those_of_the_same_seed(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    llm.main([*given, "--temperature", "0.7", "--methods", "lookahead"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["temperature"] == 0.7 and result["lookahead"]["identical"] == 4


@looks_up
def test_a_token_that_differs_ends_an_fp32_run_without_a_figure(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(blocks: Any) -> dict[str, Any]:
        run = llm_peers.timed(blocks)
        return run | {"tokens": [*run["tokens"][:5], run["tokens"][5] + 1, *run["tokens"][6:]]}

    monkeypatch.setattr(llm, "timed", wrong)
    with pytest.raises(SystemExit, match=r"not lossless: 'lookahead' differs .* 'position': 5"):
        llm.main(given)
    assert "x greedy" not in capsys.readouterr().out


@looks_up
def test_a_fresh_process_decodes_its_prompt_alone(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(command: list[str], *, input: str, **_: Any) -> Any:
        monkeypatch.setattr("sys.stdin", __import__("io").StringIO(input))
        llm.main(command[3:])
        return type("Done", (), {"returncode": 0, "stdout": capsys.readouterr().out, "stderr": ""})

    monkeypatch.setattr(llm.subprocess, "run", here)
    llm.main([*given, "--cold", "1"])
    cold = json.loads(capsys.readouterr().out.splitlines()[-1])["cold"]
    assert cold["prompts"] == 4 and cold["cold"]["tokens_per_pass"] >= 1 and cold["median_call_s"] > 0


def run_of(tokens: list[int], seconds: float, passes: int, gaps: list[float] | None = None) -> Run:
    return Run(
        tokens, 1, passes, dict.fromkeys(("cpu", "wall"), 0.0), dict.fromkeys(("cpu", "wall"), seconds), gaps or []
    )


def test_figures_are_those_of_the_runs_and_leave_loops_out_where_they_say_so() -> None:
    prompts = [Prompt(category, torch.zeros(1, 3, dtype=torch.long)) for category in ("qa", "qa", "rag")]
    straight, looping = list(range(41)), [1, 2] * 20 + [3]
    greedy = [run_of(straight, 40.0, 40), run_of(looping, 40.0, 40), run_of(straight, 80.0, 40)]
    ours = [run_of(straight, 20.0, 20), run_of(looping, 4.0, 4), run_of(straight, 100.0, 40)]
    figures = figures_of({"greedy": greedy, "lookahead": ours}, prompts)["lookahead"]
    assert figures["speedup"]["cpu"] == pytest.approx(160 / 124, abs=1e-3)
    assert figures["without_loops"]["speedup"]["cpu"] == 1.0 and figures["lowest"] == 0.8
    assert figures["by_category"]["qa"]["tokens_per_pass"] == pytest.approx(80 / 24, abs=1e-3)


def test_prompts_are_texts_turns_or_token_ids(tmp_path: Path, model_folder: Path) -> None:
    path, tokenizer = tmp_path / "prompts.jsonl", transformers.AutoTokenizer.from_pretrained(model_folder)
    lines = [{"category": "agent", "prompt": each} for each in ([5, 6, 7], "one two", ["one two", "three"], "spare")]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    parser = argparse.ArgumentParser()
    llm.add_prompt_options(parser, per_category=3)
    prompts, _ = llm.read_prompts(tokenizer, parser.parse_args(["--prompts", str(path), "--field", "prompt"]))
    assert prompts[0].ids.tolist() == [[5, 6, 7]]
    assert prompts[1].ids.tolist() == prompts[2].ids.tolist()


def test_where_an_output_parts_is_told_with_the_gap_of_the_likeliest_logits() -> None:
    greedy = [run_of([1, 2, 3], 1.0, 2, [0.5, 0.25, 0.125])] * 3
    ours = [run_of([1, 2, 3], 1.0, 2), run_of([1, 7, 3], 1.0, 2), run_of([1, 2], 1.0, 1)]
    assert differences(ours, greedy) == [
        {"prompt": 1, "position": 1, "gap": 0.25},
        {"prompt": 2, "position": 2, "gap": 0.125},
    ]


def test_no_speed_is_reported_of_outputs_that_part_where_bits_were_promised() -> None:
    greedy = [run_of([1, 2, 3], 1.0, 2), run_of([1, 2, 3], 1.0, 2)]
    ours = [replace(run_of([1, 2, 3], 1.0, 2), is_bitwise=True), run_of([1, 7, 3], 1.0, 2)]
    check_lossless(ours, greedy, "bf16", "ours")
    with pytest.raises(SystemExit, match=r"not lossless: ours differs .*'prompt': 1"):
        check_lossless(ours, greedy, "fp32", "ours")
    with pytest.raises(SystemExit, match="not lossless"):
        check_lossless([ours[0], replace(ours[1], is_bitwise=True)], greedy, "bf16", "ours")


def test_too_few_prompts_and_unknown_methods_are_refused_by_name(given: list[str]) -> None:
    with pytest.raises(SystemExit, match="--offset 2 and --per-category 1 need 4 prompts of 'qa', there are 3"):
        llm.main([*given, "--offset", "2"])
    with pytest.raises(SystemExit, match="--methods: 'magic' is none of greedy"):
        llm.main([*given, "--methods", "magic"])


@pytest.mark.parametrize(
    ("peer", "complaint"), [("magic:/bin/sh", "'magic' is none of"), ("vllm:/no/python", "no program of vllm at")]
)
def test_a_peer_that_is_not_there_is_refused(peer: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        llm.parse_arguments(["--prompts", "p", "--peer", peer])
    assert complaint in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        llm.main([*given, "--stories", "missing.jsonl"])
    assert "no such file: missing.jsonl" in capsys.readouterr().err


def test_a_peer_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").touch()
    monkeypatch.chdir(tmp_path)
    assert llm_peers.peer_of("vllm:python").program == tmp_path / "python"


def test_a_peer_that_fails_is_left_out_and_the_rest_is_kept(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(llm_peers.KINDS, "stub", ("broken", ""))
    llm.main([*given, "--methods", "lookahead", "--peer", f"stub:{sys.executable}"])
    printed = capsys.readouterr()
    assert list(json.loads(printed.out.splitlines()[-1])["methods"]) == ["greedy", "lookahead", "stub"]
    assert "left out: the peer stub broken failed" in printed.err and "no kind 'broken'" in printed.err


def test_the_passes_of_a_peer_leave_its_prefill_out() -> None:
    run = llm_peers.timed(iter([[1], [2, 3], [4]]))
    assert (run["tokens"], run["first"], run["passes"]) == ([1, 2, 3, 4], 1, 2)
