"""Is the index one consistent state, shared by the stores of a process, and no other's?"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import pytest

from shardb import index as index_module
from shardb.errors import StorageFailedError, StorageFullError, UsageError
from shardb.filesystem import FileStatus, RealFileSystem
from shardb.index import Index, applied_position, put_applied_position
from shardb.log import START, Position
from shardb.state import TABLES
from tests.support.forked import Tell
from tests.support.nursery import SmallChild
from tests.support.stores import InterposedFiles


@pytest.fixture
def directory(tmp_path: Path) -> str:
    (tmp_path / "index").mkdir()
    return str(tmp_path / "index")


@pytest.fixture
def index(directory: str) -> Iterator[Index]:
    made = Index(RealFileSystem(), directory)
    yield made
    made.close()


def put(index: Index, key: str, value: Any, table: str = "commits") -> None:
    index.write(lambda tables: tables.put(table, key, value))


def get(index: Index, key: str, table: str = "commits") -> Any:
    return index.read(lambda tables: tables.get(table, key))


def test_does_every_table_hold_what_was_put(index: Index) -> None:
    value = {"bytes": b"\x00\xff", "list": [1, 2.5, None, True], "text": "ü"}
    for number, table in enumerate(TABLES):
        put(index, "key", [number, value], table)
    for number, table in enumerate(TABLES):
        assert get(index, "key", table) == [number, value]
        assert get(index, "other", table) is None
        assert index.read(lambda t, name=table: list(t.items(name))) == [("key", [number, value])]


def test_are_rows_in_order_of_their_keys(index: Index) -> None:
    for key in ("b", "a", "c/d", "c"):
        put(index, key, key)
    rows = index.read(lambda tables: list(tables.items("commits")))
    assert [key for key, _ in rows] == ["a", "b", "c", "c/d"]


def test_is_a_deleted_row_gone_and_a_missing_one_no_error(index: Index) -> None:
    put(index, "key", 1)
    index.write(lambda tables: tables.delete("commits", "key"))
    index.write(lambda tables: tables.delete("commits", "key"))
    assert get(index, "key") is None


def test_does_clearing_empty_every_table(index: Index) -> None:
    for table in TABLES:
        put(index, "key", 1, table)
    index.write(lambda tables: tables.clear())
    assert [get(index, "key", table) for table in TABLES] == [None] * len(TABLES)


@pytest.mark.parametrize("key", ["", "x" * 512, "ü" * 300, "\ud800"])
def test_is_a_key_that_cannot_be_there_just_not_there(index: Index, key: str) -> None:
    assert get(index, key) is None


def test_are_rows_safe_to_keep_after_the_transaction(index: Index) -> None:
    put(index, "key", b"x" * 5000)
    rows = index.read(lambda tables: list(tables.items("commits")))
    put(index, "key", b"y" * 5000)
    assert rows == [("key", b"x" * 5000)]


def test_does_a_failed_body_change_nothing(index: Index) -> None:
    def body(tables: Any) -> None:
        tables.put("commits", "key", 1)
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        index.write(body)
    assert get(index, "key") is None


def test_does_excluding_keep_a_writer_out_and_change_nothing(index: Index) -> None:
    order: list[str] = []
    started = threading.Event()

    def write() -> None:
        started.set()
        put(index, "key", 1)
        order.append("write")

    def body(tables: Any) -> None:
        thread.start()
        started.wait()
        thread.join(timeout=0.05)
        order.append("exclude")

    thread = threading.Thread(target=write)
    index.exclude(body)
    thread.join()
    assert order == ["exclude", "write"]


def test_do_two_stores_of_a_process_share_the_environment(index: Index, directory: str) -> None:
    other = Index(RealFileSystem(), directory)
    put(index, "key", 1)
    assert get(other, "key") == 1
    other.close()
    assert get(index, "key") == 1


def test_does_closing_twice_leave_the_other_store_its_environment(
    index: Index, directory: str
) -> None:
    other = Index(RealFileSystem(), directory)
    other.close()
    other.close()
    put(index, "key", 1)
    assert get(index, "key") == 1


def test_is_a_closed_index_refused(index: Index) -> None:
    index.close()
    for use in (index.read, index.write, index.exclude):
        with pytest.raises(UsageError, match="closed"):
            use(lambda _: None)


def test_is_an_index_refused_in_another_process(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module.os, "getpid", lambda: -1)
    for use in (index.read, index.write, index.exclude):
        with pytest.raises(UsageError, match="forked"):
            use(lambda _: None)
    index.close()
    monkeypatch.undo()
    put(index, "key", 1)
    assert get(index, "key") == 1


def test_are_directories_of_equal_number_on_two_devices_kept_apart(
    index: Index, tmp_path: Path
) -> None:
    """A store in memory and its durable twin may have the same inode number."""
    (tmp_path / "twin").mkdir()
    mine = RealFileSystem().status(str(tmp_path / "index"))

    class Twin(RealFileSystem):
        def status(self, path: str) -> FileStatus:
            status = super().status(path)
            return FileStatus(
                size_bytes=status.size_bytes,
                modified_ns=status.modified_ns,
                inode=mine.inode,
                device=mine.device + 1,
                allocated_bytes=status.allocated_bytes,
                is_directory=True,
            )

    twin = Index(Twin(), str(tmp_path / "twin"))
    put(index, "key", "mine")
    assert get(twin, "key") is None
    twin.close()


def test_is_every_commit_of_the_index_reported(directory: str) -> None:
    reported: list[str] = []
    index = Index(InterposedFiles("database_committed", reported.append), directory)
    put(index, "key", 1)
    get(index, "key")
    index.exclude(lambda _: None)
    assert reported == [f"{directory}/data.mdb"]
    index.close()


def test_does_a_new_index_stand_at_the_start_of_the_log(index: Index) -> None:
    assert index.read(applied_position) == START
    position = Position(sequence=2, offset=99, lsn=7, digest=bytes(range(16)))
    index.write(lambda tables: put_applied_position(tables, position))
    assert index.read(applied_position) == position


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (lmdb.DiskError("No space left on device"), StorageFullError),
        (lmdb.MapFullError("full"), StorageFullError),
        (lmdb.Error("mdb_put: No space left on device"), StorageFullError),
        (lmdb.Error("mdb_txn_commit: Disk quota exceeded"), StorageFullError),
        (lmdb.Error("mdb_txn_commit: Input/output error"), StorageFailedError),
        (lmdb.CorruptedError("mdb_page_get"), StorageFailedError),
    ],
)
def test_does_every_error_of_the_library_get_a_kind(
    index: Index, error: Exception, expected: type[Exception]
) -> None:
    def fail(tables: Any) -> None:
        raise error

    with pytest.raises(expected, match="index"):
        index.write(fail)


def test_is_an_index_that_was_given_up_for_a_full_disk_told_as_full(index: Index) -> None:
    """LMDB answers everything after a write that failed with a panic, which has no reason."""

    def fail(error: lmdb.Error) -> None:
        index.write(partial(_raise, error))

    panic = lmdb.PanicError("mdb_txn_begin: MDB_PANIC: Update of meta page failed")
    with pytest.raises(StorageFailedError, match="could not be written a moment ago"):
        fail(panic)
    with pytest.raises(StorageFullError, match=r"free some space\. The log is intact"):
        fail(lmdb.DiskError("mdb_txn_commit: No space left on device"))
    with pytest.raises(StorageFullError, match="free some space and open the store again"):
        fail(panic)


def _raise(error: lmdb.Error, _: object) -> None:
    raise error


def test_do_readers_get_a_kind_too(index: Index) -> None:
    def fail(tables: Any) -> None:
        raise lmdb.CorruptedError("mdb_page_get")

    for use in (index.read, index.exclude):
        with pytest.raises(StorageFailedError, match="index"):
            use(fail)


def die_reading(directory: str, _tell: Tell) -> None:
    Index(RealFileSystem(), directory).read(lambda _: os._exit(0))


def test_are_slots_of_dead_readers_given_back(directory: str) -> None:
    """Every killed reader leaves a slot; opening clears them, or the 512th reader is refused."""
    for _ in range(20):
        SmallChild(partial(die_reading, directory)).finish()
    index = Index(RealFileSystem(), directory)
    assert get(index, "key") is None
    assert index._environment.reader_check() == 0
    index.close()


def test_may_an_index_be_opened_again_after_it_could_not_be(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would believe for ever that this process has it open."""
    monkeypatch.setattr(index_module, "TABLES", (*TABLES, "x" * 600))
    with pytest.raises(StorageFailedError, match="index"):
        Index(RealFileSystem(), directory)
    monkeypatch.undo()
    index = Index(RealFileSystem(), directory)
    assert get(index, "key") is None
    index.close()
