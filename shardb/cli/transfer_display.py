"""How a transfer is told: progress while it runs, then one line.

Owns these forms alone. On a terminal one line is rewritten in place; elsewhere a plain line comes
every ten seconds. Both go to standard error, so that standard output holds the result only.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from shardb.cli.printing import in_bytes
from shardb.durations import duration
from shardb.transfer_tally import Counts, Tally

REWRITE_SECONDS = 0.2
LINE_SECONDS = 10.0


class TransferDisplay:
    """Counts a transfer and shows how it goes; use it as a context manager."""

    def __init__(self) -> None:
        self.tally = Tally(self._show)
        self._terminal = sys.stderr.isatty()
        self._began = self._shown_at = time.monotonic()
        self._lock = threading.Lock()
        self._is_rewriting = False

    @property
    def seconds(self) -> float:
        """How long the transfer has taken so far."""
        return time.monotonic() - self._began

    def _show(self, counts: Counts) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._shown_at < (REWRITE_SECONDS if self._terminal else LINE_SECONDS):
                return
            self._shown_at = now
            text = progress_text(counts, now - self._began)
            if self._terminal:
                self._is_rewriting = True
                print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            else:
                print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> TransferDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_rewriting:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def to_json(self) -> dict[str, Any]:
        """The counts, as scripts read them."""
        counts = self.tally.counts
        moved = counts.objects_done - counts.objects_present - counts.objects_resumed
        return {
            "objects": {
                "copied": moved,
                "present": counts.objects_present,
                "resumed": counts.objects_resumed,
            },
            "bytes": {
                "copied": counts.bytes_moved,
                "present": counts.bytes_present,
                "resumed": counts.bytes_resumed,
            },
            "seconds": round(self.seconds, 3),
        }

    def summary(self) -> str:
        """The counts, for people."""
        counts, seconds = self.tally.counts, max(self.seconds, 1e-9)
        if not counts.objects_total:
            return "nothing to copy, it was there already"
        copied = counts.objects_done - counts.objects_present - counts.objects_resumed
        parts = [f"{copied} objects, {in_bytes(counts.bytes_moved)} copied"]
        if counts.objects_present:
            parts.append(f"{counts.objects_present} were there")
        if counts.objects_resumed:
            parts.append(f"{counts.objects_resumed} were there from an earlier copy")
        rate = in_bytes(counts.bytes_moved / seconds)
        return f"{', '.join(parts)}, in {duration(seconds)} ({rate}/s)"


def progress_text(counts: Counts, seconds: float) -> str:
    """One line: what is done, how fast, and how long the rest takes at this rate."""
    rate = counts.bytes_moved / max(seconds, 1e-9)
    left_bytes = counts.bytes_total - counts.bytes_done
    left = f", {duration(left_bytes / rate)} left" if rate > 0 else ""
    return (
        f"copied {counts.objects_done} of {counts.objects_total} objects, "
        f"{in_bytes(counts.bytes_done)} of {in_bytes(counts.bytes_total)}, {in_bytes(rate)}/s{left}"
    )
