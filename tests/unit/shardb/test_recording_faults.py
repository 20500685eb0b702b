"""Does the recording file system stop, fail and count as it says?"""

from __future__ import annotations

import errno
import inspect
import os
from pathlib import Path

import pytest

from shardb.filesystem import CREATE, EXCLUSIVE, READ, WRITE, FileSystem, RealFileSystem, opened
from shardb.testing.model import Journal, ModelStore
from shardb.testing.operations import Crash, Fault, Kind
from shardb.testing.recording import RecordingFileSystem


def test_it_has_every_operation_of_the_seam_with_the_same_parameters() -> None:
    for name, method in inspect.getmembers(FileSystem, inspect.isfunction):
        if not name.startswith("_"):
            expected = list(inspect.signature(method).parameters)
            recorded = getattr(RecordingFileSystem, name)
            assert list(inspect.signature(recorded).parameters) == expected, name
            assert list(inspect.signature(getattr(RealFileSystem, name)).parameters) == expected


def test_operations_are_numbered_and_carry_paths_and_bytes(tmp_path: Path) -> None:
    files = RecordingFileSystem(str(tmp_path))
    file = files.open(str(tmp_path / "f"), WRITE | CREATE | EXCLUSIVE)
    files.pwrite(file, b"abc", 2)
    files.fdatasync(file)
    files.close(file)
    files.rename(str(tmp_path / "f"), str(tmp_path / "g"))
    files.sync_directory(str(tmp_path))
    assert [str(o) for o in files.operations] == [
        "0 create f",
        "1 write f [2, +3]",
        "2 sync f",
        "3 rename f -> g",
        "4 sync_directory ",
    ]
    assert files.operations[1].data == b"abc"
    assert files.operations[0].inode == files.operations[2].inode > 0


def test_opening_what_is_there_is_no_operation(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    files = RecordingFileSystem(str(tmp_path))
    with opened(files, str(tmp_path / "f"), WRITE | CREATE) as file:
        assert files.pread(file, 5, 0) == b"x"
    assert files.operations == []


def test_it_stops_before_an_operation_and_refuses_all_later_ones(tmp_path: Path) -> None:
    files = RecordingFileSystem(str(tmp_path), stop_at=1)
    file = files.open(str(tmp_path / "f"), WRITE | CREATE)
    with pytest.raises(Crash):
        files.pwrite(file, b"x", 0)
    with pytest.raises(Crash):
        files.list(str(tmp_path))
    files.close(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    assert (tmp_path / "f").read_bytes() == b""
    assert len(files.operations) == 1


def test_a_crash_is_no_exception_that_a_program_would_catch() -> None:
    assert not issubclass(Crash, Exception)


def test_shutting_down_frees_the_locks(tmp_path: Path) -> None:
    files = RecordingFileSystem(str(tmp_path))
    path = str(tmp_path / "lock")
    assert files.lock(files.open(path, WRITE | CREATE), exclusive=True, blocking=False)
    other = files.open(path, WRITE)
    assert not files.lock(other, exclusive=True, blocking=False)
    files.shut_down()
    again = RealFileSystem().open(path, READ)
    assert RealFileSystem().lock(again, exclusive=True, blocking=False)
    RealFileSystem().close(again)


def test_a_fault_fires_once_at_its_call(tmp_path: Path) -> None:
    fault = Fault(operation="pwrite", nth=2, error=errno.ENOSPC)
    files = RecordingFileSystem(str(tmp_path), fault=fault)
    file = files.open(str(tmp_path / "f"), WRITE | CREATE)
    assert files.pwrite(file, b"ab", 0) == 2
    with pytest.raises(OSError, match="No space left"):
        files.pwrite(file, b"cd", 2)
    assert files.pwrite(file, b"ef", 2) == 2
    files.close(file)
    assert files.fired_count == 1
    assert (tmp_path / "f").read_bytes() == b"abef"


def test_a_persistent_fault_fires_from_its_call_on(tmp_path: Path) -> None:
    fault = Fault(operation="list", nth=2, error=errno.EIO, persistent=True)
    files = RecordingFileSystem(str(tmp_path), fault=fault)
    assert files.list(str(tmp_path)) == []
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output"):
            files.list(str(tmp_path))
    assert files.fired_count == 3


def test_short_transfers(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abcdef")
    for operation in ("pread", "pread_into", "pwrite"):
        files = RecordingFileSystem(str(tmp_path), fault=Fault(operation=operation, nth=1, short=2))
        with opened(files, str(tmp_path / "f"), WRITE) as file:
            if operation == "pread":
                assert files.pread(file, 6, 0) == b"ab"
            elif operation == "pread_into":
                assert files.pread_into(file, memoryview(bytearray(6)), 0) == 2
            else:
                assert files.pwrite(file, b"ghijkl", 0) == 2
                assert files.operations[0].data == b"gh"
        assert files.fired_count == 1


def test_a_fault_may_be_for_some_paths_only(tmp_path: Path) -> None:
    fault = Fault(operation="open", nth=1, error=errno.EIO, path_contains="wal")
    files = RecordingFileSystem(str(tmp_path), fault=fault)
    files.close(files.open(str(tmp_path / "object"), WRITE | CREATE))
    with pytest.raises(OSError, match="Input/output"):
        files.open(str(tmp_path / "wal"), WRITE | CREATE)


def test_an_ignored_sync_is_reported_as_done_and_is_not(tmp_path: Path) -> None:
    files = RecordingFileSystem(str(tmp_path), ignore=lambda o: o.kind is Kind.SYNC)
    file = files.open(str(tmp_path / "f"), WRITE | CREATE)
    files.fsync(file)
    files.close(file)
    assert [o.kind for o in files.operations] == [Kind.CREATE, Kind.IGNORED]


def test_index_images_are_kept_by_operation(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    path = tmp_path / "index" / "data.mdb"
    files = RecordingFileSystem(str(tmp_path))
    path.write_bytes(b"first")
    files.database_committed(str(path))
    path.write_bytes(b"second")
    files.database_committed(str(path))
    assert [(i.number, i.path, i.data) for i in files.index_images] == [
        (0, "index/data.mdb", b"first"),
        (1, "index/data.mdb", b"second"),
    ]


def test_the_journal_knows_what_a_crash_may_leave() -> None:
    position = 0
    journal = Journal(lambda: position)
    empty = ModelStore()
    one = empty.with_commit(step=1, shards={"a": {"t": b"1"}}, state={})
    position = 2
    journal.attempt(empty)
    position = 5
    journal.acknowledge()
    journal.attempt(one)
    position = 9
    journal.refuse()
    assert journal.at(0).may_be_absent
    assert journal.at(3).allowed() == [empty, empty]
    assert journal.at(7).allowed() == [empty, one]
    assert journal.at(9).allowed() == [empty]
