"""Threads for short tasks with a time limit; an endless task does not block the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from lookahead.serving.api_errors import ApiError
from lookahead.utils.task_thread import TaskThread

T = TypeVar("T")
_MOST_OVERDUE = 16  # maximum interrupted threads still running; above, tasks are refused


class TimedWorkers:
    """Runs tasks on a few threads; a thread past its limit is interrupted and replaced.

    An interrupt takes effect at the next line of Python, which templates run often. The threads are daemons.

    Args:
        tasks: Maximum concurrent tasks.
    """

    def __init__(self, tasks: int) -> None:
        self._free = asyncio.Semaphore(tasks)
        self._idle: list[TaskThread] = []
        self._overdue: list[TaskThread] = []

    async def run(self, task: Callable[[], T], limit_s: float) -> T:
        """Run a task for at most `limit_s` seconds and return its result.

        Raises:
            ApiError: The task took longer, or too many overdue tasks are still running.
        """
        self._overdue = [thread for thread in self._overdue if thread.is_alive()]
        if len(self._overdue) >= _MOST_OVERDUE:
            raise ApiError(503, "earlier requests still take too long to read")
        async with self._free:
            thread = self._idle.pop() if self._idle else TaskThread("lookahead-requests")
            future = thread.begin(task)
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
