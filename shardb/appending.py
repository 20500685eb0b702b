"""Appending to the log: the one place where a record becomes the truth.

Owns the order lock, catch up, append, sync (the commit point), apply, retire; the rotation of
segments; and the poison after a failed sync. Knows nothing of what a record means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from shardb import records, state
from shardb.errors import CommitUnknownError, ShardbError, StorageFailedError
from shardb.index import put_applied_position
from shardb.log import SEGMENT_LIMIT_BYTES, NoSpaceInLogError, Position
from shardb.records import Record, new_record
from shardb.recovery import catch_up
from shardb.references import Retired
from shardb.state import Tables
from shardb.storage_errors import FULL, NEVER_WRITTEN, reason, storage_error, storage_errors

if TYPE_CHECKING:
    from shardb.store import Store


class Appender:
    """Appends records to the log of one open store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._failed: ShardbError | None = None
        self._segment_limit_bytes = SEGMENT_LIMIT_BYTES

    def check_usable(self) -> None:
        """Raise the failure that poisoned this store, if there was one."""
        if self._failed is not None:
            raise StorageFailedError(
                f"{self._store.root}: the storage failed earlier ({self._failed}); close the store "
                "and open it again before writing",
                path=self._store.root,
            )

    @contextmanager
    def exclusive(self, doing: str) -> Iterator[Position]:
        """Hold the log's lock, caught up; gives the end of the log."""
        store = self._store
        with self.errors(doing), store.locks.wal():
            yield self._catch_up(doing)

    def _catch_up(self, doing: str) -> Position:
        """Take in what others have appended. A sync of it that fails poisons the store, too."""
        store = self._store
        try:
            return catch_up(store.log, store.index, store.recovery, whole=False)
        except OSError as error:
            failure = self.error(doing, error)
            if error.errno not in FULL:
                self.fail(failure)
            raise failure from error

    def change(self, make: Callable[[Tables], Record | None]) -> Record | None:
        """Append the record that `make` returns for the newest state; None appends nothing."""
        self.check_usable()
        with self.exclusive("changing the store") as end:
            record = self._store.index.read(make)
            if record is not None:
                self.append(end, record)
        return record

    def append(self, end: Position, record: Record, *, commit_id: str | None = None) -> None:
        """Append one record durably, apply it, retire what it lets go. The lock is held.

        It is applied once before, to no effect: a record that the tables refuse would be in the log
        for good, and no store with it could be opened any more.
        """
        self._store.index.exclude(lambda tables: state.apply(tables, record))
        self._apply(record, self.append_durably(end, record, commit_id=commit_id))

    def append_durably(
        self, end: Position, record: Record, *, commit_id: str | None = None
    ) -> Position:
        """Append one record; return the end of the log. A failed sync poisons the store."""
        end = self._rotate(end)
        payload = records.pack(record)
        try:
            return self._store.log.append(end, payload)
        except NoSpaceInLogError as error:
            raise self.error("writing the log", error, len(payload)) from error
        except OSError as error:
            failure = self._append_failure(error, str(record["kind"]), commit_id)
            raise self.fail(failure) from error

    def _append_failure(
        self, error: OSError, kind: str, commit_id: str | None
    ) -> StorageFailedError:
        """The error of a record that may have landed; where it cannot have, it says so."""
        root, said = self._store.root, reason(self._store.files, error)
        what = f"a {kind} record was" if commit_id is None else f"commit {commit_id} was"
        after = "nothing of it landed, and what was there before is intact"
        if error.errno not in NEVER_WRITTEN:
            after = "reopen the store: `shardb recover` says whether it landed"
        text = f"{root}: the storage failed while {what} written to the log ({said}); {after}"
        if commit_id is not None:
            return CommitUnknownError(text, commit_id=commit_id, path=root)
        failure = StorageFailedError(text, path=root)
        failure.definite = False
        return failure

    def _apply(self, record: Record, end: Position) -> None:
        """After the commit point nothing may fail any more: a broken index is caught up later."""

        def body(tables: Tables) -> list[Retired]:
            retired = state.apply(tables, record)
            put_applied_position(tables, end)
            return retired + self._swept(tables)

        try:
            for item in self._store.index.write(body):
                self._retire(item)
        except (ShardbError, OSError) as error:
            self._store.recovery.warnings.append(
                {
                    "what": "index",
                    "path": self._store.index.path,
                    "why": f"caught up later: {error}",
                }
            )

    def _swept(self, tables: Tables) -> list[Retired]:
        """What may go with a record; nothing while nobody can be asked who reads."""
        try:
            leased = self._store.leases.leased_commits()
        except OSError:
            return []
        return state.sweep(tables, leased)

    def sweep(self) -> None:
        """Retire what nothing pins or leases any more; then every object in the index is there.

        Tables that were made anew from the log tell of condemned commits that were swept before.
        """
        store = self._store
        if store.index.read(lambda tables: any(True for _ in tables.items("condemned"))):
            leased = store.leases.leased_commits
            for item in store.index.write(lambda tables: state.sweep(tables, leased())):
                self._retire(item)

    def _retire(self, item: Retired) -> None:
        """Take an object that nothing references out of `objects/`, and its image out of memory."""
        store = self._store
        if item.packed:
            store.objects.retire_packed(item.digest)
        buffer = store.cache.pop(item.digest)
        status = None if buffer is None else store.objects.look(item.digest)
        if buffer is not None and (status is None or buffer.inode != status.inode):
            buffer.disown()  # another process recycled the file that is mapped here
        if buffer is not None and buffer.path is not None:
            store.objects.hold(item.digest, buffer)
        else:
            store.objects.retire([item])
        if buffer is not None:
            buffer.release(store.buffers)

    def _rotate(self, end: Position) -> Position:
        """Begin a new segment, with a checkpoint, when this one has grown.

        The closed one is kept compressed: the log is the run's history. Without space for a new
        segment the old one grows on.
        """
        if end.offset < self._segment_limit_bytes:
            return end
        store = self._store
        try:
            store.log.compress(end.sequence)
            record = new_record("checkpoint", state=store.index.read(state.full_state))
            closed = [*record["state"]["meta"].get("closed", []), store.log.describe(end.sequence)]
            record["state"]["meta"]["closed"] = closed
            end = store.log.create_segment(end, records.pack(record))
        except OSError as error:
            if error.errno in FULL and end.sequence + 1 not in store.log.sequences():
                return end  # else there may be two ends of the log: that is a failure
            raise self.fail(self.error("beginning a log segment", error)) from error
        self._apply(record, end)
        # The checkpoint may hold much more than the records since: rotate by growth, not by size.
        self._segment_limit_bytes = max(SEGMENT_LIMIT_BYTES, 4 * end.offset)
        store.log.drop_raw(end.sequence - 1)
        return end

    def fail(self, failure: ShardbError) -> ShardbError:
        """Poison the store: a sync that failed once must not be retried on the same pages."""
        if self._failed is None:
            self._failed = failure
        return failure

    def errors(self, doing: str, needed_bytes: int | None = None) -> AbstractContextManager[None]:
        """Turn the operating system's errors inside a block into the store's own."""
        return storage_errors(self._store.files, self._store.root, doing, needed_bytes)

    def error(self, doing: str, error: OSError, needed_bytes: int | None = None) -> ShardbError:
        """The store's own error for one of the operating system's."""
        return storage_error(self._store.files, self._store.root, doing, error, needed_bytes)
