"""Threads for short jobs with a time limit; an endless job does not block the others."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from lookahead.serving.api_errors import ApiError

T = TypeVar("T")
_MOST_OVERDUE = 16  # maximum interrupted threads still running; above, jobs are refused


class TimedWorkers:
    """Runs jobs on a few threads; a thread past its limit is interrupted and replaced.

    An interrupt takes effect at the next line of Python, which templates run often. The threads are daemons.

    Args:
        jobs: Maximum concurrent jobs.
    """

    def __init__(self, jobs: int) -> None:
        self._free = asyncio.Semaphore(jobs)
        self._idle: list[_JobThread] = []
        self._overdue: list[_JobThread] = []

    async def run(self, job: Callable[[], T], limit_s: float) -> T:
        """Run a job for at most `limit_s` seconds and return its result.

        Raises:
            ApiError: The job took longer, or too many overdue jobs are still running.
        """
        self._overdue = [thread for thread in self._overdue if thread.is_alive()]
        if len(self._overdue) >= _MOST_OVERDUE:
            raise ApiError(503, "earlier requests still take too long to read")
        async with self._free:
            thread = self._idle.pop() if self._idle else _JobThread()
            future = thread.begin(job)
            try:
                return await asyncio.wait_for(asyncio.wrap_future(future), limit_s)
            except (asyncio.TimeoutError, TimeoutError):
                raise ApiError(503, f"reading the request took more than {limit_s:g} s") from None
            finally:
                if future.done():
                    self._idle.append(thread)
                else:
                    thread.interrupt()
                    self._overdue.append(thread)


class _JobThread(threading.Thread):
    """A thread that runs one job after the other."""

    def __init__(self) -> None:
        super().__init__(name="lookahead-requests", daemon=True)
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self.start()

    def begin(self, job: Callable[[], T]) -> Future[T]:
        """Start a job; the future gets its result."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # a waiter's cancellation does not affect the job
        self._jobs.put((job, future))
        return future

    def run(self) -> None:
        """Run jobs until interrupted."""
        with suppress(SystemExit):
            while True:
                job, future = self._jobs.get()
                try:
                    future.set_result(job())
                except Exception as error:
                    future.set_exception(error)
                del job, future

    def interrupt(self) -> None:
        """End the thread, at the next line of Python."""
        assert self.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(SystemExit))
