"""The FastAPI application of the server."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
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
from lookahead.serving.api_errors import ApiError
from lookahead.serving.forms import AnswerForm, FunctionForm
from lookahead.serving.llama_server import InfillBody, LlamaBody, LlamaForm, props, slots
from lookahead.serving.messages import CountBody, MessagesBody, MessagesForm
from lookahead.serving.request_schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from lookahead.serving.responses import KeptMessages, ResponsesBody, ResponsesForm
from lookahead.serving.safety import Guard
from lookahead.serving.served_models import ServedModel, ServedModels
from lookahead.serving.service import Service, Turn, unless_left

Handler = Callable[[Request, Any], Awaitable[Response]]
MakeForm = Callable[[Turn], AnswerForm]
_LEFT = 499  # the status of a request whose client is gone, for the metrics


class _Stream(StreamingResponse):  # type: ignore[misc]  # untyped base class
    """A stream that ends its outputs, also if the client left before it began."""

    def __init__(self, turn: Turn, content: AsyncIterator[str]) -> None:
        super().__init__(content, media_type="text/event-stream")
        self._turn = turn

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._turn.cancel()


def make_app(
    models: ServedModels,
    *,
    hosts: Collection[str] = (),
    api_keys: Sequence[str] = (),
    max_body: int = 4 << 20,
    timeout_s: float = 600.0,
    cors_origins: Sequence[str] = (),
    has_page: bool = True,
) -> Any:
    """The ASGI application.

    Args:
        models: The served models.
        hosts: Names that the header `Host` may have besides `localhost` and IP addresses.
        api_keys: The keys of which clients must send one; none if empty.
        max_body: Maximum bytes of a request.
        timeout_s: Maximum seconds of an answer.
        cors_origins: Allowed origins of web pages.
        has_page: Whether there is a page at `/`.
    """
    app = FastAPI(title="lookahead", version=lookahead.__version__, docs_url=None, redoc_url=None)
    service, kept = Service(models, timeout_s), KeptMessages()

    async def answer(request: Request, body: Any, form: MakeForm = lambda turn: AnswerForm()) -> Response:
        client, owner = request.state.client, request.state.owner
        salt = owner if body.cache_salt is None else f"{owner}\n{body.cache_salt}"
        turn = await unless_left(request, service.begin(body, client, salt))
        if body.stream:
            return _Stream(turn, service.stream(turn, form(turn)))
        return await service.whole(turn, request, form(turn))

    def post(path: str, kind: type[Any]) -> Callable[[Handler], Handler]:
        """A path for bodies of a kind."""
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}

        def decorate(handler: Handler) -> Handler:
            @app.post(path, name=kind.__name__, openapi_extra={"requestBody": body})
            async def handle(request: Request) -> Response:
                return await handler(request, await service.body(request, kind))

            kinds.append((kind, "validation"))
            return handler

        return decorate

    kinds = list[tuple[Any, Any]]()
    post("/v1/completions", CompletionBody)(answer)

    @post("/v1/chat/completions", ChatBody)
    async def chat(request: Request, body: ChatBody) -> Response:
        return await answer(request, body, lambda turn: FunctionForm() if body.functions else AnswerForm())

    @post("/v1/responses", ResponsesBody)
    async def responses(request: Request, body: ResponsesBody) -> Response:
        owner = request.state.owner
        earlier = kept.get(owner, body.previous_response_id) if body.previous_response_id else []
        chat = await service.parse(request, lambda: body.chat(earlier))
        keep = partial(kept.put, owner, chat.messages[bool(body.instructions) :])
        return await answer(request, chat, lambda turn: ResponsesForm(body, turn.answer.model, keep))

    @post("/v1/messages", MessagesBody)
    async def messages(request: Request, body: MessagesBody) -> Response:
        return await answer(request, await service.parse(request, body.chat), lambda turn: MessagesForm(turn.answer))

    @post("/v1/messages/count_tokens", CountBody)
    async def count_tokens(request: Request, body: CountBody) -> Response:
        chat = await service.parse(request, body.chat)
        tokens = await service.read(request, chat, lambda served: served.translator.tokens_of(chat))
        return JSONResponse({"input_tokens": len(tokens)})

    @post("/completion", LlamaBody)
    @post("/infill", InfillBody)
    async def llama(request: Request, body: LlamaBody) -> Response:
        return await answer(request, body.completion(), lambda turn: LlamaForm(turn.answer))

    @post("/tokenize", TokenizeBody)
    async def tokenize(request: Request, body: TokenizeBody) -> Response:
        def told(served: ServedModel) -> dict[str, Any]:
            tokens = served.translator.tokens_of(body)
            return {"tokens": tokens, "count": len(tokens), "max_model_len": served.translator.context}

        return JSONResponse(await service.read(request, body, told))

    @post("/apply-template", TokenizeBody)
    async def template(request: Request, body: TokenizeBody) -> Response:
        def told(served: ServedModel) -> str:
            return str(served.tokenizer.decode(served.translator.tokens_of(body)))

        return JSONResponse({"prompt": await service.read(request, body, told)})

    @post("/detokenize", DetokenizeBody)
    async def detokenize(request: Request, body: DetokenizeBody) -> Response:
        text = await service.read(request, body, lambda served: served.translator.text_of(body))
        return JSONResponse({"prompt": text, "content": text})

    @app.post("/v1/audio/transcriptions")
    async def transcriptions(request: Request) -> Response:
        return await service.hear(request, "transcribe")

    @app.post("/v1/audio/translations")
    async def translations(request: Request) -> Response:
        return await service.hear(request, "translate")

    @app.get("/props")
    async def properties() -> Response:
        return JSONResponse(props(await service.model(None, time.monotonic() + timeout_s)))

    @app.get("/slots")
    async def rows() -> Response:
        return JSONResponse(slots(await service.model(None, time.monotonic() + timeout_s)))

    @app.get("/v1/models")
    async def listed() -> Response:
        return JSONResponse({"object": "list", "data": [models.described(name) for name in models.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        models.get(name)
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

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body_at(request.url.path), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return await refused(request, ApiError(error.status_code, str(error.detail)))

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=_LEFT)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return await refused(request, ApiError(500, "internal error"))

    _, described = models_json_schema(kinds, ref_template="#/components/schemas/{model}")
    app.openapi().setdefault("components", {}).setdefault("schemas", {}).update(described["$defs"])
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["*"], allow_headers=["*"])

    def count(path: str, status: int) -> None:
        service.metrics.requests.labels(path, str(status)).inc()

    return Guard(app, hosts=hosts, api_keys=api_keys, max_body=max_body, origins=cors_origins, on_answer=count)


def _policy_of(page: str) -> str:
    """The content policy of a page: its own script and style, and requests to this server."""
    policy = "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    for name in ("script", "style"):
        text = page.partition(f"<{name}>")[2].partition(f"</{name}>")[0]
        policy += f"; {name}-src 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    return policy
