"""The benchmark of the kernels: without a GPU it says so, and references show on a CPU that all of it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import kernel, tables
from bench.command import command_line
from bench.kernel import GOALS, print_goals

TINY = ["--device", "cpu", "--rows", "1", "--contexts", "150", "--widths", "5", "--heads", "4", "--kv-heads", "2"]
TINY += ["--dim", "16", "--layers", "2", "--replays", "2"]
METHODS = ["kernel", "sdpa"]


def test_references_on_a_cpu_take_the_benchmark_from_its_check_to_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    output = tmp_path / "kernel.json"
    kernel.main([*TINY, "--output", str(output)])
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert result == json.loads(output.read_text(encoding="utf-8"))
    assert [each["method"] for each in result["results"]] == METHODS
    assert all(each["us_per_layer"] > 0 and each["error"] < 1e-2 for each in result["results"])
    assert result["figures"]["compaction_us"] > 0
    assert "target:" not in printed, "targets are of a GPU"
    shown = "\n".join(tables.section("kernel", result))
    assert shown.startswith("## kernel\n\n`python -m ") and "us_per_layer" in shown
    assert all(f"| {goal.what} | {goal.target} |" in shown for goal in GOALS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_that_it_needs_one() -> None:
    with pytest.raises(SystemExit, match=r"^bench\.kernel needs a CUDA GPU, and torch finds none$"):
        kernel.main([])


def test_a_method_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(*arguments: Any) -> Any:
        return torch.zeros_like(masked_attention(*arguments))

    masked_attention = kernel.masked_attention
    monkeypatch.setattr(kernel, "masked_attention", deaf)
    with pytest.raises(SystemExit, match=r"sdpa differs from float64 by .*: not timed"):
        kernel.main(TINY)


def timed(method: str, context: int, width: int, us: float, share: float = 0.0, rows: int = 1) -> dict[str, Any]:
    place = {"method": method, "rows": rows, "context": context, "width": width}
    return place | {"us_per_layer": us, "of_copy": share, "tflops": 1000 / us}


def test_figures_are_the_worst_of_what_they_speak_of() -> None:
    results = [
        *(timed("kernel", 32768, width, 10.0 + width, share) for width, share in ((1, 0.9), (16, 0.85), (64, 0.5))),
        timed("kernel", 8192, 16, 4.0, 0.6), timed("kernel", 8192, 16, 20.0, 0.4, rows=8),
        timed("kernel", 8192, 128, 5.0, 0.1), timed("kernel", 1024, 1, 1.0, 0.05),
        timed("sdpa", 32768, 1, 110.0), timed("sdpa", 32768, 16, 208.0), timed("sdpa", 32768, 64, 999.0),
        timed("sdpa", 8192, 16, 1.0),
    ]  # fmt: skip
    assert kernel.figures_of(results, groups=4, compaction=3.21) == {
        "copy_share_32k": 0.85, "copy_share_8k": 0.6, "over_sdpa_32k": 8.0, "tflops_128": 200.0, "compaction_us": 3.21,
    }  # fmt: skip
    assert set(kernel.figures_of(results, groups=4, compaction=1.0)) == {goal.key for goal in GOALS}


def test_the_page_names_the_commit_of_a_study_that_is_no_longer_there(tmp_path: Path) -> None:
    study = {"command": "python -m bench.gone --nodes 4", "commit": "abc1234", "model": "m", "tokens_per_pass": 2.5}
    (tmp_path / "gone.json").write_text(json.dumps(study), encoding="utf-8")
    shown = tables.page(tmp_path)
    assert "Made by `bench.gone` of commit abc1234: `python -m bench.gone --nodes 4`" in shown
    assert "| tokens_per_pass | 2.5 |" in shown
    assert shown.count("not measured yet") == len(GOALS)


def test_results_name_the_command_that_made_them_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--model", "/some/where/tiny", "--peer", "vllm:/a/bin/python", "--methods", "no drafts,lookahead"]
    monkeypatch.setattr(sys, "argv", ["/the/repository/bench/llm.py", *arguments, "-o", "results/llm.json"])
    told = "python -m bench.llm --model tiny --peer vllm:python --methods 'no drafts,lookahead' -o llm.json"
    assert command_line() == told


def test_figures_that_fall_short_of_their_goals_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {goal.key: goal.bound for goal in GOALS} | {"compaction_us": 7.5}
    print_goals(figures, has_targets=True)
    *others, compaction = capsys.readouterr().out.splitlines()
    assert compaction == "compaction of 5 tokens in all layers, us: 7.500  FALLS SHORT  (target: at most 5)"
    assert len(others) == len(GOALS) - 1 and not [line for line in others if "FALLS SHORT" in line]
