"""A thread for tasks, one after the other."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
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
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self.start()

    def begin(self, task: Callable[[], T]) -> Future[T]:
        """Queue a task; the future gets its result."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # a waiter's cancellation does not affect the task
        self._tasks.put((task, future))
        return future

    def run(self) -> None:
        """Run tasks."""
        with suppress(SystemExit):
            while (queued := self._tasks.get()) is not None:
                task, future = queued
                try:
                    future.set_result(task())
                except BaseException as error:
                    future.set_exception(error)
                    if not isinstance(error, Exception):
                        raise
                del queued, task, future

    def close(self) -> None:
        """End after the queued tasks."""
        self._tasks.put(None)

    def interrupt(self) -> None:
        """End at the next line of Python."""
        assert self.ident is not None
        self.is_interrupted = True
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(SystemExit))
