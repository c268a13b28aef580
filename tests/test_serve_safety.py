"""What a server refuses and what it survives: wrong fields, hosts, keys, clients that leave, limits."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from typer.testing import CliRunner

import lookahead
from lookahead.cli.app import app
from lookahead.serving.parsing import parsed
from lookahead.serving.request_schemas import ChatBody
from tests.support.running_server import LONG, Running, folder, server, wait_until_idle

__all__ = ["folder", "server"]  # fixtures
pytest.importorskip("openai")


@pytest.fixture(scope="module")
def plain(folder: str) -> Any:
    """What `lookahead.generate` answers."""
    model, tokenizer = lookahead.load(folder, device="cpu")

    def answer(text: str) -> Any:
        chat = [{"role": "user", "content": text}]
        return lookahead.generate(model, tokenizer, chat, max_new_tokens=30, do_sample=False)

    return answer


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2, got 3"),
        ({"temperature": "hot"}, "temperature: "),
        ({"top_p": 0}, "top_p: "),
        ({"n": 0}, "n: "),
        ({"n": True}, "n: "),
        ({"max_tokens": 10**9}, "max_tokens: must be from 1 to "),
        ({"max_tokens": 1.5}, "max_tokens: "),
        ({"seed": 2**70}, "seed: "),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 99}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias: keys must be token ids"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias: keys must be token ids"),
        ({"top_logprobs": 3}, "top_logprobs: is for logprobs=true"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role: "),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages: the chat template does not"),
        ({"messages": "hello"}, "messages: "),
        ({"messages": ...}, "messages: Field required"),
        ({"chat_template": "{{ 1 }}"}, "chat_template: unknown field"),
        ({"chat_template_kwargs": {"chat_template": "{% for i in range(10**9) %}{% endfor %}"}}, "cannot be set by"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "king"}}}}, ""),
        ({"response_format": {"type": "yaml"}}, "response_format.type: "),
        ({"tool_choice": "required"}, "tool_choice: must name one of the tools"),
        ({"regex": "a(", "max_tokens": 5}, ""),
        ({"regex": "a", "grammar": "start: \"a\""}, "grammar: cannot be combined with regex"),
        ({"best_of": 3}, "best_of: unknown field"),
        ({"functions": [{"name": "f"}], "tools": [{"type": "function", "name": "f"}]}, "cannot be combined with tools"),
        ({"audio": {}}, "audio: unknown field"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(server, fields, message):
    assert message in server.refused(**fields)
    assert not server.is_busy


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": NaN}', b"1" * 5000], ids=repr)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_a_body_that_is_no_request_is_a_400(server, path, body):
    status, answer = server.raw("POST", path, body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"


def test_a_request_without_a_model_is_answered_by_the_first(server, plain):
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 30, "temperature": 0}
    status, answer = server.raw("POST", "/v1/chat/completions", body)
    assert status == 200 and answer["choices"][0]["message"]["content"] == plain("abc").texts[0]


@pytest.mark.parametrize("name", ["other", "../chatty", "/etc/passwd", "chatty@main", "", "a" * 5000, "org/name"])
def test_models_that_are_not_served_are_not_loaded(server, name):
    status, answer = server.raw("POST", "/v1/completions", {"model": name, "prompt": "x"})
    assert status == 404 and answer["error"]["code"] == "model_not_found"
    assert len(json.dumps(answer)) < 1000 and len(server.models.loaded) == 1


def test_unknown_paths_and_methods_are_told_in_the_same_shape(server):
    for method, path, expected in (
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/load_model", 404),
    ):
        status, answer = server.raw(method, path)
        assert status == expected and {*answer["error"]} == {"message", "type", "param", "code"}


def test_health_models_tokens_metrics_and_the_page_are_served(server):
    server.ask("abc")
    assert server.raw("GET", "/health") == (200, {"status": "ok"})
    assert [each["id"] for each in server.raw("GET", "/v1/models")[1]["data"]] == [server.name]
    _, told = server.raw("POST", "/tokenize", {"prompt": "abab"})
    assert told["count"] == len(told["tokens"]) == 2
    _, metrics = server.raw("GET", "/metrics")
    for line in (
        b"lookahead_completion_tokens_total ",
        b'lookahead_accepted_tokens_total{source="recycled"}',
        b"lookahead_waiting{",
    ):
        assert line in metrics
    status, page = server.raw("GET", "/")
    assert status == 200 and b"<html" in page and b"http://" not in page.replace(b"http://www.w3.org", b"")


def test_a_host_that_is_not_this_one_is_refused(server):
    for host in ("evil.example", "127.0.0.1.evil.example:80", "", "localhost@evil.example", "[", "[::1"):
        status, answer = server.raw("GET", "/v1/models", Host=host)
        assert (status, answer["error"]["param"]) == (403, None), host
    for host in ("localhost:1", "127.0.0.1", "LOCALHOST", "[::1]:80", "192.168.1.7"):
        assert server.raw("GET", "/v1/models", Host=host)[0] == 200


def test_web_pages_of_other_origins_get_no_leave(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request(
        "OPTIONS",
        "/v1/chat/completions",
        None,
        {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"},
    )
    assert connection.getresponse().getheader("access-control-allow-origin") is None


def test_a_key_a_limit_of_bytes_and_an_origin_may_be_set(folder):
    running = Running(folder, api_keys=["secret"], max_body=2000, cors_origins=["https://good.example"])
    try:
        assert running.ask("abc").choices
        assert (
            running.raw("GET", "/v1/models")[0]
            == running.raw("GET", "/metrics", Authorization="Bearer wrong")[0]
            == 401
        )
        assert running.raw("GET", "/health")[0] == 200
        with pytest.raises(running.errors) as raised:
            running.ask("a" * 3000)
        assert raised.value.status_code == 413
        for _ in range(5):  # more than fits the buffers between, so that a reset would lose the answer
            connection = http.client.HTTPConnection("127.0.0.1", running.port)
            connection.request("POST", "/v1/completions", b"x" * 900_000, {"Authorization": "Bearer secret"})
            assert connection.getresponse().status == 413
        connection = http.client.HTTPConnection("127.0.0.1", running.port)  # which does not tell how long it is
        chunks = iter([b"x" * 1000] * 5)
        connection.request("POST", "/v1/completions", chunks, {"Authorization": "Bearer secret"}, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection = http.client.HTTPConnection("127.0.0.1", running.port)
        connection.request("GET", "/health", None, {"Origin": "https://good.example"})
        assert connection.getresponse().getheader("access-control-allow-origin") == "https://good.example"
    finally:
        running.end()


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_ends_its_answer(server, streams):
    wait_until_idle(server)
    body = {**LONG, "stream": streams}
    sent = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n\r\n"
        connection.sendall(head.encode() + sent)
        deadline = time.monotonic() + 30
        while not server.is_busy and time.monotonic() < deadline:
            time.sleep(0.005)
        assert server.is_busy
    wait_until_idle(server)


def test_a_full_queue_is_told_with_a_time_to_come_again(folder):
    running = Running(folder, decoding={"rows": 1, "queue": 1})
    try:
        body = {**LONG, "n": 1}
        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(running.raw, "POST", "/v1/completions", body) for _ in range(6)]
            deadline = time.monotonic() + 60
            while not any(each.done() and each.result()[0] == 429 for each in answers) and time.monotonic() < deadline:
                time.sleep(0.01)
            statuses = {each.result()[0] for each in answers if each.done()}
            running.models.close()
        assert 429 in statuses
    finally:
        running.end()


def test_an_answer_that_takes_too_long_is_ended(folder):
    running = Running(folder, timeout_s=1.0)
    try:
        body = LONG
        status, answer = running.raw("POST", "/v1/completions", body)
        assert status == 504 and "--request-timeout" in answer["error"]["message"]
        wait_until_idle(running)
    finally:
        running.end()


def test_an_unexpected_error_tells_nothing_of_ours(server, monkeypatch):
    monkeypatch.setattr("lookahead.serving.translation.Translator.of_completion", lambda *_: 1 / 0)
    status, answer = server.raw("POST", "/v1/completions", {"prompt": "x"})
    assert (status, answer["error"]["message"]) == (500, "internal error")


def test_a_tokenizer_that_hangs_holds_no_other_client_up(folder, monkeypatch):
    monkeypatch.setattr("lookahead.serving.service._READING_S", 0.5)
    server, hangs = Running(folder), threading.Event()
    monkeypatch.setattr("lookahead.serving.translation.Translator.tokens_of", lambda *_: hangs.wait(20))
    assert server.raw("POST", "/tokenize", {"prompt": "abc"})[0] == 503
    assert server.raw("GET", "/health")[0] == 200
    hangs.set()
    server.end()


def test_mistakes_on_the_command_line_are_told_in_a_line(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, message in (
            ([folder, "--host", "127.0.0.1", "--port", port], f"cannot listen on port {port}"),
            (["no/such/folder/at/all"], "no/such/folder"),
            ([folder, folder, "--memory", "x.lkm"], "belongs to one model: serve one model"),
            ([folder, "--queue", "-1"], "--queue"),
        ):
            result = CliRunner().invoke(app, ["serve", "--device", "cpu", *arguments])
            assert result.exit_code == 2 and message in result.output.replace("\n", "")


def test_the_first_wrong_field_is_named_whatever_is_sent():
    from lookahead.serving.api_errors import ApiError

    for wrong in (
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [7]},
        {"messages": {"a": 1}},
        {"n": [1]},
    ):
        with pytest.raises(ApiError) as raised:
            parsed(ChatBody, json.dumps({"messages": [{"role": "user", "content": "x"}], **wrong}).encode())
        assert raised.value.body["error"]["param"].partition(".")[0] in ("messages", "n")


def test_a_model_that_cannot_be_loaded_ends_the_command_with_the_reason(folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    result = CliRunner().invoke(app, ["serve", "--device", "cpu", "--port", "0", str(broken)])
    assert result.exit_code == 2 and "cannot be loaded" in result.output.replace("\n", " ")
