"""What a client may send to harm a server or others that use it: it is refused, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import ValidationError

from lookahead.decoding.prompts_ahead import PromptsAhead
from lookahead.decoding.request import Request
from lookahead.engine.engine import Engine
from lookahead.serving.api_errors import ApiError
from lookahead.serving.messages import MessagesBody
from lookahead.serving.request_schemas import ChatBody, CompletionBody
from lookahead.serving.requests import GenerationRequest
from lookahead.serving.responses import ResponsesBody
from lookahead.serving.safety import Guard
from lookahead.serving.served_models import ServedModels
from lookahead.serving.timed_workers import TimedWorkers
from tests.support.running_server import folder, server

__all__ = ["folder", "server"]  # fixtures
pytest.importorskip("openai")
# Each of its states is too large for the limits of llguidance, which tells so only when tokens are taken in.
TOO_LARGE = {
    "anyOf": [
        {
            "type": "object",
            "properties": {f"p{i}_{j}": {"type": "string", "pattern": "(a|b)*a(a|b){30}"} for j in range(30)},
        }
        for i in range(30)
    ]
}


def test_a_grammar_that_cannot_be_followed_ends_its_own_output_alone(server):
    alone = server.ask("abc", max_tokens=200).choices[0].message.content
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": TOO_LARGE}}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.ask, "abc", max_tokens=200)
        with pytest.raises(server.errors) as raised:
            server.ask("abc", response_format=form)
        assert other.result().choices[0].message.content == alone
    assert raised.value.status_code == 400 and "the grammar cannot be followed" in raised.value.message


@pytest.mark.parametrize(
    "kwargs",
    [
        {"padding": "max_length", "max_length": 10**9},
        {"truncation": True, "max_length": 1},
        {"tokenizer_kwargs": {"add_special_tokens": True}},
        {"continue_final_message": True},
        {"tools": [1]},
        {"messages": []},
    ],
    ids=str,
)
def test_arguments_of_the_tokenizer_are_no_variables_of_a_template(server, folder, kwargs):
    message = server.refused(chat_template_kwargs=kwargs)
    assert message == f"chat_template_kwargs.{next(iter(kwargs))}: cannot be set by clients"
    assert folder not in message


def test_numbers_and_texts_at_the_edge_of_what_can_be_computed_are_refused(server):
    assert server.refused(temperature=1e-320) == "temperature: must be 0, or from 1e-06 to 2, got 1e-320"
    assert "repetition_penalty" in server.refused(repetition_penalty=1e-300)


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"x": ', "", "1", "NaN"], ids=lambda text: text[:9])
def test_calls_that_were_no_json_can_be_sent_back(server, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat: Any = [{"role": "assistant", "content": "a", "tool_calls": [call]}, {"role": "user", "content": "b"}]
    assert server.raw("POST", "/v1/chat/completions", {"messages": chat, "max_tokens": 2})[0] == 200


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatBody, {"messages": [1] * 5000}),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * 5000}]}),
        (CompletionBody, {"prompt": [{}] * 5000}),
        (ChatBody, {f"field{i}": 1 for i in range(5000)}),
        (CompletionBody, {"prompt": "x", "logit_bias": {str(i): "x" for i in range(5000)}}),
        (CompletionBody, {"prompt": "x", "structured_outputs": {"choice": [1] * 5000}}),
        (ChatBody, {"messages": [], "modalities": ["image"] * 5000}),
        (ResponsesBody, {"input": "x", "include": ["x"] * 5000}),
        (ResponsesBody, {"input": "x", "metadata": {str(i): i for i in range(5000)}}),
        (ResponsesBody, {"input": [1] * 5000}),
        (ResponsesBody, {"input": [{"role": "user", "content": [1] * 5000}]}),
        (ResponsesBody, {"input": "x", "tools": [1] * 5000}),
        (ResponsesBody, {"input": [{"type": "reasoning", "summary": [1] * 5000}]}),
        (MessagesBody, {"max_tokens": 1, "messages": [1] * 5000}),
        (MessagesBody, {"max_tokens": 1, "messages": [{"role": "user", "content": [1] * 5000}]}),
        (MessagesBody, {"max_tokens": 1, "messages": [], "system": [1] * 5000, "tools": [1] * 5000}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value)[:40],
)
def test_of_thousands_of_mistakes_a_few_are_looked_at(kind, body):
    with pytest.raises(ValidationError) as raised:
        kind.model_validate_json(json.dumps(body))
    assert raised.value.error_count() < 10


def test_a_web_page_of_another_origin_cannot_even_begin_an_answer(server):
    body = {"prompt": "abc", "max_tokens": 2}
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1"):
        status, answer = server.raw("POST", "/v1/completions", body, Origin=origin, Content_Type="text/plain")
        assert status == 403 and origin in answer["error"]["message"]
    own = f"http://127.0.0.1:{server.port}"
    assert server.raw("POST", "/v1/completions", body, Origin=own)[0] == 200


@pytest.mark.parametrize("hosts", [(), ("Box.local",)])
def test_a_server_is_reached_by_addresses_and_its_own_names_alone(hosts):
    async def status(host: str) -> int:
        seen: list[Any] = []

        async def send(message: Any) -> None:
            seen.append(message)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})

        guard = Guard(app, hosts=hosts, api_keys=(), max_body=100, origins=(), on_answer=lambda *_: None)
        scope = {"type": "http", "path": "/", "method": "GET", "headers": [(b"host", host.encode())]}
        await guard(scope, asyncio.Queue[Any]().get, send)
        return int(seen[0]["status"])

    for host in ("192.168.1.7:8000", "[fe80::1]:8000", "localhost", *hosts):
        assert asyncio.run(status(host)) == 200
    for host in ("evil.example:8000", "192.168.1.7.evil.example", "", *(() if hosts else ("box.local",))):
        assert asyncio.run(status(host)) == 403


def test_a_job_that_takes_for_ever_is_ended_and_others_go_on():
    running: list[threading.Thread] = []

    def never_ends() -> None:
        running.append(threading.current_thread())
        while True:
            pass

    async def several() -> int:
        workers, deadline = TimedWorkers(1, 1.0), time.monotonic() + 60
        for _ in range(2):
            with pytest.raises(ApiError, match="took more than 1 s"):
                await workers.run(never_ends, deadline)
        return await workers.run(lambda: 7, deadline)

    assert asyncio.run(several()) == 7
    for thread in running:
        thread.join(60)
        assert not thread.is_alive()


def test_an_error_of_a_job_is_that_of_its_request_alone():
    async def several() -> int:
        workers, deadline = TimedWorkers(1), time.monotonic() + 60
        with pytest.raises(ZeroDivisionError):
            await workers.run(lambda: 1 // 0, deadline)
        return await workers.run(lambda: 7, deadline)

    assert asyncio.run(several()) == 7


@pytest.mark.parametrize("prompt", [3, 200])
def test_a_model_is_busy_from_a_request_on_until_its_end(prompt, folder, monkeypatch):
    """Its prompt is read between steps if it is short, and on another thread if it is long."""
    models = ServedModels([folder], config=None, max_new_tokens=400, loading={}, decoding={})
    loop, ended, busy = models.wait().loop, threading.Event(), []

    def tell(update: Any) -> None:
        if update.is_last:
            ended.set()

    def watched(own: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            figures = loop.figures()
            busy.append(bool(figures["running"] or figures["waiting"]))
            return own(*arguments, **options)

        return call

    for owner, name in ((PromptsAhead, "unread"), (Engine, "admit"), (Engine, "step"), (Request, "take")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    loop.submit(GenerationRequest(ids=[5] * prompt, options={"max_new_tokens": 3, "do_sample": False}), tell)
    assert ended.wait(60) and len(busy) > 3 and all(busy)
    models.close()
