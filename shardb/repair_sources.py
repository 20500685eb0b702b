"""Where a repair takes from what this store has lost.

Owns reading another store's files, which need not be a whole store: neither its log nor its index
is asked or believed. Whoever takes bytes from here checks their digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import xxhash

from shardb.buffers import BufferPool
from shardb.cache import ImageCache
from shardb.errors import LogDamagedError, ObjectMissingError, ShardbError
from shardb.filesystem import FileSystem
from shardb.log import Log
from shardb.objects import ObjectFiles, chunks_of
from shardb.pack_reading import PackedObjects
from shardb.records import ShardEntry
from shardb.storage_errors import storage_errors
from shardb.transfer_source import CHUNK_BYTES, read_chunks

UNPACKED_BYTES_MAX = 64 << 20


class RepairSource(Protocol):
    """Whatever has objects by digest."""

    @property
    def name(self) -> str:
        """The path or URL that messages use."""
        ...

    def chunks(self, entry: ShardEntry) -> Iterator[memoryview]:
        """The bytes of an object, in whole pages but for the end; a chunk lives until the next."""
        ...


class StoreFiles:
    """The objects and log segments of a store on a path."""

    def __init__(self, files: FileSystem, root: str) -> None:
        self._files = files
        self.root = root
        self._objects = ObjectFiles(files, root, verify=True)
        pool = BufferPool(UNPACKED_BYTES_MAX)
        cache = ImageCache(pool, UNPACKED_BYTES_MAX)
        packed = PackedObjects(files, self._objects.directory, pool, cache)
        self._objects.open_packed = packed.open
        self._log = Log(files, f"{root}/wal")

    @property
    def name(self) -> str:
        return self.root

    def chunks(self, entry: ShardEntry) -> Iterator[memoryview]:
        with storage_errors(self._files, self.root, f"reading {entry.digest}"):
            _, image = self._objects.open(entry.digest, entry.bytes)
        yield from chunks_of(image.data)

    def sequences(self) -> list[int]:
        """The log segments that are there."""
        try:
            return self._log.sequences()
        except OSError:
            return []

    def segment(self, sequence: int) -> bytes | None:
        """The frames of a log segment; None where it cannot be read."""
        try:
            return self._log.read(sequence)
        except (OSError, LogDamagedError):
            return None


class ExchangedFiles:
    """Damaged files of a store whose bytes are other objects of it: names were exchanged."""

    def __init__(self, files: FileSystem, root: str, paths: Mapping[str, str]) -> None:
        self._files = files
        self._paths = paths
        self._buffers = BufferPool(CHUNK_BYTES)
        self.name = f"{root}/objects"

    def chunks(self, entry: ShardEntry) -> Iterator[memoryview]:
        path = self._paths.get(entry.digest)
        if path is None:
            raise ObjectMissingError(f"no file here has the bytes of {entry.digest}")
        with storage_errors(self._files, self.name, f"reading {path}"):
            yield from read_chunks(self._files, path, entry.bytes, self._buffers)


def has_object(source: RepairSource, entry: ShardEntry) -> bool:
    """Whether a source has an object, which is read to its end for the answer."""
    hasher = xxhash.xxh3_128()
    try:
        for chunk in source.chunks(entry):
            hasher.update(chunk)
    except (ShardbError, OSError):
        return False
    return hasher.hexdigest() == entry.digest
