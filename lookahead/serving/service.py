"""Answers requests: reads them on a few threads, starts their outputs, and passes these on until the client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from lookahead.errors import LookaheadError
from lookahead.serving.answers import Answer
from lookahead.serving.api_errors import ApiError, invalid, shutting_down
from lookahead.serving.decoding_loop import DecodingLoop, PlannedRequest
from lookahead.serving.forms import AnswerForm, Event
from lookahead.serving.metrics import Metrics
from lookahead.serving.output import prompt_logprobs
from lookahead.serving.parsing import parsed
from lookahead.serving.request_schemas import ChatBody, CompletionBody
from lookahead.serving.requests import Ticket, TokenLogprobs, Update
from lookahead.serving.served_models import HearingModel, ServedModel, ServedModels
from lookahead.serving.speech import MOST_FIELDS, heard, speech_of
from lookahead.serving.timed_workers import TimedWorkers
from lookahead.serving.translation import as_api_error

T = TypeVar("T")
_MOST_SCORED = 1 << 15  # tokens of prompts whose log-probabilities a request may have
_READERS = 4  # threads for work whose size a client sets
_WRITERS = 2  # threads for bodies of requests and answers, which take tenths of a second
_READING_S = 10.0  # time limit of each piece of it
_BODY_S = 30.0  # time limit for a body to arrive
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Turn:
    """A request with its outputs in progress."""

    updates: asyncio.Queue[tuple[int, Update]]
    tickets: list[Ticket]
    client: str
    deadline: float
    started: float
    is_cancelled: threading.Event
    answer: Answer = field(init=False)

    def cancel(self) -> None:
        """End its outputs."""
        self.is_cancelled.set()
        for ticket in list(self.tickets):
            ticket.cancel()


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
        self.metrics = Metrics(lambda: [(each.name, each.loop.figures()) for each in models.loaded])
        self._readers, self._scorers = TimedWorkers(_READERS), TimedWorkers(1)
        self._parsers, self._writers = TimedWorkers(_WRITERS), TimedWorkers(_WRITERS)

    async def model(self, name: str | None, deadline: float, kind: type[Any] = ServedModel) -> Any:
        """The model of a request, of the kind that can serve it; waits while it loads."""
        future = self.models.get(name)
        try:
            served = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), _left(deadline))
        except (asyncio.TimeoutError, TimeoutError):
            raise ApiError(503, "the model is loading", headers={"Retry-After": "5"}) from None
        if not isinstance(served, kind):
            does = "writes text" if isinstance(served, ServedModel) else "transcribes sound: /v1/audio/transcriptions"
            raise invalid("model", f"{served.name!r} {does}")
        return served

    async def body(self, request: Request, kind: type[T]) -> T:
        """The body of a request."""
        return await self.parse(request, partial(parsed, kind, await self.arrived(request.body())))

    async def parse(self, request: Request, task: Callable[[], T]) -> T:
        """The result of work on a body, on a thread: other requests go on meanwhile."""
        return await unless_left(request, self._parsers.run(task, _READING_S, client=request.state.client))

    async def _write(self, turn: Turn, task: Callable[[], T]) -> T:
        """The result of work on an answer, on a thread."""
        left = _left(turn.deadline)
        return await self._writers.run(task, left, client=turn.client, wait_s=left)

    async def arrived(self, reading: Awaitable[T]) -> T:
        """What a client sends, which must arrive in a short time."""
        try:
            return await asyncio.wait_for(reading, _BODY_S)
        except (asyncio.TimeoutError, TimeoutError):
            raise ApiError(408, f"the body took more than {_BODY_S:g} s to arrive") from None

    async def hear(self, request: Request, task: str) -> Response:
        """What is said in a sound."""
        form = await self.arrived(request.form(max_files=1, max_fields=MOST_FIELDS))
        deadline = time.monotonic() + self._timeout_s
        try:
            body, file = speech_of(form)
            served: HearingModel = await self.model(body.model, deadline, HearingModel)
            hearing = self._alone(partial(heard, served, body, file, task), request.state.client, deadline)
            return await unless_left(request, hearing)
        except LookaheadError as error:
            raise as_api_error(error) or error from None
        finally:
            await form.close()

    async def _alone(self, task: Callable[[], T], client: str, deadline: float) -> T:
        """Run work that takes passes of a model beside its loop, one at a time."""
        left = _left(deadline)
        return await self._scorers.run(task, left, client=client, wait_s=left)

    async def read(self, request: Request, body: Any, task: Callable[[ServedModel], T]) -> T:
        """The result of work whose size a client sets, about the model that the body names."""
        deadline = time.monotonic() + self._timeout_s
        served: ServedModel = await self.model(body.model, deadline)
        await self.parse(request, partial(served.translator.check, body))
        return await unless_left(request, self._apart(partial(task, served), request.state.client, deadline))

    async def begin(self, body: ChatBody | CompletionBody, client: str = "", salt: str = "") -> Turn:
        """Translate a request and start its outputs, which end if this is cancelled."""
        started = time.monotonic()
        turn = Turn(asyncio.Queue(), list[Ticket](), client, started + self._timeout_s, started, threading.Event())
        try:
            served: ServedModel = await self.model(body.model, turn.deadline)
            await self._parsers.run(partial(served.translator.check, body), _READING_S, client=client)
            planned = await self._apart(partial(_plan, served, body, client, salt), client, turn.deadline)
            prompts, logprobs = [each.request.ids for each in planned], list[list[TokenLogprobs]]()
            if (top := body.prompt_top) is not None:
                if body.stream and body.prompt_logprobs is not None:
                    raise invalid("prompt_logprobs", "are not streamed")
                if (count := sum(map(len, prompts))) > _MOST_SCORED:
                    raise invalid("prompt", f"at most {_MOST_SCORED} tokens have log-probabilities, got {count}")
                for ids in prompts:
                    task = partial(prompt_logprobs, served.model, ids, top)
                    logprobs.append(await self._alone(task, client, turn.deadline))
            name = body.model or served.name
            turn.answer = await self._write(turn, partial(Answer, body, name, served.tokenizer, prompts, logprobs))
            if body.max_tokens == 0:
                return turn
            queue = partial(_queue, turn, served.loop, planned, asyncio.get_running_loop())
            await self._apart(queue, client, turn.deadline, interrupts=False)
        except BaseException as error:
            turn.cancel()
            if (known := as_api_error(error)) is None:
                raise
            raise known from None
        return turn

    async def _apart(self, task: Callable[[], T], client: str, deadline: float, *, interrupts: bool = True) -> T:
        """Run work whose size a client sets on one of a few threads, within the request's time."""
        limit, wait = min(_READING_S, _left(deadline)), _left(deadline)
        return await self._readers.run(task, limit, client=client, wait_s=wait, interrupts=interrupts)

    async def updates(self, turn: Turn) -> AsyncIterator[tuple[int, Update]]:
        """The updates of all outputs until the last has ended; ApiError if an output failed."""
        choices = turn.answer.choices
        ended = {i for i, choice in enumerate(choices) if choice.finish_reason is not None}
        while len(ended) < len(choices):
            try:
                i, update = await asyncio.wait_for(turn.updates.get(), _left(turn.deadline))
            except (asyncio.TimeoutError, TimeoutError):
                raise ApiError(
                    504, f"the answer took more than {self._timeout_s:g} s; --request-timeout sets the limit"
                ) from None
            if i in ended:  # after a stop text
                continue
            if update.error is not None:
                known = as_api_error(update.error)
                if known is None:
                    _log.error("an output failed", exc_info=update.error)
                raise known or ApiError(500, "internal error")
            if update.end == "cancelled":
                raise shutting_down()
            if update.tokens and not choices[i].tokens:
                self.metrics.first_token.observe(time.monotonic() - turn.started)
            self.metrics.new.inc(len(update.tokens))
            yield i, update
            if update.is_last or choices[i].has_stopped:
                ended.add(i)
                turn.tickets[i].cancel()
                self.metrics.count(choices[i].stats)

    async def whole(self, turn: Turn, request: Request, form: AnswerForm) -> Response:
        """The whole answer; it is cancelled if the client disconnects."""

        async def collect() -> Response:
            async for i, update in self.updates(turn):
                turn.answer.choices[i].add(update)
            return await self._write(turn, lambda: JSONResponse(form.whole(turn.answer.whole())))

        try:
            return await unless_left(request, collect())
        finally:
            turn.cancel()

    async def stream(self, turn: Turn, form: AnswerForm) -> AsyncIterator[str]:
        """The answer as server-sent events; closing it, as on a disconnect, ends the outputs."""
        answer = turn.answer
        try:
            for text in await self._write(turn, lambda: _all_sent(form.begin(), *map(form.add, answer.begin()))):
                yield text
            async for i, update in self.updates(turn):
                for event in chain.from_iterable(map(form.add, answer.add(i, update))):
                    yield _sent(event)
            for text in await self._write(turn, lambda: _all_sent(*map(form.add, answer.end()), form.finish())):
                yield text
        except ApiError as error:
            yield _sent(form.failed(error))
        finally:
            turn.cancel()
        yield form.end


def _plan(served: ServedModel, body: ChatBody | CompletionBody, client: str, salt: str) -> list[PlannedRequest]:
    """Translate and plan a request: all work whose size the client sets, once for its choices."""
    translator = served.translator
    requests = translator.of_chat(body) if isinstance(body, ChatBody) else translator.of_completion(body)
    return [served.loop.plan(replace(request, client=client, salt=salt)) for request in requests]


def _queue(
    turn: Turn, loop: DecodingLoop, planned: Sequence[PlannedRequest], events: asyncio.AbstractEventLoop
) -> None:
    """Queue all outputs of a request, unless it is cancelled meanwhile."""

    def pass_on(i: int, update: Update) -> None:
        with suppress(RuntimeError):  # the server has ended
            events.call_soon_threadsafe(turn.updates.put_nowait, (i, update))

    choices = [(each, choice) for each in planned for choice in range(each.request.choices)]
    for i, (each, choice) in enumerate(choices):
        if turn.is_cancelled.is_set():
            break
        turn.tickets.append(loop.put(each, partial(pass_on, i), choice))
    if turn.is_cancelled.is_set():
        turn.cancel()


async def unless_left(request: Request, answering: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, which is cancelled if the client disconnects; its body was read before."""
    working = asyncio.ensure_future(answering)
    leaving = asyncio.ensure_future(_disconnect(request))
    for each in (working, leaving):
        each.add_done_callback(_forget)
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnect(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _left(deadline: float) -> float:
    """Seconds left."""
    return max(0.0, deadline - time.monotonic())


def _forget(task: asyncio.Future[Any]) -> None:
    """Take note of the error of a task that nobody may wait for: asyncio logs the others as never retrieved."""
    if not task.cancelled():
        task.exception()


def _all_sent(*events: Iterable[Event]) -> list[str]:
    return [_sent(event) for event in chain(*events)]


def _sent(event: Event) -> str:
    """An event as server-sent text; one with a type is named after it."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event, ensure_ascii=False)}\n\n"
