"""`lookahead serve` as a process: what a signal ends, and how."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.support.running_server import LONG, folder

__all__ = ["folder"]  # a fixture
pytest.importorskip("openai")
HALF_SENT = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 99\r\n\r\n{"


def begun(folder: str) -> tuple[subprocess.Popen[str], int]:
    """A server, and its port."""
    command = [sys.executable, "-m", "lookahead", "serve", folder, "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"})
    assert process.stderr is not None
    line = next(line for line in process.stderr if "serving" in line)
    port = int(line.rpartition("/v1")[0].rpartition(":")[2])
    return process, port


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_streams_with_a_reason_and_the_command(folder, how, tmp_path):
    process, port = begun(folder)
    connection = http.client.HTTPConnection("localhost", port, timeout=120)
    body = {**LONG, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    reading = http.client.HTTPConnection("localhost", port, timeout=60)
    reading.request("POST", "/v1/completions", json.dumps({"prompt": ["abc " * 500] * 60, "max_tokens": 1}))
    sending = socket.create_connection(("localhost", port), timeout=60)
    sending.sendall(HALF_SENT)
    assert b" 100 " in sending.recv(1 << 16)
    process.send_signal(how)
    rest = answer.read()
    assert b"shutting down" in rest and rest.endswith(b"data: [DONE]\n\n")
    assert sending.recv(1 << 16).startswith(b"HTTP/1.1 503")
    with suppress(ConnectionError):  # if its headers had not been read
        assert reading.getresponse().status in (200, 503)
    _, log = process.communicate(timeout=20)
    assert "Traceback" not in log


def test_two_signals_end_the_command_without_an_abort(folder):
    process, port = begun(folder)
    connection = http.client.HTTPConnection("localhost", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": ["abc " * 500] * 60, "max_tokens": 99}))
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=20)
    assert process.returncode in (0, 130) and "Traceback" not in log and "terminate called" not in log
