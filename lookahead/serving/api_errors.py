"""Errors of the server, in the formats of the APIs."""

from __future__ import annotations

from typing import Any

from lookahead.errors import ConfigError, DocumentError, LogitsError, PromptError, UnsupportedModelError

OF_REQUESTS = ConfigError, DocumentError, PromptError, UnsupportedModelError  # errors that a request causes
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}

_OF_MESSAGES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class ApiError(Exception):
    """An error response to a request.

    Args:
        status: The HTTP status.
        message: The field, the allowed values, and the value received.
        param: The field.
        code: A machine-readable code.
        headers: Further headers of the response.
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

    def body_at(self, path: str) -> dict[str, Any]:
        """The body in the form of the API of a path."""
        if not path.startswith("/v1/messages"):
            return self.body
        kind = _OF_MESSAGES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(self)}, "request_id": None}


def invalid(param: str | None, message: str) -> ApiError:
    """The error for a field with an invalid value."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code="invalid_value")


def as_api_error(error: Exception) -> ApiError:
    """The response to an error, which says of errors that no request causes nothing."""
    if isinstance(error, ApiError):
        return error
    is_of_grammar = isinstance(error, LogitsError) and "grammar" in str(error)
    return (
        invalid(None, str(error))
        if is_of_grammar or isinstance(error, OF_REQUESTS)
        else ApiError(500, "internal error")
    )


def shutting_down() -> ApiError:
    """The error for a request when the server ends."""
    return ApiError(503, "the server is shutting down", code="shutting_down")
