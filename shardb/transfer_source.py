"""Where a copied commit comes from.

Owns the seam between the two ends of a copy: a `CommitSource` gives the bytes of objects and the
history of commits; `StoreSource` is a store on a path, `shardb.remote` has the one in object
storage. A source is not believed: whoever takes its bytes checks their digest.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from typing import Protocol

import xxhash

from shardb.buffers import BufferPool
from shardb.errors import ObjectCorruptError
from shardb.filesystem import READ, FileSystem, closing, open_direct
from shardb.objects import DIRECT_THRESHOLD_BYTES, chunks_of
from shardb.read_only import ReadOnlyStore
from shardb.records import ShardEntry
from shardb.storage_errors import storage_errors
from shardb.store import Store
from shardb.transfer_lineage import Lineage, lineage

CHUNK_BYTES = 8 << 20
# Buffers of this module alone: a store in memory hands out files as buffers.
_KEPT_BYTES = 64 << 20


class CommitSource(Protocol):
    """One end of a copy: what can be copied from."""

    @property
    def name(self) -> str:
        """The path or URL that messages use."""
        ...

    @property
    def store_id(self) -> str: ...

    @property
    def copies_at_once(self) -> int:
        """How many objects are best copied at a time."""
        ...

    def lineage(self, commit: str, ends: Collection[str]) -> Lineage:
        """The steps between the nearest of `ends` and a commit."""
        ...

    def object_name(self, entry: ShardEntry) -> str:
        """The path or URL of an object."""
        ...

    def chunks(self, entry: ShardEntry) -> Iterator[memoryview]:
        """The bytes of an object, in whole pages but for the end; a chunk lives until the next.

        Raises ObjectMissingError, ObjectCorruptError or the error of the medium.
        """
        ...


class StoreSource:
    """A store on a path. The caller has leased the commit whose objects are read, if it can."""

    def __init__(self, store: Store | ReadOnlyStore) -> None:
        self._store = store
        self._buffers = BufferPool(_KEPT_BYTES)

    @property
    def name(self) -> str:
        return self._store.root

    @property
    def store_id(self) -> str:
        return self._store.format.store_id

    @property
    def copies_at_once(self) -> int:
        return 2

    def lineage(self, commit: str, ends: Collection[str]) -> Lineage:
        return lineage(self._store, commit, ends)

    def object_name(self, entry: ShardEntry) -> str:
        return self._store.objects.path(entry.digest)

    def chunks(self, entry: ShardEntry) -> Iterator[memoryview]:
        """From memory where the object is still there, else past the page cache from its file."""
        store = self._store
        path = store.objects.path(entry.digest)
        cached = store.cache.get(entry.digest)
        if cached is not None:
            yield from chunks_of(cached[1].data)
            return
        reading = storage_errors(store.files, store.root, f"reading {path}")
        with reading, suppress(FileNotFoundError):
            yield from read_chunks(store.files, path, entry.bytes, self._buffers)
            return
        # The store keeps this object in another form, or this raises what is wrong.
        yield from chunks_of(store.objects.open(entry.digest, entry.bytes)[1].data)


def read_chunks(
    files: FileSystem, path: str, size_bytes: int, buffers: BufferPool
) -> Iterator[memoryview]:
    """The bytes of a file through one reused buffer, past the page cache where that can be.

    Raises ObjectCorruptError when the file has another size.
    """
    actual_bytes = files.status(path).size_bytes
    if actual_bytes != size_bytes:
        raise ObjectCorruptError(
            f"{path}: {actual_bytes} bytes, but {size_bytes} were committed; run `shardb fsck`",
            path=path,
        )
    with ExitStack() as stack:
        file = _open_direct(files, path, size_bytes)
        stack.enter_context(closing(files, file, written=False))
        buffer = buffers.take(min(size_bytes, CHUNK_BYTES), "")
        stack.callback(buffer.release, buffers)
        view = buffer.array(buffer.size_bytes, writable=True).data[:CHUNK_BYTES]
        for offset in range(0, size_bytes, CHUNK_BYTES):
            wanted_bytes = min(CHUNK_BYTES, size_bytes - offset)
            filled_bytes = 0
            while filled_bytes < wanted_bytes:
                count = files.pread_into(file, view[filled_bytes:], offset + filled_bytes)
                if count <= 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), path)
                filled_bytes += count
            yield view[:wanted_bytes]


def file_digest(files: FileSystem, path: str, size_bytes: int, buffers: BufferPool) -> str:
    """The digest of a file's bytes."""
    hasher = xxhash.xxh3_128()
    for chunk in read_chunks(files, path, size_bytes, buffers):
        hasher.update(chunk)
    return hasher.hexdigest()


def _open_direct(files: FileSystem, path: str, size_bytes: int) -> int:
    wanted = size_bytes >= DIRECT_THRESHOLD_BYTES
    file = open_direct(files, path, READ) if wanted else None
    return files.open(path, READ) if file is None else file
