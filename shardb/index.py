"""The index: the tables of `state` in LMDB, a cache of the log for every process of the store.

Owns the LMDB environment. Nothing lives only here: the position in the log that has been applied
(`applied`) is written in the same LMDB transaction as the entries, and a missing, older or
unreadable index is rebuilt. An environment never crosses a fork.

LMDB is opened without its meta page sync (MDB_NOMETASYNC): after power loss it may be one
transaction older, never damaged, and older is caught up from the log.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import lmdb
import msgpack

from shardb.errors import ShardbError, StorageFailedError, StorageFullError, UsageError
from shardb.filesystem import CREATE, WRITE, FileSystem, opened
from shardb.log import START, Position
from shardb.state import TABLES
from shardb.storage_errors import reason

# Address space, not disk: the file grows as needed.
MAP_BYTES = 16 << 30
# Where a process may not have as much (`ulimit -v`).
SMALLER_MAPS_BYTES = (1 << 30, 128 << 20)
READERS_MAX = 512
# What LMDB's lock file takes for that many readers, in whole pages.
LOCK_FILE_BYTES = 36 << 10
# A disk with less room than the largest write of LMDB may have cut that write short.
SHORT_WRITE_BYTES = 1 << 20
KEY_BYTES_MAX = 511
T = TypeVar("T")


class LmdbTables:
    """The tables inside one LMDB transaction."""

    def __init__(self, transaction: Any, databases: dict[str, Any]) -> None:
        self._transaction = transaction
        self._databases = databases

    def get(self, table: str, key: str) -> Any:
        name = key.encode(errors="replace")
        if not 0 < len(name) <= KEY_BYTES_MAX:
            return None  # LMDB refuses to look for what it could not hold
        value = self._transaction.get(name, db=self._databases[table])
        return None if value is None else msgpack.unpackb(value, raw=False)

    def put(self, table: str, key: str, value: Any) -> None:
        packed = msgpack.packb(value, use_bin_type=True)
        self._transaction.put(key.encode(), packed, db=self._databases[table])

    def delete(self, table: str, key: str) -> None:
        self._transaction.delete(key.encode(), db=self._databases[table])

    def items(self, table: str) -> Iterator[tuple[str, Any]]:
        with self._transaction.cursor(db=self._databases[table]) as cursor:
            rows = [(bytes(key), bytes(value)) for key, value in cursor]
        for key, value in rows:
            yield key.decode(), msgpack.unpackb(value, raw=False)

    def clear(self) -> None:
        for database in self._databases.values():
            self._transaction.drop(database, delete=False)


class _SharedEnvironment:
    """An LMDB environment and how many stores of this process use it.

    LMDB forbids opening an environment twice in one process, so its stores share one. Keyed by
    process and directory, so that neither a fork nor a replaced directory finds somebody else's.
    """

    lock: ClassVar[threading.Lock] = threading.Lock()
    opened: ClassVar[dict[tuple[int, int, int], _SharedEnvironment]] = {}

    def __init__(self, directory: str) -> None:
        self.users = 0
        self.environment = self._open(directory)
        try:
            self.environment.reader_check()
            with self.environment.begin(write=True) as transaction:
                self.databases = {
                    name: self.environment.open_db(name.encode(), txn=transaction)
                    for name in TABLES
                }
        except BaseException:
            self.environment.close()  # else this process could never open it again
            raise

    @staticmethod
    def _open(directory: str) -> Any:
        """Open LMDB with as much address space as there is."""
        *larger, smallest = (MAP_BYTES, *SMALLER_MAPS_BYTES)
        for map_bytes in larger:
            with suppress(lmdb.MemoryError):
                return _open_lmdb(directory, map_bytes)
        return _open_lmdb(directory, smallest)

    @classmethod
    def close_inherited(cls, process: int) -> None:
        """In a forked child: close what the parent had open; the library refuses it else."""
        for key in [key for key in cls.opened if key[0] != process]:
            cls.opened.pop(key).environment.close()


def _open_lmdb(directory: str, map_bytes: int) -> Any:
    return lmdb.open(
        directory,
        map_size=map_bytes,
        max_dbs=len(TABLES),
        max_readers=READERS_MAX,
        metasync=False,
        writemap=False,
        readahead=False,
        mode=0o666,
    )


class Index:
    """The LMDB environment under one directory."""

    def __init__(self, files: FileSystem, directory: str) -> None:
        self._files = files
        self.path = f"{directory}/data.mdb"
        self._owner = os.getpid()
        self._closed = False
        self._was_full = False
        status = files.status(directory)
        self._key = (self._owner, status.device, status.inode)
        with _SharedEnvironment.lock:
            _SharedEnvironment.close_inherited(self._owner)
            shared = _SharedEnvironment.opened.get(self._key)
            if shared is None:
                shared = self._open_environment(directory)
                _SharedEnvironment.opened[self._key] = shared
            shared.users += 1
        self._environment = shared.environment
        self._databases = shared.databases

    def _open_environment(self, directory: str) -> _SharedEnvironment:
        """Open LMDB; StorageFullError or StorageFailedError when it cannot be."""
        _allocate_lock_file(self._files, f"{directory}/lock.mdb")
        try:
            return _SharedEnvironment(directory)
        except lmdb.Error as error:
            raise self._error(error) from error

    def read(self, body: Callable[[LmdbTables], T]) -> T:
        """Run `body` over one consistent state of the tables."""
        self.check_open()
        try:
            with self._environment.begin() as transaction:
                return body(LmdbTables(transaction, self._databases))
        except lmdb.Error as error:
            raise self._error(error) from error

    def write(self, body: Callable[[LmdbTables], T]) -> T:
        """Run `body` in a write transaction: all of its changes or none.

        Raises StorageFullError or StorageFailedError when LMDB cannot write.
        """
        self.check_open()
        try:
            with self._environment.begin(write=True) as transaction:
                result = body(LmdbTables(transaction, self._databases))
        except lmdb.Error as error:
            raise self._error(error) from error
        self._files.database_committed(self.path)
        return result

    def exclude(self, body: Callable[[LmdbTables], T]) -> T:
        """Run `body`, which only reads, while no other process can be in a write transaction."""
        self.check_open()
        try:
            transaction = self._environment.begin(write=True)
            try:
                return body(LmdbTables(transaction, self._databases))
            finally:
                transaction.abort()
        except lmdb.Error as error:
            raise self._error(error) from error

    def _error(self, error: lmdb.Error) -> ShardbError:
        """The store's own error for one of LMDB's."""
        text = str(error)
        if isinstance(error, lmdb.MemoryError):
            return StorageFailedError(
                f"{self.path}: not enough address space for the index: this process may have too "
                "little (`ulimit -v`, or its batch system's limit); raise it, and run this again",
                path=self.path,
            )
        full = isinstance(error, lmdb.DiskError | lmdb.MapFullError)
        full = full or "No space left" in text or "quota" in text
        if "Input/output error" in text:
            # LMDB says so of a short write too, which is what a full disk gives.
            full = self._files.space(self.path.rpartition("/")[0]).free_bytes < SHORT_WRITE_BYTES
        panic = "MDB_PANIC" in text  # the answer to all that follows on a write that failed
        if full or (panic and self._was_full):
            self._was_full = True
            again = " and open the store again" if panic else ""
            return StorageFullError(
                f"{self.path}: no space for the index; free some space{again}. The log is intact "
                "and the index is caught up from it",
                path=self.path,
            )
        after = ": see that the disk has room and works, and open the store again"
        for code in (errno.EPERM, errno.EACCES, errno.EROFS, errno.EMFILE):
            if os.strerror(code) in text:
                text = reason(self._files, OSError(code, os.strerror(code), self.path))
                after = ""  # it says what helps; to open the store again does not
        if panic:
            text = "it could not be written a moment ago, and is not used any more"
        return StorageFailedError(
            f"{self.path}: the index failed ({text}); what the log has is safe, and the index is "
            f"caught up from it{after}",
            path=self.path,
        )

    def close(self) -> None:
        """Close the environment with its last user in this process; once is enough."""
        if self._owner != os.getpid() or self._closed:
            return
        self._closed = True
        with _SharedEnvironment.lock:
            shared = _SharedEnvironment.opened[self._key]
            shared.users -= 1
            if shared.users == 0:
                del _SharedEnvironment.opened[self._key]
                shared.environment.close()

    def check_open(self) -> None:
        """Raise UsageError when the store was closed, or opened in another process."""
        if self._closed:
            raise UsageError("this store is closed; open it again")
        if self._owner != os.getpid():
            raise UsageError(
                f"this store was opened in process {self._owner} and must not be used in a forked "
                "child; open it there"
            )


def applied_position(tables: Any) -> Position:
    """The position in the log up to which the tables are applied."""
    row = tables.get("meta", "applied")
    if row is None:
        return START
    sequence, offset, lsn, digest = row
    return Position(sequence=sequence, offset=offset, lsn=lsn, digest=bytes(digest))


def put_applied_position(tables: Any, position: Position) -> None:
    """Say how far the tables are applied, in the transaction that applies."""
    row = [position.sequence, position.offset, position.lsn, position.digest]
    tables.put("meta", "applied", row)


def _allocate_lock_file(files: FileSystem, path: str) -> None:
    """Give LMDB's lock file its blocks before LMDB maps it.

    LMDB makes it sparse and writes through the mapping: on a full disk that is a SIGBUS, which no
    program survives. Here it is an OSError.
    """
    if files.exists(path) and files.status(path).allocated_bytes >= LOCK_FILE_BYTES:
        return
    with opened(files, path, WRITE | CREATE) as file:
        try:
            files.allocate(file, LOCK_FILE_BYTES, keep_size=True)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
