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
from shardb.fsck_audit import Reading
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


def go_on_from_the_end(root: Path) -> None:
    with shardb.open(root) as store:
        commit_step(store, LAST_STEP + 1)


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


def test_is_no_whole_object_read_for_each_plan(whole_run: Path, cut_run: Path) -> None:
    """There is a plan with what ours tells, and one with what the copy goes on with."""
    reopen(cut_run)
    source, read = StoreFiles(RealFileSystem(), str(whole_run)), list[str]()
    outcome = repair(str(cut_run), source=source, reading=Reading(on_verified=read.append))
    assert "log_fill" in [action.what for action in outcome.plan.actions]
    with shardb.open(whole_run) as store:
        needed = {e.digest for commit in store.commits() for e in commit.shards.values()}
    assert sorted(read) == sorted(needed)


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


# Where the log is longer or shorter than it was, or is another one


def insert(data: bytes, at: int) -> bytes:
    return data[:at] + data[at - 500 : at] + data[at:]


def remove(data: bytes, at: int) -> bytes:
    return data[:at] + data[at + 90 :]


def overwrite(data: bytes, at: int) -> bytes:
    return data[:at] + bytes(90) + data[at + 90 :]


@pytest.mark.parametrize("spoil", [insert, remove, overwrite])
@pytest.mark.parametrize("since", [nothing, go_on_from_the_end], ids=["same", "ours goes on"])
@pytest.mark.parametrize("segment_bytes", [0, 4000], ids=["one segment", "several segments"])
def test_does_a_copy_fill_damage_that_moved_what_is_behind_it(
    tmp_path: Path,
    segment_bytes: int,
    since: Callable[[Path], None],
    spoil: Callable[[bytes, int], bytes],
) -> None:
    fill_store(
        tmp_path / "run", range(LAST_STEP + 1), snapshots=(1, 7), segment_bytes=segment_bytes
    )
    copy = copy_store(tmp_path / "run", tmp_path / "copy")
    since(tmp_path / "run")
    known = Known.of(tmp_path / "run")
    log = Log(RealFileSystem(), str(tmp_path / "run/wal"))
    segment = Path(log.path(log.sequences()[-1]))
    whole = segment.read_bytes()
    frames = [f for f in all_frames((copy / "wal" / segment.name).read_bytes()) if f.offset]
    segment.write_bytes(spoil(whole, frames[len(frames) // 2].offset + 20))
    outcome = repair(
        str(tmp_path / "run"), yes=True, source=StoreFiles(RealFileSystem(), str(copy))
    )
    assert [action.what for action in outcome.plan.actions] == ["log_fill"]
    assert not outcome.plan.loses
    assert segment.read_bytes() == whole
    check_repaired(tmp_path / "run", known)


@pytest.fixture
def older(whole_run: Path, tmp_path: Path) -> Path:
    """A run whose log was replaced by that of an older copy, which had gone on by itself."""
    run, early = copy_store(whole_run, tmp_path / "run"), copy_store(whole_run, tmp_path / "early")
    cut_behind(early, KEPT_STEP)
    with shardb.open(early) as store:
        store.create_snapshot("zz")
    for path in (run / "wal").iterdir():
        path.unlink()
    shutil.copytree(early / "wal", run / "wal", dirs_exist_ok=True)
    return run


def test_is_the_log_that_the_index_has_seen_taken_for_an_older_one(
    whole_run: Path, older: Path
) -> None:
    known = Known.of(whole_run)
    ours = max((older / "wal").glob("*.wal"))
    replaced = ours.read_bytes()
    source = StoreFiles(RealFileSystem(), str(whole_run))
    outcome = repair(str(older), yes=True, source=source)
    told = [action for action in outcome.plan.actions if action.loses]
    assert [(action.what, action.loses) for action in told] == [("log_fill", "snapshot zz")]
    assert "is kept aside" in told[0].does
    assert [path.read_bytes() for path in (older / "wal").glob("damaged-*")] == [replaced]
    logs = [Log(RealFileSystem(), str(root / "wal")) for root in (older, whole_run)]
    assert [log.sequences() for log in logs] == [logs[1].sequences()] * 2
    for sequence in logs[1].sequences():
        assert logs[0].read(sequence) == logs[1].read(sequence)
    check_repaired(older, known)


def test_is_a_copy_that_does_not_lead_to_what_the_index_has_seen_not_taken(
    whole_run: Path, older: Path
) -> None:
    """The first record of the copy's segment is damaged, so that it does not follow."""
    sequence = int(max((older / "wal").glob("*.wal")).stem)
    log = Log(RealFileSystem(), str(whole_run / "wal"))
    data = bytearray(log.read(sequence))
    data[20] ^= 1
    log.drop_raw(sequence)
    Path(log.compressed_path(sequence)).unlink(missing_ok=True)
    Path(log.path(sequence)).write_bytes(data)
    outcome = repair(str(older), yes=True, source=StoreFiles(RealFileSystem(), str(whole_run)))
    assert "log_fill" not in [action.what for action in outcome.plan.actions]
    assert not fsck(older).has_errors
    with shardb.open(older) as store:
        assert store.resolve("main").step == LAST_STEP


def test_is_the_copy_of_another_store_not_taken_for_an_older_log(
    older: Path, tmp_path: Path
) -> None:
    """The index is that of the other store too: it leads there, and yet is not ours."""
    other = tmp_path / "other"
    fill_store(other, range(LAST_STEP + 5))
    shutil.rmtree(older / "index")
    shutil.copytree(other / "index", older / "index")
    outcome = repair(str(older), yes=True, source=StoreFiles(RealFileSystem(), str(other)))
    assert "log_fill" not in [action.what for action in outcome.plan.actions]
    with shardb.open(older) as store:
        assert "zz" in store.snapshots() or store.resolve("main").step <= KEPT_STEP
