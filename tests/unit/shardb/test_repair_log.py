"""What does a repair make of logs that other repairs seldom meet?

A copy of another history, a segment that is no file, records that are none, somebody who writes
meanwhile.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import zstandard

import shardb
from shardb import frames, records
from shardb.branching import delete_snapshot
from shardb.errors import ConflictError, CorruptionError
from shardb.filesystem import RealFileSystem
from shardb.gc import collect_garbage
from shardb.pack import pack_snapshots
from shardb.records import new_record
from shardb.repair import repair
from shardb.repair_plan import Outcome, Plan
from shardb.repair_sources import StoreFiles
from tests.support import pack_stores
from tests.support.damage import (
    Known,
    check_repaired,
    frames_of,
    last_segment,
    spoil_closed_segment,
    spoil_object,
    spoil_record,
)
from tests.support.small_stores import commit_step, copy_store, fill_store, flip_bit, fsck


@pytest.fixture
def run(long: Path, tmp_path: Path) -> Path:
    """A copy of the store, for damaging."""
    return copy_store(long, tmp_path / "run")


def copied(root: Path) -> StoreFiles:
    return StoreFiles(RealFileSystem(), str(root))


def words(outcome: Outcome) -> list[str]:
    return [action.what for action in outcome.plan.actions]


# A copy of the log that does not help


def test_is_a_copy_that_lost_the_same_segment_of_no_use(run: Path, tmp_path: Path) -> None:
    known = Known.of(run)
    spoil_closed_segment(run)
    other = copy_store(run, tmp_path / "other")
    (min((other / "wal").iterdir())).unlink()
    outcome = repair(str(run), yes=True, source=copied(other))
    assert "log_fill" not in words(outcome)
    assert "history_acknowledge" in words(outcome)
    check_repaired(run, known)


def test_is_a_copy_with_the_same_record_damaged_of_no_use(run: Path, tmp_path: Path) -> None:
    known = Known.of(run)
    spoil_record(1)(run)
    other = copy_store(run, tmp_path / "other")
    outcome = repair(str(run), yes=True, source=copied(other))
    assert "log_fill" not in words(outcome)
    check_repaired(run, known)


def test_is_a_copy_that_went_another_way_of_no_use(tmp_path: Path) -> None:
    """Both go on from one store: the damaged segment of one is not the one of the other."""
    ours, theirs = tmp_path / "run", tmp_path / "other"
    fill_store(ours, range(2))
    copy_store(ours, theirs)
    for root in (ours, theirs):
        with shardb.open(root) as store:
            for step in range(2, 5):
                commit_step(store, step)
            store.appender._segment_limit_bytes = 1
            commit_step(store, 5)
    known = Known.of(ours)
    spoil_closed_segment(ours)
    outcome = repair(str(ours), yes=True, source=copied(theirs))
    assert "log_fill" not in words(outcome)
    check_repaired(ours, known)


def test_is_a_log_that_does_not_say_whose_it_is_not_taken(run: Path, tmp_path: Path) -> None:
    """Nothing of ours is left; the copy's first record names no store."""
    (tmp_path / "other/wal").mkdir(parents=True)
    payload = records.pack(new_record("note", text="x"))
    frame, _ = frames.encode(lsn=1, previous=bytes(16), payload=payload)
    (tmp_path / "other/wal/0000000001.wal").write_bytes(frame)
    shutil.rmtree(run / "index")
    for path in (run / "wal").iterdir():
        path.unlink()
    with pytest.raises(CorruptionError, match="nothing to repair"):
        repair(str(run), yes=True, source=copied(tmp_path / "other"))
    assert list((run / "wal").iterdir()) == []


def test_are_several_lost_segments_taken_from_a_copy(run: Path, long: Path) -> None:
    """Each follows on the one before, which is a copy itself; the first says whose it is."""
    known = Known.of(long)
    shutil.rmtree(run / "index")
    for path in (run / "wal").iterdir():
        path.unlink()
    outcome = repair(str(run), yes=True, source=copied(long))
    assert words(outcome).count("log_fill") == len(list((long / "wal").iterdir())) > 2
    assert outcome.exit_code == 0
    check_repaired(run, known)


def test_is_a_closed_segment_written_anew_whose_file_has_changed(run: Path) -> None:
    """Its records are whole: somebody has compressed it again."""
    known = Known.of(run)
    path = min((run / "wal").iterdir())
    data = zstandard.ZstdDecompressor().decompress(path.read_bytes())
    path.write_bytes(zstandard.ZstdCompressor(level=19).compress(data))
    assert [finding.kind for finding in fsck(run).findings] == ["log_damaged"]
    outcome = repair(str(run), yes=True)
    assert words(outcome) == ["log_rewrite"]
    assert zstandard.ZstdDecompressor().decompress(path.read_bytes()) == data
    check_repaired(run, known)


def test_has_a_copy_without_a_log_no_segments(tmp_path: Path) -> None:
    assert copied(tmp_path).sequences() == []


# A log in pieces


def test_does_a_store_go_on_whose_last_segment_is_a_directory(run: Path) -> None:
    known = Known.of(run)
    path = last_segment(run)
    path.unlink()
    path.mkdir()
    outcome = repair(str(run), yes=True)
    assert words(outcome)[-2:] == ["log_set_aside", "log_go_on"]
    check_repaired(run, known)


def test_is_a_closed_segment_that_is_a_directory_acknowledged(run: Path) -> None:
    known = Known.of(run)
    path = min((run / "wal").iterdir())
    path.unlink()
    path.mkdir()
    assert words(repair(str(run), yes=True)) == ["history_acknowledge"]
    check_repaired(run, known)
    assert repair(str(run), yes=True).plan.is_empty


def test_are_records_behind_the_damage_counted_that_nobody_can_read(run: Path) -> None:
    known = Known.of(run)
    path = last_segment(run)
    last = frames_of(path)[-1]
    frame, _ = frames.encode(lsn=last.lsn + 1, previous=last.digest, payload=b"\xff no record")
    path.write_bytes(path.read_bytes() + frame)
    flip_bit(path, last.offset + frames.HEADER_BYTES)
    shutil.rmtree(run / "index")
    outcome = repair(str(run), yes=True)
    assert "1 other record" in " ".join(a.loses or "" for a in outcome.plan.actions)
    check_repaired(run, known)


# Somebody else


def test_is_a_log_not_mended_that_somebody_wrote_to_meanwhile(run: Path) -> None:
    whole = (run / "FORMAT").read_bytes()
    (run / "FORMAT").write_bytes(b"spoilt")

    def meanwhile(_: Plan) -> None:
        (run / "FORMAT").write_bytes(whole)
        with shardb.open(run) as store:
            commit_step(store, 12)

    with pytest.raises(ConflictError, match="wrote to the log meanwhile"):
        repair(str(run), yes=True, on_planned=meanwhile)
    with shardb.open(run) as store:
        assert store.resolve().step == 12


def test_is_an_object_not_put_back_whose_snapshot_went_meanwhile(run: Path, long: Path) -> None:
    with shardb.open(run) as store:
        digest = store.resolve("step-3").shards["params/a"].digest
    spoil_object(3, "params/a")(run)

    def meanwhile(_: Plan) -> None:
        with shardb.open(run) as store:
            delete_snapshot(store, "step-3")
        collect_garbage(str(run))

    outcome = repair(str(run), yes=True, source=copied(long), on_planned=meanwhile)
    assert words(outcome) == ["object_restore"]
    assert not (run / "objects" / f"{digest}.safetensors").exists()
    assert not fsck(run).has_errors


# In words


def test_is_a_base_without_a_commit_of_its_own_told_as_what_it_is(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with shardb.open(root, create=True) as store:
        pack_stores.fill(store, range(7), snapshots=(1, 2))
        pack_snapshots(store)
        base = store.resolve("step-1").shards["params/a"].digest
        delete_snapshot(store, "step-1")
    collect_garbage(str(root))
    copy = copy_store(root, tmp_path / "copy")
    (root / "objects" / f"{base}.pack").unlink()
    outcome = repair(str(root), source=copied(copy))
    assert "what others are a difference to" in outcome.plan.actions[0].does


def test_is_what_cannot_be_mended_told_as_json(run: Path) -> None:
    for path in (run / "objects").iterdir():
        path.unlink()
    told = repair(str(run)).to_json()
    assert told["actions"] == []
    assert {item["path"].endswith(".safetensors") for item in told["unmended"]} == {True}
    assert all("--from OTHER" in item["why"] for item in told["unmended"])


@pytest.mark.parametrize("position", [0, -1])
def test_is_a_directory_in_the_place_of_a_segment_that_a_copy_has_moved_aside(
    run: Path, long: Path, position: int
) -> None:
    known = Known.of(long)
    segment = sorted((run / "wal").iterdir())[position]
    segment.unlink()
    segment.mkdir()
    (segment / "somebody's").write_bytes(b"x")
    outcome = repair(str(run), yes=True, source=copied(long))
    assert words(outcome) == ["log_fill"]
    assert not outcome.plan.loses
    assert [path.name for path in (run / "wal").glob("damaged-*/*")] == ["somebody's"]
    check_repaired(run, known)
