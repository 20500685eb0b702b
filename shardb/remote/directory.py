"""A bucket that is a plain directory: `file:///mnt/backup/run`.

Owns values as files, written beside, synced and renamed, and one lock file under which conditional
writes compare and swap. For media that a store itself must not live on, such as a network file
system: the log is not there, only whole files are written, and the lock is held for a moment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import xxhash

from shardb.errors import CorruptionError, NotFoundError, ObjectMissingError, RemoteFailedError
from shardb.filesystem import (
    CREATE,
    EXCLUSIVE,
    READ,
    WRITE,
    FileSystem,
    opened,
    read_exactly,
    write_all,
)
from shardb.remote.bucket import Stored, Version
from shardb.storage_errors import FULL, storage_error

CHUNK_BYTES = 8 << 20
LOCK_NAME = ".lock"


class DirectoryBucket:
    """Values in the files under `root`, whose parent exists."""

    def __init__(self, files: FileSystem, root: str) -> None:
        self._files = files
        self._root = root
        self._directories: set[str] = set()
        if not files.exists(os.path.dirname(root)):
            raise NotFoundError(f"{self.url}: its parent directory does not exist", path=root)

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    def read(self, key: str, *, limit_bytes: int) -> Stored | None:
        try:
            with self._errors(key), opened(self._files, self._path(key), READ) as file:
                data = read_exactly(self._files, file, limit_bytes + 1, 0)
        except FileNotFoundError:
            return None
        if len(data) > limit_bytes:
            raise CorruptionError(f"{self.url}/{key}: more than {limit_bytes} bytes", path=key)
        return Stored(data=data, version=_version(data))

    def size(self, key: str) -> int | None:
        try:
            with self._errors(key):
                return self._files.status(self._path(key)).size_bytes
        except FileNotFoundError:
            return None

    def chunks(self, key: str, start: int) -> Iterator[memoryview]:
        try:
            with self._errors(key), opened(self._files, self._path(key), READ) as file:
                while data := self._files.pread(file, CHUNK_BYTES, start):
                    yield memoryview(data)
                    start += len(data)
        except FileNotFoundError as error:
            raise ObjectMissingError(f"{self.url}/{key}: missing", path=key) from error

    def create(self, key: str, data: bytes) -> bool:
        with self._errors(key), self._locked():
            if self._files.exists(self._path(key)):
                return False
            self._write(key, iter([data]))
        return True

    def replace(self, key: str, data: bytes, version: Version) -> bool:
        with self._errors(key), self._locked():
            present = self.read(key, limit_bytes=1 << 20)
            if present is None or present.version != version:
                return False
            self._write(key, iter([data]))
        return True

    def keeps_conditions(self, key: str, data: bytes) -> bool:
        del key, data
        return True  # they are code of this module

    def upload(self, key: str, size_bytes: int, chunks: Iterator[bytes]) -> None:
        del size_bytes
        with self._errors(key):
            self._write(key, chunks)

    def keys(self, prefix: str) -> Iterator[str]:
        directory = self._path(prefix.rstrip("/"))
        with self._errors(prefix):
            names = self._files.list(directory) if self._files.exists(directory) else []
        for name in names:
            if ".partial." not in name:
                yield f"{prefix}{name}"

    # Parts

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _write(self, key: str, chunks: Iterator[bytes]) -> None:
        path = self._path(key)
        self._make_directory(os.path.dirname(path))
        partial = f"{path}.partial.{os.urandom(8).hex()}"
        try:
            with opened(self._files, partial, WRITE | CREATE | EXCLUSIVE) as file:
                offset = 0
                for chunk in chunks:
                    write_all(self._files, file, chunk, offset)
                    offset += len(chunk)
                self._files.fsync(file)
            self._files.rename(partial, path)
        except BaseException:
            if self._files.exists(partial):
                self._files.unlink(partial)
            raise
        self._files.sync_directory(os.path.dirname(path))

    def _make_directory(self, path: str) -> None:
        """Make a directory and those above it, down from the root's parent, durably."""
        if path in self._directories:
            return
        if not self._files.exists(path):
            if path != self._root:
                self._make_directory(os.path.dirname(path))
            with suppress(FileExistsError):
                self._files.make_directory(path)
            self._files.sync_directory(os.path.dirname(path))
        self._directories.add(path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude every other writer of a conditional value. Each use has a descriptor of its own,
        so that threads exclude each other too."""
        self._make_directory(self._root)
        with opened(self._files, self._path(LOCK_NAME), WRITE | CREATE) as file:
            self._files.lock(file, exclusive=True, blocking=True)
            yield

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in FULL:
                raise storage_error(self._files, self._root, f"writing {key}", error) from error
            raise RemoteFailedError(
                f"{self.url}/{key}: {error.strerror or error}; run the same command again, it "
                "goes on where it stopped",
                path=key,
            ) from error


def _version(data: bytes) -> Version:
    return Version(etag=xxhash.xxh3_128_hexdigest(data))
