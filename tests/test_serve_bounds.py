"""Work whose size a client sets: it is bounded, done once, and ends with the client."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from lookahead.decoding.prompts import PromptReader
from lookahead.plugins.grammar.grammar import Grammar
from lookahead.serving import service
from lookahead.serving.answers import Answer
from lookahead.serving.messages import MessagesAnswer
from lookahead.serving.parsing import parsed
from lookahead.serving.request_schemas import ChatBody, CompletionBody
from lookahead.serving.responses import ResponsesAnswer
from lookahead.serving.timed_workers import TimedWorkers
from lookahead.serving.translation import Translator
from tests.support.running_server import Running, folder, server

__all__ = ["folder", "server"]  # fixtures
pytest.importorskip("openai")
WAIT_S = 60.0


def soon() -> float:
    """A deadline."""
    return time.monotonic() + WAIT_S


def refused_at_once(server: Any, path: str, body: Any) -> dict[str, Any]:
    """The error of a request that is refused with 400 while all threads that read requests are busy."""
    entered, leave = threading.Semaphore(0), threading.Event()

    def hangs(*_: Any) -> list[int]:
        entered.release()
        leave.wait(WAIT_S)
        return []

    own = Translator.tokens_of
    Translator.tokens_of = hangs
    try:
        with ThreadPoolExecutor(service._READERS) as pool:
            try:
                for _ in range(service._READERS):
                    pool.submit(server.raw, "POST", "/tokenize", {"prompt": "abc"})
                    assert entered.acquire(timeout=WAIT_S)
                status, answer = server.raw("POST", path, body)
            finally:
                leave.set()
    finally:
        Translator.tokens_of = own
    assert status == 400, answer
    return dict(answer["error"])


@pytest.mark.parametrize("text", ["x", "\N{WINKING FACE}", " "])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_a_prompt_that_cannot_fit_is_refused_by_its_size_however_busy(server, path, text):
    long = text * 250_000
    body = {"messages": [{"role": "user", "content": long}]} if "chat" in path else {"prompt": long}
    assert refused_at_once(server, path, body)["code"] == "context_length_exceeded"


def test_a_text_is_measured_in_bytes_as_its_tokens_are(server):
    translator = server.models.wait().translator
    tokens = translator.context * translator._longest // 4 + 1  # characters of four bytes
    body = {"prompt": "\N{WINKING FACE}" * tokens}
    assert refused_at_once(server, "/v1/completions", body)["code"] == "context_length_exceeded"


def test_the_size_of_a_chat_is_that_of_all_its_messages(server):
    part = {"role": "user", "content": [{"type": "text", "text": "x" * 1000}] * 20}
    body = {"messages": [part] * 40}
    assert refused_at_once(server, "/v1/chat/completions", body)["param"] == "messages"


def test_token_ids_that_cannot_fit_are_counted(server):
    assert refused_at_once(server, "/v1/completions", {"prompt": [5] * 3000})["code"] == "context_length_exceeded"


def test_a_prompt_that_may_fit_is_not_refused_by_its_size(server):
    tokenizer, translator = server.models.wait().tokenizer, server.models.wait().translator
    longest = max(tokenizer.get_vocab(), key=len)
    text = tokenizer.decode(tokenizer.convert_tokens_to_ids([longest])) * (translator.context - 1)
    ids = tokenizer(text).input_ids
    if len(ids) < translator.context:
        assert server.complete(text, max_tokens=1).usage.prompt_tokens == len(ids)
    translator.check(parsed(CompletionBody, json.dumps({"prompt": text}).encode()))


@pytest.mark.parametrize(
    "body", [{"prompt": "abc", "n": 12}, {"prompt": ["abc"] * 12}, {"prompt": ["abc"] * 3, "n": 4}], ids=str
)
def test_more_outputs_than_can_run_and_wait_will_never_be_served(server, body):
    error = refused_at_once(server, "/v1/completions", body)
    assert "at most 11 outputs at once, got 12" in error["message"] and error["param"] == "n"


def test_the_work_of_a_request_is_done_once_for_all_choices(server, monkeypatch):
    calls = list[str]()

    def counted(owner: Any, name: str) -> None:
        own = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return own(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    counted(Grammar, "__init__")
    counted(PromptReader, "plan")
    got = server.ask("abc", n=4, seed=3, temperature=1.5, extra_body={"regex": "[ab]{3,9}"})
    assert len({choice.message.content for choice in got.choices}) > 1
    assert sorted(calls) == ["__init__", "plan"]


@pytest.mark.parametrize("longest", [5, 500])
def test_a_prediction_is_cut_to_what_the_answer_can_hold_before_it_is_tokenized(longest, server, monkeypatch):
    translator, most = server.models.wait().translator, 8
    tokenizer: Any = translator._tokenizer
    sizes, own = list[int](), type(tokenizer).__call__

    def call(self: Any, text: Any, *arguments: Any, **options: Any) -> Any:
        sizes.append(len(text))
        return own(self, text, *arguments, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", call)
    monkeypatch.setattr(translator, "_longest", longest)  # bytes of a token
    prediction = {"type": "content", "content": "ab" * 100_000}
    body = {"messages": [{"role": "user", "content": "abc"}], "prediction": prediction, "n": 8, "max_tokens": most}
    (request,) = translator.of_chat(parsed(ChatBody, json.dumps(body).encode()))
    assert request.choices == 8 and len(request.prediction) >= most
    assert max(sizes) <= most * min(longest, 16)


def test_what_is_read_for_clients_that_left_is_given_up(folder, monkeypatch):
    monkeypatch.setattr(service, "_READING_S", WAIT_S)
    begun, server = threading.Semaphore(0), Running(folder)

    def endless(*_: Any) -> None:
        begun.release()
        while True:
            time.sleep(0.001)

    with monkeypatch.context() as patch:
        patch.setattr(Translator, "of_completion", endless)
        sent = json.dumps({"prompt": "abc"}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n\r\n".encode()
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(service._READERS)]
        for client in clients:
            client.sendall(head + sent)
            assert begun.acquire(timeout=WAIT_S)
        for client in clients:
            client.close()
    began = time.monotonic()
    assert server.raw("POST", "/tokenize", {"prompt": "abc"})[0] == 200
    assert time.monotonic() - began < WAIT_S / 2  # before the limit of time
    server.end()


@contextmanager
def stalled(monkeypatch: Any, owner: Any, name: str) -> Iterator[threading.Semaphore]:
    """A function of the server does not begin before the end; a semaphore counts its calls."""
    begun, leave, own = threading.Semaphore(0), threading.Event(), getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        begun.release()
        assert leave.wait(WAIT_S)
        return own(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, call)
        try:
            yield begun
        finally:
            leave.set()


REQUESTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/responses": {"input": "abc", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "abc"}]},
    "/tokenize": {"prompt": "abc"},
}
WORK = [
    *((path, owner, name) for path in REQUESTS for owner, name in [(service, "parsed"), (Translator, "check")]),
    ("/v1/completions", Answer, "__init__"), ("/v1/completions", Answer, "whole"),
    ("/v1/responses", ResponsesAnswer, "answer"), ("/v1/messages", MessagesAnswer, "answer"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "owner", "name"), WORK, ids=lambda value: getattr(value, "__name__", str(value)))
def test_others_are_answered_while_bodies_are_read_and_answers_written(server, monkeypatch, path, owner, name):
    with ThreadPoolExecutor(8) as pool, stalled(monkeypatch, owner, name) as begun:
        answers = [pool.submit(server.raw, "POST", path, REQUESTS[path]) for _ in range(8)]
        assert begun.acquire(timeout=WAIT_S)
        assert server.raw("GET", "/health")[0] == 200
    assert [answer.result()[0] for answer in answers] == [200] * 8


@pytest.mark.parametrize("stream", [{"logprobs": 3, "echo": True, "max_tokens": 0}, {"max_tokens": 2}], ids=str)
@pytest.mark.parametrize("name", ["begin", "finish"])
def test_others_are_answered_while_a_stream_begins_and_ends(server, monkeypatch, stream, name):
    body = {"prompt": "abc", "stream": True, **stream}
    with ThreadPoolExecutor(1) as pool, stalled(monkeypatch, Answer, name) as begun:
        answer = pool.submit(server.raw, "POST", "/v1/completions", body)
        assert begun.acquire(timeout=WAIT_S)
        assert server.raw("GET", "/health")[0] == 200
    assert answer.result()[1].endswith(b"data: [DONE]\n\n")


def test_a_body_of_too_many_objects_is_refused_and_those_in_texts_are_not_counted(server):
    many = 1 << 14
    body = {"prompt": "abc", "guided_json": {"enum": [{}] * (many - 4)}, "foo": []}
    assert "foo: unknown field" in server.raw("POST", "/v1/completions", body)[1]["error"]["message"]
    body["guided_json"]["enum"].append([])
    status, answer = server.raw("POST", "/v1/completions", body)
    assert (status, answer["error"]["message"]) == (
        400, f"the body must have at most {many} objects and arrays, got {many + 1}"
    )  # fmt: skip
    text = '\\"[{' * 20_000 + "\\"
    assert server.raw("POST", "/tokenize", {"prompt": text})[1]["error"]["code"] == "context_length_exceeded"


def test_no_more_tasks_run_at_once_than_there_are_workers_even_if_they_are_left():
    running, most, leave = 0, 0, threading.Event()

    def busy() -> None:  # in code that is not Python's, which cannot be interrupted
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            leave.wait(WAIT_S)
        finally:
            running -= 1

    async def several() -> None:
        workers = TimedWorkers(2)
        tasks = [asyncio.ensure_future(workers.run(busy, soon())) for _ in range(6)]
        await asyncio.sleep(0.05)
        for task in tasks[:4]:  # their clients have left
            task.cancel()
        await asyncio.sleep(0.05)
        assert most == 2
        leave.set()
        await asyncio.gather(*tasks[4:])
        assert await workers.run(lambda: 7, soon()) == 7

    asyncio.run(several())
    assert most == 2


def test_workers_take_the_tasks_of_clients_in_turns():
    order, leave = list[str](), threading.Event()

    async def several() -> None:
        workers = TimedWorkers(1)
        first = asyncio.ensure_future(workers.run(lambda: leave.wait(WAIT_S), soon()))
        await asyncio.sleep(0)
        tasks = [
            asyncio.ensure_future(workers.run(lambda client=client: order.append(client), soon(), client))
            for client in ["a", "a", "a", "b", "c", "b"]
        ]
        await asyncio.sleep(0.05)
        leave.set()
        await asyncio.gather(first, *tasks)

    asyncio.run(several())
    assert order == ["a", "b", "c", "a", "b", "a"]


@pytest.mark.parametrize("key", ["1" * 4400, "01", "\N{ARABIC-INDIC DIGIT ONE}", "-1", "1.0", " 1", ""], ids=repr)
def test_a_token_has_one_name_among_biases(server, key):
    assert "keys must be token ids" in server.refused(logit_bias={key: 1})
