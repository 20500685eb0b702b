"""Counting what a transfer has done and still has to do.

Owns the counts, safe for several threads, and tells an observer of every change. Knows nothing of
stores, and prints nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Objects and bytes of one transfer.

    `present` were at the target already, `resumed` were left there by an interrupted transfer and
    only read again; both count as done. `bytes_done` moves with every chunk.
    """

    objects_total: int = 0
    objects_done: int = 0
    objects_present: int = 0
    objects_resumed: int = 0
    bytes_total: int = 0
    bytes_done: int = 0
    bytes_present: int = 0
    bytes_resumed: int = 0

    @property
    def bytes_moved(self) -> int:
        """Bytes that were really copied."""
        return self.bytes_done - self.bytes_present - self.bytes_resumed


Observer = Callable[[Counts], None]


class Tally:
    """The counts of one transfer, which may span several commits."""

    def __init__(self, observer: Observer | None = None) -> None:
        self.counts = Counts()
        self._observer = observer
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def fresh(self, digests: Collection[str]) -> set[str]:
        """Those that this is not told of again: commits of one transfer share objects."""
        with self._lock:
            found = set(digests) - self._known
            self._known |= found
        return found

    def expect(self, objects: int, size_bytes: int) -> None:
        """More objects belong to the transfer."""
        self._add(objects_total=objects, bytes_total=size_bytes)

    def present(self, objects: int, size_bytes: int) -> None:
        """Some of them are at the target."""
        self._add(
            objects_done=objects,
            objects_present=objects,
            bytes_done=size_bytes,
            bytes_present=size_bytes,
        )

    def moved(self, size_bytes: int) -> None:
        """Bytes of an object were copied; a negative number takes a failed attempt back."""
        self._add(bytes_done=size_bytes)

    def finished(self) -> None:
        """An object was copied and has the right digest."""
        self._add(objects_done=1)

    def resumed(self, size_bytes: int) -> None:
        """An object was found at the target, left by an interrupted transfer."""
        self._add(
            objects_done=1, objects_resumed=1, bytes_done=size_bytes, bytes_resumed=size_bytes
        )

    def _add(self, **changes: int) -> None:
        with self._lock:
            values = {name: getattr(self.counts, name) + n for name, n in changes.items()}
            self.counts = replace(self.counts, **values)
            counts = self.counts
        if self._observer is not None:
            self._observer(counts)
