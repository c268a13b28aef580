"""Threads for work whose size a client sets: few, with a time limit, and in turns between clients."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from lookahead.serving.api_errors import ApiError
from lookahead.utils.task_thread import TaskThread

T = TypeVar("T")


class TimedWorkers:
    """Runs tasks on a few threads; those of different clients take turns.

    A task past its limit, or whose client has left, is interrupted. An interrupt takes effect at the next line of
    Python, which templates run often. Until then the task keeps its place, so that there are never more than `tasks`
    threads at work, whatever clients send. The threads are daemons.

    Args:
        tasks: Maximum concurrent tasks.
        limit_s: Maximum seconds of a task.
    """

    def __init__(self, tasks: int, limit_s: float = math.inf) -> None:
        self._free, self._limit_s = tasks, limit_s
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by client, the next one first
        self._idle: list[TaskThread] = []

    async def run(self, task: Callable[[], T], deadline: float, client: str = "", *, interrupts: bool = True) -> T:
        """Run a task once a thread is free, and return its result.

        Args:
            task: The task.
            deadline: When it must be done, as `time.monotonic` counts.
            client: Whose task it is.
            interrupts: Whether to interrupt a task that nobody waits for any more; otherwise it ends by itself.

        Raises:
            ApiError: The task took longer, or waited longer.
        """
        late = ApiError(503, "earlier requests still take too long to read")
        await in_time(self._enter(client), left(deadline), late)
        limit_s = min(self._limit_s, left(deadline))
        event_loop = asyncio.get_running_loop()
        thread = self._idle.pop() if self._idle else TaskThread("lookahead-requests")
        future = thread.begin(task)

        def end(ended: Any) -> None:
            with suppress(RuntimeError):  # the server has ended
                event_loop.call_soon_threadsafe(self._leave, thread)

        future.add_done_callback(end)
        late = ApiError(503, f"reading the request took more than {limit_s:g} s")
        try:
            return await in_time(asyncio.wrap_future(future), limit_s, late)
        finally:
            if interrupts and not future.done():
                thread.interrupt()

    async def _enter(self, client: str) -> None:
        """Wait for a free thread."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()
            raise

    def _leave(self, thread: TaskThread) -> None:
        """Take back the thread of a task that ended."""
        if thread.is_alive() and not thread.is_interrupted:
            self._idle.append(thread)
        self._next()

    def _next(self) -> None:
        """Let the next client's first task begin."""
        while self._waiting:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # after the other clients
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


async def in_time(waiting: Awaitable[T], limit_s: float, late: ApiError) -> T:
    """The result of what is waited for, or an error if it comes late."""
    try:
        return await asyncio.wait_for(waiting, limit_s)
    except (asyncio.TimeoutError, TimeoutError):
        raise late from None


def left(deadline: float) -> float:
    """Seconds left."""
    return max(0.0, deadline - time.monotonic())
