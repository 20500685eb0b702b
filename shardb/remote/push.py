"""Pushing commits and snapshots of a store into a remote one.

Owns the order of a push and what makes it safe beside others: see `shardb.remote.repository`. An
interrupted push leaves objects, and perhaps a record, that no ref points to; the next push finds
them by name and size, for object storage shows a value only when it is whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import xxhash

from shardb.errors import (
    ConflictError,
    LogDamagedError,
    ObjectCorruptError,
    RemoteFailedError,
)
from shardb.layout import check_name
from shardb.records import Commit, ShardEntry
from shardb.remote import layout
from shardb.remote.pull import RemoteSource
from shardb.remote.repository import Head, RemoteStore
from shardb.transfer import Source, branch_of, record_of
from shardb.transfer_lineage import Lineage
from shardb.transfer_objects import TransferStoppedError
from shardb.transfer_receive import (
    UNCHECKED,
    ExpectedHead,
    Incoming,
    Unchecked,
    diverged,
    received_record,
)
from shardb.transfer_source import StoreSource
from shardb.transfer_tally import Tally

UPLOADS_AT_ONCE = 4
# The library repeats single requests; a whole upload that failed is begun again so often.
UPLOAD_ATTEMPTS_MAX = 4
PAUSE_SECONDS = 0.25
# A branch that others move forward on the commit's own line is followed so often.
MOVES_MAX = 20


def push_commit(
    source: Source,
    remote: RemoteStore,
    ref: str | None = None,
    branch: str | None = None,
    *,
    expected_head: ExpectedHead = UNCHECKED,
    tally: Tally | None = None,
) -> Commit:
    """Make the commit that `ref` names the head of a remote branch; only forward.

    Raises ConflictError when the branch has steps the commit does not come from: somebody else
    pushed. Nothing of theirs is lost, and what was uploaded is found again by the next push.
    """
    with source.at(ref=ref) as view:
        incoming = Incoming(record=record_of(source, view.commit), source=StoreSource(source))
        branch = branch or branch_of(ref, view.commit, source.branches())
        check_name(branch, "branch")
        _Push(incoming, remote, tally or Tally()).to_branch(branch, expected_head)
        view.close()  # every digest was checked
        return view.commit


def push_snapshot(
    source: Source, remote: RemoteStore, name: str, *, tally: Tally | None = None
) -> Commit:
    """Copy a snapshot under its name; SnapshotExistsError when it pins another commit there."""
    with source.snapshot(name) as view:
        incoming = Incoming(record=record_of(source, view.commit), source=StoreSource(source))
        _Push(incoming, remote, tally or Tally()).to_snapshot(name)
        view.close()
        return view.commit


class _Push:
    """One commit on its way to a remote store."""

    def __init__(self, incoming: Incoming, remote: RemoteStore, tally: Tally) -> None:
        self._incoming = incoming
        self._commit = incoming.commit
        self._remote = remote
        self._tally = tally
        self._stop = threading.Event()

    def to_branch(self, branch: str, expected_head: ExpectedHead) -> None:
        uploaded = False
        for _ in range(MOVES_MAX):
            head = self._remote.head(branch)
            self._check_expected(branch, head, expected_head)
            if head is not None and self._is_there(head):
                return
            between = self._between(branch, head)
            if not uploaded:
                self._upload(head.ref.commit if head else None)
                self._write_record(branch, between)
                uploaded = True
            if self._remote.move_branch(branch, head, self._commit):
                return
        raise ConflictError(
            f"{self._remote.url}: branch {branch!r} moved at each of {MOVES_MAX} attempts; run the "
            "same command again"
        )

    def to_snapshot(self, name: str) -> None:
        existing = self._remote.snapshots().get(name)
        if existing is None:
            known = self._remote.commit_ids()
            if self._commit.id not in known:
                between = self._incoming.source.lineage(self._commit.id, known)
                self._upload(None)
                self._write_record(self._commit.branch, between)
        self._remote.create_snapshot(name, self._commit)

    def _write_record(self, branch: str, between: Lineage) -> None:
        self._remote.create_commit(
            received_record(self._incoming, branch, between.reached, between)
        )

    # Where the branch is

    def _check_expected(self, branch: str, head: Head | None, expected: ExpectedHead) -> None:
        at = head.ref.commit if head else None
        if not isinstance(expected, Unchecked) and at != expected:
            raise ConflictError(
                f"{self._remote.url}: branch {branch!r} is at {at or 'no commit'}, not at "
                f"{expected or 'no commit'} as expected; nothing was changed"
            )

    def _is_there(self, head: Head) -> bool:
        """Whether the branch is at the commit, or beyond it."""
        if head.ref.commit == self._commit.id:
            return True
        if head.ref.step <= self._commit.step:
            return False
        history = RemoteSource(self._remote)
        if history.lineage(head.ref.commit, [self._commit.id]).reached is None:
            return False
        return self._commit.id in self._remote.commit_ids(self._commit.id)

    def _between(self, branch: str, head: Head | None) -> Lineage:
        """The steps since the branch's head; for a new branch, since what is there of its line."""
        source = self._incoming.source
        ends = self._remote.commit_ids() if head is None else [head.ref.commit]
        found = source.lineage(self._commit.id, ends)
        if head is None or found.reached is not None:
            return found
        if not found.complete:
            raise LogDamagedError(
                f"{source.name}: a part of the log is lost, so that nobody can tell whether step "
                f"{self._commit.step} comes from step {head.ref.step} of {self._remote.url}. Put "
                "the log segment back, or push it beside with `--branch other`"
            )
        raise diverged(self._remote.url, branch, head.ref.step, head.ref.commit, self._incoming)

    # Objects

    def _upload(self, head: str | None) -> None:
        """Upload the objects that are not there; those of the branch's head certainly are."""
        entries = {entry.digest: entry for entry in self._commit.shards.values()}
        fresh = self._tally.fresh(entries)
        self._tally.expect(len(fresh), sum(entries[digest].bytes for digest in fresh))
        present = self._digests_of(head)
        for digest in present & fresh:
            self._tally.present(1, entries[digest].bytes)
        rest = [entry for digest, entry in entries.items() if digest not in present]
        pool = ThreadPoolExecutor(UPLOADS_AT_ONCE, thread_name_prefix="shardb-push")
        try:
            for future in as_completed(
                [pool.submit(self._upload_one, e, e.digest in fresh) for e in rest]
            ):
                future.result()
        finally:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def _digests_of(self, commit: str | None) -> set[str]:
        record = self._remote.record(commit) if commit is not None else None
        if record is None:
            return set()
        return {entry.digest for entry in Commit.from_record(record).shards.values()}

    def _upload_one(self, entry: ShardEntry, is_fresh: bool) -> None:
        """Upload an object unless it is there; one that is not fresh was expected before."""
        bucket, key = self._remote.bucket, layout.object_key(entry.digest)
        if bucket.size(key) == entry.bytes:
            if is_fresh:
                self._tally.resumed(entry.bytes)
            return
        if not is_fresh:
            self._tally.expect(1, entry.bytes)
        for attempt in range(1, UPLOAD_ATTEMPTS_MAX + 1):
            moved: list[int] = []
            try:
                bucket.upload(key, entry.bytes, self._checked(entry, moved))
                break
            except RemoteFailedError:
                self._tally.moved(-sum(moved))
                if attempt == UPLOAD_ATTEMPTS_MAX or self._stop.wait(PAUSE_SECONDS * 2**attempt):
                    raise
        self._tally.finished()

    def _checked(self, entry: ShardEntry, moved: list[int]) -> Iterator[bytes]:
        """An object's bytes; the last of them only when all of them have the right digest.

        An upload that is not fed to its end is given up and leaves nothing, so that no wrong bytes
        can appear under a digest. `moved` gets the sizes of what was given.
        """
        hasher = xxhash.xxh3_128()
        held = b""
        for chunk in self._incoming.source.chunks(entry):
            if self._stop.is_set():
                raise TransferStoppedError("another object could not be copied")
            hasher.update(chunk)
            if held:
                moved.append(len(held))
                self._tally.moved(len(held))
                yield held
            held = bytes(chunk)
        if hasher.hexdigest() != entry.digest:
            name = self._incoming.source.object_name(entry)
            raise ObjectCorruptError(
                f"{name}: the bytes have digest {hasher.hexdigest()}, not the one that names the "
                f"object; nothing was pushed. Run `shardb fsck {self._incoming.source.name}`",
                path=name,
            )
        moved.append(len(held))
        self._tally.moved(len(held))
        yield held
