"""Errors of the server, in the shape that clients of the OpenAI API know."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """A request that is answered by an error.

    Args:
        status: Of HTTP.
        message: What is wrong: the field, what is allowed, what was received.
        param: The field.
        code: A word for programs.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        kind = _TYPES.get(status, "invalid_request_error")
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def invalid(param: str | None, message: str) -> ApiError:
    """The error of a field that cannot be served."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code="invalid_value")
