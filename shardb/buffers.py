"""Page-aligned host memory that is kept and handed out again.

Owns anonymous mappings whose size is a multiple of 4 KiB, aligned for direct I/O and, when large,
backed by 2 MiB pages. A buffer is reused only when no array made from it is alive: every exported
array holds a ctypes object whose end is counted. Knows nothing of shards.

An array may end at any moment, in a garbage collection in the middle of any line. So its end takes
no lock: it is noted in a queue, and read when the next buffer is wanted.

Reuse matters: the first touch of fresh memory costs 0.3 to 0.5 s a GiB.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardb.filesystem import Stamp

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
Bytes = NDArray[np.uint8]


def padded(length: int, unit: int = PAGE_BYTES) -> int:
    """`length` rounded up to a multiple of `unit`."""
    return -(-length // unit) * unit


class Pool(Protocol):
    """Where buffers come from and go back to."""

    def take(self, length: int, branch: str) -> PooledBuffer: ...
    def put_back(self, buffer: PooledBuffer) -> None:
        """Take a buffer back that may be idle now. Takes no lock: see above."""

    def close(self) -> None:
        """Let go of what waits for its next use."""


class PooledBuffer:
    """One stable piece of host memory; with `path` and `stamp` of its file when it maps one.

    The stamp is of the moment before the image was filled. Filling a mapping for the first time may
    change the file's, as somebody else's writing does: then its digest is checked once more.
    """

    def __init__(
        self, mapping: mmap.mmap, path: str | None = None, stamp: Stamp | None = None
    ) -> None:
        self.size_bytes = len(mapping)
        self.path = path
        self.stamp = stamp
        self._map = mapping
        self._lock = threading.Lock()
        self._given = 0
        self._ended: deque[None] = deque()
        self._given_writable = 0
        self._ended_writable: deque[None] = deque()
        self._released: Pool | None = None

    @property
    def inode(self) -> int | None:
        """The number of the file."""
        return None if self.stamp is None else self.stamp.inode

    @property
    def file_mapping(self) -> mmap.mmap | None:
        """The mapping of a file in memory, which stays for the life of the store; else None."""
        return None if self.path is None else self._map

    @property
    def exports(self) -> int:
        """Arrays, and everything made from them, that are still alive."""
        return self._given - len(self._ended)

    @property
    def writers(self) -> int:
        """Those of them through which somebody can still write."""
        return self._given_writable - len(self._ended_writable)

    def array(self, length: int, *, writable: bool) -> Bytes:
        """The first `length` bytes as an array; the buffer is not reused while it lives."""
        owner: Any = (ctypes.c_char * self.size_bytes).from_buffer(self._map)
        with self._lock:
            self._given += 1
            self._given_writable += writable
        weakref.finalize(owner, self._array_gone, writable).atexit = False
        array: Bytes = np.frombuffer(owner, dtype=np.uint8, count=length)
        array.flags.writeable = writable
        return array

    def _array_gone(self, writable: bool) -> None:
        if writable:
            self._ended_writable.append(None)
        self._ended.append(None)
        pool = self._released
        if pool is not None and self.exports == 0:
            pool.put_back(self)

    def release(self, pool: Pool) -> None:
        """Give the buffer back: at once, or when its last array is gone."""
        self._released = pool
        if self.exports == 0:
            pool.put_back(self)

    def disown(self) -> None:
        """Forget the file: it belongs to somebody else now."""
        self.path = None

    def settle(self) -> bool:
        """Leave the queue of a pool; False when it was in it twice, or is not idle."""
        with self._lock:
            if self._released is None or self.exports:
                return False
            self._released = None
            return True


class BufferPool:
    """Buffers waiting for their next use, at most `limit_bytes` of them."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._free: dict[int, list[PooledBuffer]] = {}
        self._free_bytes = 0
        self._returned: deque[PooledBuffer] = deque()
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """Bytes that wait for their next use."""
        with self._lock:
            self._settle()
            return self._free_bytes

    def take(self, length: int, branch: str) -> PooledBuffer:
        """A buffer of at least `length` bytes. Its content is arbitrary."""
        del branch  # memory belongs to nobody
        size = padded(length, HUGE_PAGE_BYTES if length >= HUGE_PAGE_BYTES else PAGE_BYTES)
        with self._lock:
            self._settle()
            waiting = self._free.get(size)
            if waiting:
                self._free_bytes -= size
                return waiting.pop()
        return PooledBuffer(_anonymous(size))

    def put_back(self, buffer: PooledBuffer) -> None:
        self._returned.append(buffer)

    def close(self) -> None:
        with self._lock:
            self._settle()
            self._free.clear()
            self._free_bytes = 0

    def _settle(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            fits = self._free_bytes + buffer.size_bytes <= self._limit_bytes
            if buffer.settle() and fits:
                self._free_bytes += buffer.size_bytes
                self._free.setdefault(buffer.size_bytes, []).append(buffer)


def _anonymous(size_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
