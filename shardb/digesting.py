"""The digest of an image that grows from its start on, taken while the rest is still written.

Owns how far it has come. A digest takes one byte after the other: one thread is at it at a time,
whichever comes first, the task that `fill_to` started or the one that calls `finish`. Invariants:
there is one task an image at most, which goes on until it has caught up, or until the end is wanted
and whoever wants it takes over, within `PART_BYTES`. So threads do not wait for one another while
other images have work for them, and nobody waits for a task that is still queued. Knows nothing of
files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import xxhash

from shardb.buffers import Bytes

# A few milliseconds of one thread.
PART_BYTES = 32 << 20


class GrowingDigest:
    """The digest of one image; `start` begins a task in the background."""

    def __init__(self, image: Bytes, start: Callable[[Callable[[], None]], object]) -> None:
        self._image = image
        self._size_bytes = len(image)
        self._start = start
        self._digest = xxhash.xxh3_128()
        self._turn = threading.Lock()
        self._asking = threading.Lock()
        self._has_task = False
        self._is_wanted = False
        self._filled_bytes = 0
        self._done_bytes = 0

    def fill_to(self, size_bytes: int) -> None:
        """Say that the image is complete up to here, and will not be changed there.

        What is known already, said late by another thread, changes nothing.
        """
        assert 0 <= size_bytes <= self._size_bytes
        with self._asking:
            if size_bytes <= self._filled_bytes:
                return
            self._filled_bytes = size_bytes
            if self._has_task:
                return
            self._has_task = True
        self._start(self._catch_up)

    def finish(self) -> str:
        """Give the digest of the whole image, which is complete; it is let go of."""
        with self._asking:
            self._filled_bytes = self._size_bytes
            self._is_wanted = True
        with self._turn:
            while self._done_bytes < self._size_bytes:
                self._go_on()
        self._image = np.empty(0, dtype=np.uint8)
        return self._digest.hexdigest()

    def _catch_up(self) -> None:
        with self._turn:
            while self._is_behind():
                self._go_on()

    def _is_behind(self) -> bool:
        """Say whether the task has more to do; else it is over, and the next one may begin."""
        with self._asking:
            self._has_task = not self._is_wanted and self._done_bytes < self._filled_bytes
            return self._has_task

    def _go_on(self) -> None:
        end = min(self._filled_bytes, self._done_bytes + PART_BYTES)
        self._digest.update(self._image[self._done_bytes : end].data)
        self._done_bytes = end
