"""A server on a thread of this process, and clients of it."""

from __future__ import annotations

import copy
import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lookahead.serving.connections import Server, listen
from lookahead.serving.served_models import ServedModels
from lookahead.serving.web_app import make_app
from tests.support.grammars import json_model, json_tokenizer


class Running:
    """The server, and its clients."""

    def __init__(self, folder: str, **options: Any) -> None:
        decoding = {"rows": 3, "queue": 8, **options.pop("decoding", {})}
        serving = {"plain_user_text": options.pop("plain_user_text", False)}
        serving["max_new_tokens"] = options.pop("max_new_tokens", 3000)
        given = {**serving, "config": None, "loading": {"device": "cpu"}, "decoding": decoding}
        self.models = ServedModels([folder], **given)
        self.listener = listen("127.0.0.1", 0)
        self.name, self.port = self.models.names[0], self.listener.getsockname()[1]
        connections = options.pop("connections", None)
        self.server = Server(make_app(self.models, **options), self.models, connections=connections)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self._thread.start()
        self.models.wait()
        import openai  # not at the top: it takes a second, and every worker imports this file

        url, self.errors = f"http://127.0.0.1:{self.port}/v1", openai.APIStatusError
        self.client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=120)

    def ask(self, text: str, **options: Any) -> Any:
        options = {"max_tokens": 30, "temperature": 0, "model": self.name, **options}
        return self.client.chat.completions.create(messages=[{"role": "user", "content": text}], **options)

    def complete(self, prompt: Any, **options: Any) -> Any:
        options = {"max_tokens": 30, "temperature": 0, "model": self.name, **options}
        return self.client.completions.create(prompt=prompt, **options)

    def raw(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """The status and the body of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, sent, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        content = answer.read()
        try:
            return answer.status, json.loads(content)
        except ValueError:
            return answer.status, content

    def refused(self, **fields: Any) -> str:
        """The message of a chat request that is refused with 400."""
        body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3, **fields}
        status, answer = self.raw("POST", "/v1/chat/completions", {k: v for k, v in body.items() if v is not ...})
        assert status == 400 and {*answer["error"]} == {"message", "type", "param", "code"}, answer
        return str(answer["error"]["message"])

    @property
    def is_busy(self) -> bool:
        figures = self.models.wait().loop.figures()
        return bool(figures["running"] or figures["waiting"])

    def end(self) -> None:
        self.server.stop()
        self._thread.join(30)
        assert not self._thread.is_alive()


LONG = {"prompt": "abc", "max_tokens": 1900, "n": 8, "logit_bias": {"1": -100, "2": -100}}
"""A completion without an end-of-sequence token, which takes seconds."""


def save_chatty(path: Path) -> str:
    """Save a tiny model with a tokenizer of bytes and a chat template; returns the folder."""
    tokenizer = copy.deepcopy(json_tokenizer())
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | map(attribute='function.name') | join }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    json_model().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def wait_until_idle(server: Running) -> None:
    deadline = time.monotonic() + 60
    while server.is_busy and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server.is_busy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    """The folder of a tiny model."""
    return save_chatty(tmp_path_factory.mktemp("served") / "chatty")


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Running]:
    """A server of the tiny model."""
    running = Running(folder)
    yield running
    running.end()
