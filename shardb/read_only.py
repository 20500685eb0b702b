"""Looking at a store that cannot be written: a read-only mount, somebody else's store, a full disk.

Owns the choice between opening a store and only looking at it, and the second. Nothing is created
or written, not even a lock file or a lease: the tables are made in memory from the end of the log,
by the same strict reading as when a store is opened.

Without a lease a live writer may retire what is being read. So a view looks again when it is
closed, and says when its commit is gone; every object's digest is checked as always.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from shardb import format as store_format
from shardb import opening, records, refs, state
from shardb.buffers import BufferPool
from shardb.cache import ImageCache
from shardb.errors import (
    ConflictError,
    CorruptionError,
    FormatError,
    ShardbError,
    StorageFailedError,
    StorageFullError,
)
from shardb.filesystem import FileSystem, RealFileSystem
from shardb.fsck_view import take_view
from shardb.index_state import IndexUnreadableError, check_own, read_index
from shardb.leases import Leases
from shardb.locks import Locks
from shardb.log import START, Log, Position
from shardb.looking import Looking
from shardb.objects import ObjectFiles
from shardb.pack_reading import PackedObjects
from shardb.read_view import CommitView
from shardb.records import Commit, ShardEntry
from shardb.recovery import RecoveryReport, read_end
from shardb.state import DictTables, Tables
from shardb.storage_errors import storage_errors
from shardb.store import Store
from shardb.store import open as open_store
from shardb.views import ShardView

T = TypeVar("T")
REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EXDEV)
UNPACKED_BYTES_MAX = 1 << 30


def open_to_look(
    root: str,
    *,
    files: FileSystem | None = None,
    verify: bool = True,
    allow_network: bool = False,
) -> Store | ReadOnlyStore:
    """Open a store, or only look at it where it cannot be written; use it as a context manager.

    Raises what `shardb.open` raises.
    """
    files = files or RealFileSystem()
    try:
        return open_store(root, files=files, verify=verify, allow_network=allow_network)
    except (StorageFullError, StorageFailedError) as error:
        if not isinstance(error, StorageFullError) and not _is_refusal(error):
            raise
        why: ShardbError = error
    with storage_errors(files, root, "looking at the store"):
        return ReadOnlyStore(root, files=files, why=why, verify=verify, allow_network=allow_network)


def _is_refusal(error: BaseException) -> bool:
    """Whether the storage works, but this process may not write to it.

    The database library has no error numbers, only their texts.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in REFUSED:
            return True
        if any(os.strerror(code) in str(cause) for code in REFUSED):
            return True
        cause = cause.__cause__
    return False


class TablesInMemory:
    """Tables that nobody changes, in the place of an index."""

    def __init__(self, tables: DictTables) -> None:
        self._tables = tables

    def read(self, body: Callable[[Tables], T]) -> T:
        """Run `body` over the tables."""
        return body(self._tables)


class ReadOnlyStore(Looking):
    """A store as it was at one moment; made by `open_to_look`."""

    def __init__(
        self,
        root: str,
        *,
        files: FileSystem,
        why: ShardbError,
        verify: bool,
        allow_network: bool,
    ) -> None:
        self.root = root
        self.files = files
        self.recovery = RecoveryReport()
        self.recovery.warnings.append({"what": "read only", "path": root, "why": why.message})
        self.format = store_format.read_format(files, root)
        opening.check_medium(files, root, self.recovery, allow_network=allow_network)
        self.log = Log(files, f"{root}/wal")
        self.locks = Locks(files, root)
        self.leases = Leases(files, root)
        self.objects = ObjectFiles(files, root, verify=verify)
        pool = BufferPool(UNPACKED_BYTES_MAX)
        cache = ImageCache(pool, UNPACKED_BYTES_MAX)
        packed = PackedObjects(files, self.objects.directory, pool, cache)
        self.objects.open_packed = packed.open
        self.cache = cache
        self.index = TablesInMemory(self._newest())

    def _newest(self) -> DictTables:
        """The tables of this moment; LogDamagedError or LogTruncatedError as when opening."""
        view = take_view(self.files, self.root)
        try:
            index = read_index(view.index) if view.index is not None else None
        except IndexUnreadableError:
            index = None
        if index is not None:
            path = f"{self.root}/index/data.mdb"
            check_own(self.log, index, self.format.store_id, path)
        applied = index.applied if index is not None else START
        tables = self._replayed(applied)
        state.sweep(tables, view.leased(self.files))
        if tables.get("meta", "store_id") != self.format.store_id:
            path = store_format.format_path(self.root)
            raise FormatError(
                f"{path}: it names store {self.format.store_id}, but the log beside it is of "
                "another one; run `shardb fsck`, then `shardb repair`",
                path=path,
            )
        return tables

    def _replayed(self, applied: Position) -> DictTables:
        scan, _ = read_end(self.log, applied, whole=True)
        tables = DictTables()
        for frame in scan.frames:
            state.apply(tables, records.unpack(frame.payload))
        return tables

    def at(
        self,
        *,
        ref: str | None = None,
        branch: str | None = None,
        snapshot: str | None = None,
        step: int | None = None,
        commit: str | None = None,
    ) -> UnleasedView:
        """A view of one commit, named in any one way; by default the main branch."""
        wanted = refs.Wanted(ref=ref, branch=branch, snapshot=snapshot, step=step, commit=commit)
        return UnleasedView(self, self.index.read(wanted.find))

    def snapshot(self, name: str) -> UnleasedView:
        """A view of a snapshot."""
        return self.at(snapshot=name)

    def read_object(self, name: str, entry: ShardEntry) -> ShardView:
        """A view of one object, mapped from its file."""
        with storage_errors(self.files, self.root, f"reading shard {name!r}"):
            layout, image = self.objects.open(entry.digest, entry.bytes)
        return ShardView(name, layout, image, entry.digest)

    def check_still_there(self, commit: Commit) -> None:
        """Raise ConflictError when a writer has retired a commit since this store was opened."""
        if self._newest().get("commits", commit.id) is None:
            raise ConflictError(
                f"{self.root}: step {commit.step} was retired while it was read, which a store "
                "that cannot be written cannot prevent; run the same command again"
            )

    def close(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> ReadOnlyStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class UnleasedView(CommitView):
    """One commit of a store that is only looked at.

    Who has checked all that was read closes the view before its block ends: then nobody asks
    whether the commit is still there.
    """

    _store: ReadOnlyStore

    def __init__(self, store: ReadOnlyStore, commit: Commit) -> None:
        super().__init__(store, commit)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise ConflictError when the commit is gone: what was read need not be what it was."""
        was_open = self._open
        super().__exit__(kind, error, trace)
        if was_open and (error is None or isinstance(error, CorruptionError)):
            self._store.check_still_there(self.commit)
