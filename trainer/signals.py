"""What an interrupt does to a run: the step in work is finished and committed, then the run ends.

Owns the handlers of SIGINT and SIGTERM. Knows nothing of steps; the loop asks `stop_signal` between
two of them. A second SIGINT ends the process at once: the store is built to be left that way, and
stays at its last commit. A second SIGTERM does not, because supervisors and terminals often send
one after an interrupt.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE_BASE = 128


class StopRequest:
    """The first stop signal that arrived, if any."""

    def __init__(self) -> None:
        self.stop_signal: signal.Signals | None = None
        self.before_abort: Callable[[], None] = _nothing

    @property
    def exit_code(self) -> int:
        """0, or 130 after SIGINT and 143 after SIGTERM."""
        return 0 if self.stop_signal is None else EXIT_CODE_BASE + self.stop_signal

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Note the signal; on a second SIGINT leave at once, without unwinding anything."""
        del frame
        arrived = signal.Signals(number)
        if self.stop_signal is None:
            self.stop_signal = arrived
            _say(
                f"{arrived.name}: the step in work is finished and committed first"
                " (a second SIGINT stops at once, at the last commit)"
            )
        elif arrived is signal.SIGINT:
            self.before_abort()
            _say("stopped at once; the store is at its last commit")
            os._exit(EXIT_CODE_BASE + arrived)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Take over SIGINT and SIGTERM for the length of a block."""
    request = StopRequest()
    earlier = {
        number: signal.signal(number, request.receive) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield request
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _nothing() -> None:
    """Nothing needs to be put back before the process ends."""


def _say(text: str) -> None:
    # os.write, not print: a handler may interrupt a print that holds the stream's lock.
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{text}\n".encode())
