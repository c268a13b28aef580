"""The FastAPI application of the server."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from hashlib import sha256
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

import lookahead
from lookahead.serving import llama_server
from lookahead.serving.answers import Answer
from lookahead.serving.api_errors import OF_REQUESTS, ApiError, as_api_error
from lookahead.serving.messages import CountBody, MessagesAnswer, MessagesBody
from lookahead.serving.request_schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from lookahead.serving.responses import KeptMessages, ResponsesAnswer, ResponsesBody
from lookahead.serving.safety import Guard
from lookahead.serving.served_models import ServedModel, ServedModels
from lookahead.serving.service import MakeAnswer, Service, Turn, unless_left
from lookahead.serving.speech import MOST_FIELDS

Handler = Callable[[Turn, Any], Awaitable[Response]]
_LEFT = 499  # the status of a request whose client is gone, for the metrics


def make_app(
    models: ServedModels,
    *,
    timeout_s: float = 600.0,
    cors_origins: Sequence[str] = (),
    has_page: bool = True,
    **checks: Any,
) -> Guard:
    """The ASGI application.

    Args:
        models: The served models.
        timeout_s: Maximum seconds of an answer.
        cors_origins: Allowed origins of web pages.
        has_page: Whether there is a page at `/`.
        checks: Further arguments of `Guard`.
    """
    app = FastAPI(title="lookahead", version=lookahead.__version__, docs_url=None, redoc_url=None)
    service, kept = Service(models, timeout_s), KeptMessages()

    def turn_of(request: Request) -> Turn:
        turn = service.turn(client=request.state.client, owner=request.state.owner)
        request.state.at_end.callback(turn.cancel)
        return turn

    async def answer(turn: Turn, body: Any, make: MakeAnswer = Answer) -> Response:
        await service.begin(turn, body, make)
        if body.stream:
            return StreamingResponse(service.stream(turn), media_type="text/event-stream")
        return await service.whole(turn)

    def post(path: str, kind: type[Any], handler: Handler) -> None:
        """A path for bodies of a kind."""
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        kinds.append((kind, "validation"))

        @app.post(path, name=kind.__name__, openapi_extra={"requestBody": body})
        async def handle(request: Request) -> Response:
            sent, turn = await service.arrived(request.body()), turn_of(request)

            async def respond() -> Response:
                return await handler(turn, await service.parse(kind, sent, turn))

            return await unless_left(request, respond())

    def of_tokens(tell: Callable[[ServedModel, list[int]], Any]) -> Handler:
        """A path that answers with what is told of the tokens of the body."""

        async def handle(turn: Turn, body: Any) -> Response:
            return JSONResponse(
                await service.read(turn, body, lambda served: tell(served, served.translator.tokens_of(body)))
            )

        return handle

    async def respond(turn: Turn, body: ResponsesBody) -> Response:
        messages = body.follow(kept.get(turn.owner, body.previous_response_id))
        return await answer(turn, body, partial(ResponsesAnswer, partial(kept.put, turn.owner, messages)))

    async def hear(request: Request) -> Response:
        form = await service.arrived(request.form(max_files=1, max_fields=MOST_FIELDS))
        try:
            task = "translate" if request.url.path.endswith("translations") else "transcribe"
            return await unless_left(request, service.hear(form, task, turn_of(request)))
        finally:
            await form.close()

    kinds = list[tuple[Any, Any]]()
    post("/v1/completions", CompletionBody, answer)
    post("/v1/chat/completions", ChatBody, answer)
    post("/v1/responses", ResponsesBody, respond)
    post("/v1/messages", MessagesBody, partial(answer, make=MessagesAnswer))
    post("/v1/messages/count_tokens", CountBody, of_tokens(lambda _, tokens: {"input_tokens": len(tokens)}))
    post("/completion", llama_server.LlamaBody, partial(answer, make=llama_server.LlamaAnswer))
    post("/infill", llama_server.InfillBody, partial(answer, make=llama_server.LlamaAnswer))
    post("/tokenize", TokenizeBody, of_tokens(llama_server.tokenized))
    post("/apply-template", TokenizeBody, of_tokens(lambda served, tokens: {"prompt": served.tokenizer.decode(tokens)}))
    post("/detokenize", DetokenizeBody, of_tokens(llama_server.detokenized))
    app.post("/v1/audio/transcriptions")(hear)
    app.post("/v1/audio/translations")(hear)

    @app.get("/props")
    async def properties() -> Response:
        return JSONResponse(llama_server.props(await service.model(None, service.turn().deadline)))

    @app.get("/slots")
    async def rows() -> Response:
        return JSONResponse(llama_server.slots(await service.model(None, service.turn().deadline)))

    @app.get("/v1/models")
    async def listed() -> Response:
        return JSONResponse({"object": "list", "data": [models.described(name) for name in models.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(models.described(name))

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": lookahead.__version__})

    @app.get("/ping")
    async def ping() -> Response:
        return Response()

    @app.get("/health")
    async def health() -> Response:
        status = "loading" if models.is_loading else "ok"
        return JSONResponse({"status": status}, 503 if models.is_loading else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    if has_page:
        content = resources.files("lookahead.serving").joinpath("page.html").read_text("utf-8")

        @app.get("/")
        async def page() -> Response:
            return HTMLResponse(content, headers={"Content-Security-Policy": _policy_of(content)})

    async def refused(request: Request, error: Exception) -> Response:
        told = as_api_error(error)
        return JSONResponse(told.body_at(request.url.path), told.status, told.headers)

    for kind in (ApiError, *OF_REQUESTS, Exception):
        app.add_exception_handler(kind, refused)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return await refused(request, ApiError(error.status_code, str(error.detail)))

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=_LEFT)

    _, described = models_json_schema(kinds, ref_template="#/components/schemas/{model}")
    app.openapi().setdefault("components", {}).setdefault("schemas", {}).update(described["$defs"])
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["*"], allow_headers=["*"])

    def count(path: str, status: int) -> None:
        service.metrics.requests.labels(path, str(status)).inc()

    return Guard(app, origins=cors_origins, on_answer=count, **checks)


def _policy_of(page: str) -> str:
    """The content policy of a page: its own script and style, and requests to this server."""
    policy = "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    for name in ("script", "style"):
        text = page.partition(f"<{name}>")[2].partition(f"</{name}>")[0]
        policy += f"; {name}-src 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    return policy
