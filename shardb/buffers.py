"""Page-aligned host memory that is kept and handed out again.

Owns anonymous mappings whose size is a multiple of 4 KiB, aligned for direct I/O and, when large,
backed by 2 MiB pages. A buffer is reused only when no array made from it is alive: every exported
array holds a ctypes object whose end is counted. Knows nothing of shards.

Reuse matters: the first touch of fresh memory costs 0.3 to 0.5 s a GiB.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
Bytes = NDArray[np.uint8]


def padded(length: int, unit: int = PAGE_BYTES) -> int:
    """`length` rounded up to a multiple of `unit`."""
    return -(-length // unit) * unit


class Pool(Protocol):
    """Where buffers come from and go back to."""

    def take(self, length: int, branch: str) -> PooledBuffer: ...
    def put_back(self, buffer: PooledBuffer) -> None: ...


class PooledBuffer:
    """One stable piece of host memory; `path` is its file when it is the mapping of one."""

    def __init__(self, mapping: mmap.mmap, path: str | None = None) -> None:
        self.size_bytes = len(mapping)
        self.path = path
        self._map = mapping
        self._lock = threading.Lock()
        self._exports = 0
        self._released: Pool | None = None

    @property
    def exports(self) -> int:
        """Arrays, and everything made from them, that are still alive."""
        return self._exports

    def array(self, length: int, *, writable: bool) -> Bytes:
        """The first `length` bytes as an array; the buffer is not reused while it lives."""
        owner: Any = (ctypes.c_char * self.size_bytes).from_buffer(self._map)
        with self._lock:
            self._exports += 1
        weakref.finalize(owner, self._array_gone).atexit = False
        array: Bytes = np.frombuffer(owner, dtype=np.uint8, count=length)
        array.flags.writeable = writable
        return array

    def _array_gone(self) -> None:
        with self._lock:
            self._exports -= 1
            pool = self._released if self._exports == 0 else None
        if pool is not None:
            pool.put_back(self)

    def release(self, pool: Pool) -> None:
        """Give the buffer back: at once, or when its last array is gone."""
        with self._lock:
            self._released = pool
            idle = self._exports == 0
        if idle:
            pool.put_back(self)

    def reuse(self) -> None:
        assert self._exports == 0
        self._released = None


class BufferPool:
    """Buffers waiting for their next use, at most `limit_bytes` of them."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._free: dict[int, list[PooledBuffer]] = {}
        self._free_bytes = 0
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    def take(self, length: int, branch: str) -> PooledBuffer:
        """A buffer of at least `length` bytes. Its content is arbitrary."""
        del branch  # memory belongs to nobody
        size = padded(length, HUGE_PAGE_BYTES if length >= HUGE_PAGE_BYTES else PAGE_BYTES)
        with self._lock:
            waiting = self._free.get(size)
            if waiting:
                self._free_bytes -= size
                buffer = waiting.pop()
                buffer.reuse()
                return buffer
        return PooledBuffer(_anonymous(size))

    def put_back(self, buffer: PooledBuffer) -> None:
        with self._lock:
            if self._free_bytes + buffer.size_bytes <= self._limit_bytes:
                self._free_bytes += buffer.size_bytes
                self._free.setdefault(buffer.size_bytes, []).append(buffer)


def _anonymous(size_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
