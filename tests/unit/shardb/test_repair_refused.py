"""Is nothing given up that the storage only does not show? It may be whole."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import shardb
from shardb.errors import StorageFailedError
from shardb.filesystem import RealFileSystem
from shardb.repair import repair
from shardb.repair_objects import Wishes
from shardb.repair_sources import StoreFiles
from shardb.testing.operations import Fault
from shardb.testing.recording import RecordingFileSystem
from tests.support.damage import Known, check_repaired, last_segment
from tests.support.small_stores import object_of


def retained(run: Path) -> list[int]:
    with shardb.open(run) as store:
        return [commit.step for commit in store.commits()]


@pytest.mark.parametrize("name", ["objects", "wal"])
def test_is_nothing_given_up_that_only_may_not_be_read(
    run: Path, known: Known, nobody: None, name: str
) -> None:
    locked = object_of(run, 6, "params/a") if name == "objects" else last_segment(run)
    locked.chmod(0)
    with pytest.raises(StorageFailedError, match="nothing says that it is damaged") as caught:
        repair(str(run), yes=True)
    assert caught.value.path == str(locked)
    locked.chmod(0o644)
    assert repair(str(run), yes=True).plan.is_empty
    check_repaired(run, known)


def unreadable(run: Path, step: int) -> RecordingFileSystem:
    """A disk that fails whenever one object is read."""
    path = object_of(run, step, "params/a")
    fault = Fault(
        operation="pread_into", nth=1, error=errno.EIO, persistent=True, path_contains=path.name
    )
    return RecordingFileSystem(str(run), fault=fault)


@pytest.mark.parametrize("step", [2, 5, 6])
def test_is_nothing_given_up_that_the_disk_does_not_show(run: Path, step: int) -> None:
    """A snapshot, a commit that its branch retains, a head."""
    before = retained(run)
    outcome = repair(str(run), yes=True, files=unreadable(run, step))
    assert outcome.plan.actions == []
    assert {item.path for item in outcome.plan.unmended} == {str(object_of(run, step, "params/a"))}
    assert "Input/output error" in outcome.plan.unmended[0].why
    assert outcome.exit_code == 1
    assert retained(run) == before


def test_is_it_given_up_when_it_is_named(run: Path, known: Known) -> None:
    files = unreadable(run, 2)
    outcome = repair(str(run), yes=True, files=files, wishes=Wishes(drops=["step-2"]))
    assert [action.what for action in outcome.plan.actions] == ["snapshot_drop"]
    check_repaired(run, known)


def test_is_it_restored_from_a_copy(run: Path, whole: Path, known: Known) -> None:
    outcome = repair(
        str(run),
        yes=True,
        files=unreadable(run, 6),
        source=StoreFiles(RealFileSystem(), str(whole)),
    )
    assert [action.what for action in outcome.plan.actions] == ["object_restore"]
    assert outcome.plan.unmended == []
    check_repaired(run, known)


def test_is_no_part_of_the_log_given_up_that_the_disk_does_not_show(
    run: Path, known: Known
) -> None:
    fault = Fault(operation="pread", nth=1, error=errno.EIO, persistent=True, path_contains=".wal")
    files = RecordingFileSystem(str(run), fault=fault)
    with pytest.raises(StorageFailedError, match="the disk failed to read") as caught:
        repair(str(run), yes=True, files=files)
    assert caught.value.path == str(last_segment(run))
    check_repaired(run, known)
