"""Threads for short jobs with a time limit, which a job that takes for ever does not hold up."""

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
_MOST_OVERDUE = 16  # threads that did not end when told to, with which no further job is taken


class TimedWorkers:
    """Runs jobs on a few threads; one past its limit is told to end, and another thread takes its place.

    A thread ends at the next line of Python that it runs, which a template has many of. The threads do not keep the
    process from ending.

    Args:
        jobs: How many may run together.
    """

    def __init__(self, jobs: int) -> None:
        self._free = asyncio.Semaphore(jobs)
        self._idle: list[_JobThread] = []
        self._overdue: list[_JobThread] = []

    async def run(self, job: Callable[[], T], limit_s: float) -> T:
        """The result of a job, which may take so many seconds.

        Raises:
            ApiError: It took longer, or too many that did are still running.
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
        """Begin a job; its result comes with the future."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # whoever waits for it may go, and the job does not notice
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
