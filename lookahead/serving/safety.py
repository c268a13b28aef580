"""Checks before a request is served: its host, its origin, the API key, and the size of its body."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from lookahead.serving.api_errors import ApiError, shutting_down

_OPEN = "/health", "/ping", "/"  # served without a key: they reveal nothing
_LEAST_REST, _REST_S = 1 << 20, 2.0  # bytes and seconds for the rest of a body that is too large

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
OnAnswer = Callable[[str, int], None]


class Guard:
    """An ASGI middleware that checks requests.

    A web page that a user visits can send requests to this machine under a domain that resolves to it (DNS rebinding).
    So the `Host` must be an IP address, which no domain can pretend to be, `localhost` or a known name. A page can also
    send some requests under a known name, without reading the answers (CSRF): so the `Origin`, which browsers send,
    must be this server or an allowed origin.

    Args:
        app: The application.
        origins: Allowed origins of web pages.
        on_answer: Called with the path and the status of every answer.
        hosts: Names that the header `Host` may have besides `localhost` and IP addresses.
        api_keys: The keys of which clients must send one; none if empty.
        max_body: Maximum bytes of a request.
    """

    def __init__(
        self,
        app: Any,
        *,
        origins: Collection[str],
        on_answer: OnAnswer,
        hosts: Collection[str] = (),
        api_keys: Sequence[str] = (),
        max_body: int = 4 << 20,
    ) -> None:
        self._app, self._max_body = app, max_body
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._on_answer, self._origins = on_answer, frozenset(origins)
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """The ASGI entry point."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        has_begun = False

        async def counted(message: dict[str, Any]) -> None:
            nonlocal has_begun
            has_begun = True
            if message["type"] == "http.response.start":
                self._on_answer(getattr(scope.get("route"), "path", "other"), message["status"])
            await send(message)

        try:
            self._check(scope, Headers(scope=scope))
            async with AsyncExitStack() as at_end:  # ends what the request began
                scope["state"]["at_end"] = at_end
                await self._app(scope, self._limited(receive), counted)
        except (ApiError, asyncio.CancelledError) as raised:
            if has_begun:
                raise
            # At its end, uvicorn cancels what is left.
            error = raised if isinstance(raised, ApiError) else shutting_down()
            if error.status == 413:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._read_rest(receive), _REST_S)
            answer = JSONResponse(error.body_at(scope["path"]), error.status, {**error.headers, "connection": "close"})
            await answer(scope, receive, counted)

    def _check(self, scope: dict[str, Any], headers: Headers) -> None:
        try:
            host = (urlsplit(f"//{headers.get('host', '')}").hostname or "").lower()
        except ValueError:  # not an address
            host = ""
        if host not in self._hosts and not _is_address(host):
            raise ApiError(403, f"Host: {host[:100]!r} is not a name of this server; --allowed-host adds names")
        origin = headers.get("origin")
        is_known = origin is None or origin in self._origins
        if not is_known and origin.partition("//")[2].lower() != headers["host"].lower():
            raise ApiError(403, f"Origin: {origin[:100]!r} may not call this server; --cors-origin allows an origin")
        owner = ""
        if self._keys and scope["path"] not in _OPEN and scope["method"] != "OPTIONS":
            # Clients send characters outside ASCII as UTF-8 or as Latin-1.
            bearer = headers.get("authorization", "").partition(" ")[2].strip()
            sent = (bearer or headers.get("x-api-key", "")).encode("latin-1")
            forms = sent, sent.decode("latin-1").encode()
            fits = [any(hmac.compare_digest(form, key) for form in forms) for key in self._keys]
            if not any(fits):
                raise ApiError(401, "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'")
            owner = f"key {fits.index(True)}"
        address = str((scope.get("client") or ("",))[0])
        scope["state"] = {**scope.get("state", {}), "owner": owner, "client": owner if len(self._keys) > 1 else address}
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body:
            raise self._too_large()

    def _limited(self, receive: Receive) -> Receive:
        taken = 0

        async def limited() -> dict[str, Any]:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body:
                raise self._too_large()
            return message

        return limited

    async def _read_rest(self, receive: Receive) -> None:
        """Read what a client still sends, up to a limit: bytes left unread reset its connection and lose the answer."""
        left = max(self._max_body, _LEAST_REST)
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            if not message.get("more_body"):
                return

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body must have at most {self._max_body} bytes; --max-body-mb sets the limit")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
