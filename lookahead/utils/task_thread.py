"""A thread for tasks, one after the other."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class TaskThread(threading.Thread):
    """A daemon thread that runs one task after the other, until it is closed or interrupted.

    Args:
        name: Its name.

    Attributes:
        is_interrupted: Whether `interrupt` was called; the thread takes no more tasks.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.is_interrupted = False
        self._is_open, self._changing = False, threading.Lock()  # whether an interrupt may be raised, in a task only
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self.start()

    def begin(self, task: Callable[[], T]) -> Future[T]:
        """Queue a task; the future gets its result."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # a waiter's cancellation does not affect the task
        self._tasks.put((task, future))
        return future

    def run(self) -> None:
        """Run tasks. An interrupt ends the task, and never what tells its end."""
        while (queued := self._tasks.get()) is not None:
            task, future = queued
            value, error = None, None
            try:
                try:
                    with self._changing:
                        if self.is_interrupted:
                            raise SystemExit
                        self._is_open = True
                    value = task()
                finally:
                    self._shut()
            except BaseException as raised:
                error = raised
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
            del queued, task, future, value, error

    def _shut(self) -> None:
        """From here on no interrupt is raised: one that is on its way is raised in the loop at the latest."""
        with self._changing:
            self._is_open = False
        for _ in range(2):
            pass

    def close(self) -> None:
        """End after the queued tasks."""
        self._tasks.put(None)

    def interrupt(self) -> None:
        """End the running task at its next line of Python, and the thread after it."""
        assert self.ident is not None
        with self._changing:
            if self._is_open and not self.is_interrupted:
                raised = ctypes.py_object(SystemExit)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), raised)
            self.is_interrupted = True
        self._tasks.put(None)
