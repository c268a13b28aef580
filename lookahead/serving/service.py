"""Answers requests: reads them on a few threads, starts their outputs, and passes these on until the client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import anyio
from fastapi import Request
from starlette.datastructures import FormData
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from lookahead.serving.answers import Answer, Event
from lookahead.serving.api_errors import ApiError, as_api_error, invalid, shutting_down
from lookahead.serving.decoding_loop import DecodingLoop, PlannedRequest
from lookahead.serving.metrics import Metrics
from lookahead.serving.parsing import parsed
from lookahead.serving.request_schemas import ChatBody, CompletionBody
from lookahead.serving.requests import Output, TokenLogprobs, Update, prompt_logprobs
from lookahead.serving.served_models import HearingModel, ServedModel, ServedModels
from lookahead.serving.speech import heard, speech_of
from lookahead.serving.timed_workers import TimedWorkers, in_time, left

T = TypeVar("T")
MakeAnswer = Callable[..., Answer]
_MOST_SCORED = 1 << 15  # tokens of prompts whose log-probabilities a request may have
_READERS = 4  # threads for work whose size a client sets
_WRITERS = 2  # threads for bodies of requests and answers, which take tenths of a second
_READING_S = 10.0  # time limit of each piece of it
_BODY_S = 30.0  # time limit for a body to arrive

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Turn:
    """A request of a client, with its outputs in progress.

    Attributes:
        deadline: When it must be answered, as `time.monotonic` counts.
        client: Whose it is.
        owner: Whose texts it may share.
    """

    deadline: float
    client: str = ""
    owner: str = ""
    started: float = field(default_factory=time.monotonic)
    updates: asyncio.Queue[tuple[int, Update]] = field(default_factory=asyncio.Queue)
    outputs: list[Output] = field(default_factory=list)
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    answer: Answer = field(init=False)

    def cancel(self) -> None:
        """End its outputs."""
        self.is_cancelled.set()
        for output in list(self.outputs):
            output.cancel()


class Service:
    """Answers the requests of an application.

    Args:
        models: The served models.
        timeout_s: Maximum seconds from a request to the end of its answer.

    Attributes:
        metrics: Its counters.
    """

    def __init__(self, models: ServedModels, timeout_s: float) -> None:
        self.models, self._timeout_s = models, timeout_s
        self.metrics = Metrics(lambda: [(model.name, model.loop.figures()) for model in models.loaded])
        self._readers, self._parsers = TimedWorkers(_READERS, _READING_S), TimedWorkers(_WRITERS, _READING_S)
        self._scorers, self._writers = TimedWorkers(1), TimedWorkers(_WRITERS)  # the first takes passes of a model

    async def model(self, name: str | None, deadline: float, kind: type[Any] = ServedModel) -> Any:
        """The model of a request, of the kind that can serve it; waits while it loads."""
        loading = ApiError(503, "the model is loading", headers={"Retry-After": "5"})
        served = await in_time(asyncio.shield(asyncio.wrap_future(self.models.get(name))), left(deadline), loading)
        if not isinstance(served, kind):
            does = "writes text" if isinstance(served, ServedModel) else "transcribes sound: /v1/audio/transcriptions"
            raise invalid("model", f"{served.name!r} {does}")
        return served

    def turn(self, client: str = "", owner: str = "") -> Turn:
        """A request that comes now."""
        return Turn(deadline=time.monotonic() + self._timeout_s, client=client, owner=owner)

    async def arrived(self, reading: Awaitable[T]) -> T:
        """What a client sends, which must arrive in a short time."""
        return await in_time(reading, _BODY_S, ApiError(408, f"the body took more than {_BODY_S:g} s to arrive"))

    async def parse(self, kind: type[T], sent: bytes, turn: Turn) -> T:
        """The request in a body, read on a thread: other requests go on meanwhile."""
        return await self._parsers.run(partial(parsed, kind, sent), turn.deadline, turn.client)

    async def hear(self, form: FormData, task: str, turn: Turn) -> Response:
        """What is said in a sound."""
        body, file = speech_of(form)
        served: HearingModel = await self.model(body.model, turn.deadline, HearingModel)
        return await self._scorers.run(partial(heard, served, body, file, task), turn.deadline, turn.client)

    async def read(self, turn: Turn, body: Any, task: Callable[[ServedModel], T]) -> T:
        """The result of work whose size a client sets, about the model that the body names."""
        served: ServedModel = await self.model(body.model, turn.deadline)
        await self._parsers.run(partial(served.translator.check, body), turn.deadline, turn.client)
        return await self._readers.run(partial(task, served), turn.deadline, turn.client)

    async def begin(self, turn: Turn, body: ChatBody | CompletionBody, make: MakeAnswer = Answer) -> None:
        """Translate a request and start its outputs, until the turn is cancelled."""
        whose = turn.deadline, turn.client
        served, planned = await self.read(turn, body, lambda served: (served, _plan(served, body, turn)))
        prompts, logprobs = [plan.request.ids for plan in planned], list[list[TokenLogprobs]]()
        tops = [body.prompt_logprobs, body.logprobs if isinstance(body, CompletionBody) and body.echo else None]
        if (top := max((top for top in tops if top is not None), default=None)) is not None:
            if body.stream and body.prompt_logprobs is not None:
                raise invalid("prompt_logprobs", "are not streamed")
            if (count := sum(map(len, prompts))) > _MOST_SCORED:
                raise invalid("prompt", f"at most {_MOST_SCORED} tokens have log-probabilities, got {count}")
            for ids in prompts:
                logprobs.append(await self._scorers.run(partial(prompt_logprobs, served.model, ids, top), *whose))
        arguments = body, body.model or served.name, served.tokenizer, prompts, logprobs
        turn.answer = await self._writers.run(partial(make, *arguments), *whose)
        if body.max_tokens != 0:
            queue = partial(_queue, turn, served.loop, planned, asyncio.get_running_loop())
            await self._readers.run(queue, *whose, interrupts=False)

    async def updates(self, turn: Turn) -> AsyncIterator[tuple[int, Update]]:
        """The updates of all outputs until the last has ended; ApiError if an output failed."""
        choices = turn.answer.choices
        late = ApiError(504, f"the answer took more than {self._timeout_s:g} s; --request-timeout sets the limit")
        while any(choice.finish_reason is None for choice in choices):
            i, update = await in_time(turn.updates.get(), left(turn.deadline), late)
            if choices[i].finish_reason is not None:  # after a stop text
                continue
            if update.error is not None:
                error = as_api_error(update.error)
                if error.status == 500:
                    _log.error("an output failed", exc_info=update.error)
                raise error
            if update.end == "cancelled":
                raise shutting_down()
            if update.tokens and not choices[i].tokens:
                self.metrics.first_token.observe(time.monotonic() - turn.started)
            self.metrics.new.inc(len(update.tokens))
            yield i, update
            if choices[i].finish_reason is not None:
                turn.outputs[i].cancel()
                self.metrics.count(choices[i].stats)

    async def whole(self, turn: Turn) -> Response:
        """The whole answer."""
        async for i, update in self.updates(turn):
            turn.answer.choices[i].add(update)
        return await self._writers.run(lambda: JSONResponse(turn.answer.whole()), turn.deadline, turn.client)

    async def stream(self, turn: Turn) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        answer = turn.answer
        written = partial(self._writers.run, deadline=turn.deadline, client=turn.client)
        try:
            yield await written(lambda: _sent(answer.begin()))
            async for i, update in self.updates(turn):
                yield _sent(answer.add(i, update))
            yield await written(lambda: _sent(answer.finish()))
        except ApiError as error:
            yield _sent([answer.failed(error)])
        yield answer.end


def _plan(served: ServedModel, body: ChatBody | CompletionBody, turn: Turn) -> list[PlannedRequest]:
    """Translate and plan a request: all work whose size the client sets, once for its choices."""
    translator = served.translator
    requests = translator.of_chat(body) if isinstance(body, ChatBody) else translator.of_completion(body)
    salt = turn.owner if body.cache_salt is None else f"{turn.owner}\n{body.cache_salt}"
    return [served.loop.plan(replace(request, client=turn.client, salt=salt)) for request in requests]


def _queue(
    turn: Turn, loop: DecodingLoop, planned: Sequence[PlannedRequest], events: asyncio.AbstractEventLoop
) -> None:
    """Queue all outputs of a request, unless it is cancelled meanwhile."""

    def pass_on(i: int, update: Update) -> None:
        with suppress(RuntimeError):  # the server has ended
            events.call_soon_threadsafe(turn.updates.put_nowait, (i, update))

    choices = [(plan, choice) for plan in planned for choice in range(plan.request.choices)]
    for i, (plan, choice) in enumerate(choices):
        if turn.is_cancelled.is_set():
            break
        turn.outputs.append(loop.put(plan, partial(pass_on, i), choice))
    if turn.is_cancelled.is_set():
        turn.cancel()


async def unless_left(request: Request, answering: Awaitable[T]) -> T:
    """The result of a coroutine, which is cancelled if the client disconnects; its body was read before."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    with anyio.CancelScope() as scope:
        watching = asyncio.ensure_future(watch())
        try:
            return await answering
        finally:
            watching.cancel()
    raise ClientDisconnect


def _sent(events: Iterable[Event]) -> str:
    """Events as server-sent text; one with a type is named after it."""
    text = ""
    for event in events:
        text += f"event: {event['type']}\n" if "type" in event else ""
        text += f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
    return text
