"""The FastAPI application of the server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from lookahead.errors import ConfigError
from lookahead.serving.answers import Answer
from lookahead.serving.api_errors import ApiError, shutting_down
from lookahead.serving.metrics import Metrics
from lookahead.serving.request_schemas import ChatBody, CompletionBody, TokenizeBody, parsed
from lookahead.serving.requests import GenerationRequest, Ticket, Update
from lookahead.serving.safety import Guard
from lookahead.serving.served_models import ServedModel, ServedModels
from lookahead.serving.timed_workers import TimedWorkers
from lookahead.serving.translation import as_api_error

_READERS = 8  # threads for rendering and tokenizing
_READING_S = 10.0  # time limit of rendering and tokenizing
_LEFT = 499  # the status of a request whose client is gone, for the metrics
_SHUTDOWN_S = 3  # time for answers to end at shutdown
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request with its outputs in progress."""

    answer: Answer
    updates: asyncio.Queue[tuple[int, Update]]
    tickets: list[Ticket]
    deadline: float
    started: float
    is_cancelled: threading.Event

    def cancel(self) -> None:
        self.is_cancelled.set()
        for ticket in list(self.tickets):
            ticket.cancel()


class _Service:
    def __init__(self, models: ServedModels, timeout_s: float) -> None:
        self.models, self._timeout_s = models, timeout_s
        self.metrics = Metrics(lambda: [(each.name, each.loop.figures()) for each in models.loaded])
        self._readers = TimedWorkers(_READERS)

    async def model(self, name: str | None) -> ServedModel:
        """The model of a request; waits while it loads."""
        future = self.models.get(name)
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), self._timeout_s)
        except (asyncio.TimeoutError, TimeoutError):
            raise ApiError(503, "the model is loading", headers={"Retry-After": "5"}) from None

    async def body(self, request: Request) -> bytes:
        """The body of a request, which must arrive within the request's time limit."""
        try:
            return bytes(await asyncio.wait_for(request.body(), self._timeout_s))
        except (asyncio.TimeoutError, TimeoutError):
            raise ApiError(408, f"the body took more than {self._timeout_s:g} s to arrive") from None

    async def apart(self, function: Any, *arguments: Any) -> Any:
        """Run a slow function on a thread with a time limit and return its result."""
        return await self._readers.run(partial(function, *arguments), _READING_S)

    async def begin(self, body: ChatBody | CompletionBody) -> _Turn:
        """Translate a request and start its outputs."""
        started, served = time.monotonic(), await self.model(body.model)
        translator: Any = served.translator
        translate = translator.of_chat if isinstance(body, ChatBody) else translator.of_completion
        requests: Sequence[GenerationRequest] = await self.apart(translate, body)
        prompts = [len(request.ids) for request in requests[:: body.choices]]
        answer = Answer(body, body.model or served.name, served.tokenizer, prompts)
        updates, tickets = asyncio.Queue[tuple[int, Update]](), list[Ticket]()
        turn = _Turn(answer, updates, tickets, started + self._timeout_s, started, threading.Event())
        event_loop = asyncio.get_running_loop()

        def pass_on(i: int, update: Update) -> None:
            event_loop.call_soon_threadsafe(updates.put_nowait, (i, update))

        def submit(i: int, each: GenerationRequest) -> None:
            tickets.append(served.loop.submit(each, partial(pass_on, i)))
            if turn.is_cancelled.is_set():  # the request was cancelled meanwhile
                turn.cancel()

        try:
            for i, each in enumerate(requests):
                await asyncio.to_thread(submit, i, each)
        except BaseException as error:
            turn.cancel()
            if (known := as_api_error(error)) is None:
                raise
            raise known from None
        return turn

    async def updates(self, turn: _Turn) -> AsyncIterator[tuple[int, Update]]:
        """The updates of all outputs until the last has ended; ApiError if an output failed."""
        choices, ended = turn.answer.choices, set[int]()
        while len(ended) < len(choices):
            try:
                i, update = await asyncio.wait_for(turn.updates.get(), max(0.0, turn.deadline - time.monotonic()))
            except (asyncio.TimeoutError, TimeoutError):
                raise ApiError(504, f"the answer took more than {self._timeout_s:g} s; --request-timeout") from None
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
            yield i, update
            if update.is_last or choices[i].has_stopped:
                ended.add(i)
                turn.tickets[i].cancel()
                self.metrics.count(choices[i].stats)

    async def whole(self, turn: _Turn, request: Request) -> Response:
        """The whole answer; it is cancelled if the client disconnects."""

        async def collect() -> None:
            async for i, update in self.updates(turn):
                turn.answer.choices[i].add(update)

        collecting, leaving = asyncio.ensure_future(collect()), asyncio.ensure_future(_left(request))
        for each in (collecting, leaving):
            each.add_done_callback(_forget)
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=_LEFT)
            collecting.result()
            return JSONResponse(turn.answer.whole())
        finally:
            turn.cancel()
            collecting.cancel()
            leaving.cancel()

    async def stream(self, turn: _Turn) -> AsyncIterator[str]:
        """The answer as server-sent events; closing it, as on a disconnect, ends the outputs."""
        try:
            for chunk in turn.answer.begin():
                yield _event(chunk)
            async for i, update in self.updates(turn):
                for chunk in turn.answer.add(i, update):
                    yield _event(chunk)
            for chunk in turn.answer.end():
                yield _event(chunk)
        except ApiError as error:
            yield _event(error.body)
        finally:
            turn.cancel()
        yield "data: [DONE]\n\n"


def _forget(task: asyncio.Task[None]) -> None:
    """Take note of the error of a task that nobody may wait for: asyncio logs the others as never retrieved."""
    if not task.cancelled():
        task.exception()


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


async def _left(request: Request) -> None:
    """Wait until the client disconnects; its body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def make_app(
    models: ServedModels,
    *,
    hosts: Collection[str] = (),
    api_key: str | None = None,
    max_body: int = 4 << 20,
    timeout_s: float = 600.0,
    cors_origins: Sequence[str] = (),
) -> Any:
    """The ASGI application.

    Args:
        models: The served models.
        hosts: Names that the header `Host` may have besides `localhost` and IP addresses.
        api_key: The key that clients must send; None for none.
        max_body: Maximum bytes of a request.
        timeout_s: Maximum seconds of an answer.
        cors_origins: Allowed origins of web pages.
    """
    app = FastAPI(title="lookahead", docs_url=None, redoc_url=None, openapi_url=None)
    service = _Service(models, timeout_s)

    async def generation(request: Request, kind: type[Any]) -> Response:
        body = parsed(kind, await service.body(request))
        turn = await service.begin(body)
        if body.stream:
            return StreamingResponse(service.stream(turn), media_type="text/event-stream")
        return await service.whole(turn, request)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await generation(request, ChatBody)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generation(request, CompletionBody)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = parsed(TokenizeBody, await service.body(request))
        served = await service.model(body.model)
        tokens = await service.apart(served.translator.tokens_of, body)
        told = {"tokens": tokens, "count": len(tokens), "max_model_len": served.translator.context}
        return JSONResponse(told)

    @app.get("/v1/models")
    async def listed() -> Response:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "lookahead"} for name in models.names]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/health")
    async def health() -> Response:
        status = "loading" if models.is_loading else "ok"
        return JSONResponse({"status": status}, 503 if models.is_loading else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(resources.files("lookahead.serving").joinpath("page.html").read_text("utf-8"))

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return JSONResponse(ApiError(error.status_code, str(error.detail)).body, error.status_code)

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=_LEFT)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return JSONResponse(ApiError(500, "internal error").body, 500)

    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["*"], allow_headers=["*"])

    def count(path: str, status: int) -> None:
        service.metrics.requests.labels(path, str(status)).inc()

    return Guard(app, hosts=hosts, api_key=api_key, max_body=max_body, origins=cors_origins, on_answer=count)


class Server(uvicorn.Server):  # type: ignore[misc]  # untyped base class
    """A server that ends its answers with a reason at shutdown."""

    def __init__(self, app: Any, models: ServedModels, log_level: str = "warning") -> None:
        super().__init__(uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=_SHUTDOWN_S))
        self._models = models

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Shut down on a signal; a second one exits immediately."""
        super().handle_exit(sig, frame)
        self.stop()

    def stop(self) -> None:
        """End the server, from any thread."""
        threading.Thread(target=self._models.close, daemon=True).start()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; connections wait until the server runs. Port 0 picks a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        # Errors of name resolution have negative numbers, which os.strerror does not know.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(f"cannot listen on port {port} of {host}: {reason}; --port names another") from error
