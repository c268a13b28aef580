"""The benchmark of the kernels: without a GPU it says so, and references show on a CPU that all of it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import kernel, tables
from bench.targets import KERNEL

TINY = ["--device", "cpu", "--rows", "1", "--contexts", "150", "--widths", "5", "--heads", "4", "--kv-heads", "2"]
TINY += ["--dim", "16", "--layers", "2", "--replays", "2"]
METHODS = ["kernel", "sdpa", "flash, merged", "flex", "flex, mask inside"]


def test_references_on_a_cpu_take_the_benchmark_from_its_check_to_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    output = tmp_path / "kernel.json"
    assert kernel.main([*TINY, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert result == json.loads(output.read_text(encoding="utf-8"))
    assert [each["method"] for each in result["results"]] == METHODS
    assert all(each["us_per_layer"] > 0 and each["error"] < 1e-2 for each in result["results"])
    assert result["figures"]["compaction_us"] > 0
    assert "target:" not in printed, "targets are of a GPU"
    shown = "\n".join(tables.section("kernel", result))
    assert "| flex, mask inside |" in shown and "us_per_layer" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_that_it_needs_one() -> None:
    with pytest.raises(SystemExit, match=r"^bench\.kernel needs a CUDA GPU, and torch finds none$"):
        kernel.main([])


def test_a_method_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(sees: Tensor, *arguments: Any, **options: Any) -> Any:
        return attention_sdpa(torch.ones_like(sees), *arguments, **options)

    attention_sdpa = kernel._sdpa
    monkeypatch.setattr(kernel, "_sdpa", deaf)
    with pytest.raises(SystemExit, match=r"sdpa differs from float64 by .*: not timed"):
        kernel.main(TINY)


def test_a_method_of_torch_that_cannot_serve_is_said_to_have_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **options: Any) -> Any:
        raise RuntimeError("no valid triton configs\nout of resource: shared memory")

    monkeypatch.setattr(kernel, "_flex", broken)
    assert kernel.main(TINY) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    failures = [each.get("failed") for each in result["results"]]
    assert failures == [*[None] * 3, *["RuntimeError: no valid triton configs"] * 2]


def test_a_method_that_cannot_be_recorded_is_timed_by_hand_and_the_result_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = kernel.median_us

    def median_us(run: Any, device: torch.device, replays: int, *, is_recorded: bool = True) -> float:
        if is_recorded and "flex" in str(run.__defaults__):
            raise RuntimeError("capture failed")
        return timed(run, device, replays, is_recorded=is_recorded)

    monkeypatch.setattr(kernel, "median_us", median_us)
    assert kernel.main(TINY) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [each.get("by_hand", False) for each in results] == [*[False] * 3, True, True]


def timed(method: str, context: int, width: int, us: float, share: float = 0.0, rows: int = 1) -> dict[str, Any]:
    place = {"method": method, "rows": rows, "context": context, "width": width}
    return place | {"us_per_layer": us, "of_copy": share, "tflops": 1000 / us}


def test_figures_are_the_worst_of_what_they_speak_of() -> None:
    results = [
        *(timed("kernel", 32768, width, 10.0 + width, share) for width, share in ((1, 0.9), (16, 0.85), (64, 0.5))),
        timed("kernel", 8192, 16, 4.0, 0.6), timed("kernel", 8192, 16, 20.0, 0.4, rows=8),
        timed("kernel", 8192, 128, 5.0, 0.1), timed("kernel", 1024, 1, 1.0, 0.05),
        timed("sdpa", 32768, 1, 110.0), timed("sdpa", 32768, 16, 208.0), timed("sdpa", 8192, 16, 1.0),
        timed("flex", 32768, 1, 12.1), timed("flex", 8192, 16, 3.8), timed("flex", 1024, 1, 0.1),
        {"method": "flex, mask inside", "rows": 1, "context": 8192, "width": 16, "failed": "x"},
        timed("flex, mask inside", 32768, 1, 22.0),
    ]  # fmt: skip
    assert kernel.figures_of(results, groups=4, compaction=3.21) == {
        "copy_share_32k": 0.85, "copy_share_8k": 0.6, "over_sdpa_32k": 8.0, "over_flex": 0.95,
        "over_flex_inside": 2.0, "tflops_128": 200.0, "compaction_us": 3.21,
    }  # fmt: skip
    assert set(kernel.figures_of(results, groups=4, compaction=1.0)) == {goal.key for goal in KERNEL}
