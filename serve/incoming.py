"""A request as the routes see it: its body, checked in size and time.

Owns reading a body. Knows nothing of what it means. Invariants: no more than the limit is ever
held; a client that sends slowly is not waited for; a client that sends too much can read that it
did, since most read nothing before they have sent everything, and a connection that is closed with
bytes unread takes its answer with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Scope

from serve.errors import ApiError
from serve.limits import Limits
from serve.request_fields import parse_body
from serve.sse import ClientLeft

# Of a body that is too large so much is taken and dropped, before the answer says so.
DROPPED_BYTES_MAX = 64 << 20


class Incoming:
    """One request."""

    def __init__(self, scope: Scope, receive: Receive, limits: Limits, *, rest: str = "") -> None:
        """`rest` is what a route of the form /v1/models/… leaves of the path."""
        self.receive = receive
        self.rest = rest
        self._scope = scope
        self._limits = limits
        self._is_too_large = False

    @property
    def path(self) -> str:
        """Give the path."""
        return str(self._scope["path"])

    def header(self, name: str) -> str | None:
        """Give a header by its name in small letters."""
        for key, value in self._scope["headers"]:
            if key == name.encode():
                return str(value.decode("latin-1"))
        return None

    def query(self, name: str) -> str | None:
        """Give a parameter of the query."""
        values = parse_qs(self._scope["query_string"].decode("latin-1")).get(name)
        return values[0] if values else None

    async def json(self) -> Mapping[str, Any]:
        """Read the body as a JSON object."""
        try:
            data = await asyncio.wait_for(self._body(), self._limits.body_seconds)
        except TimeoutError as error:
            if self._is_too_large:
                raise self._too_large() from None
            raise ApiError(
                408,
                f"the body did not arrive within {self._limits.body_seconds:g} s",
                code="request_timeout",
                headers={"connection": "close"},
            ) from error
        return parse_body(data)

    async def _body(self) -> bytes:
        limit, told = self._limits.body_bytes, self._told_bytes()
        self._is_too_large = told > limit
        is_asking_first = self._is_too_large and self.header("expect") is not None
        if is_asking_first or told > limit + DROPPED_BYTES_MAX:
            raise self._too_large()
        parts: list[bytes] = []
        size, is_more = 0, True
        while is_more and size <= limit + DROPPED_BYTES_MAX:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            is_more = message.get("more_body", False)
            self._is_too_large = self._is_too_large or size > limit
            if self._is_too_large:
                parts.clear()
        if self._is_too_large:
            raise self._too_large()
        return b"".join(parts)

    def _told_bytes(self) -> int:
        """Give the size that the client tells beforehand, 0 where it tells none."""
        told = self.header("content-length") or ""
        return int(told) if told.isdecimal() else 0

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self._limits.body_bytes:,} bytes",
            code="request_too_large",
            headers={"connection": "close"},
        )
