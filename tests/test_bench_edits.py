"""Edits of a history, and the benchmark that has them written again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import edit_runs, edits
from bench.edit_runs import Given, by_ours, by_transformers, sampled
from bench.history import HALVES, read_edits
from bench.llm_figures import Run
from tests.support.grammars import json_model, json_tokenizer

LINES = [f"a{i} = {i * i}\n" for i in range(40)]


def commit(repository: Path, subject: str, **files: str) -> None:
    """Commit files, by their names without the suffix."""
    for name, text in files.items():
        (repository / f"{name}.py").write_text(text, encoding="utf-8")
    who = ("-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    for arguments in (("add", "-A"), (*who, "commit", "-qm", subject)):
        subprocess.run(["git", *arguments], cwd=repository, check=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history with twelve edits of two files, and with changes that are none."""
    folder = tmp_path_factory.mktemp("repository")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    few, many, text = "".join(LINES[:20]), "".join(LINES * 6), "".join(LINES)
    commit(folder, "New files are none", few=few, many=many, one=text, two="#\n" + text)
    commit(folder, "Files that are too short or too long", few="#\n#\n" + few, many="#\n#\n" + many)
    for i in range(6):
        one, two = ("".join(LINES[:i] + [f"b = {i}\n"] * 2 + LINES[i:]) for i in (i, i + 7))
        commit(folder, f"Edit {i}: näher", one=one, two=two)
    commit(folder, "A line is too little", one=one + "c = 1\n")
    commit(folder, "Too much is changed", two="".join(f"{line[:-1]}0\n" for line in LINES))
    (folder / "one.py").rename(folder / "three.py")
    commit(folder, "Renamed and deleted files are none")
    return folder


def test_edits_are_those_files_of_some_size_that_a_commit_changed_by_some_lines(repository: Path) -> None:
    found = {half: read_edits(repository, half) for half in HALVES}
    both = [edit for each in found.values() for edit in each]
    assert sorted((edit.instruction, edit.path) for edit in both) == [
        (f"Edit {i}: näher", f"{name}.py") for i in range(6) for name in ("one", "two")
    ]
    assert not {edit.commit for edit in found["dev"]} & {edit.commit for edit in found["held-out"]}
    last = next(edit for edit in both if (edit.instruction[:6], edit.path) == ("Edit 5", "one.py"))
    assert last.after == "".join(LINES[:5] + ["b = 5\n"] * 2 + LINES[5:])
    assert last.before == "".join(LINES[:4] + ["b = 4\n"] * 2 + LINES[4:])
    assert read_edits(repository, "dev") == found["dev"] == sorted(found["dev"])
    assert not [edit for half in HALVES for edit in read_edits(repository, half, "HEAD~9")]


def test_a_folder_without_a_history_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"no history at {tmp_path}: "):
        read_edits(tmp_path, "dev")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has room for a file twice."""
    path = tmp_path_factory.mktemp("bytes")
    json_model().save_pretrained(path)
    json_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def given(folder: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of a small run; the process of the tests may run on any core afterwards."""
    monkeypatch.setattr(edits, "stay_on_cores", lambda core: None)
    # Commits have other hashes every time.
    half = max(HALVES, key=lambda half: len(read_edits(repository, half)))
    return ["--model", str(folder), "--repository", str(repository), "--half", half, "--limit", "2"]


def test_a_replay_tells_what_it_is_worth_to_have_the_original_or_to_expect_it(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "edits.json"
    edits.main([*given, "--replay", "--nodes", "8,32", "-o", str(output)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads(output.read_text(encoding="utf-8"))
    assert result["edits"] == 2 and list(result["nodes"]) == ["8", "32"]
    for nodes, methods in result["nodes"].items():
        rates = {name: each["tokens_per_step"] for name, each in methods.items()}
        assert {"prompt lookup", "longest suffix", "first occurrence", *edits.WAYS} == set(rates)
        assert all(1 <= rate <= int(nodes) + 1 for rate in rates.values())
        assert min(rates["prompt"], rates["prediction"], rates["both"]) > 1.2 * rates["none"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_writes_the_edited_files_in_every_way(
    dtype: str, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    edits.main([*given, "--dtype", dtype, "--useless-tokens", "32"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["edits"] == 2 and result["dtype"] == dtype
    ways = result["ways"]
    assert list(ways) == ["greedy", "greedy, file in the prompt", "no drafts", *edits.WAYS]
    assert [ways[name]["tokens_per_pass"] for name in list(ways)[:3]] == [1.0, 1.0, 1.0]
    assert ways["prediction"]["tokens_per_pass"] >= 1  # measured times decide how much is drafted
    assert ways["greedy"]["speedup"]["cpu"] == ways["greedy, file in the prompt"]["end_to_end"]["cpu"] == 1.0
    assert ways["both"]["over"] == "greedy, file in the prompt" and ways["prediction"]["over"] == "greedy"
    assert ways["useless"]["of_none, decode"] > 0


def test_a_token_that_is_not_dictated_ends_a_run_without_a_figure(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(edit_runs, "_RAISE", 0.0)
    with pytest.raises(SystemExit, match=r"not lossless: .* does not write the given text"):
        edits.main([*given, "--useless-tokens", "8"])
    assert "speedup" not in capsys.readouterr().out


def test_transformers_and_ours_are_dictated_the_same_text() -> None:
    model, rng = json_model(), np.random.default_rng(0)
    prompt, text = (rng.integers(3, 200, size).astype(np.int32) for size in (9, 40))
    plain = by_transformers(model)(Given(prompt, text))
    ours = by_ours(model, draft="fixed", min_probability=0.0)(Given(prompt, text, [text]))
    assert plain.tokens == ours.tokens == text.tolist()
    assert plain.passes == 39 and ours.passes < 10


def test_a_token_of_a_sampled_output_takes_the_mean_time_of_both_ends() -> None:
    """Of a way that takes as many seconds for a token as there are tokens before it."""
    prompts: list[int] = []

    def way(given: Given) -> Run:
        begin, new = len(given.prompt), len(given.output)
        prompts.append(begin)
        prefill, total = ({"cpu": float(s), "wall": 0.0} for s in (begin, sum(range(begin, begin + new))))
        return Run(given.output.tolist(), 1, new - 1, prefill, total)

    text = np.arange(100, dtype=np.int32)
    whole = sampled(way, 200)(Given(text[:10], text))
    part: Any = sampled(way, 20)(Given(text[:10], text))
    assert prompts == [10, 10, 100]
    assert part.tokens == whole.tokens == text.tolist() and part.passes == whole.passes == 99
    assert part.prefill == whole.prefill and part.first == 1
    assert part.decode("cpu") == pytest.approx(whole.decode("cpu"), rel=0.01)
