"""Server-sent events, and answers that notice when their client has left.

Owns the bytes of an event stream and the watch on a connection. Knows nothing of what events hold.
Invariants: a stream that ends well ends with `data: [DONE]` and a blank line, one that fails with
an error event and without it; while nothing is said, comments keep the connection alive; a client
that left or does not read ends the work at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from serve.errors import ApiError

T = TypeVar("T")
# Failures that show at once get a status of their own; whatever takes longer gets its headers now.
HEADERS_AFTER_SECONDS = 0.25
DONE = b"data: [DONE]\n\n"
ABORT = "abort_connection"


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamLimits:
    """How long a stream stays silent, and how long it waits for its reader."""

    keep_alive_seconds: float = 5.0
    reader_seconds: float = 30.0


class ClientLeft(Exception):
    """The client closed its connection before the answer was whole."""


def encode_json(value: Any) -> bytes:
    """Give compact JSON; a number that JSON does not have is a mistake of ours."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def event(value: Any) -> bytes:
    """Give one event."""
    return b"data: " + encode_json(value) + b"\n\n"


class Json(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the body."""
        return encode_json(content)


def error_response(error: ApiError) -> Response:
    """Give an error as an answer; whatever characters it quotes are escaped."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


async def unless_client_leaves(receive: Receive, work: Awaitable[T]) -> T:
    """Do work while the client waits for it; ClientLeft, and the work cancelled, when it left."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for each in (task, left):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


class EventStream(Response):
    """An answer made of events; the headers go out with the first one, or a little later."""

    def __init__(
        self,
        events: AsyncIterator[Any],
        limits: StreamLimits,
        *,
        headers: Mapping[str, str],
        comment: Callable[[], str],
        on_end: Callable[[], None],
    ) -> None:
        """`comment` says what is going on while nothing is said; `on_end` is called once."""
        self._events = events
        self._limits = limits
        self._comment = comment
        self._on_end = on_end
        self.status_code = 200
        self.background = None
        self.init_headers(
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
                **headers,
            }
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end; ClientLeft when nobody reads them any more."""
        try:
            await unless_client_leaves(receive, self._send_all(scope, receive, send))
        except TimeoutError as error:
            abort = scope.get("state", {}).get(ABORT)
            if abort is not None:
                abort()  # a plain close would wait for the reader once more
            raise ClientLeft from error
        finally:
            with suppress(Exception):
                await self._events.aclose()  # type: ignore[attr-defined]
            self._on_end()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        upcoming = asyncio.ensure_future(_next(self._events))
        try:
            await asyncio.wait({upcoming}, timeout=HEADERS_AFTER_SECONDS)
            failure = upcoming.exception() if upcoming.done() else None
            if isinstance(failure, ApiError):
                await error_response(failure)(scope, receive, send)
                return
            await self._start(send, is_waiting=not upcoming.done())
            while True:
                done, _ = await asyncio.wait({upcoming}, timeout=self._limits.keep_alive_seconds)
                if not done:
                    await self._say(send, f": {self._comment()}\n\n".encode())
                    continue
                value = upcoming.result()
                if value is _END:
                    break
                await self._say(send, event(value))
                upcoming = asyncio.ensure_future(_next(self._events))
            await self._say(send, DONE, last=True)
        except ApiError as error:
            await self._say(send, event(error.body()), last=True)
        finally:
            upcoming.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await upcoming

    async def _start(self, send: Send, *, is_waiting: bool) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        if is_waiting:
            await self._say(send, f": {self._comment()}\n\n".encode())

    async def _say(self, send: Send, data: bytes, *, last: bool = False) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": not last}
        await asyncio.wait_for(send(message), self._limits.reader_seconds)


_END = object()


async def _next(events: AsyncIterator[Any]) -> Any:
    return await anext(events, _END)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
