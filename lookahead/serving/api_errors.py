"""Errors of the server, in the formats of the APIs."""

from __future__ import annotations

from typing import Any

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


def queue_full(waiting: int) -> ApiError:
    """The error for a request to a server with too many others."""
    message = f"{waiting} requests wait, the maximum; try again later"
    return ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})


def shutting_down() -> ApiError:
    """The error for a request when the server ends."""
    return ApiError(503, "the server is shutting down", code="shutting_down")
