"""Clients that leave, and models that end: nobody's log fills up, and whoever still waits is told why."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from lookahead.serving.api_errors import ApiError
from lookahead.serving.parsing import parsed
from lookahead.serving.request_schemas import CompletionBody
from lookahead.serving.served_models import ServedModels
from lookahead.serving.service import Service, unless_left
from tests.support.running_server import LONG, folder, server, wait_until_idle

__all__ = ["folder", "server"]  # fixtures
pytest.importorskip("openai")
LOGGERS = "asyncio", "lookahead", "uvicorn.error"
WAIT_S = 30.0
BODY = json.dumps({**LONG, "n": 4}).encode()


class Log(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@pytest.fixture
def log() -> Iterator[Log]:
    """What the server and asyncio log."""
    kept = Log()
    for name in LOGGERS:
        logging.getLogger(name).addHandler(kept)
    yield kept
    for name in LOGGERS:
        logging.getLogger(name).removeHandler(kept)


def left(server) -> float:
    """The number of requests whose client had left, by the metrics."""
    lines = server.raw("GET", "/metrics")[1].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if "requests_total" in line and 'status="499"' in line)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize(
    "sent",
    [
        b"Content-Length: 1000\r\n\r\n",
        b"Content-Length: 1000\r\n\r\n{\"prompt\": ",
        b"Transfer-Encoding: chunked\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n4\r\n{\"pr\r\n",
        b"Expect: 100-continue\r\nContent-Length: 1000\r\n\r\n",
    ],
    ids=["headers", "a part", "no chunk", "a chunk", "expecting"],
)  # fmt: skip
def test_a_client_that_leaves_while_it_sends_is_counted_and_not_logged(server, log, path, sent):
    before = left(server)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST " + path.encode() + b" HTTP/1.1\r\nHost: localhost\r\n" + sent)
        time.sleep(0.05)
    deadline = time.monotonic() + WAIT_S
    while left(server) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left(server) == before + 1 and log.texts == []
    assert server.raw("POST", "/tokenize", {"prompt": "abc"})[0] == 200


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_an_answer_is_not_logged(server, log, streams):
    body = json.dumps({**LONG, "n": 4, "stream": streams}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        deadline = time.monotonic() + WAIT_S
        while not server.is_busy:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    wait_until_idle(server)
    gc.collect()
    assert log.texts == []


def models_of(folder: str) -> ServedModels:
    return ServedModels([folder], config=None, max_new_tokens=3000, loading={"device": "cpu"}, decoding={})


def test_outputs_that_end_while_the_client_leaves_lose_no_error(folder, log):
    """The outputs end first; the client leaves a few turns of the event loop later."""

    async def one(service: Service, turn: Any, later: int) -> None:
        async def receive() -> dict[str, str]:
            for _ in range(later):
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        try:
            await unless_left(Request({"type": "http"}, receive), service.whole(turn))
            raise AssertionError("an answer for a client that left")
        except ClientDisconnect:
            pass
        except ApiError as error:
            assert error.status == 503

    async def several() -> None:
        models = models_of(folder)
        loop = (await asyncio.to_thread(models.wait)).loop
        service = Service(models, WAIT_S)
        turns = [service.turn() for _ in range(8)]
        for turn in turns:
            await service.begin(turn, parsed(CompletionBody, BODY))
        await asyncio.to_thread(loop.close)
        for later, turn in enumerate(turns):
            await one(service, turn, later)
        await asyncio.sleep(0.1)  # for tasks that nobody waits for

    asyncio.run(several())
    gc.collect()
    assert log.texts == []


def test_a_request_to_a_server_that_ends_is_told_why_and_not_of_a_full_queue(folder):
    async def refused() -> list[ApiError]:
        models = models_of(folder)
        await asyncio.to_thread(models.wait)
        service, body = Service(models, WAIT_S), parsed(CompletionBody, BODY)
        turn = service.turn()
        await service.begin(turn, body)
        await asyncio.to_thread(models.close)
        with pytest.raises(ApiError) as running:
            _ = [update async for update in service.updates(turn)]
        with pytest.raises(ApiError) as new:
            await service.begin(service.turn(), body)
        return [running.value, new.value]

    assert [(each.status, str(each)) for each in asyncio.run(refused())] == [(503, "the server is shutting down")] * 2


def test_an_answer_ends_though_its_client_leaves_just_as_an_update_comes():
    async def both() -> list[str]:
        updates, ended = asyncio.Queue[int](), list[str]()

        async def receive() -> dict[str, str]:
            updates.put_nowait(1)
            return {"type": "http.disconnect"}

        async def answer() -> None:
            try:
                while True:
                    await asyncio.wait_for(updates.get(), WAIT_S)
            finally:
                ended.append("ended")

        with pytest.raises(ClientDisconnect):
            await unless_left(Request({"type": "http"}, receive), answer())
        return [*ended]  # `asyncio.run` cancels what is left

    assert asyncio.run(both()) == ["ended"]
