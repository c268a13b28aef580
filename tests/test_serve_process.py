"""`lookahead serve` as a process: what a signal ends, and how."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support.running_server import LONG, folder

__all__ = ["folder"]  # a fixture
pytest.importorskip("openai")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_streams_with_a_reason_and_the_command(folder, how, tmp_path):
    command = [sys.executable, "-m", "lookahead", "serve", folder, "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"})
    assert process.stderr is not None
    line = next(line for line in process.stderr if "serving" in line)
    port = int(line.rpartition("/v1")[0].rpartition(":")[2])
    connection = http.client.HTTPConnection("localhost", port, timeout=120)
    body = {**LONG, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    process.send_signal(how)
    rest = answer.read()
    assert b"shutting down" in rest and rest.endswith(b"data: [DONE]\n\n")
    process.communicate(timeout=20)
