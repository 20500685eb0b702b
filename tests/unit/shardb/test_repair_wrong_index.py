"""Does a repair believe the log, where the index beside it is not of these files?"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

import shardb
from shardb.errors import FormatError, LogTruncatedError
from shardb.filesystem import RealFileSystem
from shardb.read_only import open_to_look
from shardb.repair import repair
from shardb.repair_sources import StoreFiles
from tests.support.small_stores import commit_step, copy_store, fill_store, fsck, kinds

BEGUN, BACKED_UP, AHEAD = 3, 5, 9


def steps(root: Path) -> dict[str, int]:
    with shardb.open(root) as store:
        names = {name: commit.step for name, commit in store.branches().items()}
        return names | {name: commit.step for name, commit in store.snapshots().items()}


def go_on(root: Path, steps: Iterable[int]) -> None:
    with shardb.open(root) as store:
        for step in steps:
            commit_step(store, step)


@pytest.fixture
def backup(root: Path) -> Path:
    """A store at a step, which is whole."""
    fill_store(root, range(BACKED_UP + 1), snapshots=(BEGUN,))
    return root


def put_back(source: Path, target: Path, *folders: str) -> None:
    for folder in folders:
        shutil.rmtree(target / folder)
        shutil.copytree(source / folder, target / folder)


def test_is_a_backup_whole_that_was_put_back_under_a_newer_index(
    backup: Path, tmp_path: Path
) -> None:
    run = copy_store(backup, tmp_path / "ahead")
    go_on(run, range(BACKED_UP + 1, AHEAD + 1))
    put_back(backup, run, "wal", "objects")
    with pytest.raises(LogTruncatedError):
        shardb.open(run)
    outcome = repair(str(run), yes=True)
    assert steps(run) == steps(backup)
    assert kinds(fsck(run)) == ["index_set_aside"]
    lost = [action for action in outcome.plan.actions if action.loses]
    assert [action.what for action in lost] == ["index_rebuild"]
    assert lost[0].loses is not None
    assert f"step {AHEAD} of main" in lost[0].loses, "what the index alone knew is named"


def test_does_the_index_count_where_the_newer_files_are_there(backup: Path, tmp_path: Path) -> None:
    run = copy_store(backup, tmp_path / "ahead")
    go_on(run, range(BACKED_UP + 1, AHEAD + 1))
    expected = steps(run)
    put_back(backup, run, "wal")  # the objects of the newer steps are still there
    repair(str(run), yes=True)
    assert steps(run) == expected


def test_does_a_snapshot_count_that_only_the_index_knows(backup: Path, tmp_path: Path) -> None:
    """The log leads to a newer step of main, but not to a snapshot that is whole."""
    run = copy_store(backup, tmp_path / "ahead")
    with shardb.open(run) as store:
        store.create_snapshot("kept")
    put_back(backup, run, "wal")
    repair(str(run), yes=True)
    assert steps(run) == steps(backup) | {"kept": BACKED_UP}


@pytest.mark.parametrize("first", [BACKED_UP + 1, BACKED_UP + 2])
def test_is_the_log_believed_beside_the_index_of_a_sister_copy(
    backup: Path, tmp_path: Path, first: int
) -> None:
    """Two copies went different ways: with the same steps, and with others."""
    ours, sister = (copy_store(backup, tmp_path / name) for name in ("ours", "sister"))
    go_on(ours, range(BACKED_UP + 1, AHEAD))
    go_on(sister, range(first, AHEAD + 1))
    with shardb.open(ours) as store:
        store.create_snapshot("mine")
    expected = steps(ours)
    put_back(sister, ours, "index")
    repair(str(ours), yes=True)
    assert steps(ours) == expected
    assert kinds(fsck(ours)) == ["index_set_aside"]


def test_is_the_index_of_another_store_called_that(backup: Path, tmp_path: Path) -> None:
    """Its steps are not missing here, and nothing is lost with them."""
    fill_store(tmp_path / "other", range(AHEAD))
    expected = steps(backup)
    put_back(tmp_path / "other", backup, "index")
    for look in (shardb.open, open_to_look):
        with pytest.raises(FormatError, match=r"it is the index of store .* copied here by"):
            look(str(backup))
    assert kinds(fsck(backup)) == ["index_foreign"]
    outcome = repair(str(backup), yes=True)
    assert not outcome.plan.loses
    assert "another store" in outcome.plan.actions[0].does
    assert steps(backup) == expected


def test_is_a_foreign_log_not_called_a_foreign_index(backup: Path, tmp_path: Path) -> None:
    """FORMAT and the index agree: it is the log that was copied here by mistake."""
    fill_store(tmp_path / "other", range(2))
    expected = steps(backup)
    put_back(tmp_path / "other", backup, "wal")
    assert "index_foreign" not in kinds(fsck(backup))
    with pytest.raises(LogTruncatedError):
        shardb.open(backup)
    repair(str(backup), yes=True)
    assert steps(backup) == expected


def test_is_a_log_that_cannot_be_read_no_witness_against_the_index(
    backup: Path, tmp_path: Path
) -> None:
    fill_store(tmp_path / "other", range(AHEAD))
    put_back(tmp_path / "other", backup, "index")
    (segment,) = (backup / "wal").iterdir()
    segment.write_bytes(b"")
    assert "index_foreign" not in kinds(fsck(backup))


@pytest.mark.parametrize("ahead", [False, True])
def test_is_a_copy_with_all_of_the_log_named_where_ours_went_another_way(
    backup: Path, tmp_path: Path, ahead: bool
) -> None:
    """An older log that was put back had been written to: the records of the copy do not follow."""
    older = copy_store(backup, tmp_path / "older")
    with shardb.open(older) as store:
        for number in range(20):  # more than the index has seen: which is newer, nobody knows
            store.create_snapshot(f"theirs-{number}")
    go_on(backup, range(BACKED_UP + 1, AHEAD))
    copy = copy_store(backup, tmp_path / "copy")
    if ahead:
        go_on(copy, [AHEAD])
    put_back(older, backup, "wal")
    outcome = repair(str(backup), source=StoreFiles(RealFileSystem(), str(copy)))
    said = " ".join(action.loses or "" for action in outcome.plan.actions)
    assert (f"{copy}/wal has all of it" in said) is not ahead
    if not ahead:
        put_back(copy, backup, "wal")
        assert repair(str(backup)).plan.is_empty
        assert steps(backup)["main"] == AHEAD - 1
