"""A request as the routes see it: its body, checked in size and time.

Owns reading a body. Knows nothing of what it means. Invariants: no more than the limit is ever
held; a client that sends slowly is not waited for.
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


class Incoming:
    """One request."""

    def __init__(self, scope: Scope, receive: Receive, limits: Limits, *, rest: str = "") -> None:
        """`rest` is what a route of the form /v1/models/… leaves of the path."""
        self.receive = receive
        self.rest = rest
        self._scope = scope
        self._limits = limits

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
            raise ApiError(
                408,
                f"the body did not arrive within {self._limits.body_seconds:g} s",
                code="request_timeout",
                headers={"connection": "close"},
            ) from error
        return parse_body(data)

    async def _body(self) -> bytes:
        told = self.header("content-length")
        if told is not None and told.isdecimal() and int(told) > self._limits.body_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            part = message.get("body", b"")
            size += len(part)
            if size > self._limits.body_bytes:
                raise self._too_large()
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self._limits.body_bytes:,} bytes",
            code="request_too_large",
            headers={"connection": "close"},
        )
