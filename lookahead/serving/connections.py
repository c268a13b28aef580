"""Connections of the server: how many there may be, how long each may take to say what it wants, and their end."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import uvicorn

from lookahead.errors import ConfigError
from lookahead.serving.served_models import ServedModels

_SHUTDOWN_S = 3  # time for answers to end at shutdown


class Server(uvicorn.Server):  # type: ignore[misc]  # untyped base class
    """A server that ends its answers with a reason at shutdown."""

    def __init__(self, app: Any, models: ServedModels, log_level: str = "warning") -> None:
        super().__init__(uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=_SHUTDOWN_S))
        self._models = models

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Shut down on a signal; a second one exits immediately."""
        super().handle_exit(sig, frame)
        self.stop()

    def stop(self) -> None:
        """End the server, from any thread."""
        threading.Thread(target=self._models.close, daemon=True).start()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; connections wait until the server runs. Port 0 picks a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        # Errors of name resolution have negative numbers, which os.strerror does not know.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(f"cannot listen on port {port} of {host}: {reason}; --port names another") from error
