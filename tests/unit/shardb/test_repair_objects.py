"""Are damaged objects taken from where they are, and is no more given up than has to be?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardb
from shardb.branching import create_branch, rewind
from shardb.errors import BranchLockedError, NotFoundError, UsageError
from shardb.filesystem import RealFileSystem
from shardb.pack import pack_snapshots
from shardb.repair import repair
from shardb.repair_objects import Wishes
from shardb.repair_plan import Outcome
from shardb.repair_sources import RepairSource, StoreFiles
from shardb.timeline import read_timeline
from shardb.transfer import clone
from tests.support import damage as d
from tests.support.damage import Known, check_repaired, check_values
from tests.support.small_stores import (
    commit_step,
    copy_store,
    flip_bit,
    fsck,
    kinds,
    object_of,
)


def files_of(root: Path) -> StoreFiles:
    return StoreFiles(RealFileSystem(), str(root))


def mend(run: Path, source: RepairSource | None = None, **wishes: object) -> Outcome:
    told = Wishes(**wishes)  # type: ignore[arg-type]
    return repair(str(run), yes=True, source=source, wishes=told)


def retained(run: Path) -> list[int]:
    with shardb.open(run) as store:
        return [commit.step for commit in store.commits()]


# From elsewhere


@pytest.mark.parametrize("kind", ["copy", "clone", "bare objects"])
def test_is_what_another_store_has_restored(
    run: Path, known: Known, quick_path: Path, kind: str
) -> None:
    other = quick_path / "other"
    if kind == "clone":
        with shardb.open(run) as store, shardb.open(other, create=True) as target:
            clone(store, target, retained=True)
    else:
        copy_store(run, other)
    if kind == "bare objects":
        for name in ("wal", "index", "FORMAT"):
            d.remove(name)(other)
    d.spoil_object(2, "params/a")(run)
    d.remove_object(6, "optim/a")(run)
    d.remove_object(5, "meta/recipe")(run)
    d.object_as_directory(run) if kind == "copy" else None
    outcome = mend(run, files_of(other))
    assert {action.what for action in outcome.plan.actions} == {"object_restore"}
    assert (outcome.exit_code, outcome.remaining) == (0, ())
    assert retained(run) == [2, 5, 6]
    check_repaired(run, known)


def test_is_a_copy_with_other_damage_used_as_far_as_it_goes(
    run: Path, known: Known, quick_path: Path
) -> None:
    other = copy_store(run, quick_path / "other")
    for step in (2, 6):
        d.spoil_object(step, "params/a")(run)
    d.spoil_object(2, "params/a", 6000)(other)
    outcome = mend(run, files_of(other))
    whats = sorted(action.what for action in outcome.plan.actions)
    assert whats == ["object_restore", "snapshot_drop"]
    assert outcome.exit_code == 1
    assert retained(run) == [5, 6]
    check_repaired(run, known)


def test_are_large_objects_restored(root: Path, quick_path: Path) -> None:
    """Past the page cache, several pieces each."""
    values = np.arange(5_000_000, dtype=np.float32)
    with shardb.open(root, create=True) as store, store.begin() as txn:
        txn.write("params/a", {"w": values})
        commit = txn.commit(step=1)
    other = copy_store(root, quick_path / "other")
    path = root / "objects" / f"{commit.shards['params/a'].digest}.safetensors"
    flip_bit(path, path.stat().st_size - 9)
    assert kinds(fsck(root)) == ["object_corrupt"]
    assert mend(root, files_of(other)).exit_code == 0
    assert fsck(root).findings == []
    with shardb.open(root) as store, store.at() as view:
        assert np.array_equal(view.read("params/a").array("w"), values)


def test_are_objects_restored_beside_a_writer(run: Path, quick_path: Path) -> None:
    """Only a log has to be left alone for its repair."""
    other = copy_store(run, quick_path / "other")
    d.spoil_object(2, "params/a")(run)
    with shardb.open(run) as store:
        commit_step(store, 7)
        assert mend(run, files_of(other)).exit_code == 0
        commit_step(store, 8)
        with store.snapshot("step-2") as view:
            check_values(store, view.commit)
    assert not fsck(run).has_errors


# Packed objects


@pytest.fixture
def packed(root: Path) -> Path:
    """Snapshots of steps 1, 2 and 3, whose objects are differences to each other's."""
    generator = np.random.default_rng(1)
    values = generator.standard_normal(60_000).astype(np.float32)
    with shardb.open(root, create=True) as store:
        for step in range(1, 6):
            with store.begin() as txn:
                txn.write("params/a", {"w": values + np.float32(step * 1e-6)})
                txn.commit(step=step)
            if step <= 3:
                store.create_snapshot(f"step-{step}")
        pack_snapshots(store)
    return root


def pack_files(root: Path) -> dict[str, Path]:
    """Snapshot to the packed file of its one object."""
    with shardb.open(root) as store:
        return {
            name: root / "objects" / f"{commit.shards['params/a'].digest}.pack"
            for name, commit in store.snapshots().items()
        }


def test_is_a_packed_object_restored_and_what_needs_it_whole(
    packed: Path, quick_path: Path
) -> None:
    other = copy_store(packed, quick_path / "other")
    found = pack_files(packed)
    assert all(path.exists() for path in found.values())
    for path in found.values():
        flip_bit(path, path.stat().st_size // 2)
    outcome = mend(packed, files_of(other))
    assert {action.what for action in outcome.plan.actions} == {"object_restore"}
    assert (outcome.exit_code, outcome.remaining) == (0, ())
    assert fsck(packed).findings == []
    with shardb.open(packed) as store, shardb.open(other) as copy:
        for name in found:
            with store.snapshot(name) as one, copy.snapshot(name) as two:
                ours, theirs = (v.read("params/a").array("w") for v in (one, two))
                assert np.array_equal(ours, theirs)


def test_is_a_lost_base_the_loss_of_its_differences(packed: Path) -> None:
    found = pack_files(packed)
    with shardb.open(packed) as store:
        bases = {row[0] for _, row in store.index.read(lambda t: list(t.items("packs")))}
    base = next(path for path in found.values() if path.stem in bases)
    flip_bit(base, base.stat().st_size // 2)
    hit = set(fsck(packed).findings[0].snapshots)
    assert len(hit) > 1, "the control: others are differences to it"
    outcome = mend(packed)
    assert outcome.exit_code == 1
    assert set(pack_files(packed)) == set(found) - hit
    assert not fsck(packed).has_errors


# Giving up


def test_is_a_damaged_snapshot_dropped_and_its_bytes_kept(run: Path, known: Known) -> None:
    path = object_of(run, 2, "params/a")
    flip_bit(path, 5000)
    spoilt = path.read_bytes()
    outcome = mend(run)
    assert [a.loses for a in outcome.plan.actions] == [
        "step 2 under the name step-2: params/a cannot be read"
    ]
    assert retained(run) == [5, 6]
    (kept,) = (run / "objects").glob("damaged-*")
    assert kept.read_bytes() == spoilt
    check_repaired(run, known)
    assert kept.read_bytes() == spoilt, "never used again"


def test_does_a_damaged_head_go_back_to_the_nearest_whole_commit(run: Path, known: Known) -> None:
    d.remove_object(6, "params/a")(run)
    outcome = mend(run)
    assert [action.what for action in outcome.plan.actions] == ["branch_rewind"]
    assert retained(run) == [2, 5]
    check_repaired(run, known)


def test_is_a_snapshot_gone_back_to_when_nothing_else_is_whole(run: Path, known: Known) -> None:
    for step in (5, 6):
        d.spoil_object(step, "params/b")(run)
    mend(run)
    with shardb.open(run) as store:
        assert store.resolve().step == 2
    assert retained(run) == [2]
    check_repaired(run, known)


def test_does_a_branch_rather_go_back_than_onto_another_line(run: Path) -> None:
    with shardb.open(run) as store:
        create_branch(store, "side", "step-5")
        commit_step(store, 7)
        commit_step(store, 8)
    d.remove_object(5, "params/a")(run)
    mend(run)
    with shardb.open(run) as store:
        assert {n: c.step for n, c in store.branches().items()} == {"main": 8, "side": 2}
    assert not fsck(run).has_errors


def test_is_a_step_of_another_branch_named_as_such(run: Path) -> None:
    with shardb.open(run) as store:
        create_branch(store, "side", "step-2")
        commit_step(store, 7, branch="side")
    for step in (2, 5, 6):
        d.spoil_object(step, "params/b")(run)
    outcome = mend(run)
    moved = [action.does for action in outcome.plan.actions if action.what == "branch_rewind"]
    assert len(moved) == 1
    assert moved[0].endswith(", which is a step of branch side and not of its own")


def test_is_only_what_is_damaged_of_several_branches_given_up(run: Path) -> None:
    with shardb.open(run) as store:
        create_branch(store, "side", "step-5")
        commit_step(store, 7, branch="side")
        commit_step(store, 8, branch="side")
        rewind(store, "main", "step-5")
    d.remove_object(7, "params/a")(run)
    d.remove_object(6, "params/a")(run)
    outcome = mend(run)
    assert [action.what for action in outcome.plan.actions] == ["commit_drop", "commit_drop"]
    with shardb.open(run) as store:
        assert {n: c.step for n, c in store.branches().items()} == {"main": 5, "side": 8}
        assert [commit.step for commit in store.commits()] == [2, 5, 8]
        assert store.index.read(lambda tables: list(tables.items("abandoned"))) == []
    assert not fsck(run).has_errors


def test_is_everything_kept_when_nothing_is_whole(run: Path, quick_path: Path) -> None:
    """Giving all of it up would help nobody; a copy may turn up, and one shard is enough."""
    other = copy_store(run, quick_path / "other")
    d.remove_object(6, "meta/recipe")(run)
    outcome = mend(run)
    assert (outcome.plan.actions, outcome.exit_code) == ([], 1)
    assert "no commit of the store is whole" in outcome.plan.unmended[0].why
    assert retained(run) == [2, 5, 6]
    assert mend(run, files_of(other)).exit_code == 0


def test_is_a_branch_that_somebody_writes_to_left_alone(run: Path) -> None:
    d.spoil_object(6, "params/a")(run)
    with shardb.open(run) as store, store.begin() as txn:
        with pytest.raises(BranchLockedError):
            mend(run)
        txn.abort()
    assert retained(run) == [2, 5, 6]


# Wishes


@pytest.fixture
def hurt(run: Path) -> Path:
    """Damage in the head and in the snapshot."""
    d.spoil_object(6, "params/a")(run)
    d.spoil_object(2, "params/a")(run)
    return run


def test_is_only_what_was_named_given_up(hurt: Path, quick_path: Path, whole: Path) -> None:
    outcome = mend(hurt, drops=["step-2"])
    assert [action.what for action in outcome.plan.actions] == ["snapshot_drop"]
    assert "branch main stays damaged" in outcome.plan.unmended[0].why
    assert (outcome.exit_code, retained(hurt)) == (1, [5, 6])
    other = copy_store(whole, quick_path / "other")
    assert mend(hurt, files_of(other)).exit_code == 0


def test_does_a_branch_go_where_it_is_told(run: Path, known: Known) -> None:
    d.spoil_object(6, "params/a")(run)
    outcome = mend(run, rewinds={"main": "step-2"})
    assert outcome.exit_code == 1
    with shardb.open(run) as store:
        assert store.resolve().step == 2
    assert retained(run) == [2, 5]  # what a rewind leaves is kept until gc
    check_repaired(run, known)


def test_are_wishes_that_do_not_fit_refused(hurt: Path, whole: Path, quick_path: Path) -> None:
    with pytest.raises(UsageError, match="damaged too; whole are steps 5"):
        mend(hurt, rewinds={"main": "step-2"})
    with pytest.raises(NotFoundError, match="did you mean main"):
        mend(hurt, rewinds={"mian": "step-5"})
    with pytest.raises(NotFoundError, match="did you mean step-2"):
        mend(hurt, drops=["step2"])
    other = copy_store(whole, quick_path / "other")
    with pytest.raises(UsageError, match="is whole"):
        mend(other, rewinds={"main": "step-5"})
    with pytest.raises(UsageError, match="is whole"):
        mend(other, drops=["step-2"])
    assert retained(hurt) == [2, 5, 6]


def test_is_a_source_that_changes_while_it_is_read_refused(run: Path) -> None:
    """What was found when it was planned is read again when it is copied."""
    entry_path = object_of(run, 2, "params/a")
    good = entry_path.read_bytes()
    flip_bit(entry_path, 5000)

    class Changing:
        name = "elsewhere"
        reads = 0

        def chunks(self, _: object) -> list[memoryview]:
            self.reads += 1
            return [memoryview(good if self.reads == 1 else bytes(len(good)))]

    with pytest.raises(shardb.ShardbError, match="have changed"):
        mend(run, Changing())  # type: ignore[arg-type]
    assert kinds(fsck(run)) == ["object_corrupt"]
    assert not any(path.name.startswith("staged") for path in (run / "spare").iterdir())


def test_is_history_left_when_objects_are_lost(run: Path, known: Known) -> None:
    """The steps whose weights were given up are still told."""
    d.remove_object(6, "params/a")(run)
    mend(run)
    rows = read_timeline(RealFileSystem(), str(run)).rows
    assert [row.step for row in rows] == list(range(7))
    assert rows[-1].is_left
