"""Processes that fork children in place of the test session.

Forking a session that has torch and thousands of tests in memory takes a fifth of a second; these
know only what their children's work imports. One is kept small; another has imported the commands,
so that a command's process need not do it again. Requests are pickled; what a child tells goes
straight to the test through pipes that are handed over.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tests.support.forked import Child, Tell, run_and_end

REQUEST_BYTES_MAX = 1 << 16


class SmallChild(Child):
    """A forked child like any other; `work` is a function of a module, or a partial of one."""

    def __init__(self, work: Callable[[Tell], None]) -> None:
        self._reading, writing = os.pipe()
        try:
            self.pid = int(asked("small", ("fork", work), [writing]))
        finally:
            os.close(writing)
        self._told = b""

    def wait(self) -> int:
        return int(asked("small", ("wait", self.pid)))


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command to be run by `main` of its module, in a process like that of `python -m`.

    imports: what the command imports once it knows its flags, to be there before it is asked for.
    """

    module: str
    imports: Sequence[str]
    arguments: Sequence[str]
    environment: Mapping[str, str]


def asked(name: str, request: tuple[str, Any], files: Sequence[int] = ()) -> Any:
    """Ask the nursery of a name to fork, start or wait; give its answer."""
    line = _nursery(name)
    socket.send_fds(line, [pickle.dumps(request)], files)
    answer = line.recv(REQUEST_BYTES_MAX)
    assert answer, "the small process ended"
    return pickle.loads(answer)


@cache
def _nursery(name: str) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.nursery", str(theirs.fileno()), name],
        cwd=Path(__file__).resolve().parents[2],
        # Looked at when PyTorch is imported: what a child's environment says comes too late.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        pass_fds=[theirs.fileno()],
        stdout=subprocess.DEVNULL,  # as that of a command whose output is read: no terminal
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait(timeout=10)

    atexit.register(end)
    return ours


def _serve(line: socket.socket) -> None:
    """Answer until the session ends."""
    while True:
        request, files, *_ = socket.recv_fds(line, REQUEST_BYTES_MAX, 2)
        if not request:
            return
        kind, what = pickle.loads(request)  # imports the work's module, once
        if kind == "wait":
            answer = os.waitstatus_to_exitcode(os.waitpid(what, 0)[1])
        else:
            if kind == "start":
                _import(what)
            answer = os.fork()
            if answer == 0:
                line.close()
                if kind == "start":
                    _become(what, files)
                run_and_end(what, files[0])
        for file in files:
            os.close(file)
        line.send(pickle.dumps(answer))


def _import(command: Command) -> None:
    for name in (command.module, *command.imports):
        importlib.import_module(name)
    # A collection in a child would touch, and so copy, all that was imported.
    gc.freeze()


def _become(command: Command, files: Sequence[int]) -> NoReturn:
    """Be the command's process: its outputs, its environment, its arguments, its exit code."""
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(command.environment)
    sys.argv = [command.module, *command.arguments]
    code = 1
    try:
        sys.modules[command.module].main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - shown, and told by the exit code
        traceback.print_exc()
    finally:
        # What Python does at its end, except to take apart what was imported.
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
        except OSError:
            code = 120
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
