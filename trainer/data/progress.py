"""What a person sees while data is prepared: how far, how fast, how long yet.

Owns the words and their pace: one line that is redrawn on a terminal, plain lines elsewhere. It is
told of bytes read and knows nothing of what is done with them.
"""

from __future__ import annotations

import time
from typing import Protocol, TextIO

from shardb.durations import duration

_REDRAW_SECONDS = 0.2
_PLAIN_SECONDS = 5.0
_MEGABYTE = 1_000_000


class PrepareProgress(Protocol):
    """Follows the passes over the text."""

    def begin(self, what: str, total_bytes: int) -> None:
        """Start a pass over that many bytes."""

    def advance(self, byte_count: int) -> None:
        """Take in bytes that were read."""

    def end(self) -> None:
        """Finish the pass."""

    def note(self, text: str) -> None:
        """Say something that is no number of a pass."""


class NoProgress:
    """Says nothing."""

    def begin(self, what: str, total_bytes: int) -> None:
        """Nothing is shown."""

    def advance(self, byte_count: int) -> None:
        """Nothing is shown."""

    def end(self) -> None:
        """Nothing is shown."""

    def note(self, text: str) -> None:
        """Nothing is shown."""


class TextProgress:
    """Writes to a stream: redrawn in place when it is a terminal, a line now and then when not."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._what = ""
        self._total = self._done = 0
        self._begun = self._shown = 0.0

    def begin(self, what: str, total_bytes: int) -> None:
        """Start a pass over that many bytes."""
        self._what, self._total, self._done = what, total_bytes, 0
        self._begun = self._shown = time.monotonic()

    def advance(self, byte_count: int) -> None:
        """Take in bytes that were read; show it when the last time is long enough ago."""
        self._done += byte_count
        now = time.monotonic()
        if now - self._shown < (_REDRAW_SECONDS if self._is_terminal else _PLAIN_SECONDS):
            return
        self._shown = now
        line = progress_line(self._what, self._done, self._total, now - self._begun)
        self._write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")

    def end(self) -> None:
        """Finish the pass with a line that says how long it took."""
        seconds = time.monotonic() - self._begun
        rate = self._done / _MEGABYTE / seconds if seconds > 0 else 0.0
        done = f"{self._done / _MEGABYTE:,.1f} MB in {duration(seconds)}"
        line = f"{self._what}: {done} ({rate:.1f} MB/s)"
        self._write(f"\r\x1b[K{line}\n" if self._is_terminal else f"{line}\n")

    def note(self, text: str) -> None:
        """Write a line of its own."""
        self._write(f"\r\x1b[K{text}\n" if self._is_terminal else f"{text}\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def progress_line(what: str, done: int, total: int, seconds: float) -> str:
    """Return `encoding: 12.0 of 30.0 MB (40 %), 6.1 MB/s, 3.0 s left`."""
    rate = done / seconds if seconds > 0 else 0.0
    left = duration((total - done) / rate) if rate > 0 else "unknown"
    share = 100 * done / total if total else 100.0
    return (
        f"{what}: {done / _MEGABYTE:,.1f} of {total / _MEGABYTE:,.1f} MB ({share:.0f} %), "
        f"{rate / _MEGABYTE:.1f} MB/s, {left} left"
    )
