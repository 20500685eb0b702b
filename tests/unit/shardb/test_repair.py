"""Does a repair mend every kind of damage, lose no more than it says, and wait to be told?"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import shardb
from shardb.errors import ConflictError, CorruptionError, FormatError, NotFoundError
from shardb.format import encode_format
from shardb.repair import repair
from shardb.repair_objects import Wishes
from shardb.repair_plan import Outcome
from tests.support import damage as d
from tests.support.damage import Damage, Known, check_repaired
from tests.support.small_stores import (
    commit_step,
    copy_store,
    fill_store,
    flip_bit,
    fsck,
    kinds,
    tree,
)


@pytest.fixture(scope="module")
def long_known(long: Path) -> Known:
    return Known.of(long)


def steps(root: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Branches and snapshots, and where they are."""
    with shardb.open(root) as store:
        branches = {name: commit.step for name, commit in store.branches().items()}
        return branches, {name: commit.step for name, commit in store.snapshots().items()}


def words(outcome: Outcome) -> list[str]:
    return [action.what for action in outcome.plan.actions]


def mended(root: Path, **how: object) -> Outcome:
    """Say what would be done, which changes nothing; then do exactly that."""
    before = tree(root)
    planned = repair(str(root), **how)  # type: ignore[arg-type]
    assert tree(root) == before
    assert (planned.done, planned.exit_code) == (False, 1)
    done = repair(str(root), yes=True, **how)  # type: ignore[arg-type]
    assert done.plan == planned.plan
    assert done.remaining == ()
    assert repair(str(root)).plan.is_empty, "nothing is left to do"
    return done


def test_is_nothing_done_to_a_whole_store(run: Path) -> None:
    before = tree(run)
    for yes in (False, True):
        outcome = repair(str(run), yes=yes)
        assert (outcome.plan.is_empty, outcome.exit_code) == (True, 0)
    assert tree(run) == before


# What is mended without a loss

LOSSLESS: dict[str, tuple[Damage, str]] = {
    "format flipped": (lambda root: flip_bit(root / "FORMAT", 30), "format_write"),
    "format gone": (d.remove("FORMAT"), "format_write"),
    "format of another store": (d.foreign_format, "format_write"),
    "format a directory": (
        lambda root: ((root / "FORMAT").unlink(), (root / "FORMAT").mkdir())[0],
        "format_write",
    ),
    "index gone": (d.remove("index"), "index_rebuild"),
    "index cut": (lambda root: (root / "index/data.mdb").write_bytes(b"x"), "index_rebuild"),
    "index entry changed": (d.spoil_index_entry, "index_rebuild"),
    "spare gone": (d.remove("spare"), "directory_make"),
    "torn end": (
        lambda root: d.last_segment(root).open("ab").write(b"SDBW half a record"),
        "log_cut_torn",
    ),
    "objects exchanged": (d.exchange_objects, "object_restore"),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_is_what_can_be_made_anew_made_anew(run: Path, known: Known, name: str) -> None:
    damage, what = LOSSLESS[name]
    expected = steps(run)
    damage(run)
    outcome = mended(run)
    assert set(words(outcome)) == {what}
    assert (outcome.exit_code, outcome.plan.loses) == (0, False)
    assert steps(run) == expected
    check_repaired(run, known)


# A damaged log

HISTORY: dict[str, Damage] = {
    "a record in the middle": d.spoil_record(5),
    "the first record": d.spoil_record(0),
    "the last record": d.spoil_record(-1),
    "a record, no index": d.without_index(d.spoil_record(5)),
    "the first record, no index": d.without_index(d.spoil_record(0)),
    "two records": lambda root: (d.spoil_record(8)(root), d.spoil_record(3)(root))[0],
    "cut by bytes": lambda root: (
        d.last_segment(root).write_bytes(d.last_segment(root).read_bytes()[:-100]) and None
    ),
    "cut by records": d.shorten_log(5),
    "gone": d.remove("wal/0000000001.wal"),
    "directory gone": d.remove("wal"),
    "empty": lambda root: d.last_segment(root).write_bytes(b"") and None,
    "garbled": d.garble_last_record,
}


@pytest.mark.parametrize("name", HISTORY)
def test_does_a_damaged_log_go_on_from_the_newest_state(run: Path, known: Known, name: str) -> None:
    expected = steps(run)
    HISTORY[name](run)
    assert fsck(run).has_errors
    outcome = mended(run)
    assert (outcome.exit_code, outcome.plan.loses) == (1, True)
    assert steps(run) == expected, "no step is lost, only what the log told"
    assert {"log_acknowledged"} <= set(kinds(fsck(run)))
    check_repaired(run, known)


def test_is_the_same_damage_a_second_time_found_again(run: Path, known: Known) -> None:
    """The control: what is acknowledged is one place, not the log."""
    d.spoil_record(5)(run)
    mended(run)
    with shardb.open(run) as store:
        commit_step(store, 7)
    d.spoil_record(-1)(run)
    assert fsck(run).has_errors
    mended(run)
    assert steps(run)[0] == {"main": 7}


@pytest.mark.parametrize("with_index", [True, False])
def test_does_a_cut_end_the_log_at_the_damage_and_keep_the_rest(
    run: Path, known: Known, with_index: bool
) -> None:
    data = d.last_segment(run).read_bytes()
    at = d.frames_of(d.last_segment(run))[-1].offset
    d.spoil_record(-1)(run)
    if not with_index:
        with d.last_segment(run).open("ab") as file:  # else it is a torn end
            file.write(data[d.frames_of(d.last_segment(run))[-1].offset : at])
    outcome = repair(str(run), yes=True, wishes=Wishes(cut=True))
    assert "log_cut" in words(outcome)
    assert d.last_segment(run).read_bytes().startswith(data[:at])
    assert data[at:][:200] not in d.last_segment(run).read_bytes()
    (kept,) = (run / "wal").glob("damaged-*")
    assert len(kept.read_bytes()) >= len(data) - at
    assert steps(run)[0] == {"main": 5}
    report = fsck(run)
    assert "damaged_set_aside" in kinds(report)
    assert kept.exists()


def test_is_a_log_of_another_store_set_aside(run: Path, known: Known, quick_path: Path) -> None:
    other = quick_path / "other"
    fill_store(other, range(9))
    expected = steps(run)
    shutil.copy(d.last_segment(other), d.last_segment(run))
    outcome = mended(run)
    assert "log_set_aside" in words(outcome)
    assert steps(run) == expected
    check_repaired(run, known)


def test_is_the_index_of_another_store_made_anew(run: Path, known: Known, quick_path: Path) -> None:
    other = quick_path / "other"
    fill_store(other, range(9))
    expected = steps(run)
    shutil.copy(other / "index/data.mdb", run / "index/data.mdb")
    outcome = mended(run)
    assert words(outcome) == ["index_rebuild"]
    assert steps(run) == expected
    check_repaired(run, known)


# A log of many segments


CLOSED: dict[str, Damage] = {
    "closed flipped": d.spoil_closed_segment,
    "closed gone": lambda root: sorted((root / "wal").iterdir())[1].unlink(),
    "first gone": lambda root: min((root / "wal").iterdir()).unlink(),
    "closed emptied": lambda root: sorted((root / "wal").iterdir())[1].write_bytes(b"") and None,
    "last gone": lambda root: d.last_segment(root).unlink(),
    "last without beginning": d.spoil_record(0),
    "last without beginning, no index": d.without_index(d.spoil_record(0)),
    "all gone": d.remove("wal"),
}


@pytest.mark.parametrize("name", CLOSED)
def test_is_the_run_not_affected_by_what_is_lost_of_its_history(
    long: Path, long_known: Known, root: Path, name: str
) -> None:
    run = copy_store(long, root)
    expected = steps(run)
    CLOSED[name](run)
    assert fsck(run).has_errors
    outcome = mended(run)
    assert (outcome.exit_code, outcome.plan.loses) == (1, True)
    assert steps(run) == expected
    with shardb.open(run) as store:
        assert [w for w in store.recovery.warnings if w["what"] == "closed log segment"] == []
    check_repaired(run, long_known)


def test_is_what_the_last_segment_told_lost_without_an_index(
    long: Path, long_known: Known, root: Path
) -> None:
    """Nobody else knows what it was; the run goes on from the end of the segment before."""
    run = copy_store(long, root)
    (run / "index/data.mdb").unlink()
    d.last_segment(run).unlink()
    planned = repair(str(run))
    assert any("what came behind" in (a.loses or "") for a in planned.plan.actions)
    repair(str(run), yes=True)
    with shardb.open(run) as store:
        assert {commit.id for commit in store.commits()} <= set(long_known.commits)


# What cannot be repaired


def test_is_a_store_that_nobody_can_make_sense_of_left_alone(run: Path) -> None:
    d.without_index(d.remove("wal"))(run)
    before = tree(run)
    with pytest.raises(CorruptionError, match="neither the log nor the index"):
        repair(str(run), yes=True)
    assert tree(run) == before


def test_is_no_store_and_a_newer_one_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFoundError):
        repair(str(tmp_path / "nowhere"), yes=True)
    monkeypatch.setattr("shardb.format.FORMAT_VERSION", 99)
    newer = encode_format("0" * 32)
    monkeypatch.undo()
    (run / "FORMAT").write_bytes(newer)
    with pytest.raises(FormatError, match="newer"):
        repair(str(run), yes=True)


def test_is_a_log_not_mended_while_somebody_has_the_store_open(run: Path) -> None:
    with shardb.open(run) as store, store.begin():
        flip_bit(run / "FORMAT", 30)
        with pytest.raises(ConflictError, match="has this store open"):
            repair(str(run), yes=True)
        assert repair(str(run)).exit_code == 1, "looking may be done at any time"
    mended(run)
