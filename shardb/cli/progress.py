"""One line of progress on a terminal, rewritten in place.

Owns how often it is written and how it goes away. On standard error, so that standard output holds
the result only; where that is no terminal nothing is shown.
"""

from __future__ import annotations

import sys
import time
from typing import Protocol, Self

from shardb.cli.printing import in_bytes
from shardb.durations import duration

REWRITE_SECONDS = 0.2


class Passed(Protocol):
    """How many objects of how many were passed, and in which time."""

    @property
    def objects(self) -> int: ...
    @property
    def objects_total(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def bytes_total(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class ProgressLine:
    """Use it as a context manager."""

    def __init__(self) -> None:
        self._began = self._written_at = time.monotonic()
        self._is_written = False

    def show(self, text: str) -> None:
        """Write the line, unless it was written a moment ago."""
        now = time.monotonic()
        if sys.stderr.isatty() and now - self._written_at >= REWRITE_SECONDS:
            self._written_at, self._is_written = now, True
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def show_bytes(self, doing: str, done_bytes: int, total_bytes: int) -> None:
        """Say how far it is, how fast, and how long the rest takes at this rate."""
        rate = done_bytes / max(time.monotonic() - self._began, 1e-9)
        left_seconds = (total_bytes - done_bytes) / rate if rate else 0.0
        self.show(
            f"{doing}: {in_bytes(done_bytes)} of {in_bytes(total_bytes)}, {in_bytes(rate)}/s, "
            f"{duration(left_seconds)} left"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_written:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class ObjectsLine(ProgressLine):
    """The line of a verb that passes over objects; `done` is what it has done to them."""

    def __init__(self, done: str) -> None:
        super().__init__()
        self._done = done

    def show_objects(self, passed: Passed) -> None:
        """Say how many it has done, how fast, and how long the rest takes at this rate."""
        rate = passed.bytes / max(passed.seconds, 1e-9)
        left_seconds = (passed.bytes_total - passed.bytes) / rate if rate else 0.0
        self.show(
            f"{self._done} {passed.objects} of {passed.objects_total} objects, "
            f"{in_bytes(passed.bytes)} of {in_bytes(passed.bytes_total)}, "
            f"{in_bytes(rate)}/s, {duration(left_seconds)} left"
        )
