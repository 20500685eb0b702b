"""Images of committed objects that are still in memory.

Owns the least-recently-used set of buffers that transactions filled: the next step reads the same
shards, and their bytes in memory are the bytes on disk. An evicted buffer is reused only when the
last array over it is gone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from shardb.buffers import Bytes, Pool, PooledBuffer
from shardb.layout import Layout


class ImageCache:
    """Digest to (layout, buffer), at most `limit_bytes` in all."""

    def __init__(self, pool: Pool, limit_bytes: int) -> None:
        self._pool = pool
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._images: OrderedDict[str, tuple[Layout, PooledBuffer]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        return self._bytes

    def get(self, digest: str, inode: int | None = None) -> tuple[Layout, Bytes] | None:
        """The image of an object, read-only, if it is here.

        With `inode` an image that maps a file is given only if that is the file: another process
        may have recycled the one that was mapped here.
        """
        with self._lock:
            found = self._images.get(digest)
            if found is None or (inode is not None and found[1].inode != inode):
                return None
            self._images.move_to_end(digest)
            layout, buffer = found
            return layout, buffer.array(layout.size_bytes, writable=False)

    def put(self, digest: str, layout: Layout, buffer: PooledBuffer) -> None:
        """Take over a buffer that holds the object `digest`.

        It takes the place of an older one: if they map files, only this one's has the name now.
        """
        with self._lock:
            known = self._images.pop(digest, None)
            if known is not None:
                self._bytes -= known[1].size_bytes
                known[1].disown()
            self._images[digest] = (layout, buffer)
            self._bytes += buffer.size_bytes
            evicted = self._evict()
        for old in [*evicted, *([known[1]] if known is not None else [])]:
            old.release(self._pool)

    def pop(self, digest: str) -> PooledBuffer | None:
        """Forget an object that is retired; the caller releases its buffer."""
        with self._lock:
            found = self._images.pop(digest, None)
            if found is None:
                return None
            self._bytes -= found[1].size_bytes
            return found[1]

    def clear(self) -> None:
        """Let go of every image; a mapped one stays the object that it is."""
        with self._lock:
            for _, buffer in self._images.values():
                buffer.disown()
            self._images.clear()
            self._bytes = 0

    def _evict(self) -> list[PooledBuffer]:
        evicted: list[PooledBuffer] = []
        while self._bytes > self._limit_bytes and self._images:
            _, (_, buffer) = self._images.popitem(last=False)
            self._bytes -= buffer.size_bytes
            evicted.append(buffer)
        return evicted
