"""Does the server stay well among clients that leave, do not read, lie or come in crowds?"""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve.limits import Limits
from tests.support.byte_model import ids_of, small_store
from tests.support.byte_server import Asked, ByteServer, byte_server, says
from tests.support.http_client import read_all, wait_for

PROMPT = {"model": "primary", "prompt": "hi", "max_tokens": 200}
CLIENTS = 64
LIMITS = Limits(
    answers_running=64,
    answers_queued=192,
    body_bytes=50_000,
    body_seconds=0.4,
    header_seconds=0.4,
    reader_seconds=0.4,
    request_seconds=20.0,
    keep_alive_seconds=0.05,
    connections=160,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_store(tmp_path_factory.mktemp("serve") / "run", [1])


@pytest.fixture
def server(store: Path) -> Iterator[ByteServer]:
    with byte_server(store, says("word " * 60), limits=LIMITS, sweep_seconds=0.01) as opened:
        yield opened


def check_well(server: ByteServer) -> None:
    """Nothing runs, nothing is leased but the head, and the next request is answered."""
    server.wait_until_idle()
    assert server.leases() == 1
    answer = server.ask("/v1/completions", {**PROMPT, "max_tokens": 5})
    assert answer.json["choices"][0]["text"] == "word "
    assert server.ask("/health").status == 200


def leave(opened: socket.socket) -> None:
    """Break a connection at once, as a process that died does."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    opened.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "running"])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/v1/chat/completions"])
def test_does_work_stop_when_its_client_left(
    server: ByteServer, stream: bool, phase: str, path: str
) -> None:
    body: dict[str, Any] = {**PROMPT, "stream": stream}
    if path == "/v1/chat/completions":
        body = {"model": "primary", "messages": [{"role": "user", "content": "hi"}]} | {
            "stream": stream
        }
    if phase == "queued":
        server.scheduler.held.set()
    server.scheduler.sweep_seconds = 0.01  # a request is far from its end when its client leaves
    opened = server.open(path, body)
    wait_for(lambda: server.scheduler.statistics().requests_running == 1)
    sweeps = server.scheduler.sweeps
    leave(opened)
    server.wait_until_idle()
    assert server.scheduler.ended == ["cancelled"]
    assert server.scheduler.sweeps - sweeps < 100
    server.scheduler.sweep_seconds = 0.0
    server.scheduler.held.clear()
    check_well(server)


@pytest.mark.parametrize("length", [0, 10, 40, 75])
def test_does_a_request_that_never_comes_whole_hurt_nobody(server: ByteServer, length: int) -> None:
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n{" + b" " * 40
    )
    left = server.open_raw(request[:length])
    waits = server.open_raw(request[:length])
    leave(left)
    began = time.monotonic()
    told = read_all(waits)
    assert time.monotonic() - began < 10
    assert told == b"" or b'"code":"request_timeout"' in told
    check_well(server)


def test_is_a_reader_that_does_not_read_left(store: Path) -> None:
    script = says("word " * 40)
    with byte_server(store, script, limits=LIMITS) as server:
        body = {**PROMPT, "stream": True, "logprobs": 20, "n": 60}
        stuck = [stuck_reader(server, body) for _ in range(2)]
        wait_for(lambda: server.service.metrics.clients_left == 2)
        check_well(server)
        for opened in stuck:
            assert b"[DONE]" not in read_all(opened)


def stuck_reader(server: ByteServer, body: Any) -> socket.socket:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    return server.open_raw(head.encode() + data, receive_bytes=2048)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x00\x01\x02\x03\r\n\r\n", b'"code":"invalid_http"'),
        (b"GET / HTTP/9.9\r\nconnection: close\r\n\r\n", b"HTTP/1.1"),
        (b"GET /" + b"a" * 30_000 + b" HTTP/1.1\r\nconnection: close\r\n\r\n", b'"code":"'),
        (
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
            b'"code":"invalid_http"',
        ),
        (
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n",
            b'"code":"request_too_large"',
        ),
        (
            b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            b"8000\r\n" + b"x" * 0x8000 + b"\r\n8000\r\n" + b"x" * 0x8000 + b"\r\n",
            b'"code":"request_too_large"',
        ),
        (
            b"POST /generate HTTP/1.0\r\nhost: x\r\ncontent-length: 3\r\n\r\n\xff\xfe\xfd",
            b'"code":"invalid_json"',
        ),
        (
            b"GET /v1/models/\xff\xfe HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
            b"HTTP/1.1 4",
        ),
        (
            b"GET /v1/models/%00%ff%0a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
            b'"code":"model_not_found"',
        ),
        (b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b'"code":"unknown_url"'),
    ],
)
def test_are_malformed_requests_answered_in_shape(
    server: ByteServer, data: bytes, words: bytes
) -> None:
    assert words in read_all(server.open_raw(data))
    check_well(server)


def chunks(count: int) -> Iterator[bytes]:
    return (b" " * 50_000 for _ in range(count))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(lambda: b" " * 30_000_000, id="told"),
        pytest.param(lambda: chunks(600), id="chunked"),
    ],
)
def test_can_a_client_that_sends_everything_first_read_that_it_was_too_much(
    store: Path, body: Callable[[], Any]
) -> None:
    with byte_server(
        store, says("word " * 60), limits=replace(LIMITS, body_seconds=20.0)
    ) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("POST", "/generate", body())
        answer = connection.getresponse()
        assert (answer.status, json.load(answer)["error"]["code"]) == (413, "request_too_large")
        connection.close()
        check_well(server)


def test_is_a_client_that_asks_first_answered_first(server: ByteServer) -> None:
    began = time.monotonic()
    opened = server.open_raw(
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n"
        b"expect: 100-continue\r\n\r\n"
    )
    told = read_all(opened)
    assert b" 413 " in told
    assert b" 100 " not in told
    assert time.monotonic() - began < LIMITS.body_seconds


@pytest.mark.parametrize("path", ["/nowhere", "/health", "/v1/models"])
def test_does_a_body_that_nobody_reads_end_its_connection(server: ByteServer, path: str) -> None:
    opened = server.open_raw(
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n" % path.encode()
    )
    opened.settimeout(0.05)
    deadline = time.monotonic() + 20 * LIMITS.body_seconds
    told = b""
    with suppress(ConnectionError):
        while True:
            assert time.monotonic() < deadline, "it holds a connection for as long as it likes"
            with suppress(TimeoutError):
                part = opened.recv(1 << 16)
                told += part
                if not part:
                    break
            opened.sendall(b" ")
    assert b'"code":"' in told
    check_well(server)


def test_does_a_body_that_nobody_reads_leave_its_connection_of_use(server: ByteServer) -> None:
    late = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"
    opened = server.open_raw(late)
    assert b" 404 " in opened.recv(1 << 16)
    data = json.dumps({**PROMPT, "max_tokens": 100}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d"
    opened.sendall(b"rest" + head % len(data) + b"\r\n\r\n" + data)  # an answer of a second
    assert b'"finish_reason":"length"' in read_all(opened)
    check_well(server)


def test_is_a_full_server_refusing_with_the_time_to_wait(store: Path) -> None:
    limits = Limits(answers_running=2, answers_queued=2)
    with byte_server(store, says("x"), limits=limits) as server:
        server.scheduler.held.set()
        waiting = [server.open("/v1/completions", PROMPT) for _ in range(4)]
        wait_for(lambda: server.service.admission.active == 4)
        refused = server.ask("/v1/completions", PROMPT)
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert refused.error["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        server.scheduler.held.clear()
        for opened in waiting:
            assert b" 200 OK" in opened.recv(1000)
            opened.close()
        server.wait_until_idle()
        assert server.ask("/v1/completions", PROMPT).status == 200


def test_does_a_request_that_takes_too_long_end(store: Path) -> None:
    with byte_server(store, says("x" * 50), limits=Limits(request_seconds=0.1)) as server:
        server.scheduler.held.set()
        answer = server.ask("/v1/completions", PROMPT)
        assert (answer.status, answer.error["code"]) == (503, "timeout")
        server.wait_until_idle()
        assert server.scheduler.ended == ["cancelled"]


def test_are_connections_bounded(store: Path) -> None:
    with byte_server(store, says("x"), limits=Limits(connections=8, header_seconds=5)) as server:
        opened = [server.open_raw(b"") for _ in range(8)]
        wait_for(lambda: len(server.server.server_state.connections) == 8)
        assert read_all(server.open_raw(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")) == b""
        for each in opened:
            each.close()
        wait_for(lambda: not server.server.server_state.connections)
        assert server.ask("/health").status == 200


def echoing(asked: Asked) -> list[int]:
    """Say the prompt again, without its beginning and the newest byte's case."""
    return list(asked.prompt_ids[1:])


def test_do_secrets_stay_with_their_clients(store: Path) -> None:
    with byte_server(store, echoing, limits=LIMITS) as server:
        found: dict[int, str] = {}
        barrier = threading.Barrier(CLIENTS)

        def client(number: int) -> None:
            secret = f"<secret {number} of client {number * 7919}>"
            barrier.wait()
            for turn in range(3):
                body = {**PROMPT, "prompt": secret, "stream": (number + turn) % 2 == 0}
                answer = server.ask("/v1/completions", body)
                rows = answer.events if body["stream"] else [answer.json]
                text = "".join(row["choices"][0]["text"] for row in rows)
                assert text == secret
                found[number] = text

        with ThreadPoolExecutor(CLIENTS) as pool:
            for each in [pool.submit(client, number) for number in range(CLIENTS)]:
                each.result()
        assert len(set(found.values())) == CLIENTS
        server.wait_until_idle()
        assert server.leases() == 1


def test_control_a_mixed_up_answer_would_be_seen(store: Path) -> None:
    with byte_server(store, lambda _: ids_of("somebody else's"), limits=LIMITS) as server:
        answer = server.ask("/v1/completions", {**PROMPT, "prompt": "mine"}).json
        assert answer["choices"][0]["text"] != "mine"
