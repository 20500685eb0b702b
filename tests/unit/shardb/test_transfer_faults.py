"""Does a copy fail cleanly whichever call of the target's storage fails, and then go on?

Faults are enumerated: the first call of a kind fails, then the second, until the copy has no such
call any more.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardb
from shardb.errors import CommitUnknownError, ShardbError
from shardb.testing.operations import Fault
from shardb.testing.oracle import QuickFileSystem, fsck_audit
from shardb.testing.recording import RecordingFileSystem
from shardb.transfer import copy_commit
from shardb.transfer_source import StoreSource
from tests.support.transfer_stores import commit, contents

OPERATIONS = (
    "open pwrite fdatasync rename sync_directory status list lock pread_into space"
).split()
CALLS_MAX = 200


@pytest.fixture
def source(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[shardb.Store]:
    monkeypatch.setattr(StoreSource, "copies_at_once", 1)
    with shardb.open(quick_path / "source", create=True) as store:
        for step in range(2):
            commit(store, step, size=500, shards=("params/block_000",))
        yield store


def copy_with(fault: Fault, source: shardb.Store, disk: Path) -> tuple[bool, ShardbError | None]:
    """Copy twice into a new store whose storage has a fault; whether it fired, and what was said.

    The first copy is interrupted by nothing; the second finds staged files of a copy before.
    """
    root = disk / "run"
    with shardb.open(root, create=True, files=QuickFileSystem()) as target:
        copy_commit(source, target, "step-0")
        leave_staged(source, target)
    files = RecordingFileSystem(str(disk))
    failure: ShardbError | None = None
    with shardb.open(root, files=files, writer_threads=1) as target:
        files._fault = fault  # planted only now: opening has tests of its own
        try:
            copy_commit(source, target)
        except ShardbError as error:
            failure = error
        fired = files.fired_count > 0
        files._fault = None
    files.shut_down()
    return fired, failure


def leave_staged(source: shardb.Store, target: shardb.Store) -> None:
    """What an interrupted copy leaves: one whole object, and half of another."""
    for number, entry in enumerate(source.resolve("main").shards.values()):
        data = Path(source.objects.path(entry.digest)).read_bytes()
        path = Path(target.objects.staged_name("main", entry.digest))
        path.write_bytes(data if number else data[: len(data) // 2])


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_does_every_failing_call_leave_a_store_that_goes_on(
    source: shardb.Store, quick_path: Path, operation: str, code: int
) -> None:
    expected = contents(source)
    nth, failed = 0, 0
    while nth < CALLS_MAX:
        nth += 1
        disk = quick_path / f"disk-{nth}"
        disk.mkdir()
        fired, failure = copy_with(Fault(operation=operation, nth=nth, error=code), source, disk)
        failed += failure is not None
        with shardb.open(disk / "run", files=QuickFileSystem()) as target:
            landed = target.resolve("main").step == 1
            if failure is None:
                assert landed
            elif landed:
                assert not failure.definite, (operation, nth, failure)
                assert isinstance(failure, CommitUnknownError)
            copy_commit(source, target)
            assert contents(target) == expected
        assert fsck_audit(str(disk / "run")) == []
        if not fired:
            break
    assert nth < CALLS_MAX
    assert failed, f"no call of {operation} matters to a copy"
