"""A small process that forks children in place of the test session.

Forking a session that has torch and thousands of tests in memory takes a fifth of a second; this
one knows only what its children's work imports. Requests are pickled; what a child tells goes
straight to the test through a pipe that is handed over.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.forked import Child, Tell, run_and_end

REQUEST_BYTES_MAX = 1 << 16


class SmallChild(Child):
    """A forked child like any other; `work` is a function of a module, or a partial of one."""

    def __init__(self, work: Callable[[Tell], None]) -> None:
        self._reading, writing = os.pipe()
        try:
            self.pid = int(_asked(("fork", work), [writing]))
        finally:
            os.close(writing)
        self._told = b""

    def wait(self) -> int:
        return int(_asked(("wait", self.pid), []))


def _asked(request: tuple[str, Any], files: list[int]) -> Any:
    line = _nursery()
    socket.send_fds(line, [pickle.dumps(request)], files)
    answer = line.recv(REQUEST_BYTES_MAX)
    assert answer, "the small process ended"
    return pickle.loads(answer)


@cache
def _nursery() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.nursery", str(theirs.fileno())],
        cwd=Path(__file__).resolve().parents[2],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait(timeout=10)

    atexit.register(end)
    return ours


def _serve(line: socket.socket) -> None:
    while True:
        request, files, *_ = socket.recv_fds(line, REQUEST_BYTES_MAX, 1)
        if not request:
            return
        kind, what = pickle.loads(request)  # imports the work's module, once
        if kind == "wait":
            answer = os.waitstatus_to_exitcode(os.waitpid(what, 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                line.close()
                run_and_end(what, files[0])
        for file in files:
            os.close(file)
        line.send(pickle.dumps(answer))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
