"""Connections of the server: how many there may be, how long each may take to say what it wants, and their end."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from lookahead.errors import ConfigError

if TYPE_CHECKING:
    from lookahead.serving.served_models import ServedModels

_SHUTDOWN_S = 3  # time for answers to end at shutdown
_HEADERS_S = 10.0  # time limit for the headers of a request
_STALLED_S = 60.0  # time limit for a client to take more of an answer
_MOST = 1024
_QUIET_S = 60.0  # time between two lines about connections that cannot be accepted
_TRIM_S = 30.0  # time between two times that free memory is given back
_log = logging.getLogger(__name__)


def most_connections() -> int:
    """How many connections there may be: half of the files that this process may open, at most 1024."""
    try:
        import resource
    except ImportError:  # on Windows
        return _MOST
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if files == resource.RLIM_INFINITY else max(8, min(_MOST, files // 2))


class Connection(AutoHTTPProtocol):  # type: ignore[misc]  # untyped base class
    """A connection that ends if its client is slow, or if it has asked nothing and others need its place.

    Args:
        most: Maximum connections.
        options: Arguments of uvicorn's protocol.
    """

    def __init__(self, *arguments: Any, most: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._most = most
        self._waiting: asyncio.TimerHandle | None = None  # for headers
        self._stalled: asyncio.TimerHandle | None = None

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Take a connection; if there are too many, the oldest one without a request ends, or this one."""
        super().connection_made(transport)
        self._wait_for_headers()
        if len(self.connections) > self._most:
            idle = [other for other in self.connections if other is not self and other._is_idle]
            oldest = min(idle, key=lambda other: other.since, default=self)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take what the client sends; the headers of its next request must come soon."""
        super().data_received(data)
        if not self._is_idle:
            self._stop_waiting()
        elif self._waiting is None:
            self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait until the client has taken more of its answer, but not for ever."""
        super().pause_writing()
        self._stalled = self._stalled or self.loop.call_later(_STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Continue the answer."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if self.flow is not None:
            super().resume_writing()

    def _wait_for_headers(self) -> None:
        self.since = time.monotonic()
        self._waiting = self.loop.call_later(_HEADERS_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class Server(uvicorn.Server):  # type: ignore[misc]  # untyped base class
    """A server that ends its answers with a reason at shutdown.

    Args:
        app: The application.
        models: Its models, which end with it.
        log_level: As in uvicorn.
        connections: Maximum connections; None for `most_connections()`.
    """

    def __init__(
        self, app: Any, models: ServedModels, log_level: str = "warning", connections: int | None = None
    ) -> None:
        most = connections or most_connections()

        # asyncio accepts up to `backlog` connections before it makes the first of them known.
        options: Any = {"backlog": max(1, most // 2), "timeout_graceful_shutdown": _SHUTDOWN_S, "lifespan": "off"}
        super().__init__(uvicorn.Config(app, http=partial(Connection, most=most), log_level=log_level, **options))
        self._models, self._last_told = models, -_QUIET_S

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections; failures to do so are told once a minute."""
        asyncio.get_running_loop().set_exception_handler(self._tell)
        self._trimming = asyncio.create_task(give_memory_back())
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all answers; the requests that are cancelled at the end of the time still say why."""
        await super().shutdown(sockets)
        if tasks := set(self.server_state.tasks):
            await asyncio.wait(tasks, timeout=1)

    def _tell(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), OSError) or "socket" not in context:
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._last_told + _QUIET_S:
            self._last_told = time.monotonic()
            _log.error("connections cannot be accepted: %s", context["exception"])

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Shut down on a signal; a second one exits immediately."""
        super().handle_exit(sig, frame)
        self.stop()

    def stop(self) -> None:
        """End the server, from any thread."""
        threading.Thread(target=self._models.close, daemon=True).start()
        self.should_exit = True


async def give_memory_back(every: float = _TRIM_S) -> None:
    """Let glibc give free memory back to the system, again and again.

    Prompts and answers of many sizes leave holes in its arenas, which it keeps: a gigabyte after minutes under load.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    while trim is not None:
        await asyncio.sleep(every)
        await asyncio.to_thread(trim, 0)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; connections wait until the server runs. Port 0 picks a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        # Errors of name resolution have negative numbers, which os.strerror does not know.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(f"cannot listen on port {port} of {host}: {reason}; --port names another") from error
