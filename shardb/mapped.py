"""Buffers of a store in memory (tmpfs): each one is the mapping of an object file itself.

Filling a staged image is writing its file; committing it is a rename, which keeps the mapping, so a
page-locked registration of it stays valid for the life of the process. Owns the mappings and the
names of the files that wait for reuse. Used only where the medium is memory: on a disk, mapped
writes are slower than direct ones and their errors come too late.
"""

from __future__ import annotations

import errno
import resource
import threading
from collections import deque

from shardb.buffers import PooledBuffer
from shardb.filesystem import CREATE, EXCLUSIVE, WRITE, opened
from shardb.objects import ObjectFiles


def allow_open_files() -> None:
    """Raise this process's soft limit of open files to its hard one.

    Python's mmap keeps a descriptor a mapping, about two a shard: 500 shards meet the usual 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class MappedPool:
    """Object files waiting for their next use, mapped."""

    def __init__(self, objects: ObjectFiles) -> None:
        allow_open_files()
        self._objects = objects
        self._free: dict[int, list[PooledBuffer]] = {}
        self._returned: deque[PooledBuffer] = deque()
        self._lock = threading.Lock()

    def take(self, length: int, branch: str) -> PooledBuffer:
        """A mapped file of exactly `length` bytes under a staged name, of arbitrary content."""
        while (buffer := self._waiting(length)) is not None:
            assert buffer.path is not None
            staged = self._objects.staged_name(branch)
            try:
                self._objects.rename(buffer.path, staged)
            except FileNotFoundError:
                continue  # `gc` took the file; its mapping goes with it
            status = self._objects.files.status(staged)
            if status.is_shared:
                self._objects.files.unlink(staged)  # another copy of the store has this file too
                continue
            buffer.path, buffer.stamp = staged, status.stamp
            return buffer
        path, fresh = self._objects.staged_path(branch, length)
        files = self._objects.files
        with opened(files, path, WRITE | (CREATE | EXCLUSIVE if fresh else 0)) as file:
            if fresh or files.status(path).size_bytes < length:
                self._reserve(file, length)
            mapping = files.map(file, length, writable=True)
        return PooledBuffer(mapping, path, files.status(path).stamp)

    def _reserve(self, file: int, length: int) -> None:
        """Give a file its pages now: a full RAM disk must be an error, not a SIGBUS while filling.

        ramfs cannot, and has no limit that it could be full at.
        """
        files = self._objects.files
        try:
            files.allocate(file, length, keep_size=False)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            files.truncate(file, length)

    def put_back(self, buffer: PooledBuffer) -> None:
        self._returned.append(buffer)

    def collect(self) -> None:
        """Give the files of idle buffers the names of files that wait for reuse."""
        with self._lock:
            while self._returned:
                buffer = self._returned.popleft()
                if not buffer.settle() or buffer.path is None:
                    continue
                try:
                    buffer.path = self._objects.set_free(buffer.path, buffer.size_bytes)
                except OSError:
                    continue  # gone, or cannot be renamed: the next writer reclaims it
                self._free.setdefault(buffer.size_bytes, []).append(buffer)

    def close(self) -> None:
        self.collect()
        with self._lock:
            self._free.clear()

    def _waiting(self, length: int) -> PooledBuffer | None:
        self.collect()
        with self._lock:
            waiting = self._free.get(length)
            return waiting.pop() if waiting else None
