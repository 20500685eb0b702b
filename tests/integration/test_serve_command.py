"""Does the command start, drain, end with the right code, and leave nothing behind?"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shardb
from serve.cli import HELP, command
from tests.support.http_client import HttpClient, read_all
from tests.support.small_stores import flip_bit, object_of
from tests.support.spoken_steps import write_spoken_steps
from tests.support.warm_process import WarmProcess
from trainer.command_cli import answer, new_app

LONG = {"model": "primary", "prompt": "ab", "max_tokens": 700, "stream": True, "temperature": 0}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two steps: the first says c after Q, the second d; both say a and b in turn for ever."""
    said = {1: ["aba", "Qc"], 2: ["aba", "Qd"]}
    return write_spoken_steps(tmp_path / "run", said, window=1024)


@dataclass(frozen=True, kw_only=True)
class Running(HttpClient):
    """The command as a process of its own."""

    process: WarmProcess
    greeting: list[str]

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


@contextmanager
def running(store: Path, *flags: str) -> Iterator[Running]:
    process = WarmProcess("serve.cli", ["--store", store, "--port", "0", *flags])
    greeting = []
    try:
        for line in process.stderr:
            greeting.append(line.rstrip())
            if found := re.search(r"serving .* on http://.*:(\d+)/", line):
                yield Running(port=int(found[1]), process=process, greeting=greeting)
                break
        else:
            pytest.fail(f"it never listened: {greeting}")
    finally:
        process.kill()
        process.communicate()


def leases(store: Path) -> set[str]:
    with shardb.open(store) as opened:
        return opened.leases.leased_commits()


def heard(server: Running, count: int, **more: Any) -> Any:
    """Begin a long stream, and read until its first events have come."""
    opened = server.open("/v1/completions", {**LONG, **more})
    data = b""
    while data.count(b"data: ") < count:
        data += opened.recv(4096)
    return opened


def test_does_a_signal_let_answers_finish(store: Path) -> None:
    with running(store) as server:
        assert server.ask("/v1/completions", {**LONG, "prompt": "Q"}).events[0]["choices"]
        assert leases(store) != set()
        opened = heard(server, 3)
        server.process.send_signal(signal.SIGTERM)
        rest = read_all(opened)
        assert rest.rstrip().endswith(b"0")  # the last, empty chunk
        assert b"data: [DONE]" in rest
        assert b'"finish_reason":"length"' in rest
        code, err = server.end()
    assert (code, "SIGTERM: stopped" in err) == (143, True), err
    assert "Traceback" not in err
    assert leases(store) == set()


def test_does_time_to_drain_end(store: Path) -> None:
    with running(store, "--drain-seconds", "0", "--max-resident-bytes", "0") as server:
        opened = heard(server, 1, n=48)  # far more than is written in the time to drain
        server.process.send_signal(signal.SIGINT)
        code, err = server.end()
        assert code == 130, err
        assert b"[DONE]" not in read_all(opened)
    assert leases(store) == set()


def test_does_a_kill_leave_no_lease_and_damage_stay_with_its_commit(store: Path) -> None:
    flip_bit(object_of(store, 1, "params/lm_head"), 5000)
    flags = ("--max-resident-bytes", "0", "--host", "0.0.0.0", "--backup-ref", "step-1")
    with running(store, *flags) as server:
        assert any(line.startswith("warning: 0.0.0.0") for line in server.greeting)
        body = {"model": "run@step-1", "prompt": "Q", "temperature": 0}
        for stream in (False, True):
            damaged = server.ask("/v1/completions", {**body, "stream": stream})
            assert (damaged.status, damaged.error["code"]) == (503, "object_corrupt")
            assert str(store) not in damaged.error["message"]
            good = server.ask("/v1/completions", {**body, "model": "primary"})
            assert good.json["choices"][0]["text"] == "d"
        heard(server, 1)
        assert leases(store) != set()
        server.process.kill()
        server.process.wait()
    assert leases(store) == set()


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--max-resident-bytes", "lots"], 2, "--max-resident-bytes"),
        (["--port", "99999"], 2, "--port"),
        (["--ref", "step-9"], 4, "step 9"),
        (["--backup-store", "/nonexistent"], 4, "/nonexistent"),
        (["--tokenizer", "/nonexistent"], 2, "tokenizer.json"),
        (["--chat-adapter", "odd"], 2, "--chat-adapter"),
        (["--chat-template", "/nonexistent"], 2, "--chat-template"),
        (["--api-key-file", "/nonexistent"], 2, "--api-key-file"),
        (["--api-key", ""], 2, "--api-key"),
        (["--host", "256.1.1.1"], 2, "--host"),
        (["--device", "quantum"], 2, "--device"),
        (["--dtype", "int3"], 2, "dtype"),
        (["--kv-cache-bytes", "1"], 2, "kv"),
        (["--odd"], 2, "--odd"),
    ],
)
def test_is_a_wrong_flag_refused_before_listening(
    store: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, words: str
) -> None:
    arguments = ["--store", str(store), "--port", "0", *flags]
    assert answer(new_app(command, HELP), arguments, "serve") == code
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert words in told
    assert told.count("\n") == 1
    assert leases(store) == set()
