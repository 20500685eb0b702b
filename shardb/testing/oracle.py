"""Is a recovered store one that its workload may have left behind?

Owns the four questions: the state is a commit that was made; it is not below the last one reported
durable; every shard of it is there, of one step and with the right bytes; snapshots are
byte-identical. The store is read through its public interface alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np

import shardb
from shardb import fsck_leftovers, fsck_objects, pack_threads
from shardb.errors import CorruptionError, FormatError, NotFoundError, ShardbError
from shardb.filesystem import DIRECT, RealFileSystem
from shardb.fsck import check_store
from shardb.read_view import CommitView
from shardb.testing.model import Expectation, Journal, Mend, ModelCommit, ModelStore, Tensors
from shardb.writer import CallerExecutor

# Returns what is wrong with the closed store at a path.
Audit = Callable[[str], list[str]]


class QuickFileSystem(RealFileSystem):
    """Real files on a RAM disk that stand for a disk: nothing needs a sync."""

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        return super().open(path, flags & ~DIRECT, mode)

    def fsync(self, file: int) -> None:
        pass

    def fdatasync(self, file: int) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass

    def kind(self, path: str) -> str:
        return "disk" if super().exists(path) else super().kind(path)


_FIRST_SHARDS: dict[str, Tensors] = {"params/first": {"tensor": b"first"}}


def no_audit(_: str) -> list[str]:
    """Nothing beyond the oracle."""
    return []


def fsck_audit(path: str) -> list[str]:
    """Errors that `shardb fsck` finds in a store that was opened once; there must be none."""
    with _alone():
        report = check_store(QuickFileSystem(), path)
    return [
        f"fsck: {finding.kind}: {finding.path}: {finding.expected} expected, {finding.found} found"
        for finding in report.findings
        if finding.severity == "error"
    ]


def _one_thread(*_: object, **__: object) -> CallerExecutor:
    return CallerExecutor()


@contextmanager
def _alone() -> Iterator[None]:
    """Nobody has the store open: no lease is probed twice, and small objects need no threads."""
    with (
        mock.patch.object(fsck_leftovers, "LEASE_PROBE_SECONDS", 0.0),
        mock.patch.object(fsck_objects, "ThreadPoolExecutor", _one_thread),
        mock.patch.object(pack_threads, "THREADS_MAX", 1),
    ):
        yield


def check(
    path: str, expectation: Expectation, *, audit: Audit = fsck_audit, replay: int | None = None
) -> list[str]:
    """Open the store at `path` and say what is wrong with it; empty when nothing is.

    With `replay` a further commit is made, and the store opened again: recovery must leave a store
    that can be used. It holds the bytes of some commit that was made before, chosen by the number:
    a resumed run makes objects again whose names may still lie about.

    Where a repair is under way, a store that is refused is fine, one that answers otherwise is not;
    then it is mended, and checked as any other.
    """
    with _alone():
        if expectation.mend is not None:
            return _check_mended(path, expectation, expectation.mend, audit, replay)
        return _check(path, expectation, audit, replay)


def _check(path: str, expectation: Expectation, audit: Audit, replay: int | None) -> list[str]:
    files = QuickFileSystem()
    try:
        store = shardb.open(path, files=files, writer_threads=0)
    except (NotFoundError, FormatError) as error:
        if not expectation.may_be_absent:
            return [f"the store is gone: {error}"]
        return _create_again(path, files)
    except ShardbError as error:
        return [f"opening was refused ({error.kind}): {error}"]
    with store:
        wrong = _compare(store, expectation)
    wrong += audit(path)
    if replay is not None and not wrong:
        versions = expectation.allowed()[-1].commits
        wrong += _go_on(path, files, versions[replay % len(versions)] if versions else None)
    return wrong


def _check_mended(
    path: str, expectation: Expectation, mend: Mend, audit: Audit, replay: int | None
) -> list[str]:
    plain = replace(expectation, mend=None)
    try:
        with shardb.open(path, files=QuickFileSystem()) as store:
            found = observe(store)
            if not any(_difference(found, state) is None for state in plain.allowed()):
                return ["the damaged store opens, and answers with what was never there"]
    except CorruptionError:
        pass  # Fails closed, as it must.
    except ShardbError as error:
        return [f"the damaged store was refused as if it were not ({error.kind}): {error}"]
    return mend(path) or _check(path, plain, audit, replay)


def observe(store: shardb.Store) -> ModelStore:
    """Read everything that the store holds: heads, snapshots and every retained commit."""
    read: dict[str, Tensors] = {}
    known = {commit.id: observe_commit(store, commit, read) for commit in store.commits()}
    return ModelStore(
        heads={name: known[commit.id] for name, commit in store.branches().items()},
        snapshots={name: known[commit.id] for name, commit in store.snapshots().items()},
        commits=tuple(known.values()),
    )


def observe_commit(
    store: shardb.Store, commit: shardb.Commit, read: dict[str, Tensors] | None = None
) -> ModelCommit:
    """Read one commit as the model has it, without a lease: nobody else writes.

    `read` has the objects that were read before, by digest, and gets those that are read now.
    """
    read = {} if read is None else read
    view = CommitView(store, commit)
    shards = {}
    for name, entry in commit.shards.items():
        if entry.digest not in read:
            shard = view.read(name)
            read[entry.digest] = {tensor: shard.raw(tensor).tobytes() for tensor in shard.specs}
        shards[name] = read[entry.digest]
    written = {name: entry.step for name, entry in commit.shards.items()}
    return ModelCommit(step=commit.step, shards=shards, written=written, state=dict(commit.state))


def _compare(store: shardb.Store, expectation: Expectation) -> list[str]:
    try:
        found = observe(store)
    except ShardbError as error:
        return [f"reading was refused ({error.kind}): {error}"]
    reasons = [_difference(found, state) for state in expectation.allowed()]
    if None in reasons:
        return []
    return [f"no allowed state: {'; or '.join(reason for reason in reasons if reason)}"]


def _difference(found: ModelStore, allowed: ModelStore) -> str | None:
    """How the found state differs from an allowed one; None when it does not."""
    steps = {name: commit.step for name, commit in found.heads.items()}
    allowed_steps = {name: commit.step for name, commit in allowed.heads.items()}
    if steps != allowed_steps:
        return f"branches are at {steps}, not at {allowed_steps}"
    for name, head in found.heads.items():
        if head != allowed.heads[name]:
            return f"branch {name!r}, step {head.step}: {_unlike(head, allowed.heads[name])}"
    if set(found.snapshots) != set(allowed.snapshots):
        return f"snapshots are {sorted(found.snapshots)}, not {sorted(allowed.snapshots)}"
    for name, commit in found.snapshots.items():
        if commit != allowed.snapshots[name]:
            return f"snapshot {name!r}: {_unlike(commit, allowed.snapshots[name])}"
    for commit in found.commits:
        if commit not in allowed.commits:
            return f"a commit of step {commit.step} is retained that was never made"
    return None


def _unlike(found: ModelCommit, expected: ModelCommit) -> str:
    if set(found.shards) != set(expected.shards):
        return f"shards {sorted(set(found.shards) ^ set(expected.shards))} are missing or extra"
    wrong = [n for n, tensors in found.shards.items() if tensors != expected.shards[n]]
    if wrong:
        return f"wrong bytes in {wrong}"
    return f"wrong step of a shard or wrong state: {found.written}, {found.state}"


def _create_again(path: str, files: RealFileSystem) -> list[str]:
    """A creation that was cut short can be done again."""
    try:
        with shardb.open(path, create=True, files=files) as store:
            return [f"a new store has branches {store.branches()}"] if store.branches() else []
    except ShardbError as error:
        return [f"creation cannot be repeated ({error.kind}): {error}"]


def _go_on(path: str, files: RealFileSystem, version: ModelCommit | None) -> list[str]:
    """Make the next commit and see it again after reopening."""
    journal = Journal(lambda: 0)
    try:
        with shardb.open(path, files=files, writer_threads=0) as store:
            commit_version(store, journal, version)
        with shardb.open(path, files=files) as store:
            wrong = _compare(store, journal.at(0))
    except ShardbError as error:
        return [f"the store cannot go on ({error.kind}): {error}"]
    return [f"after a further commit: {reason}" for reason in wrong]


def commit_version(store: shardb.Store, journal: Journal, version: ModelCommit | None) -> None:
    """Note what a store shows, and commit the next step with the bytes of an earlier version.

    Shards that the version lacks, or that are not trainable, stay as they are. Tensors are
    written as flat bytes: for workloads that do the same, the objects are those of the version.
    """
    shown = observe(store)
    journal.opened(shown)
    with store.begin() as transaction:
        base = transaction.base
        contents: dict[str, Tensors] = dict(version.shards if version else _FIRST_SHARDS)
        if base is not None:
            old = shown.heads["main"].shards
            trainable = [name for name, entry in base.shards.items() if entry.trainable]
            contents = {name: contents.get(name, old[name]) for name in trainable}
        for name, tensors in contents.items():
            arrays = {tensor: np.frombuffer(data, np.uint8) for tensor, data in tensors.items()}
            transaction.write(name, arrays)
        step = base.step + 1 if base else 0
        journal.attempt(shown.with_commit(step=step, shards=contents, state={"next": True}))
        transaction.commit(step=step, state={"next": True})
    journal.acknowledge()


def index_path(path: str) -> str:
    """Where the data file of a store's index lies."""
    return os.path.join(path, "index", "data.mdb")
