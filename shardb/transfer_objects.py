"""The objects of one commit on their way into a store.

Owns which of them are missing, what an interrupted copy left of them, and copying the others with a
few threads: in chunks, with every digest checked. Knows nothing of branches or records. The caller
holds the lock under whose name (`key`) the files are staged, and places them with its record.

Only the target's index says what the target has. What merely has the right name, in `spare/` or in
`objects/`, is read again and taken only for what its bytes are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress

from shardb import references
from shardb.buffers import BufferPool
from shardb.errors import ObjectCorruptError, ShardbError, StorageFullError
from shardb.objects import StagedObject, free_bytes_of
from shardb.records import Commit, ShardEntry
from shardb.store import Store
from shardb.transfer_source import CHUNK_BYTES, CommitSource, file_digest
from shardb.transfer_tally import Tally


class TransferStoppedError(ShardbError):
    """Raised in a copying thread when another one has failed; never seen by a caller."""

    kind = "transfer_stopped"


class ObjectIntake:
    """Brings the objects of one commit into staged files of a store."""

    def __init__(
        self, target: Store, source: CommitSource, commit: Commit, key: str, tally: Tally
    ) -> None:
        self._target = target
        self._source = source
        self._key = key
        self._tally = tally
        self.commit = commit
        self._wanted = {entry.digest: entry for entry in commit.shards.values()}
        self._left: dict[str, list[str]] = {}  # digest to what may be it
        self._staged: dict[str, StagedObject] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._buffers = BufferPool(source.copies_at_once * CHUNK_BYTES)
        self._expected: set[str] = set()

    @property
    def staged(self) -> list[StagedObject]:
        """What was brought, ready to be placed."""
        return list(self._staged.values())

    def look_around(self, *, fresh: bool) -> None:
        """Find what an interrupted copy left; take back other leftovers if the lock is `fresh`."""
        target = self._target
        with target.appender.errors("looking for copied objects"):
            for path, digest in target.objects.interrupted(self._key):
                entry = self._wanted.get(digest)
                if entry is not None and target.files.status(path).size_bytes == entry.bytes:
                    self._left.setdefault(digest, []).append(path)
            if fresh:
                keep = {path for paths in self._left.values() for path in paths}
                target.objects.reclaim_staged(self._key, keep=keep)
        with self._target.appender.exclusive("looking for copied objects"):
            self._unplace_unreferenced()

    def _unplace_unreferenced(self) -> None:
        """Objects that were placed for a record that never came: staged again, to be checked.

        Under the log's lock. One that any commit of the index references is left alone, though it
        be condemned: a reader may still need its name.
        """
        target = self._target
        known = target.index.read(
            lambda tables: {d for d in self._wanted if tables.get("objects", d) is not None}
        )
        for digest in self._wanted.keys() - known:
            path = target.objects.path(digest)
            exists = target.files.exists(path)
            if exists and target.files.status(path).size_bytes == self._wanted[digest].bytes:
                path = target.objects.unplace(digest, self._key)
                self._left.setdefault(digest, []).append(path)

    def missing(self) -> dict[str, ShardEntry]:
        """Objects that are neither held by the target nor staged, by digest."""
        held = self._target.index.read(lambda tables: references.held(tables, self._wanted))
        return {d: e for d, e in self._wanted.items() if d not in held and d not in self._staged}

    def bring(self) -> None:
        """Copy what is missing, and sync it; what was brought stays staged when this fails."""
        missing = self.missing()
        self._announce(missing)
        with self._target.appender.errors("looking for space"):
            self._check_space(missing)
        pool = ThreadPoolExecutor(self._source.copies_at_once, thread_name_prefix="shardb-transfer")
        try:
            futures = [pool.submit(self._bring_one, entry) for entry in missing.values()]
            for future in as_completed(futures):
                future.result()
        finally:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            self._stop.clear()
        self._target.sync_objects([self._staged[digest] for digest in missing])

    def leave(self) -> None:
        """Let go of what is staged; the next copy of these objects finds and checks it."""
        for staged in self._staged.values():
            with suppress(OSError):
                self._target.objects.leave(staged)

    def _announce(self, missing: dict[str, ShardEntry]) -> None:
        new = self._wanted.keys() - self._expected
        self._expected |= new
        told = self._tally.fresh(new) | (new & missing.keys())
        self._tally.expect(len(told), sum(self._wanted[d].bytes for d in told))
        present = [self._wanted[d] for d in told if d not in missing]
        self._tally.present(len(present), sum(entry.bytes for entry in present))

    def _check_space(self, missing: dict[str, ShardEntry]) -> None:
        """Refuse before the first byte what cannot fit: StorageFullError with needed and free."""
        target = self._target
        spare: dict[int, int] = {}
        for name in target.files.list(target.objects.spare_directory):
            if (size := free_bytes_of(name)) is not None:
                spare[size] = spare.get(size, 0) + 1
        needed_bytes = 0
        for digest, entry in missing.items():
            if self._left.get(digest):
                continue
            if spare.get(entry.bytes):
                spare[entry.bytes] -= 1
            else:
                needed_bytes += entry.bytes
        free_bytes = target.files.space(target.root).free_bytes
        if needed_bytes > free_bytes:
            raise StorageFullError(
                f"{target.root}: {needed_bytes} bytes are to be copied here and {free_bytes} are "
                "free; nothing was changed. Free some space (`shardb gc` may help) and run the "
                "same command again",
                path=target.root,
            )

    def _bring_one(self, entry: ShardEntry) -> None:
        staged = self._resume(entry) or self._copy(entry)
        with self._lock:
            self._staged[entry.digest] = staged

    def _resume(self, entry: ShardEntry) -> StagedObject | None:
        """Take what an interrupted copy left, if its bytes are what they should be."""
        target = self._target
        for path in self._left.pop(entry.digest, []):
            with target.appender.errors(f"reading {path}"):
                digest = file_digest(target.files, path, entry.bytes, self._buffers)
                if digest == entry.digest:
                    self._tally.resumed(entry.bytes)
                    return target.objects.resume(path, digest, entry.bytes)
                target.objects.drop(StagedObject(digest=digest, bytes=entry.bytes, path=path))
        return None

    def _copy(self, entry: ShardEntry) -> StagedObject:
        target = self._target
        moved_bytes = 0

        def counted() -> Iterator[memoryview]:
            nonlocal moved_bytes
            for chunk in self._source.chunks(entry):
                if self._stop.is_set():
                    raise TransferStoppedError("another object could not be copied")
                yield chunk
                moved_bytes += len(chunk)
                self._tally.moved(len(chunk))

        try:
            with target.appender.errors(f"writing {entry.digest}", needed_bytes=entry.bytes):
                staged = target.objects.write_chunks(
                    counted(), entry.bytes, self._key, content=entry.digest
                )
            if staged.digest != entry.digest:
                target.drop_object(staged)
                raise self._corrupt(entry, staged.digest)
        except BaseException:
            self._tally.moved(-moved_bytes)
            raise
        self._tally.finished()
        return staged

    def _corrupt(self, entry: ShardEntry, digest: str) -> ObjectCorruptError:
        name = self._source.object_name(entry)
        remedy = f"Run `shardb fsck` on {self._source.name}"
        if "://" in name:  # `fsck` reads no URL, and a branch that is there is not pushed again
            remedy = (
                "Delete it, and push the commit again from a store where it is whole, to a new "
                "branch: `--branch NAME`"
            )
        shards = (n for n, known in self.commit.shards.items() if known.digest == entry.digest)
        return ObjectCorruptError(
            f"{name}: the bytes of shard {next(shards)!r} have digest {digest}, not the one that "
            f"step {self.commit.step} was committed with; nothing was changed here. {remedy}",
            path=name,
        )
