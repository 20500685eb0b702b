"""Somebody else is at work: is what he does no damage, and is he waited for, or named?"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardb
from shardb import history, reserve
from shardb import locks as locks_module
from shardb.branching import delete_snapshot, rewind
from shardb.errors import ConflictError, StorageFailedError, StorageFullError
from shardb.filesystem import RealFileSystem
from shardb.fsck import check_store
from shardb.fsck_view import take_view
from shardb.gc import Collected, collect_garbage
from shardb.leases import Leases
from shardb.locks import Locks
from shardb.testing.operations import Fault
from shardb.testing.recording import RecordingFileSystem
from tests.support.small_stores import commit_step, fsck, kinds, object_of

COMMIT = "ab" * 16


class Meanwhile(RealFileSystem):
    """Real files; before an operation on a path that contains `part`, something happens once."""

    def __init__(self, operation: str, part: str, act: Callable[[], object]) -> None:
        def call(path: Any, *rest: Any, **named: Any) -> Any:
            if part in str(path) and not self.done:
                self.done = True
                act()
            return original(path, *rest, **named)

        self.done = False
        original = getattr(super(), operation)
        setattr(self, operation, call)


def failing(root: Path, **fault: Any) -> RecordingFileSystem:
    return RecordingFileSystem(str(root), fault=Fault(nth=1, error=errno.EIO, **fault))


# A check


def gone_meanwhile(run: Path) -> None:
    """The snapshot goes, and its objects with it."""
    with shardb.open(run) as store:
        delete_snapshot(store, "step-2")
    collect_garbage(str(run))


def test_is_an_object_no_loss_whose_snapshot_went_during_the_check(run: Path) -> None:
    name, before = object_of(run, 2, "params/a").name, fsck(run).objects_checked
    report = check_store(Meanwhile("open", name, lambda: gone_meanwhile(run)), str(run))
    assert not report.has_errors
    assert fsck(run).objects_checked <= report.objects_checked < before


def test_is_an_object_no_loss_that_is_back_when_it_is_looked_at_again(run: Path) -> None:
    path = object_of(run, 2, "params/a")
    files = RecordingFileSystem(
        str(run),
        fault=Fault(operation="pread_into", nth=1, error=errno.EIO, path_contains=path.name),
    )
    assert not check_store(files, str(run)).has_errors
    assert files.fired_count == 1


def test_is_an_object_a_loss_where_the_index_went_during_the_check(run: Path) -> None:
    path = object_of(run, 2, "params/a")
    path.unlink()

    def spoil() -> None:
        (run / "index/data.mdb").write_bytes(b"x" * 100)

    files = Meanwhile("status", path.name.removesuffix(".safetensors") + ".pack", spoil)
    files.open = Meanwhile("open", path.name, spoil).open  # type: ignore[method-assign]
    report = check_store(files, str(run))
    assert "object_missing" in {finding.kind for finding in report.findings}


def test_is_a_lease_no_leftover_that_ends_during_the_check(run: Path) -> None:
    lease = run / "leases" / f"{COMMIT}.0123456789abcdef"
    lease.write_bytes(b"")
    files = Meanwhile("exists", lease.name, lease.unlink)
    assert not [f for f in check_store(files, str(run)).findings if "lease" in f.kind]


def test_is_a_foreign_file_among_spare_ones_told_and_left(run: Path) -> None:
    (run / "spare/mine").write_bytes(b"x")
    assert kinds(fsck(run)) == ["foreign_file"]
    collect_garbage(str(run))
    assert (run / "spare/mine").exists()


@pytest.mark.parametrize(
    "fault",
    [
        {"operation": "status", "path_contains": "/reserve"},
        {"operation": "open", "path_contains": "/locks/branch-main"},
    ],
    ids=["places", "locks"],
)
def test_is_a_check_refused_that_the_storage_fails(run: Path, fault: dict[str, Any]) -> None:
    if "branch" in fault["path_contains"]:
        (run / "spare/staged.main.0123").write_bytes(b"x")
    with pytest.raises((OSError, StorageFailedError), match="Input/output error"):
        check_store(failing(run, **fault), str(run))


def test_is_a_spare_file_that_cannot_be_asked_an_error_of_the_check(run: Path) -> None:
    spare = next(run.glob("spare/free.*"))
    fault = {"operation": "status", "nth": 2, "error": errno.EIO, "path_contains": spare.name}
    with pytest.raises(OSError, match="Input/output error"):
        check_store(RecordingFileSystem(str(run), fault=Fault(**fault)), str(run))


def test_is_the_log_waited_for_and_its_holder_named_after_too_long(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, holder = RealFileSystem(), os.open(run / "locks/wal", os.O_RDWR)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            os.close(holder)

    monkeypatch.setattr(history.time, "sleep", sleep)
    fcntl.flock(holder, fcntl.LOCK_EX)
    take_view(files, str(run))
    assert len(waits) == 3
    again = Locks(RealFileSystem(), str(run))
    monkeypatch.setattr(history, "LOCK_WAIT_SECONDS_MAX", -1.0)
    with again.wal(), pytest.raises(ConflictError, match="has held the log's lock"):
        take_view(files, str(run))
    again.close()


# Locks and leases


def test_is_the_holder_of_the_log_named_to_a_writer(run: Path) -> None:
    one, other = (Locks(RealFileSystem(), str(run)) for _ in range(2))
    other.wait_seconds_max = -1.0
    with one.wal(), pytest.raises(ConflictError, match="has held the log's lock"), other.wal():
        pass
    one.close()
    other.close()


def test_may_the_index_be_shared_twice(run: Path) -> None:
    locks = Locks(RealFileSystem(), str(run))
    assert locks.share_index()
    assert locks.share_index()
    locks.close()


def test_is_a_branch_locked_that_this_store_writes_to(run: Path) -> None:
    locks = Locks(RealFileSystem(), str(run))
    assert not locks.branch_is_locked("main")
    locks.take_branch("main")
    assert locks.branch_is_locked("main")
    locks.close()


@pytest.mark.parametrize("owner", [b"\xff", b"[]", b"not json"])
def test_is_an_owner_without_a_name_only_an_owner(run: Path, owner: bytes) -> None:
    locks = Locks(RealFileSystem(), str(run))
    locks.take_branch("main")
    (run / "locks/branch-main").write_bytes(owner)
    assert [told for told in locks.writers() if told.get("branch") != "main"] == []
    assert locks_module._owner(owner) == {}
    locks.close()


def test_is_no_lease_left_open_that_could_not_be_locked(run: Path) -> None:
    files = failing(run, operation="lock", path_contains="leases/")
    with pytest.raises(OSError, match="Input/output error"):
        Leases(files, str(run)).take(COMMIT)
    assert files.calls["close"] == 1


def test_is_a_lease_that_cannot_be_read_not_described(run: Path) -> None:
    lease = Leases(RealFileSystem(), str(run)).take(COMMIT)
    seen = Leases(RealFileSystem(), str(run)).describe_all()
    assert [told["commit"] for told in seen] == [COMMIT]
    files = failing(run, operation="open", path_contains=COMMIT)
    assert Leases(files, str(run)).describe_all() == []
    assert Path(lease.path).exists()


def test_is_a_lease_dead_that_goes_while_it_is_asked(run: Path) -> None:
    lease = run / "leases" / f"{COMMIT}.0123456789abcdef"
    lease.write_bytes(b"")
    files = Meanwhile("open", lease.name, lease.unlink)
    assert Leases(files, str(run)).leased_commits() == set()


# A collection


def words(collected: Collected) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(json.dumps(collected.to_json()))
    return told


def test_is_a_collection_told_as_json(run: Path) -> None:
    told = words(collect_garbage(str(run), dry_run=True))
    assert told["dry_run"] is True
    assert told["freed_bytes"] == sum(item["bytes"] for item in told["removed"]) > 0
    assert told["abandoned"] == told["notes"] == []


def test_is_a_file_not_counted_that_somebody_takes_first(run: Path) -> None:
    spare = next(run.glob("spare/free.*"))
    collected = collect_garbage(str(run), files=Meanwhile("unlink", spare.name, spare.unlink))
    assert str(spare) not in {item.path for item in collected.removed}


def test_does_a_disk_too_full_to_open_get_room_from_spare_files(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardb import gc  # the name of the function that it opens with is its own

    spare = sorted(run.glob("spare/free.*"))
    real, tries = gc.open_store, []

    def opening(*words: Any, **named: Any) -> shardb.Store:
        tries.append([path.exists() for path in spare])
        if len(tries) == 1:
            raise StorageFullError("full")
        return real(*words, **named)

    monkeypatch.setattr(gc, "open_store", opening)
    collected = collect_garbage(str(run))
    assert all(tries[0])
    assert not any(tries[1])
    assert {str(path) for path in spare} <= {item.path for item in collected.removed}
    tries.clear()
    with pytest.raises(StorageFullError):
        collect_garbage(str(run), dry_run=True)


@pytest.mark.parametrize("what", ["condemned", "abandoned"])
def test_is_what_a_full_disk_keeps_told(
    run: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise StorageFullError("no space left")

    with shardb.open(run) as store:
        reader = store.at(ref="step-5")
        commit_step(store, 7)
        commit_step(store, 8)
        if what == "abandoned":
            rewind(store, "main", "step-7")
        reader.close()
    shutil.rmtree(run / "leases")
    if what == "condemned":
        monkeypatch.setattr(reserve, "with_reserve", full)
    else:
        monkeypatch.setattr(shardb.store.Appender, "change", full)
    collected = collect_garbage(str(run))
    assert ["kept for now: no space left" in note for note in collected.notes] == [True]
    assert collected.abandoned == []
    monkeypatch.undo()
    assert collect_garbage(str(run)).notes == []
    assert not fsck(run).has_errors


def test_is_the_reserve_written_where_space_cannot_be_allocated(tmp_path: Path) -> None:
    fault = Fault(operation="allocate", nth=1, error=errno.EOPNOTSUPP, persistent=True)
    assert reserve.ensure(RecordingFileSystem(str(tmp_path), fault=fault), str(tmp_path))
    assert (tmp_path / "reserve").stat().st_size == reserve.RESERVE_BYTES


def test_is_a_disk_that_fails_the_reserve_told(tmp_path: Path) -> None:
    files = failing(tmp_path, operation="allocate")
    with pytest.raises(OSError, match="Input/output error"):
        reserve.ensure(files, str(tmp_path))


def test_is_what_a_live_writer_has_staged_no_leftover(run: Path) -> None:
    with shardb.open(run, writer_threads=0) as store, store.begin() as txn:
        txn.write("params/a", {"w": np.zeros(9, dtype=np.float32)})
        assert list(run.glob("spare/staged.main.*"))
        assert "staged_leftover" not in kinds(fsck(run))
