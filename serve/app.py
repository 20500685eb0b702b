"""The application: from an ASGI scope to a route, and every failure to one shape.

Owns the table of routes, the request id, the key check and the last resort. Knows nothing of
generation. Invariants: every answer has `x-request-id`; whatever fails, a client gets the error
shape, or, where its answer had begun, a connection that breaks; a path or name that a client wrote
never becomes a metric.
"""

from __future__ import annotations

import logging
import re
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from serve import routes_native, routes_openai
from serve.errors import ApiError, of_store
from serve.incoming import Incoming
from serve.limits import check_key
from serve.page import FILES, Page
from serve.routes_status import StatusRoutes
from serve.service import Service
from serve.sse import ABORT, ClientLeft, error_response
from shardb.errors import ShardbError

Endpoint = Callable[[Service, Incoming], Awaitable[Response]]
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")
MODEL_PREFIX = "/v1/models/"
# Readiness probes have no key, and the page asks for one itself.
OPEN_TO_ALL = ("/health", *FILES)


@dataclass(kw_only=True)
class Exchange:
    """One request and what has been answered so far."""

    id: str
    began: float
    route: str = "unknown"
    status: int = 0


class App:
    """The ASGI application."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._status = StatusRoutes(service)
        self._page = Page()
        self._log = logging.getLogger("serve")
        status = self._status
        self._routes: dict[str, dict[str, Endpoint]] = {
            "/health": {"GET": status.health},
            "/models": {"GET": status.models},
            "/run": {"GET": status.run},
            "/metrics": {"GET": status.metrics},
            "/generate": {"POST": routes_native.generate},
            "/compare": {"POST": routes_native.compare},
            "/v1/models": {"GET": routes_openai.models},
            "/v1/completions": {"POST": routes_openai.completions},
            "/v1/chat/completions": {"POST": routes_openai.chat_completions},
        }
        self._routes |= {path: {"GET": self._file} for path in FILES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"this application answers HTTP alone, not {scope['type']}")
        exchange = Exchange(id=_request_id(scope), began=time.monotonic())
        sending = self._sending(exchange, send)
        try:
            response = await self._answer(scope, receive, exchange)
            await response(scope, receive, sending)
        except ClientLeft:
            self._service.metrics.clients_left += 1
        except Exception as error:  # noqa: BLE001 - the last resort: a client is owed an answer
            await self._fail(scope, receive, sending, exchange, error)
        finally:
            seconds = time.monotonic() - exchange.began
            self._service.metrics.answered(exchange.route, exchange.status, seconds)

    async def _answer(self, scope: Scope, receive: Receive, exchange: Exchange) -> Response:
        path, method = scope["path"], scope["method"]
        incoming = Incoming(scope, receive, self._service.limits)
        if path not in OPEN_TO_ALL:
            check_key(self._service.api_keys, incoming.header("authorization"))
        if path.startswith(MODEL_PREFIX) and len(path) > len(MODEL_PREFIX):
            exchange.route = "/v1/models/{id}"
            incoming.rest = path.removeprefix(MODEL_PREFIX)
            methods: dict[str, Endpoint] = {"GET": routes_openai.model}
        else:
            known = self._routes.get(path)
            if known is None:
                raise _no_such_route(method, path)
            exchange.route, methods = path, known
        endpoint = methods.get("GET" if method == "HEAD" else method)
        if endpoint is None:
            raise _no_such_method(method, path, methods)
        return await endpoint(self._service, incoming)

    async def _file(self, service: Service, incoming: Incoming) -> Response:
        del service
        return self._page.response(incoming.path)

    async def _fail(
        self, scope: Scope, receive: Receive, send: Send, exchange: Exchange, error: Exception
    ) -> None:
        told = self._told(error, exchange)
        if exchange.status == 0:
            await error_response(told)(scope, receive, send)
            return
        abort = scope.get("state", {}).get(ABORT)
        if abort is not None:
            abort()

    def _told(self, error: Exception, exchange: Exchange) -> ApiError:
        if isinstance(error, ApiError):
            if error.__cause__ is not None and error.status >= 500:
                self._log.error("%s: %s: %s", exchange.id, error.message, error.__cause__)
            return error
        if isinstance(error, ShardbError):
            self._log.error("%s: %s", exchange.id, error)
            return of_store(error, "of this request")
        self._log.error("%s: %s", exchange.id, "".join(traceback.format_exception(error)))
        return ApiError(
            500, f"The server had an error; its log has it under {exchange.id}", code="server_error"
        )

    def _sending(self, exchange: Exchange, send: Send) -> Send:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = exchange.id
                milliseconds = round(1000 * (time.monotonic() - exchange.began))
                headers["openai-processing-ms"] = str(milliseconds)
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        return sending


def _request_id(scope: Scope) -> str:
    """Give the client's own id back where it is a plain word, else a new one."""
    for key, value in scope["headers"]:
        if key == b"x-request-id":
            text = value.decode("latin-1")
            if REQUEST_ID.match(text):
                return str(text)
    return f"req_{uuid.uuid4().hex}"


def _no_such_route(method: str, path: str) -> ApiError:
    return ApiError(404, f"Invalid URL ({method} {path[:200]})", code="unknown_url", param=None)


def _no_such_method(method: str, path: str, methods: dict[str, Endpoint]) -> ApiError:
    return ApiError(
        405,
        f"Not allowed to {method} on {path[:200]}",
        code="method_not_supported",
        headers={"allow": ", ".join(sorted(methods))},
    )
