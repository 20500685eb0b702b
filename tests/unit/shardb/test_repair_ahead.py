"""Does a copy give back the end of a log that was cut to the byte, if the index is gone as well?"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import shardb
from shardb import records
from shardb.cli import run as run_command
from shardb.filesystem import RealFileSystem
from shardb.log import Log
from shardb.repair import repair
from shardb.repair_objects import Wishes
from shardb.repair_sources import StoreFiles
from shardb.repair_state import all_frames
from tests.support.damage import Known, check_repaired, spoil_object
from tests.support.small_stores import commit_step, copy_store, fill_store, fsck, kinds

KEPT_STEP, LAST_STEP = 3, 9


def cut_behind(root: Path, step: int) -> None:
    """End the log behind the commit of a step, and take the index away."""
    log = Log(RealFileSystem(), str(root / "wal"))
    for sequence in reversed(log.sequences()):
        data = log.read(sequence)
        for path in (log.path(sequence), log.compressed_path(sequence)):
            Path(path).unlink(missing_ok=True)
        for frame in reversed(all_frames(data)):
            if records.unpack(frame.payload).get("step") == step:
                Path(log.path(sequence)).write_bytes(data[: frame.end])
                shutil.rmtree(root / "index")
                return


def nothing(_: Path) -> None:
    """Nobody has opened it since."""


def reopen(root: Path) -> None:
    """The index is made anew from what is left."""
    shardb.open(root).close()


def begin(root: Path) -> None:
    """A run was begun, and found that it cannot read its shards."""
    with shardb.open(root) as store:
        store.begin().abort()
    reopen(root)


def begin_and_lose_the_index(root: Path) -> None:
    """The index has seen records of that run that the copy has not."""
    begin(root)
    shutil.rmtree(root / "index")
    reopen(root)


def go_on(root: Path) -> None:
    with shardb.open(root) as store:
        commit_step(store, KEPT_STEP + 1)


@pytest.fixture(params=[0, 4000], ids=["one segment", "several segments"])
def whole_run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    root = tmp_path / "orig"
    fill_store(root, range(LAST_STEP + 1), snapshots=(1, 7), segment_bytes=request.param)
    return root


@pytest.fixture
def cut_run(whole_run: Path, tmp_path: Path) -> Path:
    run = copy_store(whole_run, tmp_path / "run")
    cut_behind(run, KEPT_STEP)
    return run


@pytest.mark.parametrize("since", [nothing, reopen, begin, begin_and_lose_the_index])
def test_is_nothing_lost_that_a_copy_has(
    whole_run: Path, cut_run: Path, since: Callable[[Path], None]
) -> None:
    known = Known.of(whole_run)
    since(cut_run)
    outcome = repair(str(cut_run), yes=True, source=StoreFiles(RealFileSystem(), str(whole_run)))
    assert not outcome.plan.loses
    assert "log_fill" in [action.what for action in outcome.plan.actions]
    assert set(kinds(fsck(cut_run))) <= {"index_set_aside"}
    with shardb.open(cut_run) as store:
        assert store.resolve("main").step == LAST_STEP
        assert set(store.snapshots()) == {"step-1", "step-7"}
    check_repaired(cut_run, known)


@pytest.mark.parametrize("since", [reopen, begin_and_lose_the_index])
def test_is_a_step_brought_back_whose_loss_shows_nowhere(
    whole_run: Path, tmp_path: Path, since: Callable[[Path], None]
) -> None:
    """The step before is whole: but objects lie there that only the lost one needs."""
    run = copy_store(whole_run, tmp_path / "run")
    cut_behind(run, LAST_STEP - 1)
    since(run)
    assert not fsck(run).has_errors
    repair(str(run), yes=True, source=StoreFiles(RealFileSystem(), str(whole_run)))
    assert set(kinds(fsck(run))) <= {"index_set_aside"}
    with shardb.open(run) as store:
        assert store.resolve("main").step == LAST_STEP


def test_is_a_store_that_went_another_way_not_mixed_with_its_copy(
    whole_run: Path, cut_run: Path
) -> None:
    go_on(cut_run)
    source = StoreFiles(RealFileSystem(), str(whole_run))
    assert repair(str(cut_run), yes=True, source=source).plan.loses
    with shardb.open(cut_run) as store:
        assert store.resolve("main").step == KEPT_STEP + 1


def test_does_a_whole_log_stay_where_it_is(whole_run: Path, tmp_path: Path) -> None:
    """The copy was trained on: it has what is damaged here, and nothing is to be moved forward."""
    copy = copy_store(whole_run, tmp_path / "copy")
    with shardb.open(copy) as store:
        commit_step(store, LAST_STEP + 1)
    run = copy_store(whole_run, tmp_path / "run")
    source = StoreFiles(RealFileSystem(), str(copy))
    assert repair(str(run), yes=True, source=source).plan.is_empty
    spoil_object(-1, "params/a")(run)
    outcome = repair(str(run), yes=True, source=source)
    assert not outcome.plan.loses
    with shardb.open(run) as store:
        assert store.resolve("main").step == LAST_STEP


def test_is_it_given_up_where_it_is_named(whole_run: Path, cut_run: Path) -> None:
    reopen(cut_run)
    source = StoreFiles(RealFileSystem(), str(whole_run))
    wishes = Wishes(rewinds={"main": "step-1"})
    assert repair(str(cut_run), yes=True, source=source, wishes=wishes).plan.loses
    with shardb.open(cut_run) as store:
        assert store.resolve("main").step == 1


def test_is_nobody_told_to_free_what_may_be_of_a_lost_step(cut_run: Path) -> None:
    reopen(cut_run)
    report = fsck(cut_run)
    assert report.has_errors, "objects of the last step that is left were used again"
    loose = [f for f in report.findings if f.kind == "object_unreferenced"]
    assert loose
    assert {finding.next_command for finding in loose} == {None}
    assert "keep it" in (loose[0].found or "")


def test_is_another_copy_asked_for_where_one_did_not_help(
    whole_run: Path, cut_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go_on(cut_run)
    assert run_command(["repair", str(cut_run), "--from", str(whole_run)]) == 1
    assert "With another copy" in capsys.readouterr().out
