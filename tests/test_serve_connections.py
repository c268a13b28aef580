"""Connections that ask nothing, send slowly or do not read: others are served, and the log stays short."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import logging
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lookahead.serving import connections, service
from lookahead.serving.connections import Server, give_memory_back, most_connections
from tests.support.running_server import Running, folder, server, wait_until_idle

__all__ = ["folder", "server"]  # fixtures
pytest.importorskip("openai")
WAIT_S = 60.0
HALF = b"GET /health HTTP/1.1\r\nHost: loc"


@pytest.fixture(scope="module")
def small(folder: str) -> Iterator[Running]:
    """A server of few connections."""
    running = Running(folder, connections=6)
    yield running
    running.end()


def connected(running: Running, sent: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S)
    client.sendall(sent)
    time.sleep(0.01)  # where connections come faster than they are accepted, the system makes a client wait a second
    return client


def is_closed(client: socket.socket) -> bool:
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("sent", [b"", HALF, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + HALF], ids=len)
def test_half_sent_headers_keep_nobody_out(small, sent, monkeypatch):
    monkeypatch.setattr(connections, "_HEADERS_S", 2 * WAIT_S)
    clients = [connected(small, sent) for _ in range(20)]
    for _ in range(3):
        assert small.raw("GET", "/health")[0] == 200
    assert len(small.server.server_state.connections) <= 6
    assert is_closed(clients[0])  # the oldest one made room
    for client in clients:
        client.close()


def test_answers_go_on_while_others_fill_all_connections(small):
    body = json.dumps({"prompt": "abc", "max_tokens": 200, "temperature": 0, "logit_bias": {"1": -100, "2": -100}})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    asking = connected(small, (head + body).encode())
    deadline = time.monotonic() + WAIT_S
    while not small.is_busy and time.monotonic() < deadline:
        time.sleep(0.001)
    idle = [connected(small, HALF) for _ in range(20)]
    assert asking.recv(1 << 16).startswith(b"HTTP/1.1 200")
    for client in [asking, *idle]:
        client.close()


@pytest.mark.parametrize("sent", [b"", HALF, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + HALF], ids=len)
def test_headers_must_arrive_soon(server, sent, monkeypatch):
    monkeypatch.setattr(connections, "_HEADERS_S", 0.2)
    monkeypatch.setattr(server.server.config, "timeout_keep_alive", 0.2)
    client = connected(server, sent)
    assert is_closed(client)
    assert server.raw("GET", "/health")[0] == 200


def test_a_client_that_sends_a_header_now_and_then_gains_no_time(server, monkeypatch):
    monkeypatch.setattr(connections, "_HEADERS_S", 0.4)
    client = connected(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
    began = time.monotonic()
    try:
        while time.monotonic() < began + WAIT_S:
            client.sendall(b"X: y\r\n")
            time.sleep(0.02)
    except OSError:
        return
    raise AssertionError("it was never closed")


def test_a_body_must_arrive_soon(server, monkeypatch):
    monkeypatch.setattr(service, "_BODY_S", 0.2)
    client = connected(server, b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    assert client.recv(1 << 16).startswith(b"HTTP/1.1 408")
    client.close()


def test_an_answer_that_nobody_reads_ends(server, monkeypatch):
    monkeypatch.setattr(connections, "_STALLED_S", 0.2)
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server.client.close()  # its connections are kept alive
    wait_until_idle(server)
    fields = {"prompt": "abc", "max_tokens": 1900, "n": 8, "stream": True, "logprobs": 20}
    body = json.dumps({**fields, "logit_bias": {"1": -100, "2": -100}})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    client.sendall((head + body).encode())
    deadline = time.monotonic() + WAIT_S
    while not server.server.server_state.connections:
        assert time.monotonic() < deadline
    while server.server.server_state.connections:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    wait_until_idle(server)
    client.close()


def test_connections_are_fewer_than_the_files_that_may_be_open():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for files, most in ((256, 128), (64, 32), (4, 8), (min(hard, 65536), 1024)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
            assert most_connections() == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_that_cannot_be_accepted_are_one_line_a_minute(caplog):
    served = Server(lambda *_: None, None)  # type: ignore[arg-type]  # no models are needed
    event_loop: Any = asyncio.new_event_loop()
    failed = OSError(errno.EMFILE, "Too many open files")
    with caplog.at_level(logging.ERROR):
        for _ in range(1000):
            context = {"message": "socket.accept() out of system resource", "exception": failed, "socket": None}
            served._tell(event_loop, context)
    event_loop.close()
    assert len(caplog.records) == 1 and caplog.records[0].exc_info is None


@pytest.mark.skipif(not (sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")), reason="of glibc")
def test_free_memory_between_blocks_in_use_is_given_back():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = [libc.malloc(60_000) for _ in range(2_000)]
    for block in blocks:
        ctypes.memset(block, 1, 60_000)
    for block in blocks[:-1]:  # the last one keeps the system from taking the others back
        libc.free(block)
    most = resident() - 60_000 * 1_000 // 4096

    async def until_given_back() -> None:
        task = asyncio.create_task(give_memory_back(every=0.01))
        while resident() > most:
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(until_given_back(), timeout=WAIT_S))
    libc.free(blocks[-1])


def resident() -> int:
    """The pages of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1])
