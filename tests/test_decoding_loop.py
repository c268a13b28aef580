"""The decoding loop of the server: every output has the tokens that it has alone, whatever runs beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.read_prompt import PrefixStore, prefixes_of
from lookahead.backend.torch_backend import TorchBackend
from lookahead.decoding import scheduler
from lookahead.engine.engine import Engine
from lookahead.errors import ConfigError, PromptError
from lookahead.model.slots import RowCopy
from lookahead.serving.api_errors import ApiError
from lookahead.serving.decoding_loop import DecodingLoop
from lookahead.serving.requests import GenerationRequest, Update
from tests.test_encoder_decoder import model_of

PROMPTS = [
    "abcabcabcabcabcabcabcabcab",
    "the cat sat on the mat and the cat sat on the",
    "xyz",
    "a b c d e f g a b c d",
]
WAIT_S = 120.0
GREEDY = {"max_new_tokens": 12, "do_sample": False}


class Client:
    """Collects the updates of one output."""

    def __init__(
        self, loop: DecodingLoop, request: GenerationRequest, on_first: Callable[[], Any] | None = None
    ) -> None:
        self.updates, self._ended, self._on_first = list[Update](), threading.Event(), on_first
        self.ticket = loop.submit(request, self._take)

    def _take(self, update: Update) -> None:
        self.updates.append(update)
        if self._on_first is not None and len(self.updates) == 1:
            self._on_first()
        if update.is_last:
            self._ended.set()

    def wait(self) -> Update:
        assert self._ended.wait(WAIT_S)
        return self.updates[-1]

    @property
    def tokens(self) -> list[int]:
        return [token for update in self.updates for token in update.tokens]

    @property
    def text(self) -> str:
        return "".join(update.text for update in self.updates)


@pytest.fixture
def serving() -> Iterator[Callable[..., DecodingLoop]]:
    loops: list[DecodingLoop] = []

    def begin(*arguments: Any, **options: Any) -> DecodingLoop:
        loops.append(DecodingLoop(*arguments, **{"config": LookaheadConfig(draft="fixed"), **options}))
        return loops[-1]

    yield begin
    for loop in loops:
        loop.close()


def request_of(tokenizer: Any, text: str, **options: Any) -> GenerationRequest:
    given = {name: options.pop(name) for name in ("seed", "top_logprobs", "prediction") if name in options}
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    return GenerationRequest(ids=tokenizer(text).input_ids, options=options, **given)


def alone(model: Any, tokenizer: Any, request: GenerationRequest) -> lookahead.GenerationResult:
    """What the request gives by itself."""
    return lookahead.generate(
        model, tokenizer, request.ids, seed=request.seed, prediction=request.prediction, **request.options
    )


class Pushing(LogitsProcessor):
    """Keeps a state: the scores of a token grow at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls += 1
        scores[:, 7] += 0.05 * self.calls
        return scores


OPTIONS = {
    "greedy": lambda: {},
    "longer": lambda: {"max_new_tokens": 50},
    "drawn": lambda: {"do_sample": True, "temperature": 0.9, "seed": 3},
    "drawn by another seed": lambda: {"do_sample": True, "top_k": 5, "seed": 4},
    "penalized": lambda: {"repetition_penalty": 1.3},
    "one token": lambda: {"max_new_tokens": 1},
    "with a processor that keeps a state": lambda: {"logits_processor": [Pushing()]},
    "with logarithms": lambda: {"top_logprobs": 3},
    "predicted": lambda: {"prediction": "abc abc the cat"},
    "ended by a text": lambda: {"stop_strings": ["a"]},
}


@pytest.mark.parametrize("draft", ["fixed", "auto"])
def test_outputs_with_options_of_their_own_have_the_tokens_they_have_alone(serving, draft, tiny_llama, tiny_tokenizer):
    loop = serving(tiny_llama, tiny_tokenizer, rows=3, config=LookaheadConfig(draft=draft))
    requests = [request_of(tiny_tokenizer, text, **make()) for make in OPTIONS.values() for text in PROMPTS]
    clients = [Client(loop, request) for request in requests]
    for client, request in zip(clients, requests, strict=True):
        last = client.wait()
        if "logits_processor" in request.options:
            request = GenerationRequest(ids=request.ids, options={**request.options, "logits_processor": [Pushing()]})
        expected = alone(tiny_llama, tiny_tokenizer, request)
        assert (client.tokens, client.text) == (expected.token_ids[0], expected.texts[0])
        assert last.end == expected.finish_reasons[0] and last.error is None
        assert sum(len(each.logprobs) for each in client.updates) == len(client.tokens) * (
            request.top_logprobs is not None
        )


def test_logarithms_are_those_of_the_models_logits(serving, tiny_llama, tiny_tokenizer):
    loop = serving(tiny_llama, tiny_tokenizer, rows=2)
    client = Client(loop, request_of(tiny_tokenizer, PROMPTS[0], top_logprobs=4))
    client.wait()
    ids = tiny_tokenizer(PROMPTS[0]).input_ids
    with torch.no_grad():
        logits = tiny_llama(torch.tensor([[*ids, *client.tokens]])).logits[0, len(ids) - 1 : -1]
    logs = torch.log_softmax(logits.float(), -1)
    found = [each for update in client.updates for each in update.logprobs]
    for each, expected in zip(found, logs, strict=True):
        assert each.logprob == pytest.approx(float(expected[each.token]), abs=1e-3)
        assert [log for _, log in each.top] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-3)


def test_a_request_joins_while_another_is_decoded_and_may_end_before_it(serving, tiny_llama, tiny_tokenizer):
    loop, joined = serving(tiny_llama, tiny_tokenizer, rows=2), threading.Event()
    long = Client(loop, request_of(tiny_tokenizer, PROMPTS[0], max_new_tokens=400, min_new_tokens=400), joined.set)
    assert joined.wait(WAIT_S)
    short = Client(loop, request_of(tiny_tokenizer, PROMPTS[1], max_new_tokens=3))
    short.wait()
    assert not long.updates[-1].is_last
    long.wait()
    assert len(long.tokens) == 400


def test_a_prompt_that_begins_as_an_earlier_text_reads_only_the_rest(serving, tiny_llama, tiny_tokenizer, monkeypatch):
    prefixes_of(tiny_llama, 0)  # without what other tests have read
    read, unread = TorchBackend.read, list[int]()

    def counted(self: TorchBackend, prompts: Any, first: int = 0, **options: Any) -> Any:
        held = self.cache.slots.lengths[first : first + len(prompts)]
        if threading.current_thread() is not threading.main_thread() and len(prompts[0]) >= len(text):  # no probe
            unread.extend(len(prompt) - int(known) for prompt, known in zip(prompts, held, strict=True))
        return read(self, prompts, first, **options)

    monkeypatch.setattr(TorchBackend, "read", counted)
    loop, text = serving(tiny_llama, tiny_tokenizer, rows=2), PROMPTS[1] * 4
    first = request_of(tiny_tokenizer, text)
    one = Client(loop, first)
    one.wait()
    turn = GenerationRequest(ids=[*first.ids, *one.tokens, 5, 6, 7], options=first.options)
    two = Client(loop, turn)
    assert two.wait().stats.reused_tokens == len(first.ids) + len(one.tokens) - 1  # the last token's are not known yet
    assert two.tokens == alone(tiny_llama, tiny_tokenizer, turn).token_ids[0]
    same = Client(loop, first)
    assert same.wait().stats.reused_tokens == len(first.ids) - 1
    assert same.tokens == one.tokens
    assert unread == [len(first.ids), 4, 1]
    figures = loop.figures()
    assert figures["read_tokens"] == len(first.ids) + 4 + 1 and figures["reused_tokens"] > 0


def test_no_keys_are_kept_where_no_bytes_are_given_for_them(serving, tiny_llama, tiny_tokenizer):
    loop = serving(tiny_llama, tiny_tokenizer, rows=1, prefix_bytes=0)
    for _ in range(2):
        assert Client(loop, request_of(tiny_tokenizer, PROMPTS[1])).wait().stats.reused_tokens == 0
    assert prefixes_of(tiny_llama, 0).nbytes == 0


def test_more_rows_than_the_cache_has_room_for_wait_for_their_turn(serving, tiny_llama, tiny_tokenizer):
    loop = serving(tiny_llama, tiny_tokenizer, rows=8, cache_tokens=200)
    requests = [request_of(tiny_tokenizer, text) for text in PROMPTS * 3]
    clients = [Client(loop, request) for request in requests]
    for client, request in zip(clients, requests, strict=True):
        client.wait()
        assert client.tokens == alone(tiny_llama, tiny_tokenizer, request).token_ids[0]


def test_a_queue_that_is_full_refuses_and_takes_again_later(serving, tiny_llama, tiny_tokenizer):
    loop = serving(tiny_llama, tiny_tokenizer, rows=1, queue=1)
    long = request_of(tiny_tokenizer, PROMPTS[0], max_new_tokens=300, min_new_tokens=300)
    clients = [Client(loop, long)]
    with pytest.raises(ApiError, match="requests wait"):
        while True:
            clients.append(Client(loop, long))
    for client in clients:
        client.ticket.cancel()
        client.wait()
    assert Client(loop, request_of(tiny_tokenizer, PROMPTS[0])).wait().end == "length"


@pytest.mark.parametrize("waits", [False, True])
def test_a_cancelled_output_ends_and_others_go_on(serving, waits, tiny_llama, tiny_tokenizer):
    loop, begun = serving(tiny_llama, tiny_tokenizer, rows=1 if waits else 2), threading.Event()
    other = request_of(tiny_tokenizer, PROMPTS[1], max_new_tokens=200, min_new_tokens=200)
    running = Client(loop, other, begun.set)
    assert begun.wait(WAIT_S)
    gone = Client(loop, request_of(tiny_tokenizer, PROMPTS[0], max_new_tokens=3000, min_new_tokens=3000))
    gone.ticket.cancel()
    assert gone.wait().end == "cancelled" and len(gone.tokens) < 3000
    running.wait()
    assert running.tokens == alone(tiny_llama, tiny_tokenizer, other).token_ids[0]


def test_what_a_request_asks_for_is_checked_before_it_is_taken(serving, tiny_llama, tiny_tokenizer):
    loop = serving(tiny_llama, tiny_tokenizer, rows=1)
    for wrong, error in (
        (GenerationRequest(ids=[]), PromptError),
        (GenerationRequest(ids=[10_000]), PromptError),
        (GenerationRequest(ids=[1, 2], options={"temperature": "hot"}), ConfigError),
        (GenerationRequest(ids=[1, 2], options={"max_new_tokens": 0}), ConfigError),
        (GenerationRequest(ids=[1, 2], prediction=object()), PromptError),
    ):
        with pytest.raises(error):
            Client(loop, wrong)
    assert Client(loop, request_of(tiny_tokenizer, PROMPTS[0])).wait().end == "length"


class Failing(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] > 30:
            raise ZeroDivisionError("in a processor")
        return scores


def test_an_error_of_one_output_ends_that_one_alone(serving, tiny_llama, tiny_tokenizer):
    loop = serving(tiny_llama, tiny_tokenizer, rows=2)
    request = request_of(tiny_tokenizer, PROMPTS[1])
    failing = Client(loop, request_of(tiny_tokenizer, PROMPTS[0], logits_processor=[Failing()], max_new_tokens=40))
    other = Client(loop, request)
    assert isinstance(failing.wait().error, ZeroDivisionError)
    other.wait()
    assert other.tokens == alone(tiny_llama, tiny_tokenizer, request).token_ids[0]


def test_a_failed_step_of_outputs_with_logarithms_ends_them_and_not_the_loop(
    serving, tiny_llama, tiny_tokenizer, monkeypatch
):
    loop, calls, own = serving(tiny_llama, tiny_tokenizer, rows=2), [0], Engine._observe

    def observe(self: Any, *arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("after the tokens were chosen")
        own(self, *arguments)

    monkeypatch.setattr(Engine, "_observe", observe)
    clients = [Client(loop, request_of(tiny_tokenizer, text, top_logprobs=1)) for text in PROMPTS[:2]]
    assert any(isinstance(client.wait().error, RuntimeError) for client in clients)
    assert Client(loop, request_of(tiny_tokenizer, PROMPTS[2], top_logprobs=1)).wait().error is None


def test_requests_that_batches_decode_elsewhere_are_served_one_by_one(serving, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(scheduler, "joins_alone", lambda *_: False)  # as on a GPU
    loop, request = serving(model := model_of("Bart"), tiny_tokenizer), request_of(tiny_tokenizer, PROMPTS[0], **GREEDY)
    clients = [Client(loop, request) for _ in range(2)]
    for client in clients:
        assert client.wait().error is None
        assert client.tokens == alone(model, tiny_tokenizer, request).token_ids[0]


def test_an_error_before_a_request_begins_ends_that_request(serving, tiny_llama, tiny_tokenizer, monkeypatch):
    loop = serving(tiny_llama, tiny_tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.Scheduler, "_open_rows", lambda self: 1 / 0)
        assert isinstance(Client(loop, request_of(tiny_tokenizer, PROMPTS[0])).wait().error, ZeroDivisionError)
    assert Client(loop, request_of(tiny_tokenizer, PROMPTS[0])).wait().error is None


def test_a_model_that_fails_in_a_step_ends_what_runs_and_serves_again(serving, tiny_llama, tiny_tokenizer, monkeypatch):
    loop, step, fails = serving(tiny_llama, tiny_tokenizer, rows=2), Engine.step, [True]

    def sometimes(self: Engine, **options: Any) -> Any:
        if fails and fails.pop():
            raise MemoryError("no room")
        return step(self, **options)

    monkeypatch.setattr(Engine, "step", sometimes)
    assert isinstance(Client(loop, request_of(tiny_tokenizer, PROMPTS[0])).wait().error, MemoryError)
    request = request_of(tiny_tokenizer, PROMPTS[1])
    client = Client(loop, request)
    client.wait()
    assert client.tokens == alone(tiny_llama, tiny_tokenizer, request).token_ids[0]


def test_inputs_of_an_encoder_are_decoded_one_after_another(serving, tiny_tokenizer):
    model = model_of("T5")
    loop = serving(model, tiny_tokenizer, rows=2)
    requests = [request_of(tiny_tokenizer, text) for text in PROMPTS]
    clients = [Client(loop, request) for request in requests]
    for client, request in zip(clients, requests, strict=True):
        client.wait()
        assert client.tokens == alone(model, tiny_tokenizer, request).token_ids[0]


def test_closing_ends_outputs_with_a_reason_and_the_threads(tiny_llama, tiny_tokenizer):
    before = threading.active_count()
    loop, begun = DecodingLoop(tiny_llama, tiny_tokenizer, rows=1), threading.Event()
    endless = request_of(tiny_tokenizer, PROMPTS[0], max_new_tokens=3000, min_new_tokens=3000)
    clients = [Client(loop, endless, begun.set), *(Client(loop, endless) for _ in range(3))]
    assert begun.wait(WAIT_S)
    loop.close()
    assert [client.wait().end for client in clients] == ["cancelled"] * 4
    with pytest.raises(ApiError, match="shutting down"):
        Client(loop, endless)
    deadline = time.monotonic() + WAIT_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("options", "message"), [({"rows": 0}, "rows"), ({"queue": -1}, "queue"), ({"cache_tokens": 0}, "cache")]
)
def test_options_out_of_range_are_refused_by_name(options, message, tiny_llama, tiny_tokenizer):
    with pytest.raises(ConfigError, match=message):
        DecodingLoop(tiny_llama, tiny_tokenizer, **options)


def held(tokens: int, heads: int = 2, dim: int = 4) -> RowCopy:
    return RowCopy({0: (torch.zeros(heads, tokens, dim), torch.zeros(heads, tokens, dim))}, {}, tokens)


def ids(*tokens: int) -> np.ndarray[Any, Any]:
    return np.array(tokens, np.int32)


def test_the_store_gives_the_longest_shared_beginning_and_drops_the_oldest():
    size = 2 * 2 * 40 * 4 * 4
    store = PrefixStore(2 * size)
    texts = [ids(*range(at, at + 40)) for at in (0, 100, 200)]
    for text in texts[:2]:
        store.put(text, held(40))
    assert store.longest(np.append(texts[0][:30], 7))[:2] == (store.longest(texts[0])[0], 30)
    store.put(texts[2], held(40))  # the second was not used since
    assert store.nbytes == 2 * size and store.longest(texts[1]).held is None
    assert store.longest(texts[0])[1] == 39  # a token is left to be read
    longer = np.append(texts[0], texts[1])
    store.put(longer, held(80))
    assert store.longest(np.append(longer, 1))[1] == 80 and store.longest(texts[2]).held is None
    store.put(texts[0], held(40))  # which the longer one begins with
    assert store.nbytes == 2 * size
    store.put(ids(*range(4)), held(4))
    assert store.longest(ids(0, 1, 2, 3, 4, 5))[1] == 0  # so short a beginning is read as fast
    PrefixStore(0).put(texts[0], held(40))


def test_a_criterion_of_a_user_ends_its_own_output(serving, tiny_llama, tiny_tokenizer):
    class AfterFive(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.full((len(input_ids),), input_ids.shape[1] >= len(PROMPTS[0]) + 5)

    loop = serving(tiny_llama, tiny_tokenizer, rows=2)
    request = request_of(tiny_tokenizer, PROMPTS[0], stopping_criteria=[AfterFive()])
    client = Client(loop, request)
    assert client.wait().end == alone(tiny_llama, tiny_tokenizer, request).finish_reasons[0]
    assert client.tokens == alone(tiny_llama, tiny_tokenizer, request).token_ids[0]
