"""The store: opening, reading, beginning, committing, naming.

Owns the parts (log, index, object files, locks, leases, buffers) and the order in which they work
together. One `Store` belongs to one process and must not cross a fork. Reading and one transaction
a branch may run in several threads; the log's lock orders everything that changes the store.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType

from shardb import format as store_format
from shardb import opening, records, refs
from shardb.appending import Appender
from shardb.buffers import BufferPool, Bytes, Pool, PooledBuffer
from shardb.cache import ImageCache
from shardb.digesting import GrowingDigest
from shardb.errors import (
    ConflictError,
    SnapshotExistsError,
)
from shardb.filesystem import FileSystem, RealFileSystem
from shardb.index import Index
from shardb.layout import Layout, check_name
from shardb.leases import Lease, Leases
from shardb.locks import Locks
from shardb.log import Log
from shardb.looking import Looking
from shardb.mapped import MappedPool
from shardb.objects import ObjectFiles, StagedObject
from shardb.pack_reading import PackedObjects
from shardb.patrol import Patrol
from shardb.read_view import ReadView
from shardb.records import Commit, Record, ShardEntry, new_record
from shardb.recovery import RecoveryReport
from shardb.state import DEFAULT_BRANCH, Tables
from shardb.storage_errors import FULL, storage_errors
from shardb.transaction import Transaction
from shardb.views import ShardView
from shardb.writer import BackgroundWriter

LEASE_ATTEMPTS = 100


class Store(Looking):
    """An open store; make one with `shardb.open`, close it or use it as a context manager."""

    def __init__(
        self,
        root: str,
        *,
        files: FileSystem,
        verify: bool,
        cache_bytes: int,
        writer_threads: int,
        max_pending_writes: int,
        allow_network: bool,
    ) -> None:
        self.root = root
        self.files = files
        self.recovery = RecoveryReport()
        self.format = store_format.read_format(files, root)
        opening.check_medium(files, root, self.recovery, allow_network=allow_network)
        self._transactions: dict[str, Transaction] = {}
        self._beginning = threading.Lock()
        self._receiving: set[str] = set()
        self.log = Log(files, f"{root}/wal")
        self.locks = Locks(files, root)
        self.leases = Leases(files, root)
        self.objects = ObjectFiles(files, root, verify=verify)
        self.mapped = files.kind(root).startswith("memory:")
        self.buffers: Pool = MappedPool(self.objects) if self.mapped else BufferPool(cache_bytes)
        self.cache = ImageCache(self.buffers, sys.maxsize if self.mapped else cache_bytes)
        self.objects.open_packed = self._packed_objects(cache_bytes).open
        self.appender = Appender(self)
        self.writer = BackgroundWriter(threads=writer_threads, max_pending=max_pending_writes)
        self.patrol = Patrol(self)
        try:
            self.index: Index = opening.open_index(self, self.recovery)
        except BaseException:
            self.writer.close()
            self.locks.close()
            raise
        self._left_to_parent = False
        os.register_at_fork(after_in_child=partial(_after_fork, weakref.ref(self)))

    def _packed_objects(self, cache_bytes: int) -> PackedObjects:
        """Unpacked images join the others; in a store in memory those are files, so they do not."""
        pool, cache = self.buffers, self.cache
        if self.mapped:
            pool = BufferPool(cache_bytes)
            cache = ImageCache(pool, cache_bytes)
        return PackedObjects(self.files, self.objects.directory, pool, cache)

    # Looking

    def history(self) -> Iterator[Record]:
        """Every record of the log that is still there in raw form, oldest first."""
        with storage_errors(self.files, self.root, "reading the log"):
            for sequence in self.log.sequences():
                for frame in self.log.scan(sequence).frames:
                    yield records.unpack(frame.payload)

    # Reading

    def at(
        self,
        *,
        ref: str | None = None,
        branch: str | None = None,
        snapshot: str | None = None,
        step: int | None = None,
        commit: str | None = None,
    ) -> ReadView:
        """A leased read view of one commit, named in any one way; by default the main branch."""
        wanted = refs.Wanted(ref=ref, branch=branch, snapshot=snapshot, step=step, commit=commit)
        with self.appender.errors("taking a lease"):
            for _ in range(LEASE_ATTEMPTS):
                found = self.index.read(wanted.find)
                lease = self.leases.take(found.id)
                if self._lease_is_good(lease):
                    return ReadView(self, found, lease)
                self.leases.release(lease)
        raise ConflictError(f"commit {found.id} was retired at every attempt to read it")

    def snapshot(self, name: str) -> ReadView:
        """A leased read view of a snapshot."""
        return self.at(snapshot=name)

    def _lease_is_good(self, lease: Lease) -> bool:
        """Under the index's write lock the commit is live and nobody removed the lease."""

        def body(tables: Tables) -> bool:
            live = tables.get("commits", lease.commit) is not None
            return live and self.leases.still_there(lease)

        return self.index.exclude(body)

    def read_object(self, name: str, entry: ShardEntry) -> ShardView:
        """A view of one object, from memory where it is still there, else mapped from its file."""
        self.index.check_open()
        with self.appender.errors(f"reading shard {name!r}"):
            layout, image = self._image(entry)
        return ShardView(name, layout, image, entry.digest)

    def _image(self, entry: ShardEntry) -> tuple[Layout, Bytes]:
        """An image in memory is trusted as memory; one that is a file, while nobody wrote to it."""
        status = self.objects.look(entry.digest) if self.mapped else None
        if self.mapped and status is None:
            return self.objects.open(entry.digest, entry.bytes)  # packed, or missing
        found = self.cache.get(entry.digest, None if status is None else status.inode)
        if found is None:
            return self.objects.open(entry.digest, entry.bytes)
        if status is not None:
            path = self.objects.path(entry.digest)
            self.objects.verified.check(path, entry.digest, status.stamp, found[1])
        return found

    # Writing

    def begin(self, branch: str = DEFAULT_BRANCH) -> Transaction:
        """Begin the next commit of a branch; this store is its writer until it is closed.

        Raises BranchLockedError when another process, or another open store, writes to it.
        """
        self.index.check_open()
        self.appender.check_usable()
        check_name(branch, "branch")
        with self._beginning:  # no two threads may find the branch free
            return self._begin(branch)

    def _begin(self, branch: str) -> Transaction:
        self._check_free(branch)
        fresh = not self.locks.holds_branch(branch)
        with self.appender.errors("beginning a transaction"):
            self.locks.take_branch(branch)
            if fresh:
                self.objects.reclaim_staged(branch)
            with self.appender.exclusive("beginning a transaction") as end:
                base = self.branches().get(branch)
                if base is None:
                    self.index.read(lambda tables: refs.check_new_branch(tables, branch))
                transaction = Transaction(self, branch, base)
                begin = new_record(
                    "begin", branch=branch, transaction=transaction.id, base=base and base.id
                )
                self.appender.append_durably(end, begin)
        self._transactions[branch] = transaction
        return transaction

    @contextmanager
    def receiving(self, branch: str) -> Iterator[bool]:
        """Be the writer of a branch for a block that copies into it; gives whether this is news.

        Raises BranchLockedError beside another writer, ConflictError beside one in this store.
        """
        self.index.check_open()
        self.appender.check_usable()
        with self._beginning:
            self._check_free(branch)
            fresh = not self.locks.holds_branch(branch)
            self._receiving.add(branch)
        try:
            with self.appender.errors(f"locking branch {branch!r}"):
                self.locks.take_branch(branch)
            yield fresh
        finally:
            self._receiving.discard(branch)
            if fresh:
                self.locks.release_branch(branch)

    def _check_free(self, branch: str) -> None:
        if branch in self._transactions:
            raise ConflictError(f"branch {branch!r} has an open transaction in this store already")
        if branch in self._receiving:
            raise ConflictError(f"a commit is being copied into branch {branch!r} of this store")

    def transaction_closed(self, transaction: Transaction) -> None:
        self._transactions.pop(transaction.branch, None)

    def write_object(
        self,
        name: str,
        image: Bytes,
        buffer: PooledBuffer,
        branch: str,
        digest: GrowingDigest | None = None,
    ) -> StagedObject:
        """Write a sealed image to a staged file (called in a writer thread).

        digest: where one was begun while a mapped image was filled.
        """
        if buffer.path is not None:
            known = None if digest is None else digest.finish()
            return self.objects.digest_mapped(image, buffer, known)
        try:
            return self.objects.write(image, branch)
        except OSError as error:
            failure = self.appender.error(f"writing shard {name!r}", error, len(image))
            if error.errno not in FULL:
                self.appender.fail(failure)
            raise failure from error

    def sync_objects(self, staged: list[StagedObject]) -> None:
        """Sync all staged files; the first failure poisons the store. Mapped ones need none."""
        try:
            self.writer.map(self.objects.sync, [each for each in staged if each.buffer is None])
        except OSError as error:
            raise self.appender.fail(self.appender.error("syncing objects", error)) from error

    def drop_object(self, staged: StagedObject) -> None:
        """Give back a staged file, whatever state it is in; the next writer finds what is left."""
        try:
            self.objects.drop(staged)
        except OSError:
            return

    def create_snapshot(self, name: str, ref: str | None = None) -> Commit:
        """Pin the commit that `ref` names under an immovable name; constant time, reads no object.

        A name of the form step-N means the commit of that step. The same name for the same commit
        is fine; SnapshotExistsError for another one. NotFoundError when there is no such commit.
        """
        check_name(name, "snapshot")
        self.appender.check_usable()
        with self.appender.exclusive("snapshotting") as end:
            commit = self.index.read(lambda tables: refs.snapshot_target(tables, name, ref))
            existing = self.index.read(lambda tables: refs.snapshot_commit(tables, name))
            if existing is not None and existing.id != commit.id:
                raise SnapshotExistsError(
                    f"snapshot {name!r} exists and pins step {existing.step} (commit "
                    f"{existing.id}); choose another name"
                )
            if existing is None:
                if self.index.read(lambda tables: tables.get("branches", name)) is not None:
                    raise ConflictError(f"{name!r} is a branch; choose another snapshot name")
                self.appender.append(end, new_record("snapshot", name=name, commit=commit.id))
        return commit

    def close(self) -> None:
        """Abort open transactions, give up locks and leases; once is enough."""
        if self._left_to_parent:
            return
        for transaction in list(self._transactions.values()):
            transaction.abort()
        self.leases.release_all()
        self.writer.close()
        self.cache.clear()
        self.buffers.close()
        self.index.close()
        self.locks.close()

    def _leave_to_parent(self) -> None:
        """In a forked child: give up its copies of locks and leases, and touch nothing else.

        They would outlive the parent: a worker that was left behind would keep the branch locked.
        What the parent has staged is the parent's, also when the child unwinds its stack.
        """
        self.locks.close()
        self.leases.abandon()
        for transaction in self._transactions.values():
            transaction.forget()
        self._transactions.clear()
        self._left_to_parent = True

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _after_fork(reference: weakref.ref[Store]) -> None:
    store = reference()
    if store is not None:
        store._leave_to_parent()


def open(  # noqa: A001 - the field's word, used as shardb.open
    path: str | os.PathLike[str],
    *,
    create: bool = False,
    files: FileSystem | None = None,
    verify: bool = True,
    cache_bytes: int = 1 << 30,
    writer_threads: int = 2,
    max_pending_writes: int = 8,
    allow_network: bool = False,
) -> Store:
    """Open a store, recovering it if needed; `store.recovery` says what was found.

    `create` makes the store when there is none. `verify` checks each object's digest at its first
    read. `cache_bytes` bounds the images kept in memory. With `writer_threads` 0 a sealed shard is
    written before `seal` returns. Raises NotFoundError, FormatError,
    LogDamagedError, LogTruncatedError, StorageFullError or StorageFailedError.
    """
    files = files or RealFileSystem()
    root = os.path.abspath(os.fspath(path))
    with storage_errors(files, root, "opening the store"):
        if create:
            opening.create(files, root)
        return Store(
            root,
            files=files,
            verify=verify,
            cache_bytes=cache_bytes,
            writer_threads=writer_threads,
            max_pending_writes=max_pending_writes,
            allow_network=allow_network,
        )
