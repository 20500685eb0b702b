"""How many bytes of host memory this process may lock, and how many it has locked.

Owns the count and its limit. Locked pages cannot be swapped out or moved, so that a device copies
to and from them at its full speed; too many of them starve the rest of the machine. Knows nothing
of how pages are locked. Invariant: the count never exceeds the limit; who is refused goes on with
memory that is not locked, and the reason waits in `reasons` until somebody prints it.
"""

from __future__ import annotations

import threading


class PageLocks:
    """A count with a limit; None is no limit."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.locked_bytes = 0
        self.locked_bytes_max = 0
        self._reasons: list[str] = []
        self._lock = threading.Lock()

    def take(self, size: int, what: str) -> bool:
        """Count `size` bytes as locked; False, with a reason, where they exceed the limit."""
        with self._lock:
            if self.limit_bytes is not None and self.locked_bytes + size > self.limit_bytes:
                self._refuse(
                    f"{what}: {size:,} bytes are not page-locked, because with"
                    f" {self.locked_bytes:,} locked they would exceed --pinned-budget"
                    f" ({self.limit_bytes:,} bytes): copies are slower"
                )
                return False
            self.locked_bytes += size
            self.locked_bytes_max = max(self.locked_bytes_max, self.locked_bytes)
            return True

    def give_back(self, size: int, why: str | None = None) -> None:
        """Count `size` bytes as not locked any more; `why`: they never could be."""
        with self._lock:
            assert size <= self.locked_bytes, "more is given back than was taken"
            self.locked_bytes -= size
            if why is not None:
                self._refuse(why)

    def reasons(self) -> list[str]:
        """Give what was refused since the last call, each kind once."""
        with self._lock:
            found, self._reasons = self._reasons, []
        return found

    def _refuse(self, reason: str) -> None:
        """Say a reason once: a step asks for many buffers of one kind."""
        what = reason.partition(":")[0]
        if not any(said.startswith(f"{what}:") for said in self._reasons):
            self._reasons.append(reason)
