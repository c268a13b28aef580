"""Calibration: what a sweep measures, what the file keeps, and what becomes of a file that is broken."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import lookahead
from lookahead.backend import calibration
from lookahead.backend.calibration import calibrate_quickly
from lookahead.backend.cpu.cpu_backend import CpuBackend
from lookahead.backend.step_costs import cost_path
from lookahead.cli.app import app
from lookahead.drafting.cost_model import StepCost
from lookahead.model.model_state import LearnedState, use_learned
from tests.support.families import FAMILIES, build


def read_costs(model, cost: StepCost, folder: Path) -> bool:
    """Load a file into these costs."""
    state = LearnedState()
    state.cost = cost
    with use_learned(model, state):
        return lookahead.load_costs(model, folder)


def write_costs(model, cost: StepCost, folder: Path) -> Path:
    """Save these costs."""
    state = LearnedState()
    state.cost = cost
    with use_learned(model, state):
        return lookahead.save_costs(model, folder)


def learned() -> StepCost:
    cost = StepCost()
    for _ in range(20):
        for nodes in (1, 8, 32):
            cost.observe(nodes, 0.004 + 0.0003 * nodes, context=300)
            cost.observe(nodes, 0.008 + 0.0020 * nodes, rows=4, context=300)
    return cost


def curves(cost: StepCost) -> np.ndarray:
    return np.concatenate([cost.curve(rows, 40, context) for rows in (1, 4) for context in (300, 3000)])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tiny_llama, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


# The sweep


@pytest.fixture
def reads(monkeypatch):
    """A clock that goes on by a second whenever it is read."""
    reads = itertools.count(0.0)
    monkeypatch.setattr(calibration, "perf_counter", reads.__next__)
    return reads


def test_a_quick_sweep_teaches_the_costs_of_few_sizes(tiny_llama, reads, monkeypatch) -> None:
    cost = StepCost()
    monkeypatch.setattr(calibration, "LONGEST_QUICK_S", 1e9)
    assert calibrate_quickly(tiny_llama, cost)
    np.testing.assert_allclose(cost.curve(1, 64, context=300)[[1, 2, 4, 8, 16, 32]], 1.0, rtol=0.05)


def test_a_model_too_slow_for_a_quick_sweep_is_not_measured_after_two_steps(tiny_llama, reads, monkeypatch) -> None:
    cost = StepCost()
    monkeypatch.setattr(calibration, "LONGEST_QUICK_S", 20.0)
    assert not calibrate_quickly(tiny_llama, cost)
    assert next(reads) == 4, "a step takes a second by this clock, which is read before and after it"
    assert not cost.to_dict()


def test_a_model_too_slow_for_a_quick_sweep_reads_no_long_prompt_to_find_out(tiny_llama, reads, monkeypatch) -> None:
    widths: dict[float, int] = {}
    own: Any = CpuBackend._forward
    for allowed in (20.0, 1e9):
        passes: list[int] = []

        def forward(self: Any, tree_pass: Any, policy: Any, to: list[int] = passes) -> Any:
            to.append(tree_pass.tokens.shape[1])
            return own(self, tree_pass, policy)

        monkeypatch.setattr(calibration, "LONGEST_QUICK_S", allowed)
        with monkeypatch.context() as patch:
            patch.setattr(CpuBackend, "_forward", forward)
            calibrate_quickly(tiny_llama, StepCost())
        widths[allowed] = max(passes)
    assert widths[20.0] < widths[1e9]


def test_a_model_of_slow_steps_is_measured_in_two_rounds(tiny_llama, reads) -> None:
    """A step takes a second by this clock: each size is taken twice, and nothing more often."""
    assert calibrate_quickly(tiny_llama, StepCost())
    assert next(reads) == 2 * (2 + 2 * 7)


def test_a_sweep_on_a_busy_machine_is_not_believed(tiny_llama, monkeypatch) -> None:
    """By this clock two nodes take five times as long as one."""
    now, widths = [0.0], []
    handle = tiny_llama.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )

    def clock() -> float:
        now[0] += 0.5 if widths and widths[-1] > 1 else 0.1
        return now[0]

    cost = StepCost()
    monkeypatch.setattr(calibration, "perf_counter", clock)
    assert not calibrate_quickly(tiny_llama, cost)
    assert not cost.to_dict()
    handle.remove()


def test_a_model_that_cannot_verify_drafts_is_not_measured() -> None:
    assert not calibrate_quickly(build(FAMILIES["RecurrentGemma"]), StepCost())


def test_measured_costs_are_refined_and_other_sizes_are_tried_again_later() -> None:
    cost = StepCost()
    cost.calibrate([1, 8], [0.010, 0.030], rows=1, context=100)
    for _ in range(20):
        cost.observe(1, 0.010, context=100)
    assert cost.curve(1, 8, 100)[8] == pytest.approx(0.030, rel=0.03), "not forgotten"
    for _ in range(3000):
        cost.observe(1, 0.010, context=100)
    assert cost.curve(1, 8, 100)[8] < 0.015, "but in the long run"
    for _ in range(60):
        cost.observe(8, 0.020, context=100)
    assert cost.curve(1, 8, 100)[8] == pytest.approx(0.020, rel=0.05), "refined"


# Buckets


def test_a_long_context_has_costs_of_its_own_and_begins_as_the_nearest_that_is_known() -> None:
    cost = StepCost()
    for _ in range(40):
        cost.observe(1, 0.010, context=400)
        cost.observe(8, 0.020, context=400)
    assert cost.curve(1, 8, 10_000)[8] == pytest.approx(0.020, rel=0.02)
    assert not cost.knows(1, 10_000)
    for _ in range(40):
        cost.observe(1, 0.050, context=10_000)
        cost.observe(8, 0.060, context=10_000)
    assert cost.curve(1, 8, 10_000)[8] == pytest.approx(0.060, rel=0.05)
    assert cost.curve(1, 8, 400)[8] == pytest.approx(0.020, rel=0.05)


# The file


def test_costs_come_back_from_their_file_as_they_were(tiny_llama, tmp_path) -> None:
    path = write_costs(tiny_llama, learned(), tmp_path / "deep" / "costs")
    assert path == cost_path(tiny_llama, tmp_path / "deep" / "costs")
    assert list(path.parent.glob("[!.]*")) == [path], "nothing beside it but its lock"
    cost = StepCost()
    assert read_costs(tiny_llama, cost, path.parent)
    np.testing.assert_allclose(curves(cost), curves(learned()))


def test_without_a_file_nothing_is_known_and_nothing_is_said(tiny_llama, tmp_path) -> None:
    assert not read_costs(tiny_llama, StepCost(), tmp_path)


def test_a_file_of_an_older_release_is_measured_anew_without_a_word(tiny_llama, tmp_path) -> None:
    cost_path(tiny_llama, tmp_path).write_text(_content(tiny_llama, tmp_path, version=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not read_costs(tiny_llama, StepCost(), tmp_path)


def _content(tiny_llama, tmp_path, **changes) -> str:
    content = json.loads(write_costs(tiny_llama, learned(), tmp_path).read_text())
    return json.dumps({**content, **changes})


@pytest.mark.parametrize(
    "change",
    [
        {"version": 99},
        {"for": {}},
        {"costs": None},
        {"costs": [{"bucket": [0, 0], "seconds": [1.0]}]},
        {"costs": [{"bucket": [0, 0], "seconds": [-1.0] * 21}]},
        {"costs": [{"bucket": [0, 0], "seconds": [float("nan")] * 21}]},
        {"costs": [{"bucket": [float("inf"), 0], "seconds": [1.0] * 21}]},
        {"costs": [{"bucket": [0, 0], "seconds": [float("inf")] * 21}]},
        pytest.param({"costs": [{"bucket": [0, 0], "seconds": [10**400] * 21}]}, id="beyond all floats"),
        pytest.param("[" * 100_000, id="nested too deeply"),
        "not json",
        "[]",
        "\x00",
    ],
    ids=str,
)
def test_a_broken_file_is_ignored_with_a_warning_and_replaced_by_the_next(tiny_llama, tmp_path, change) -> None:
    content = _content(tiny_llama, tmp_path, **change) if isinstance(change, dict) else change
    path = cost_path(tiny_llama, tmp_path)
    path.write_text(content)
    cost = StepCost()
    with pytest.warns(UserWarning, match="cannot be used, and are measured again"):
        assert not read_costs(tiny_llama, cost, tmp_path)
    np.testing.assert_allclose(curves(cost), curves(StepCost()))
    write_costs(tiny_llama, learned(), tmp_path)
    assert read_costs(tiny_llama, cost, tmp_path)


def test_another_dtype_has_a_file_of_its_own(tiny_llama, tmp_path) -> None:
    import copy

    assert cost_path(copy.deepcopy(tiny_llama).bfloat16(), tmp_path) != cost_path(tiny_llama, tmp_path)


def test_the_library_writes_no_file_unasked(tiny_llama, tiny_tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lookahead.generate(tiny_llama, tiny_tokenizer, "abcabc", max_new_tokens=8)
    assert not cost_path(tiny_llama).parent.exists()


def test_saved_costs_are_loaded_into_the_model_they_were_saved_for(tiny_llama, tiny_tokenizer, tmp_path) -> None:
    assert not lookahead.load_costs(tiny_llama, tmp_path)
    lookahead.generate(tiny_llama, tiny_tokenizer, "abcabc", max_new_tokens=8)
    lookahead.save_costs(tiny_llama, tmp_path)
    assert lookahead.load_costs(tiny_llama, str(tmp_path))


# The first use


def test_costs_are_measured_and_saved_without_a_file_and_loaded_from_one(tiny_llama, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(calibration, "timed", lambda work, *_: work() or 1.0)  # a busy machine would not be believed
    assert lookahead.prepare_costs(tiny_llama, tmp_path)
    path = cost_path(tiny_llama, tmp_path)
    written = path.read_bytes()
    assert lookahead.prepare_costs(tiny_llama, tmp_path)
    assert path.read_bytes() == written, "measured once"


def test_a_folder_that_takes_no_file_is_a_warning_and_decoding_goes_on(model_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(calibration, "timed", lambda work, *_: work() or 1.0)  # a busy machine would not be believed
    (tmp_path / "lookahead").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ["generate", "3 4 5", "--model", str(model_folder), "--max-new-tokens", "3"]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert "step costs are not kept for the next time" in " ".join(outcome.output.split())


def test_the_command_that_measured_more_is_refused_by_name() -> None:
    result = CliRunner().invoke(app, ["calibrate", "--context", "16"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: calibrate was removed: ")
