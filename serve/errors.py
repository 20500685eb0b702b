"""What a client is told when a request fails: one shape, on every path.

Owns the error body of the OpenAI API, the status and the string code of each failure, and how an
error of the store becomes one. Knows nothing of HTTP frameworks. Invariants: a body is valid JSON
whatever a client sent; it names no path of the server's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardb.errors import CorruptionError, NotFoundError, ShardbError, StorageFailedError

SERVER_ERROR_FROM = 500
RETRY_SECONDS = 1


class ApiError(ShardbError):
    """A request that cannot be answered: status, string code, the parameter at fault."""

    kind = "api"

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Give the error in the shape that clients of the OpenAI API read."""
        return {
            "error": {
                "message": self.message,
                "type": _type_of(self.status),
                "param": self.param,
                "code": self.code,
            }
        }


def bad_value(param: str, message: str, *, code: str = "invalid_value") -> ApiError:
    """Refuse one field of a request."""
    return ApiError(400, f"'{param}': {message}", code=code, param=param)


def overloaded(message: str, *, retry_seconds: int = RETRY_SECONDS) -> ApiError:
    """Refuse a request that may be sent again a little later."""
    headers = {"retry-after": str(retry_seconds), "retry-after-ms": str(1000 * retry_seconds)}
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


def stopping() -> ApiError:
    """Refuse a request because the server is going away."""
    headers = {"retry-after": str(RETRY_SECONDS), "connection": "close"}
    return ApiError(503, "the server is stopping", code="server_stopping", headers=headers)


def model_not_found(model: str, detail: str = "") -> ApiError:
    """Refuse a model id that names no commit."""
    more = f": {detail}" if detail else ""
    return ApiError(
        404,
        f"The model '{model}' does not exist{more}. GET /v1/models lists some that do.",
        code="model_not_found",
        param="model",
    )


def of_store(error: ShardbError, commit: str) -> ApiError:
    """Translate an error of the store; the message keeps the kind and drops the path."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CorruptionError):
        return ApiError(
            503,
            f"commit {commit} cannot be served: its stored bytes are damaged or missing"
            f" ({error.kind}); other commits are still served. On the server: shardb fsck",
            code=error.kind,
        )
    if isinstance(error, NotFoundError):
        return model_not_found(commit)
    if isinstance(error, StorageFailedError):
        message = f"commit {commit}: the server's storage failed ({error.kind})"
        return ApiError(503, message, code=error.kind)
    return ApiError(500, f"commit {commit}: generation failed ({error.kind})", code=error.kind)


def _type_of(status: int) -> str:
    if status >= SERVER_ERROR_FROM:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"
