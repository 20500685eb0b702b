"""Is a commit placed, recorded and let go in order, whatever the storage says?"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import shardb
from shardb.errors import (
    CommitUnknownError,
    StorageFailedError,
    StorageFullError,
)
from tests.support.stores import (
    MEDIA,
    InterposedFiles,
    Medium,
    commit_step,
    filled,
    values_of,
)


def write_and_commit(transaction: shardb.Transaction, step: int) -> None:
    for name in ("params/a", "params/b"):
        transaction.write(name, filled(step))
    transaction.commit(step=step)


def names_in(root: Path, folder: str) -> list[str]:
    return sorted(os.listdir(root / folder))


def test_are_equal_shards_of_one_commit_stored_once(store: shardb.Store, root: Path) -> None:
    with store.begin() as transaction:
        for name in ("a", "b", "c"):
            transaction.write(name, filled(1))
        commit = transaction.commit(step=1)
    assert len({entry.digest for entry in commit.shards.values()}) == 1
    assert len(names_in(root, "objects")) == 1
    for step in (2, 3, 4, 5):
        with store.begin() as transaction:
            for number, name in enumerate("abc"):
                transaction.write(name, filled(step if number < 2 else 1))
            transaction.commit(step=step)
        with store.at() as view:
            assert values_of(view) == {"a": step, "b": step, "c": 1.0}


def test_is_the_queue_of_writes_bounded(root: Path) -> None:
    """Back-pressure: the caller waits; nothing grows."""
    release, waiting = threading.Event(), []

    def slow(*_: object, **__: object) -> None:
        release.wait(10)

    files = InterposedFiles("pwrite", lambda *_: None)
    options: dict[str, Any] = {"max_pending_writes": 2, "writer_threads": 1}
    with (
        shardb.open(root, create=True, files=files, **options) as store,
        store.begin() as transaction,
    ):
        files.before = slow

        def stage_all() -> None:
            for number in range(5):
                transaction.write(f"a{number}", filled(number))
                waiting.append(store.writer.pending)

        thread = threading.Thread(target=stage_all)
        thread.start()
        thread.join(timeout=0.3)
        assert thread.is_alive()
        assert waiting == [1, 2]
        release.set()
        thread.join()
        assert max(waiting) <= 2
        transaction.commit(step=1)


@pytest.mark.parametrize("operation", ["pwrite", "allocate"])
def test_is_a_full_disk_told_with_bytes_and_the_previous_commit_intact(
    root: Path, operation: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    medium = "memory:tmpfs" if operation == "allocate" else "disk"
    files = InterposedFiles(operation, lambda *_, **__: None, medium=medium)
    with shardb.open(root, create=True, files=files) as store:
        commit_step(store, 1)
        transaction = store.begin()
        files.before = full
        with pytest.raises(StorageFullError, match=r"\d+ bytes are needed, \d+ bytes are free"):
            write_and_commit(transaction, 2)
        files.before = lambda *_, **__: None
        transaction.abort()
        with store.at() as view:
            assert values_of(view) == {"params/a": 1.0, "params/b": 1.25}
        commit_step(store, 2)
        with store.at() as view:
            assert view.commit.step == 2


class FailingLog(Medium):
    """A medium whose log fails: at the write, so that nothing lands, or only at the sync."""

    def __init__(self, name: str, operation: str, error: int) -> None:
        super().__init__(name)
        self.failing = False
        self._operation = operation
        self._error = error
        self._log_files: set[int] = set()

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        file = super().open(path, flags, mode)
        (self._log_files.add if path.endswith(".wal") else self._log_files.discard)(file)
        return file

    def _fail(self, operation: str, file: int) -> None:
        if self.failing and operation == self._operation and file in self._log_files:
            raise OSError(self._error, os.strerror(self._error))

    def pwrite(self, file: int, data: Any, offset: int) -> int:
        self._fail("pwrite", file)
        return super().pwrite(file, data, offset)

    def fdatasync(self, file: int) -> None:
        self._fail("fdatasync", file)
        super().fdatasync(file)


@pytest.mark.parametrize("medium_name", MEDIA)
def test_does_a_full_log_give_back_what_was_placed(root: Path, medium_name: str) -> None:
    files = FailingLog(medium_name, "pwrite", errno.ENOSPC)
    with shardb.open(root, create=True, files=files) as store:
        commit_step(store, 1)
        before = names_in(root, "objects")
        for _ in range(3):
            transaction = store.begin()
            files.failing = True
            with pytest.raises(StorageFullError, match="while writing the log"):
                write_and_commit(transaction, 2)
            files.failing = False
            assert names_in(root, "objects") == before
        assert len(names_in(root, "spare")) <= 3
        for step in (2, 3, 4, 5):
            commit_step(store, step)
            with store.at() as view:
                assert values_of(view) == {"params/a": step, "params/b": step + 0.25}


@pytest.mark.parametrize("medium_name", MEDIA)
def test_is_an_unknown_commit_told_and_found_when_it_landed(root: Path, medium_name: str) -> None:
    files = FailingLog(medium_name, "fdatasync", errno.EIO)
    with shardb.open(root, create=True, files=files) as store:
        commit_step(store, 1)
        transaction = store.begin()
        files.failing = True
        with pytest.raises(CommitUnknownError) as caught:
            write_and_commit(transaction, 2)
        assert not caught.value.definite
        assert caught.value.exit_code == 7
        with pytest.raises(StorageFailedError, match="open it again"):
            store.begin()
        with store.at() as view:
            assert values_of(view) == {"params/a": 1.0, "params/b": 1.25}
    files.failing = False
    with shardb.open(root, files=files) as store:
        assert store.resolve(caught.value.commit_id).step == 2
        with store.at() as view:
            assert values_of(view) == {"params/a": 2.0, "params/b": 2.0}


@pytest.mark.parametrize("medium_name", MEDIA)
def test_is_a_live_object_never_opened_for_writing(root: Path, medium_name: str) -> None:
    """Somebody may have mapped it: saving over it would change what they see."""
    opened: list[str] = []

    def note(path: str, flags: int, *_: object) -> None:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
            opened.append(path)

    files = InterposedFiles("open", note, medium=medium_name)
    with shardb.open(root, create=True, files=files) as store:
        for step in range(1, 9):
            commit_step(store, step, fill=step % 3)
            with store.at() as view:
                values_of(view)
    assert [path for path in opened if "/objects/" in path] == []
    assert [path for path in opened if "/spare/staged." in path] != []


def test_is_a_leftover_of_an_objects_name_not_taken_for_it(root: Path) -> None:
    """Only the index says what the store has: power loss may leave any bytes under a name."""
    with shardb.open(root, create=True) as store:
        commit_step(store, 1)
    with shardb.open(root.with_name("other"), create=True) as other:
        digests = [entry.digest for entry in commit_step(other, 2).shards.values()]
    for digest in digests:
        (root / "objects" / f"{digest}.safetensors").write_bytes(b"left over")
    with shardb.open(root) as store:
        commit_step(store, 2)
    with shardb.open(root) as store, store.at() as view:
        assert values_of(view) == {"params/a": 2.0, "params/b": 2.25}
