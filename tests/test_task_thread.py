"""A thread of tasks: whenever it is interrupted, the end of its task is told."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import wait

import pytest

from lookahead.utils.task_thread import TaskThread


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def fails() -> None:
    raise ValueError("a task failed")


@pytest.mark.parametrize("task", [int, fails, lambda: sum(range(200))], ids=["quick", "failing", "longer"])
def test_an_interrupt_at_any_moment_leaves_no_task_without_an_end(task, restless):
    told = list[int]()
    for turn in range(3000):
        thread = TaskThread("test")
        future = thread.begin(task)
        future.add_done_callback(lambda _, turn=turn: told.append(turn))
        for _ in range(turn % 60):
            pass
        thread.interrupt()
        assert wait([future], 10).done, turn
        thread.join(10)
        assert not thread.is_alive() and told[-1] == turn


def test_a_task_that_runs_python_is_ended_and_its_thread_with_it():
    thread = TaskThread("test")

    def endless() -> None:
        while True:
            time.sleep(0.001)

    future = thread.begin(endless)
    time.sleep(0.05)
    thread.interrupt()
    thread.join(10)
    assert not thread.is_alive() and isinstance(future.exception(10), SystemExit)


def test_a_thread_runs_its_tasks_in_turn_and_ends_when_it_is_closed():
    thread, seen = TaskThread("test"), list[int]()
    futures = [thread.begin(lambda at=at: seen.append(at)) for at in range(5)]
    thread.close()
    thread.join(10)
    assert seen == [*range(5)] and all(future.done() for future in futures) and not thread.is_alive()
