"""Does a store end cleanly, whether it is closed, poisoned or fails to open?"""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path

import pytest

import shardb
from shardb.errors import (
    StorageFailedError,
    StorageFullError,
    UsageError,
)
from tests.support.stores import (
    InterposedFiles,
    commit_step,
    filled,
    values_of,
)


def test_is_closing_twice_fine_and_a_closed_store_refused(store: shardb.Store) -> None:
    commit_step(store, 1)
    with shardb.open(store.root) as other:
        store.close()
        store.close()
        assert other.resolve().step == 1
    for use in (store.branches, store.commits, store.at, store.begin, store.resolve):
        with pytest.raises(UsageError, match="closed"):
            use()


def test_does_closing_give_up_everything(root: Path) -> None:
    store = shardb.open(root, create=True)
    commit_step(store, 1)
    view, transaction = store.at(), store.begin()
    transaction.write("params/a", filled(2))
    store.close()
    view.close()
    transaction.abort()
    with shardb.open(root) as other:
        assert other.leases.leased_commits() == set()
        assert other.recovery.dropped == []
        commit_step(other, 2)


def test_are_no_descriptors_left_open(root: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    if not Path("/proc/self/fd").exists():
        pytest.skip("open descriptors cannot be counted here")
    shardb.open(root, create=True).close()
    gc.collect()
    before = count()
    for step in range(1, 6):
        with shardb.open(root) as store:
            commit_step(store, step)
            with store.at() as view:
                values_of(view)
            transaction = store.begin()
            transaction.write("params/a", filled(9))
    gc.collect()
    assert count() <= before


def test_is_a_failed_opening_clean(root: Path) -> None:
    shardb.open(root, create=True).close()
    (root / "wal" / "0000000001.wal").write_bytes(b"")
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(shardb.ShardbError):
            shardb.open(root)
    assert threading.active_count() == before


@pytest.mark.parametrize("operation", ["fdatasync", "sync_directory"])
def test_does_a_failed_sync_poison_the_store(root: Path, operation: str) -> None:
    """The first failure counts: the same pages must not be synced again as if nothing were."""
    files = InterposedFiles(operation, lambda *_: None)
    failing = [False]

    def fail_once(*_: object) -> None:
        if failing[0]:
            failing[0] = False
            raise OSError(errno.EIO, "Input/output error")

    files.before = fail_once
    with shardb.open(root, create=True, files=files) as store:
        commit_step(store, 1)
        transaction = store.begin()
        for name in ("params/a", "params/b"):
            transaction.write(name, filled(2))
        failing[0] = True
        with pytest.raises(StorageFailedError, match="failed") as caught:
            transaction.commit(step=2)
        assert caught.value.exit_code == 7
        for use in (store.begin, lambda: store.create_snapshot("x")):
            with pytest.raises(StorageFailedError, match="open it again"):
                use()
        with store.at() as view:
            assert values_of(view) == {"params/a": 1.0, "params/b": 1.25}
    with shardb.open(root, files=files) as store:
        assert store.resolve().step == 1
        commit_step(store, 2)


def test_does_a_failed_write_poison_the_store_too(root: Path) -> None:
    files = InterposedFiles("pwrite", lambda *_: None)
    with shardb.open(root, create=True, files=files) as store:
        commit_step(store, 1)
        transaction = store.begin()

        def fail(*_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        files.before = fail
        transaction.write("params/a", filled(2))
        transaction.write("params/b", filled(2))
        with pytest.raises(StorageFailedError, match="writing shard"):
            transaction.commit(step=2)
        files.before = lambda *_: None
        with pytest.raises(StorageFailedError, match="open it again"):
            store.begin()


def test_is_a_lease_without_space_a_full_disk(root: Path) -> None:
    files = InterposedFiles("open", lambda *_: None)
    with shardb.open(root, create=True, files=files) as store:
        commit_step(store, 1)

        def full(path: str, *_: object) -> None:
            if "/leases/" in path:
                raise OSError(errno.ENOSPC, "No space left on device", path)

        files.before = full
        with pytest.raises(StorageFullError, match="lease"):
            store.at()


def test_is_a_lease_taken_again_when_it_was_taken_for_dead(root: Path) -> None:
    attempts: list[str] = []
    files = InterposedFiles("lock", lambda *_, **__: None)
    with shardb.open(root, create=True, files=files) as store:
        commit_step(store, 1)

        def remove_first(*_: object, **__: object) -> None:
            found = os.listdir(root / "leases")
            if len(attempts) < 3 and found:
                attempts.append(found[0])
                os.unlink(root / "leases" / found[0])

        files.before = remove_first
        with store.at() as view:
            assert values_of(view) == {"params/a": 1.0, "params/b": 1.25}
    assert len(set(attempts)) == 3


def test_does_a_broken_index_not_undo_a_commit(
    store: shardb.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the commit point nothing may fail: the index is caught up by whoever comes next."""
    commit_step(store, 1)
    transaction = store.begin()
    for name in ("params/a", "params/b"):
        transaction.write(name, filled(2))
    written = store.index.write

    def fail(*_: object) -> None:
        raise StorageFullError("no space for the index")

    monkeypatch.setattr(store.index, "write", fail)
    commit = transaction.commit(step=2)
    assert [w["why"] for w in store.recovery.warnings if w["what"] == "index"]
    monkeypatch.setattr(store.index, "write", written)
    commit_step(store, 3)
    assert [c.step for c in store.commits()] == [2, 3]
    assert store.resolve("step-2").id == commit.id
