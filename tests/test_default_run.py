"""What the default run tries: core tests, a selection of every product, and the extended tests of a changed room."""

from __future__ import annotations

import os
import subprocess
from fnmatch import fnmatch
from itertools import combinations, product

import pytest

from tests.support.default_run import covering
from tests.support.extended import EXTENDED, ROOT, SHARED, changed_files, touched_tests

TESTS = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/test_*.py"))]
SIZES = [(5,), (4, 2), (3, 3, 4), (2, 6, 1, 3)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_value_and_every_pair_of_values_is_tried_and_no_more_than_needed(sizes):
    cases = [tuple(enumerate(values)) for values in product(*map(range, sizes))]
    cases = [tuple((str(name), value) for name, value in case) for case in cases]
    for strength in range(1, min(2, len(sizes)) + 1):
        chosen = covering(cases, strength)
        tried = {part for number in chosen for part in combinations(cases[number], strength)}
        assert tried == {part for case in cases for part in combinations(case, strength)}
        largest = sorted(sizes)[-strength:]
        assert len(chosen) <= 2 * largest[0] * (largest[-1] if strength == 2 else 1)


def test_values_are_told_apart_and_not_counted():
    """Two processes collect the same tests though their values have other addresses."""
    cases = [tuple(zip("abc", values, strict=True)) for values in product(range(3), range(4), range(2))]
    moved = [tuple((name, 1000 - 7 * value) for name, value in case) for case in cases]
    assert covering(cases, 2) == covering(moved, 2)
    assert len(covering(cases, 1)) == 4


def test_every_test_file_is_core_or_extended_and_every_pattern_matches_a_file():
    groups = [[test for test in TESTS if fnmatch(test, pattern)] for pattern in EXTENDED]
    assert all(groups), "a pattern matches no file"
    assert len(set().union(*groups)) == sum(map(len, groups)), "a file has two patterns"
    tops = [top for top in ROOT.iterdir() if top.name in {".ci", "Makefile"} or not top.name.startswith(".")]
    files = [str(path.relative_to(ROOT)) for top in tops for path in (top, *top.rglob("*")) if path.is_file()]
    rooms = {room for rooms in (*EXTENDED.values(), SHARED) for room in rooms}
    assert not [room for room in rooms if not any(fnmatch(path, room) for path in files)], "a room is gone"


def test_a_run_of_the_folder_leaves_out_the_extended_tests_alone(request):
    left_out = request.session.gethookproxy(ROOT / "tests").pytest_ignore_collect
    ignored = [test for test in TESTS if left_out(collection_path=ROOT / test, config=request.config)]
    assert ignored == touched_tests(None) and 0 < len(ignored) < len(TESTS) / 2


@pytest.mark.parametrize("pattern", EXTENDED)
def test_a_change_runs_the_extended_tests_of_its_rooms(pattern):
    tests = {test for test in TESTS if fnmatch(test, pattern)}
    for room in EXTENDED[pattern]:
        assert tests <= set(touched_tests(["CHANGELOG.md", room.replace("*", "a/b.py")]))
    for test in tests:
        assert touched_tests([test]) == [test]


def test_a_change_of_what_all_tests_share_runs_all_of_them_and_one_of_no_room_none():
    for room in SHARED:
        assert touched_tests([room.replace("*", "a.py")]) == touched_tests(None)
    assert touched_tests([]) == []
    assert touched_tests(["CHANGELOG.md", "tests/test_tree.py", "lookahead/reporting/charts.py"]) == []


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Runs git in a new repository, whose branch `main` has two commits."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # where a hook of git runs the tests
        monkeypatch.delenv(name)

    def run(*arguments):
        names = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit(**texts):
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
        run("add", ".")
        run("commit", "-m", "texts")

    run.commit = commit
    run("init", "-b", "main")
    commit(first="1")
    commit(second="2", ünïcode="3")
    return run


def test_a_change_is_what_differs_from_where_its_branch_left_the_main_one(git, tmp_path):
    git("checkout", "-b", "topic")
    git.commit(third="3")
    git("mv", "first", "moved")
    git.commit(fourth="4")
    git("checkout", "main")
    git.commit(later="5")
    git("checkout", "topic")
    assert sorted(changed_files(tmp_path)) == ["first", "fourth", "moved", "third"]
    (tmp_path / "second").write_text("not committed")
    assert "second" in changed_files(tmp_path)


def test_a_change_on_the_main_branch_or_without_one_is_the_last_commit(git, tmp_path):
    assert sorted(changed_files(tmp_path)) == ["second", "ünïcode"]
    git("branch", "-m", "another")
    assert sorted(changed_files(tmp_path)) == ["second", "ünïcode"]


def test_where_the_history_does_not_tell_what_changed_all_extended_tests_run(git, tmp_path, monkeypatch):
    git("clone", "--depth", "1", tmp_path.as_uri(), "shallow")
    assert changed_files(tmp_path / "shallow") is None
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / ".git").rename(tmp_path / "gone")
    assert changed_files(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert changed_files(tmp_path) is None
    assert len(touched_tests(None)) >= len(EXTENDED)
