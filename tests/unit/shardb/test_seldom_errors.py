"""Is an error that seldom comes told, and is nothing left of what it cut short?"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardb
from shardb.buffers import BufferPool
from shardb.errors import NotFoundError, StorageFailedError
from shardb.filesystem import RealFileSystem
from shardb.format import read_format
from shardb.fsck_objects import Wanted, inspect_object
from shardb.objects import ObjectFiles
from shardb.repair import repair
from shardb.repair_plan import Plan
from shardb.repair_sources import StoreFiles
from shardb.testing.operations import Fault
from shardb.testing.recording import RecordingFileSystem
from tests.support.small_stores import commit_step, fsck, object_of

COMMIT = "ab" * 16


def failing(root: Path, **fault: Any) -> RecordingFileSystem:
    return RecordingFileSystem(str(root), fault=Fault(nth=1, error=errno.EIO, **fault))


def test_is_a_commit_seen_at_once_where_no_reader_can_be_asked(run: Path) -> None:
    files = RecordingFileSystem(str(run))
    with shardb.open(run, files=files) as store:
        files._fault = Fault(
            operation="list", nth=1, error=errno.EIO, persistent=True, path_contains="/leases"
        )
        commit_step(store, 7)
        assert store.resolve().step == 7
        assert not store.recovery.warnings
        files._fault = None
        commit_step(store, 8)
        assert [commit.step for commit in store.commits()] == [2, 7, 8]


def test_is_it_open_whether_a_snapshot_landed_whose_record_was_not_synced(run: Path) -> None:
    files = RecordingFileSystem(str(run))
    with shardb.open(run, files=files) as store:
        files._fault = Fault(operation="fdatasync", nth=1, error=errno.EIO, path_contains=".wal")
        with pytest.raises(StorageFailedError, match="while a snapshot record was") as caught:
            store.create_snapshot("new")
    assert not caught.value.definite
    with shardb.open(run) as store:
        assert set(store.snapshots()) in ({"step-2"}, {"step-2", "new"})


def test_is_nothing_left_of_a_repair_whose_copy_fails_on_the_way(run: Path, whole: Path) -> None:
    for step in (2, 6):
        object_of(run, step, "params/a").unlink()
    last = object_of(whole, 6, "params/a")
    files = RecordingFileSystem(str(run))
    fault = Fault(operation="pwrite", nth=2, error=errno.EIO, path_contains="staged.@repair")
    files._fault = fault
    with pytest.raises(StorageFailedError):
        repair(str(run), yes=True, files=files, source=StoreFiles(RealFileSystem(), str(whole)))
    assert not list(run.glob("spare/staged.@repair*"))
    assert repair(str(run), yes=True, source=StoreFiles(RealFileSystem(), str(whole))).done
    assert object_of(run, 6, "params/a").read_bytes() == last.read_bytes()


def test_is_a_directory_among_spare_files_passed_over(run: Path) -> None:
    for spare in run.glob("spare/free.*"):
        spare.unlink()
        spare.mkdir()
    with shardb.open(run) as store:
        assert commit_step(store, 7).step == 7
    assert "place_taken" in {finding.kind for finding in fsck(run).findings}


def test_is_a_mapped_object_given_up_that_somebody_has_taken(run: Path) -> None:
    files = ObjectFiles(RealFileSystem(), str(run), verify=False)
    pool = BufferPool(1 << 20)
    buffer = pool.take(4096, "")
    files.hold("0" * 32, buffer)
    assert buffer.path is None
    assert not list(run.glob("spare/held.*"))


def test_does_a_forked_child_leave_what_its_parent_has_staged(run: Path) -> None:
    with shardb.open(run) as store:
        transaction = store.begin()
        transaction.write("params/a", {"w": np.zeros(9)})
        staged = list(run.glob("spare/staged.*"))
        transaction.forget()
        transaction.abort()
        assert list(run.glob("spare/staged.*")) == staged != []


def test_is_what_is_moved_aside_announced_before_it_is(run: Path) -> None:
    (run / "reserve").unlink()
    (run / "reserve").mkdir()
    told: list[tuple[list[str], bool]] = []

    def hear(plan: Plan) -> None:
        told.append(([action.what for action in plan.actions], (run / "reserve").is_dir()))

    outcome = repair(str(run), yes=True, on_planned=hear)
    assert told == [(["place_clear"], True)]
    assert [action.what for action in outcome.plan.actions] == ["place_clear"]


def test_is_a_packed_object_unreadable_that_the_log_has_not_told_yet(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / f"objects/{'1' * 32}.pack").write_bytes(bytes(9000))
    files = failing(tmp_path, operation="open", path_contains=".pack", persistent=True)
    fault = inspect_object(files, str(tmp_path), Wanted(digest="1" * 32, bytes=9000))
    assert fault is not None
    assert fault.kind == "object_unreadable"
    assert fault.found.startswith("Input/output error: the disk failed to read")


def test_is_a_store_told_whose_own_path_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("/nonexistent/volume")
    with pytest.raises(NotFoundError, match="this is a link that leads nowhere; mount"):
        read_format(RealFileSystem(), str(tmp_path / "run"))
