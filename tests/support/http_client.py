"""A client that takes nothing for granted: whole answers, events of streams that end well."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

WAIT_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        """The body; a number that JSON does not have fails."""
        return json.loads(self.data, parse_constant=_no_constant)

    @property
    def error(self) -> Any:
        """The error, in exactly its shape."""
        body = self.json
        assert set(body) == {"error"}, body
        assert set(body["error"]) == {"message", "type", "param", "code"}, body
        assert isinstance(body["error"]["code"], str), body
        return body["error"]

    @property
    def events(self) -> list[Any]:
        """The events of a stream that ended well."""
        blocks = self.data.decode().split("\n\n")
        assert blocks[-1] == "", "the stream lacks its last blank line"
        lines = [block for block in blocks[:-1] if not block.startswith(":")]
        assert lines[-1] == "data: [DONE]", lines[-1:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@dataclass(frozen=True, kw_only=True)
class HttpClient:
    """Asks the server on a port of this machine."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        method: str | None = None,
    ) -> Answer:
        """Ask, and wait for the whole answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            verb = method or ("GET" if body is None else "POST")
            connection.request(verb, path, data, dict(headers or {}))
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Answer(status=response.status, headers=named, data=response.read())
        finally:
            connection.close()

    def open(self, path: str, body: Any) -> socket.socket:
        """Send a request and give the socket, to be read or left as the test likes."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(data)}\r\n\r\n"
        return self.open_raw(head.encode() + data)

    def open_raw(self, data: bytes, *, receive_bytes: int | None = None) -> socket.socket:
        """Send bytes; `receive_bytes` is how much this end takes before the other has to wait."""
        opened = socket.socket()
        if receive_bytes is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        opened.settimeout(WAIT_SECONDS)
        opened.connect(("127.0.0.1", self.port))
        opened.sendall(data)
        return opened


def read_all(opened: socket.socket) -> bytes:
    """Read until the other end closes; a broken connection ends it too."""
    parts = []
    try:
        while part := opened.recv(1 << 16):
            parts.append(part)
    except ConnectionError:
        pass
    opened.close()
    return b"".join(parts)


def wait_for(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.005)
