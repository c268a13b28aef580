"""Threads share jobs: in order, every part once, for several callers, on more threads than cores, after a fork."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from lookahead.backend.cpu import product_choice
from lookahead.backend.cpu.whole_pass import fastest_number
from lookahead.kernels import jobs, team
from lookahead.kernels.jobs import leader, run, table_of, torch_on_one_thread
from tests.support.team_jobs import by_team, count, expected, mixing


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_a_job_begins_when_the_one_before_is_done_and_no_part_is_done_twice(threads):
    right = expected()
    for _ in range(30):
        assert (by_team(threads) == right).all()


def test_fewer_threads_than_the_team_has_take_part_in_a_call(monkeypatch):
    right = expected()
    for threads in (6, 2, 1, 4):
        assert (by_team(threads) == right).all()


@pytest.mark.parametrize(("threads", "parts"), [(2, 3), (3, 5), (2, 60)])
def test_a_call_ends_when_all_parts_are_done_by_no_more_threads_than_asked_for(threads, parts):
    team.team_of(8)
    for _ in range(10):
        numbers = np.zeros(1 + parts, np.int64)
        places = numbers.ctypes.data, numbers[1:].ctypes.data
        table = np.array(table_of([(count, parts, places, numbers)]))
        leader()(team.team_of(threads), table.ctypes.data, threads)
        assert numbers.all() and 1 <= numbers[0] <= threads


def test_callers_at_once_get_their_own_results():
    right = expected()
    with ThreadPoolExecutor(4) as pool:
        assert all((got == right).all() for got in pool.map(lambda _: by_team(3), range(60)))


@pytest.mark.parametrize("has_openmp", [True, False])
@pytest.mark.parametrize("has_team", [True, False])
def test_jobs_run_on_the_threads_of_torch_or_without_any(has_openmp, has_team, three_threads, monkeypatch):
    if not has_openmp:
        monkeypatch.setattr(jobs, "_torch_library", lambda: None)
        monkeypatch.setattr(jobs, "_torch_launcher", lambda: None)
    if not has_team:
        monkeypatch.setattr(team, "_team", lambda: None)
    for _ in range(20):
        of_mixing, numbers = mixing()
        run(*of_mixing)
        assert (numbers == expected()).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_has_a_team_of_its_own():
    program = """
import os, sys
from lookahead.kernels.team import team_of
from tests.support.team_jobs import by_team, expected
assert (by_team(4) == expected()).all()
before = team_of(4)
child = os.fork()
if not child:
    os._exit(0 if (by_team(4) == expected()).all() and team_of(4) != before else 3)
assert (by_team(4) == expected()).all()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0


def test_torch_keeps_to_one_thread_here_and_to_its_own_elsewhere(three_threads):
    with ThreadPoolExecutor(1) as pool:
        with torch_on_one_thread():
            assert torch.get_num_threads() == 1
            assert pool.submit(torch.get_num_threads).result() == 3
            with pytest.raises(KeyError), torch_on_one_thread():
                raise KeyError
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3


def test_products_are_compared_on_one_thread(three_threads, monkeypatch):
    seen, own = list[int](), product_choice.linear
    monkeypatch.setattr(product_choice, "_TRIED", (64, 64))
    monkeypatch.setattr(product_choice, "linear", lambda *each: (seen.append(torch.get_num_threads()), own(*each))[1])
    product_choice.measure(torch.float32)
    assert set(seen) == {1}


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        (lambda threads: 4 / threads, 8),
        (lambda threads: 4 * threads, 1),
        (lambda threads: 4 * abs(threads - 2) + 2, 2),
        (lambda threads: 4, 8),
    ],
)
def test_as_many_threads_share_a_pass_as_make_it_fast(seconds: Callable[[int], float], best: int) -> None:
    now = [0.0]

    def run(threads: int) -> None:
        now[0] += seconds(threads)

    assert fastest_number(run, 8, lambda: now[0]) == best


def test_one_thread_is_not_compared() -> None:
    asked = list[int]()
    assert fastest_number(asked.append, 1) == 1 and not asked
