"""The sockets: uvicorn, with the bounds and the shapes that it leaves open.

Owns the connection protocol and the course of a shutdown. Knows nothing of routes. What it adds:
a connection that sends no whole request in time is closed, and so is one too many; bytes that are
no HTTP get the error shape; an answer that cannot go on breaks its connection instead of ending it
well; after the first SIGTERM or SIGINT running answers finish, new requests are refused.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from serve.app import App
from serve.errors import ApiError
from serve.service import Service
from serve.sse import ABORT, encode_json
from shardb.errors import ShardbError

HEADER_BYTES_MAX = 32 << 10
KEEP_ALIVE_SECONDS = 75
FOLLOW_SECONDS = 1.0
EXIT_CODE_BASE = 128


class Connection(H11Protocol):
    """One client's connection."""

    def __init__(self, config: Any, server_state: Any, app_state: Any, _loop: Any = None) -> None:
        mine = {**app_state, ABORT: self._abort}
        super().__init__(config=config, server_state=server_state, app_state=mine, _loop=_loop)
        self._limits = app_state["limits"]
        self._waiting: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._answered: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            transport.abort()
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        self._stop_dropping()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Stop waiting once a whole request head is there."""
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._waiting is None and self.conn.trailing_data[0]:
            self._wait_for_request()  # a second request has begun and is not whole
        if self.cycle is not self._answered or self.conn.their_state is not h11.SEND_BODY:
            self._stop_dropping()

    def on_response_complete(self) -> None:
        """Give the rest of a body that nobody read its time to come; it is dropped."""
        super().on_response_complete()
        self._stop_dropping()
        if self.conn.their_state is h11.SEND_BODY:
            self._answered = self.cycle
            self._unread = self.loop.call_later(self._limits.body_seconds, self._abort)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the shape of every other error."""
        body = encode_json(ApiError(400, msg, code="invalid_http").body())
        headers: list[tuple[str, str]] = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        events: list[Any] = [
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        with suppress(h11.LocalProtocolError):  # an answer had begun
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _wait_for_request(self) -> None:
        seconds = self._limits.header_seconds
        self._waiting = self.loop.call_later(seconds, self._abort)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _stop_dropping(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _abort(self) -> None:
        self.transport.abort()


class Server(uvicorn.Server):
    """A server that drains at the first signal and tells which one it was."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self.stop_signal: signal.Signals | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take signals over without raising them again at the end; only the main thread may."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        earlier = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, action in earlier.items():
                signal.signal(number, action)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; a second SIGINT leaves at once, and the leases go with the process."""
        arrived = signal.Signals(sig)
        if self.stop_signal is not None:
            if arrived is signal.SIGINT:
                os._exit(EXIT_CODE_BASE + arrived)
            return
        self.stop_signal = arrived
        self._service.is_stopping = True
        self.should_exit = True

    @property
    def exit_code(self) -> int:
        """0, or 130 after SIGINT and 143 after SIGTERM."""
        return 0 if self.stop_signal is None else EXIT_CODE_BASE + self.stop_signal


def make_server(service: Service, *, host: str, port: int, drain_seconds: float) -> Server:
    """Make a server that is not listening yet."""
    config = uvicorn.Config(
        _with_lifespan(service),
        host=host,
        port=port,
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
        h11_max_incomplete_event_size=HEADER_BYTES_MAX,
    )
    return Server(config, service)


def _with_lifespan(service: Service) -> Callable[..., Any]:
    """Give the application, with what runs beside it."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await answering(scope, receive, send)
            return
        await receive()
        scope["state"]["limits"] = service.limits
        async with following(service):
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    answering = App(service)
    return app


@asynccontextmanager
async def following(service: Service) -> AsyncIterator[None]:
    """Move on to new commits for the length of a block, also while nobody asks."""
    task = asyncio.ensure_future(_follow(service))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _follow(service: Service) -> None:
    """Let go of commits that nobody reads any more: a lease keeps their space on the disk."""
    while True:
        await asyncio.sleep(FOLLOW_SECONDS)
        with suppress(ShardbError):  # the next request tells its client
            await asyncio.to_thread(service.catalogue.forget_idle)
