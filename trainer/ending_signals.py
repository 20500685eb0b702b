"""Signals that end a command through every `finally`, and are not lost on the way there.

Python raises the exception of a signal wherever the program is, also where exceptions are
swallowed: in the callback of a weak reference (each import has one), or in a library that tries
something and takes any error for a no. A command that goes on then ends with 0 after an interrupt.
So, until the command is left, the exception is raised again where it is not on its way. Knows
nothing of commands. For the main thread alone, where Python handles signals.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_SECONDS = 0.01
INTERRUPTED = 130
TERMINATED = 143


@contextmanager
def ending_signals() -> Iterator[None]:
    """In a block SIGINT is KeyboardInterrupt, and SIGTERM an exit with 143, until it is left.

    What is ignored, as SIGINT by what a script begins in the background, stays so.
    """
    ending = _Ending()
    handlers: dict[int, Callable[[int, FrameType | None], object]] = {
        signal.SIGINT: ending.receive,
        signal.SIGTERM: ending.receive,
        signal.SIGALRM: ending.look,
    }
    earlier = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
        ending.look()  # the alarm may not have come yet
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in earlier.items():
            signal.signal(number, handler)


class _Ending:
    """The exception of the last signal, if one arrived."""

    def __init__(self) -> None:
        self._raised: BaseException | None = None

    def receive(self, number: int, _: FrameType | None) -> None:
        """Raise what ends the command, and look after it from now on."""
        self._raised = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(TERMINATED)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS, AGAIN_SECONDS)
        raise self._raised

    def look(self, *_: object) -> None:
        """Raise it again unless something is being cleaned up because of it."""
        handled = sys.exception()
        while handled is not None and handled is not self._raised:
            handled = handled.__context__
        if handled is None and self._raised is not None:
            raise self._raised
