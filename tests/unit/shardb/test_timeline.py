"""Does a log tell every commit once, in order, with what happened to it, whatever part is read?"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import shardb
from shardb.branching import create_branch, delete_branch, delete_snapshot, rewind
from shardb.filesystem import RealFileSystem
from shardb.timeline import Row, Span, read_timeline
from tests.support.small_stores import commit_step, copy_store, fill_store, flip_bit


def rows_of(root: Path, **wanted: object) -> list[Row]:
    timeline = read_timeline(RealFileSystem(), str(root), Span(**wanted))  # type: ignore[arg-type]
    assert timeline.faults == []
    return timeline.rows


def notes_of(root: Path) -> dict[int, list[str]]:
    return {row.step: row.notes for row in rows_of(root) if row.notes}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0 to 39 in many segments."""
    root = tmp_path_factory.mktemp("long") / "run"
    fill_store(root, range(40), snapshots=(3,), segment_bytes=6000)
    assert len(list((root / "wal").iterdir())) > 4
    return root


def test_is_every_commit_told_once(long: Path) -> None:
    rows = rows_of(long)
    assert [row.step for row in rows] == list(range(40))
    assert len({row.commit for row in rows}) == 40
    assert rows[3].notes == ["snapshot step-3"]
    assert rows[0].bytes > rows[1].bytes == 3 * 10_096


@pytest.mark.parametrize("count", [1, 2, 7, 39, 40, 41, 1000])
def test_are_the_newest_the_same_however_few_are_read(long: Path, count: int) -> None:
    newest = [row.to_json() for row in rows_of(long, count=count)]
    assert newest == [row.to_json() for row in rows_of(long)][-count:]


def test_are_only_the_last_segments_read_for_the_newest(long: Path) -> None:
    """The control: damage in an early segment is met by who reads it, and by nobody else."""
    early = min((long / "wal").iterdir())
    whole = early.read_bytes()
    flip_bit(early, len(whole) // 2)
    try:
        assert len(rows_of(long, count=3)) == 3
        assert read_timeline(RealFileSystem(), str(long)).faults != []
    finally:
        early.write_bytes(whole)


def test_do_spans_of_steps_and_times_hold(long: Path) -> None:
    rows = rows_of(long)
    assert [row.step for row in rows_of(long, step=37)] == [37, 38, 39]
    assert [row.step for row in rows_of(long, step=37, count=2)] == [38, 39]
    for at in (0, 5, 20, 39):
        since = rows_of(long, time=rows[at].time)
        assert [row.step for row in since] == list(range(at, 40))
    assert rows_of(long, time=rows[-1].time + 1) == []
    assert [row.step for row in rows_of(long, time=rows[30].time, count=2)] == [38, 39]


def test_are_names_noted_and_lines_left_behind_marked(root: Path) -> None:
    fill_store(root, range(5))
    with shardb.open(root) as store:
        create_branch(store, "side", "step-3")
        rewind(store, "main", "step-3")
        commit_step(store, 5)
        commit_step(store, 4, branch="side")
        store.create_snapshot("kept", "main")
    found = {(row.step, row.branch): row for row in rows_of(root)}
    assert found[3, "main"].notes == ["branch side"]
    assert found[4, "main"].notes == ["then rewound main to step 3", "left behind"]
    assert found[5, "main"].notes == ["snapshot kept"]
    assert not found[4, "side"].is_left
    with shardb.open(root) as store:
        rewind(store, "main", found[4, "main"].commit)
        delete_branch(store, "side")
    found = {(row.step, row.branch): row for row in rows_of(root)}
    assert found[4, "side"].is_left
    assert not found[4, "main"].is_left, "the rewind was undone"
    assert not found[5, "main"].is_left, "a snapshot leads to it"
    with shardb.open(root) as store:
        delete_snapshot(store, "kept")
    assert next(row for row in rows_of(root) if row.step == 5).is_left


def test_are_changes_of_recipe_and_policy_noted(root: Path) -> None:
    fill_store(root, range(2))
    with shardb.open(root) as store, store.begin() as txn:
        for name in ("params/a", "params/b", "optim/a"):
            txn.stage(name, like=txn.read(name)).array("w")[:] = 1
        txn.commit(step=2, metrics={"recipe_changes": {"seed": [1, 2], "odd": 3}})
    assert notes_of(root) == {2: ["seed 1 -> 2", "odd changed"]}


def test_is_a_commit_that_a_damaged_segment_told_known_from_the_next(
    long: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    fill_store(root, range(40), snapshots=(3,), segment_bytes=6000)
    early = min((root / "wal").iterdir())
    flip_bit(early, early.stat().st_size // 2)
    timeline = read_timeline(RealFileSystem(), str(root))
    assert len(timeline.faults) == 1
    steps = [row.step for row in timeline.rows]
    assert steps == sorted(steps)
    assert 3 in steps, "the snapshot's commit stands in every checkpoint"


def removed(root: Path) -> None:
    for path in (root / "wal").iterdir():
        path.unlink()


def cut(root: Path) -> None:
    last = max((root / "wal").glob("*.wal"))
    last.write_bytes(last.read_bytes()[:-300])


def replaced(root: Path) -> None:
    """By the log of a copy that went another way, which is longer."""
    before = copy_store(root, root.parent / "before")
    with shardb.open(root) as store:
        commit_step(store, 4)
    with shardb.open(before) as store:
        for step in range(5, 8):
            commit_step(store, step)
    shutil.rmtree(root / "wal")
    (before / "wal").rename(root / "wal")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(removed, "the log is missing"), (cut, "the log ends before"), (replaced, "has another one")],
)
def test_is_a_log_that_the_index_has_seen_more_of_not_told_as_whole(
    tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    root = tmp_path / "run"
    fill_store(root, range(4))
    spoil(root)
    timeline = read_timeline(RealFileSystem(), str(root))
    assert len(timeline.faults) == 1, timeline.faults
    assert said in timeline.faults[0]
    (root / "index/data.mdb").unlink(missing_ok=True)
    told = read_timeline(RealFileSystem(), str(root)).faults
    assert len(told) == (1 if spoil is removed else 0), "without the index nobody knows"
