"""The page of results is what its files say, and says so where there is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import tables
from bench.targets import GPU_DECODE, KERNEL


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """A folder with one result, of a command that has a page of its own, and one that nothing is known of."""
    results = tmp_path / "results"
    results.mkdir()
    (results / "fuzz.json").write_text('{"runs": 12345, "failures": [7, 9], "torch": "2.99"}', encoding="utf-8")
    (results / "new.json").write_text('{"device": "abacus", "beads": 100, "each": {"left": 1}}', encoding="utf-8")
    return tmp_path


def test_the_page_in_the_repository_is_what_its_files_give() -> None:
    written = (tables.BENCH / "RESULTS.md").read_text(encoding="utf-8")
    assert written == tables.page(tables.BENCH / "results"), "run python -m bench.tables"


def test_what_no_file_holds_was_not_measured_yet(bench: Path) -> None:
    page = tables.page(bench / "results")
    for goal in GPU_DECODE + KERNEL:
        assert f"| {goal.what} | {goal.target} | not measured yet |" in page


def test_a_result_is_shown_with_its_command_and_its_versions(bench: Path) -> None:
    page = tables.page(bench / "results")
    assert "`python -m bench.fuzz --runs 10000 --output bench/results/fuzz.json`" in page
    assert "- model: not recorded; dtype: not recorded; device: not recorded; versions: torch 2.99" in page
    assert "| runs | 12,345 |" in page
    assert "| failures | 7, 9 |" in page


def test_a_result_that_nothing_is_known_of_is_shown_all_the_same(bench: Path) -> None:
    page = tables.page(bench / "results")
    assert "## new" in page and "device: abacus" in page and "| beads | 100 |" in page
    assert "| each/left | 1 |" in page


def test_measured_figures_of_a_gpu_are_shown_where_a_result_has_them(bench: Path) -> None:
    result = {"shape": "llama3-8b", "dtype": "bf16", "device": "a GPU", "figures": {"host_us": 99.5}}
    (bench / "results" / "gpu_decode.json").write_text(json.dumps(result), encoding="utf-8")
    page = tables.page(bench / "results")
    assert "- model: llama3-8b, random weights; dtype: bf16; device: a GPU" in page
    assert "| host time a plain step outside the graph, us | at most 150 | 99.5 |" in page
    assert "`generate`, tokens/s | at least 3 | not measured yet |" in page


def test_without_matplotlib_the_command_says_so_and_writes_the_page(
    bench: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "bench.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert tables.main(["--folder", str(bench)]) == 0
    assert "matplotlib is missing" in capsys.readouterr().out
    assert (bench / "RESULTS.md").read_text(encoding="utf-8") == tables.page(bench / "results")
    assert not (bench / tables.PLOT).exists()


def test_the_same_files_give_the_same_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench.plots import draw_replay

    for name in ("one.svg", "two.svg"):
        draw_replay(tables.BENCH / "results", tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def llm_result(dtype: str, **methods: float) -> dict[str, object]:
    """What `bench.llm` writes, as far as the README and the plot read it."""
    figures = {"speedup": 1.5, "without_loops": 1.2, "end_to_end": 1.3, "lowest": 0.9, "tokens_per_pass": 2.0}
    each = {
        name: {"speedup": {"cpu": speedup}, "ms_per_token": {"cpu": 60 / speedup}, "by_category": {
            "qa": {"speedup": {"cpu": speedup}}
        }}
        for name, speedup in {"greedy": 1.0, "prompt lookup 10": 1.1, "lookahead": 1.5, **methods}.items()
    }  # fmt: skip
    return {
        "model": "a model", "device": "an abacus", "threads": 1, "max_new_tokens": 128, "versions": {"torch": "2.99"},
        "dtype": dtype, "prompts": 21, "categories": {"qa": 21}, "best_prompt_lookup": "prompt lookup 10",
        "prompt_lookup": {**figures, "identical": 20}, "lookahead": {**figures, "identical": 21}, "methods": each,
    }  # fmt: skip


def test_the_readme_shows_the_files_of_the_real_model() -> None:
    readme = (tables.BENCH.parent / "README.md").read_text(encoding="utf-8")
    results = tables.llm_results(tables.BENCH / "results")
    assert readme == tables.with_table(readme, results), "run python -m bench.tables"


def test_the_table_of_the_readme_has_a_column_for_every_dtype_and_a_line_for_every_peer() -> None:
    table = tables.llm_table([llm_result("fp32"), llm_result("bf16", **{"vLLM plain": 1.7})])
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert lines[0] == ["fp32", "bf16"]
    assert ["**lookahead**", "**1.50x**", "**1.50x**"] in lines
    assert ["outputs identical to greedy: prompt lookup / lookahead", "20 / 21 of 21", "20 / 21 of 21"] in lines
    assert "| vLLM plain |  | 1.70x |" in table
    assert lines[-1] == ["a model, 21 prompts, at most 128 new tokens each; an abacus, 1 thread; torch 2.99."]


def test_a_table_takes_the_place_of_the_one_before_it_and_of_nothing_else() -> None:
    page = f"before\n{tables.BEGIN}old{tables.END}after\n"
    once = tables.with_table(page, [llm_result("fp32")])
    assert (
        once.startswith(f"before\n{tables.BEGIN}\n![Decode")
        and "| | fp32 |\n" in once
        and once.endswith(f"{tables.END}after\n")
    )
    assert "old" not in once and tables.with_table(once, [llm_result("fp32")]) == once


def test_speedups_of_a_real_model_are_plotted_by_category(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench.plots import draw_llm

    draw_llm([llm_result("fp32"), llm_result("bf16", **{"vLLM plain": 1.7})], tmp_path / "llm.svg")
    drawn = (tmp_path / "llm.svg").read_text(encoding="utf-8")
    assert all(f">{word}<" in drawn for word in ("qa", "lookahead", "vLLM plain", "1.70", "bf16: times greedy"))


def test_a_picture_shows_what_a_command_prints_and_an_error_where_it_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools import terminal_picture

    says = "print('\\x1b[1mbold\\x1b[0m'); [print('line', i) for i in range(9)]"
    assert terminal_picture.main([str(tmp_path / "a.svg"), "--lines", "3", "--", sys.executable, "-c", says]) == 0
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8").replace("&#160;", " ")
    assert ">bold<" in drawn and ">line 1<" in drawn and "line 2" not in drawn
    assert terminal_picture.main([str(tmp_path / "b.svg"), "--", sys.executable, "-c", "raise SystemExit('no')"]) == 1
    assert "no" in capsys.readouterr().err and not (tmp_path / "b.svg").exists()
