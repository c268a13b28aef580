"""Clients beside each other: who waits for whom, and what one may learn of another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from lookahead import LookaheadConfig
from lookahead.backend import torch_backend
from lookahead.backend.read_prompt import ReadingAhead
from lookahead.decoding.prompts_ahead import PromptsAhead
from lookahead.decoding.request import Request
from lookahead.engine.engine import Engine
from lookahead.serving.api_errors import ApiError
from lookahead.serving.decoding_loop import DecodingLoop
from lookahead.serving.requests import GenerationRequest
from tests.support.running_server import Running, folder, server
from tests.test_decoding_loop import Client, alone

__all__ = ["folder", "server"]  # fixtures
pytest.importorskip("openai")
WAIT_S = 120.0
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def serving() -> Iterator[Callable[..., DecodingLoop]]:
    loops: list[DecodingLoop] = []

    def begin(*arguments: Any, **options: Any) -> DecodingLoop:
        loops.append(DecodingLoop(*arguments, **{"config": LookaheadConfig(draft="fixed"), **options}))
        return loops[-1]

    yield begin
    for loop in loops:
        loop.close()


def request_of(tokens: int, first: int = 5, **fields: Any) -> GenerationRequest:
    """A request whose prompt no other one begins like."""
    first = 3 + first % 90
    ids = [first, *(3 + (first * i) % 50 for i in range(1, tokens))]
    return GenerationRequest(ids=ids, options=fields.pop("options", GREEDY), **fields)


def test_short_and_quick_prompts_pass_long_ones_and_all_keep_their_tokens(
    serving, tiny_llama, tiny_tokenizer, monkeypatch
):
    monkeypatch.setattr("lookahead.decoding.prompts_ahead._QUICK", 200)
    leave, own, begun = threading.Event(), ReadingAhead.read, threading.Event()

    def slow(self: Any, ids: Any, *arguments: Any) -> Any:
        if len(ids) > 200:
            begun.set()
            assert leave.wait(WAIT_S)
        return own(self, ids, *arguments)

    monkeypatch.setattr(ReadingAhead, "read", slow)
    loop = serving(tiny_llama, tiny_tokenizer, rows=8, prefix_bytes=0)
    long = [(request_of(300 + i, 7 + i)) for i in range(4)]
    waiting = [Client(loop, request) for request in long]
    assert begun.wait(WAIT_S)
    quick = [request_of(tokens, 20 + tokens) for tokens in (5, 100, 199, 40)]
    passing = [Client(loop, request) for request in quick]
    for client in passing:
        client.wait()
    assert not any(client.updates for client in waiting)
    leave.set()
    for client, request in zip([*waiting, *passing], [*long, *quick], strict=True):
        assert client.wait().error is None
        assert client.tokens == alone(tiny_llama, tiny_tokenizer, request).token_ids[0]


def test_of_prompts_that_wait_the_shortest_is_read_next(serving, tiny_llama, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr("lookahead.decoding.prompts_ahead._QUICK", 280)
    leave, own, order = threading.Event(), ReadingAhead.read, list[int]()

    def read(self: Any, ids: Any, *arguments: Any) -> Any:
        order.append(len(ids))
        assert leave.wait(WAIT_S)
        return own(self, ids, *arguments)

    monkeypatch.setattr(ReadingAhead, "read", read)
    loop = serving(tiny_llama, tiny_tokenizer, rows=16, prefix_bytes=0)

    def put(*sizes: int) -> list[Client]:
        return [Client(loop, request_of(tokens, tokens, client=str(tokens))) for tokens in sizes]

    clients = put(200, 300, 210)  # the thread takes the quick ones
    while len(loop._together._scheduler.running) < 2:
        time.sleep(0.01)
    clients += put(150, 250, 160, 400)
    deadline = time.monotonic() + WAIT_S
    while len(loop._together._scheduler._waiting) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    leave.set()
    for client in clients:
        assert client.wait().error is None
    assert [tokens for tokens in order if tokens <= 280] == [200, 210, 150, 160, 250]
    assert [tokens for tokens in order if tokens > 280] == [300, 400] and order.index(300) > order.index(160)


def test_few_tokens_of_prompts_that_keep_coming_are_read_between_two_steps(
    serving, tiny_llama, tiny_tokenizer, monkeypatch
):
    loop, own, read = serving(tiny_llama, tiny_tokenizer, rows=16, cache_tokens=8000, prefix_bytes=0), Engine.step, [0]

    def step(self: Any, **options: Any) -> Any:
        read.append(0)
        return own(self, **options)

    monkeypatch.setattr(Engine, "step", step)
    scheduler = loop._together._scheduler
    for i in range(14):
        planned = loop.plan(request_of(100, 7 + i))
        request = Request(i)
        request.join(planned.plan)
        scheduler.add(request)
        for requests in scheduler.steps():  # a server leaves a block where new requests have come
            read[-1] += 100 * sum(len(request.token_ids) == 1 for request in requests)
            break
    assert max(read) == 200 and len(read) > 3


def test_a_prompt_is_passed_only_until_others_have_four_times_as_many_tokens(tiny_llama):
    def request_with(tokens: int) -> Request:
        return Request(tokens, row=SimpleNamespace(tokens=tokens, text=np.arange(tokens)))

    ahead, order = PromptsAhead(tiny_llama, LookaheadConfig(), 0, is_beside=True), list[int]()
    waiting = [request_with(300)]
    for _ in range(10):
        waiting.append(request_with(100))
        first, *waiting = ahead.in_order(waiting)
        ahead.count(first)
        order.append(first.index)
    assert order == [*[100] * 8, 300, 100]


def test_a_long_prompt_that_waits_for_room_is_not_passed_for_ever(serving, tiny_llama, tiny_tokenizer):
    loop, order = serving(tiny_llama, tiny_tokenizer, rows=4, cache_tokens=500), list[str]()

    def put(name: str, request: GenerationRequest) -> Client:
        return Client(loop, request, lambda: order.append(name))

    endless = {"max_new_tokens": 150, "min_new_tokens": 150, "do_sample": False}
    first = put("first", request_of(9, 4, options=endless))
    large = put("large", request_of(300, 6))
    later = [put("later", request_of(9, 10 + i, options=endless)) for i in range(6)]
    for client in (first, large, *later):
        client.wait()
    assert order.index("large") < 3


def test_all_rows_serve_beside_a_prompt_of_six_thousand_tokens(serving, tiny_tokenizer, monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=101, max_position_embeddings=8192, **sizes)).eval()
    loop, own, together = serving(model, tiny_tokenizer, rows=16), Engine.step, list[int]()

    def step(self: Any, **options: Any) -> Any:
        together.append(len(self._rows))
        return own(self, **options)

    monkeypatch.setattr(Engine, "step", step)
    endless = {"max_new_tokens": 400, "min_new_tokens": 400, "do_sample": False}
    clients = [Client(loop, request_of(6000 if i == 0 else 9, 4 + i, options=endless)) for i in range(16)]
    for client in clients:
        assert client.wait().error is None
    assert max(together) == 16


def test_a_short_request_waits_for_no_row_and_longer_ones_do(serving, tiny_llama, tiny_tokenizer):
    loop, order = serving(tiny_llama, tiny_tokenizer, rows=8), list[str]()

    def put(name: str, first: int, tokens: int) -> Client:
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        request = request_of(9, first, client=name, options=options)
        return Client(loop, request, lambda: order.append(name))

    running = [put(f"running {i}", 4 + i, 450) for i in range(8)]
    deadline = time.monotonic() + WAIT_S
    while len(order) < 8:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    others = [put("longer", 20, 17), *(put(f"short {i}", 30 + i, 16) for i in range(3))]
    for client in others[1:]:
        assert client.wait().error is None
    assert order[8:] == ["short 0", "short 1", "short 2"] and not any(client.updates[-1].is_last for client in running)
    for client in (*running, *others):
        assert client.wait().error is None
    assert order[-1] == "longer"


def test_a_client_that_fills_the_queue_keeps_no_other_one_out(serving, tiny_llama, tiny_tokenizer):
    loop = serving(tiny_llama, tiny_tokenizer, rows=1, queue=1)
    endless = {"max_new_tokens": 200, "min_new_tokens": 200, "do_sample": False}

    def put(client: str, first: int) -> Client:
        return Client(loop, request_of(9, first, client=client, options=endless))

    clients = [put("a", 70), put("a", 71)]
    with pytest.raises(ApiError, match="requests wait"):
        put("a", 72)
    clients.append(put("b", 73))
    with pytest.raises(ApiError, match="requests wait"):
        put("b", 74)
    for client in clients:
        assert client.wait().error is None


def test_turns_go_round_the_clients(serving, tiny_llama, tiny_tokenizer):
    loop, order, begun = serving(tiny_llama, tiny_tokenizer, rows=1), list[str](), threading.Event()
    long = {"max_new_tokens": 480, "min_new_tokens": 480, "do_sample": False}

    def put(client: str, first: int, **fields: Any) -> Client:
        request = request_of(9, first, client=client, **fields)
        return Client(loop, request, lambda: (order.append(client), begun.set()))

    clients = [put("a", 4, options=long)]
    assert begun.wait(WAIT_S)
    clients += [put("a", 5 + i) for i in range(4)] + [put("b", 20), put("c", 21), put("b", 22)]
    for client in clients:
        client.wait()
    assert order == ["a", "b", "c", "a", "b", "a", "a", "a"]


def test_a_prompt_is_not_read_to_its_end_for_a_client_that_left(serving, tiny_llama, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(torch_backend, "PREFILL_CHUNK", 16)
    loop, own, parts, ticket = serving(tiny_llama, tiny_tokenizer, rows=2), ReadingAhead.read, list[int](), list[Any]()
    submitted = threading.Event()

    def read(self: Any, ids: Any, salt: str, on_prefill: Any) -> Any:
        def report(done: int, total: int) -> None:
            parts.append(done)
            assert submitted.wait(WAIT_S)
            if done >= 32:
                ticket[0].ticket.cancel()
            on_prefill(done, total)

        return own(self, ids, salt, report)

    monkeypatch.setattr(ReadingAhead, "read", read)
    ticket.append(Client(loop, request_of(400)))
    submitted.set()
    assert ticket[0].wait().end == "cancelled" and parts == [0, 16, 32]
    other = request_of(20, 9)
    client = Client(loop, other)
    client.wait()
    assert client.tokens == alone(tiny_llama, tiny_tokenizer, other).token_ids[0]


@pytest.mark.parametrize("tokens", [40, 150])
def test_kept_keys_are_those_of_requests_with_the_same_salt(serving, tokens, tiny_llama, tiny_tokenizer):
    loop, reused = serving(tiny_llama, tiny_tokenizer, rows=2), list[int]()
    for salt in ("", "a", "b", "a", "b", ""):
        request = request_of(tokens, 11 + tokens, salt=salt)
        client = Client(loop, request)
        reused.append(client.wait().stats.reused_tokens)
        assert client.tokens == alone(tiny_llama, tiny_tokenizer, request).token_ids[0]
    assert reused == [0, 0, 0, tokens - 1, tokens - 1, tokens - 1]


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_a_salt_of_a_request_hides_what_others_wrote(server):
    text = "what a secret this is, and nobody else may know of it"
    server.ask(text, extra_body={"cache_salt": "mine"})
    assert cached(server.ask(text)) == cached(server.ask(text, extra_body={"cache_salt": "other"})) == 0
    assert cached(server.ask(text, extra_body={"cache_salt": "mine"})) > 0


def test_clients_with_keys_of_their_own_share_no_kept_texts(folder):
    running = Running(folder, api_keys=["one", "schl\u00fcssel"])
    try:
        body = {"messages": [{"role": "user", "content": "a long enough text for a prefix"}], "max_tokens": 2}

        def ask(key: bytes) -> int:
            answer = running.raw(
                "POST", "/v1/chat/completions", body, Authorization=(b"Bearer " + key).decode("latin-1")
            )
            assert answer[0] == 200, answer
            return int(answer[1]["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert ask(b"one") == ask("schl\u00fcssel".encode()) == 0
        assert ask(b"one") == ask("schl\u00fcssel".encode()) == ask("schl\u00fcssel".encode("latin-1")) > 0
        assert running.raw("GET", "/v1/models", Authorization="Bearer schlussel")[0] == 401
    finally:
        running.end()
