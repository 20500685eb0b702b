"""Children forked from the test, to be killed at any moment without the price of a new interpreter.

A child tells its parent one whole number at a time, through a pipe: what was told was true before
it was told. It ends without unwinding anything, as a killed process does.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

NUMBER = struct.Struct("<q")
Tell = Callable[[int], None]


class Child:
    """A forked child that runs `work` and may be killed."""

    def __init__(self, work: Callable[[Tell], None]) -> None:
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reading)
            run_and_end(work, writing)
        os.close(writing)
        self._told = b""

    def first(self) -> int:
        """Wait for the first number."""
        while len(self._told) < NUMBER.size:
            more = os.read(self._reading, 1 << 16)
            assert more, f"the child ended before it said anything: {self.wait()}"
            self._told += more
        return int(NUMBER.unpack_from(self._told)[0])

    def kill_after(self, seconds: float, *, or_ended_by: int = signal.SIGKILL) -> list[int]:
        """Let it run on, kill it with SIGKILL; give every number it told.

        Another signal may have ended it before.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._reading], [], [], left)[0]:
                more = os.read(self._reading, 1 << 16)
                if not more:
                    break
                self._told += more
        os.kill(self.pid, signal.SIGKILL)
        return self.finish(-signal.SIGKILL, -or_ended_by)

    def finish(self, *expected: int) -> list[int]:
        """Wait for its end; give every number it told."""
        while more := os.read(self._reading, 1 << 16):
            self._told += more
        os.close(self._reading)
        code = self.wait()
        assert code in (0, *expected), f"the child ended with {code}"
        return [number for (number,) in NUMBER.iter_unpack(self._told)]

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def run_and_end(work: Callable[[Tell], None], writing: int) -> NoReturn:
    """Be the child: do the work and end without unwinding anything."""
    code = 1
    try:
        work(lambda number: _write(writing, number))
        code = 0
    except BaseException:  # noqa: BLE001 - shown, and told by the exit code
        traceback.print_exc()
    finally:
        os._exit(code)


def _write(file: int, number: int) -> None:
    assert os.write(file, NUMBER.pack(number)) == NUMBER.size
