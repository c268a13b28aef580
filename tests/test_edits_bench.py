"""`bench.edits` and `bench.grammar`: which commits are edits, and their figures with a tiny model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from bench import edits, grammar
from bench.history import HALVES, read_edits


@pytest.fixture(autouse=True)
def no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the tests may run on any core afterwards."""
    monkeypatch.setattr(edits, "stay_on_cores", lambda core: torch.set_num_threads(1))


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commits that change one line of files of 40 lines, and others that are no edits."""
    folder = tmp_path_factory.mktemp("history")

    def git(*arguments: str) -> None:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.com")
        subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)

    lines = [f"x{i} = {i} * {i}" for i in range(40)]
    git("init", "-q")
    for step in range(9):
        lines[step * 4] = f"changed = {step}"
        for name in ("a.py", "b.py"):
            (folder / name).write_text("\n".join([f"# {name}", *lines]) + "\n")
        (folder / "short.py").write_text(f"x = {step}\n")
        (folder / "notes.txt").write_text("\n".join([*lines, str(step)]))
        git("add", "-A")
        git("commit", "-qm", f"Change {step}")
    return folder


def test_edits_are_small_changes_of_python_files_and_every_commit_is_in_one_half(history: Path) -> None:
    halves = [read_edits(history, half) for half in HALVES]
    assert len(halves[0]) + len(halves[1]) == 2 * 8  # the first commit changed no file that was there
    assert not {each.commit for each in halves[0]} & {each.commit for each in halves[1]}
    for each in (*halves[0], *halves[1]):
        assert each.path in ("a.py", "b.py")
        step = int(each.instruction.removeprefix("Change "))
        assert f"changed = {step}\n" not in each.before
        assert f"changed = {step}\n" in each.after


def run(command: object, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    command.main([*arguments])  # type: ignore[attr-defined]
    found: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_a_replay_of_edits_tells_what_a_prediction_gives(
    history: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = max(HALVES, key=lambda each: len(read_edits(history, each)))
    options = ("--model", str(model_folder), "--repository", str(history), "--half", half)
    report = run(edits, capsys, "--replay", *options, "--nodes", "16", "--limit", "2")
    found = {name: each["tokens_per_step"] for name, each in report["nodes"]["16"].items()}  # type: ignore[index]
    assert found["prediction"] > 2 * found["none"]


def test_wrong_use_of_the_benchmarks_is_told_in_a_line(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(SystemExit, match="no history at"):
        edits.main(["--replay", "--repository", str(tmp_path), "--model", str(model_folder)])
    assert all(len(prompts) == 8 for _, prompts in grammar.SCHEMAS.values())
