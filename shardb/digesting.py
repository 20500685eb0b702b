"""The digest of an image that grows from its start on, taken while the rest is still written.

Owns how far it has come. A digest takes one byte after the other: one thread is at it at a time,
whichever comes first, a task that `fill_to` started or the one that calls `finish`. So nobody waits
for a task that is still queued. Knows nothing of files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import xxhash

from shardb.buffers import Bytes


class GrowingDigest:
    """The digest of one image; `start` begins a task in the background."""

    def __init__(self, image: Bytes, start: Callable[[Callable[[], None]], object]) -> None:
        self._image = image
        self._size_bytes = len(image)
        self._start = start
        self._digest = xxhash.xxh3_128()
        self._turn = threading.Lock()
        self._filled_bytes = 0
        self._done_bytes = 0

    def fill_to(self, size_bytes: int) -> None:
        """Say that the image is complete up to here, and will not be changed there.

        What is known already, said late by another thread, changes nothing.
        """
        assert 0 <= size_bytes <= self._size_bytes
        if size_bytes > self._filled_bytes:
            self._filled_bytes = size_bytes
            self._start(self._go_on)

    def finish(self) -> str:
        """Give the digest of the whole image, which is complete; it is let go of."""
        self._filled_bytes = self._size_bytes
        self._go_on()
        self._image = np.empty(0, dtype=np.uint8)
        return self._digest.hexdigest()

    def _go_on(self) -> None:
        with self._turn:
            filled = self._filled_bytes
            if self._done_bytes < filled:
                self._digest.update(self._image[self._done_bytes : filled].data)
                self._done_bytes = filled
