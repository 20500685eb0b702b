"""Is what arrives the same commit, and does a copy only ever move a branch forward?"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import shardb
from shardb import branching
from shardb.errors import (
    BranchLockedError,
    ConflictError,
    LogDamagedError,
    NotFoundError,
    SnapshotExistsError,
    UsageError,
)
from shardb.pack import pack_snapshots
from shardb.retention import Policy
from shardb.state import Tables
from shardb.transfer import clone, copy_commit, copy_snapshot
from shardb.transfer_tally import Tally
from tests.support.transfer_stores import commit, contents, tables, told_steps


def reopened(store: shardb.Store, *, without_index: bool = True) -> shardb.Store:
    """The store opened again, its index made anew from the log."""
    store.close()
    if without_index:
        shutil.rmtree(Path(store.root) / "index")
    return shardb.open(store.root)


def test_is_the_copy_the_same_commit(source: shardb.Store, target: shardb.Store) -> None:
    tally = Tally()
    copied = copy_commit(source, target, tally=tally)
    ours, theirs = source.resolve("main"), target.resolve("main")
    assert copied == theirs
    for name in ("id", "step", "time", "state", "metrics", "statistics", "recipe", "shards"):
        assert getattr(theirs, name) == getattr(ours, name)
    assert contents(target) == contents(source)
    assert tally.counts.objects_done == tally.counts.objects_total == 4
    assert tally.counts.bytes_moved == sum(e.bytes for e in ours.shards.values())


def test_is_the_history_without_a_gap(source: shardb.Store, target: shardb.Store) -> None:
    copy_commit(source, target, "step-2")
    copy_commit(source, target)
    for step in range(4, 9):
        commit(source, step)
    copy_commit(source, target)
    assert told_steps(target) == list(range(9))
    records = [r for r in target.history() if r["kind"] == "commit"]
    assert [r["parent"] for r in records[1:]] == [r["id"] for r in records[:-1]]
    assert records[-1]["origin_parent"] == source.resolve("main").parent
    losses = [entry["metrics"]["loss"] for entry in records[-1]["rolled_up"]]
    assert losses == [10.0 / (step + 1) for step in range(4, 8)]


def test_is_only_copied_what_is_missing(source: shardb.Store, target: shardb.Store) -> None:
    copy_commit(source, target)
    commit(source, 4)
    tally = Tally()
    copy_commit(source, target, tally=tally)
    assert tally.counts.objects_present == 1  # the frozen shard
    assert tally.counts.objects_done == tally.counts.objects_total == 4


def test_is_there_nothing_to_do_the_second_time(source: shardb.Store, target: shardb.Store) -> None:
    copy_commit(source, target)
    before = [record["id"] for record in target.history()]
    tally = Tally()
    assert copy_commit(source, target, tally=tally) == target.resolve("main")
    assert copy_commit(source, target, "step-3") == target.resolve("main")
    assert [record["id"] for record in target.history()] == before
    assert tally.counts.objects_total == 0


def test_is_an_older_commit_that_is_still_there_nothing_to_do(
    source: shardb.Store, target: shardb.Store
) -> None:
    copy_commit(source, target, "step-2")
    copy_commit(source, target)
    assert copy_commit(source, target, "step-2").step == 2
    assert target.resolve("main").step == 3


def test_is_an_older_commit_that_is_gone_refused(
    source: shardb.Store, target: shardb.Store
) -> None:
    copy_commit(source, target)
    with pytest.raises(ConflictError, match=r"beyond step 2 already.*--branch other"):
        copy_commit(source, target, "step-2")
    assert copy_commit(source, target, "step-2", "other").step == 2
    assert contents(target, "other") == contents(source, "step-2")


def test_does_a_diverged_branch_name_both_heads_and_the_remedy(
    source: shardb.Store, target: shardb.Store
) -> None:
    copy_commit(source, target)
    theirs = commit(target, 4, seed=1)
    ours = commit(source, 5)
    before = tables(target)
    with pytest.raises(ConflictError, match="--branch other") as caught:
        copy_commit(source, target)
    assert theirs.id in str(caught.value)
    assert ours.id in str(caught.value)
    assert caught.value.exit_code == 5
    assert tables(target) == before
    copy_commit(source, target, branch="other")
    assert {name: c.id for name, c in target.branches().items()} == {
        "main": theirs.id,
        "other": ours.id,
    }


def test_does_a_new_branch_of_a_kept_commit_copy_nothing(
    source: shardb.Store, target: shardb.Store
) -> None:
    copy_commit(source, target)
    tally = Tally()
    copy_commit(source, target, branch="candidate", tally=tally)
    assert target.branches()["candidate"].id == target.branches()["main"].id
    assert tally.counts.bytes_moved == 0


def test_does_a_branch_named_by_the_reference_keep_its_name(
    source: shardb.Store, target: shardb.Store
) -> None:
    branching.create_branch(source, "experiment", "step-2")
    copy_commit(source, target, "experiment")
    assert list(target.branches()) == ["experiment"]


def test_is_the_expected_head_compared(source: shardb.Store, target: shardb.Store) -> None:
    copy_commit(source, target, "step-2", expected_head=None)
    with pytest.raises(ConflictError, match="not at no commit as expected"):
        copy_commit(source, target, expected_head=None)
    head = target.resolve("main").id
    copy_commit(source, target, expected_head=head)
    assert target.resolve("main").step == 3


def test_is_a_live_writer_of_the_branch_respected(
    source: shardb.Store, target: shardb.Store
) -> None:
    with (
        shardb.open(target.root) as other,
        other.begin("main"),
        pytest.raises(BranchLockedError, match="already has a writer"),
    ):
        copy_commit(source, target)
    with target.begin("main"), pytest.raises(ConflictError, match="open transaction"):
        copy_commit(source, target)
    with target.receiving("main"), pytest.raises(ConflictError, match="being copied"):
        target.begin("main")
    copy_commit(source, target)
    commit(target, 4)  # the copy gave the lock back


def test_does_a_transaction_on_the_copy_see_the_same_bytes(
    source: shardb.Store, target: shardb.Store
) -> None:
    copy_commit(source, target)
    with source.begin("main") as ours, target.begin("main") as theirs:
        assert theirs.base is not None
        assert theirs.base.id == source.resolve("main").id
        for name in ours.names():
            assert theirs.read(name).image.tobytes() == ours.read(name).image.tobytes()
    assert commit(source, 4).shards == commit(target, 4).shards


def test_does_retention_of_the_target_work_on_copies(
    source: shardb.Store, target: shardb.Store
) -> None:
    for step in range(4, 9):
        commit(source, step)
        copy_commit(source, target)
    assert [c.step for c in target.commits()] == [7, 8]
    assert len(list((Path(target.root) / "objects").iterdir())) == 7  # 2 x 3 and the frozen one


def test_are_the_tables_the_same_when_made_anew(source: shardb.Store, target: shardb.Store) -> None:
    copy_commit(source, target, "step-2")
    copy_snapshot_of(source, target, "two", "step-2")
    copy_commit(source, target, "step-2", "other")
    copy_commit(source, target)
    commit(source, 4)
    copy_commit(source, target)
    copy_commit(source, target, branch="other")
    branching.delete_branch(target, "other")
    before = tables(target)
    with reopened(target) as again:
        assert tables(again) == before


def test_is_a_commit_that_comes_back_counted_once(
    source: shardb.Store, target: shardb.Store
) -> None:
    """Deleted with its branch and copied again; then the index is made anew from the log."""
    commit(target, 0, seed=5)
    for _ in range(3):
        copy_commit(source, target, branch="guest")
        branching.delete_branch(target, "guest")
    copy_commit(source, target, branch="guest")
    before = tables(target)
    assert sorted(row[1] for row in before["objects"].values()) == [1] * 6 + [2]  # one is shared
    with reopened(target) as again:
        assert tables(again) == before
        branching.delete_branch(again, "guest")
        assert len(list((Path(again.root) / "objects").iterdir())) == 4


def test_is_the_same_id_with_other_shards_refused(
    source: shardb.Store, target: shardb.Store
) -> None:
    copy_commit(source, target, "step-2", "other")
    copy_commit(source, target)

    def forge(found: Tables) -> None:
        record = found.get("commits", source.resolve("main").id)
        record["shards"].pop("params/block_000")
        found.put("commits", record["id"], record)

    source.index.write(forge)
    with pytest.raises(LogDamagedError, match="with other shards"):
        copy_commit(source, target, branch="other")
    assert target.branches()["other"].step == 2


def copy_snapshot_of(source: shardb.Store, target: shardb.Store, name: str, ref: str) -> None:
    source.create_snapshot(name, ref)
    copy_snapshot(source, target, name)


def test_does_a_snapshot_arrive_without_a_branch(
    source: shardb.Store, target: shardb.Store
) -> None:
    copy_snapshot_of(source, target, "best", "step-2")
    assert target.branches() == {}
    assert target.snapshots()["best"].id == source.snapshots()["best"].id
    assert contents(target, "best") == contents(source, "best")
    copy_snapshot(source, target, "best")  # nothing to do
    with reopened(target) as again:
        assert contents(again, "best") == contents(source, "best")


def test_is_a_taken_snapshot_name_refused(source: shardb.Store, target: shardb.Store) -> None:
    source.create_snapshot("best", "step-2")
    commit(target, 0, seed=3)
    target.create_snapshot("best")
    with pytest.raises(SnapshotExistsError, match="'best' exists"):
        copy_snapshot(source, target, "best")
    branching.create_branch(target, "good", "main")
    source.create_snapshot("good", "step-3")
    with pytest.raises(ConflictError, match="is a branch"):
        copy_snapshot(source, target, "good")
    with pytest.raises(NotFoundError):
        copy_snapshot(source, target, "worst")


def test_is_the_history_whole_when_a_branch_begins_at_a_copied_snapshot(
    source: shardb.Store, target: shardb.Store, quick_path: Path
) -> None:
    source.create_snapshot("two", "step-2")
    copy_commit(source, target)
    copy_snapshot(source, target, "two")
    branching.create_branch(target, "again", "two")
    commit(target, 3, branch="again", seed=9)
    with shardb.open(quick_path / "third", create=True) as third:
        copy_commit(target, third, "again")
        assert told_steps(third) == [0, 1, 2, 3]


def test_has_a_clone_everything(source: shardb.Store, target: shardb.Store) -> None:
    branching.set_policy(source, Policy(keep_last=3, keep_every=2))
    source.create_snapshot("two", "step-2")
    branching.create_branch(source, "experiment", "step-2")
    commit(source, 7, branch="experiment")
    branching.rewind(source, "main", "step-2")
    commit(source, 4, seed=8)
    cloned = clone(source, target)
    assert {n: c.id for n, c in cloned.branches.items()} == {
        n: c.id for n, c in source.branches().items()
    }
    assert {n: c.id for n, c in target.snapshots().items()} == {
        n: c.id for n, c in source.snapshots().items()
    }
    for ref in ("main", "experiment", "two"):
        assert contents(target, ref) == contents(source, ref)
    assert branching.policy_of(target) == Policy(keep_last=3, keep_every=2)
    before = [record["id"] for record in target.history()]
    clone(source, target)
    assert [record["id"] for record in target.history()] == before


def test_does_a_clone_take_what_is_named(source: shardb.Store, target: shardb.Store) -> None:
    source.create_snapshot("two", "step-2")
    branching.create_branch(source, "experiment", "step-2")
    with pytest.raises(NotFoundError, match="no branch 'mian'; did you mean main"):
        clone(source, target, branches=["mian"])
    clone(source, target, branches=["experiment"], snapshots=[])
    assert list(target.branches()) == ["experiment"]
    assert target.snapshots() == {}


def test_are_all_retained_commits_cloned_when_asked_for(
    source: shardb.Store, target: shardb.Store
) -> None:
    clone(source, target, retained=True)
    assert [c.id for c in target.commits()] == [c.id for c in source.commits()]


def test_is_a_clone_over_another_run_refused(source: shardb.Store, target: shardb.Store) -> None:
    commit(target, 0, seed=3)
    before = tables(target)
    with pytest.raises(ConflictError, match="is here already"):
        clone(source, target)
    assert tables(target) == before


def test_is_a_bad_branch_name_refused(source: shardb.Store, target: shardb.Store) -> None:
    for name in ("a b", "../x", "step-4"):
        with pytest.raises(UsageError):
            copy_commit(source, target, branch=name)
    assert target.branches() == {}


def test_is_a_packed_object_copied_whole(target: shardb.Store, quick_path: Path) -> None:
    with shardb.open(quick_path / "packed", create=True) as source:
        for step in range(4):
            with source.begin() as transaction:
                weight = np.linspace(1.0, 1.0 + step, 50_000, dtype=np.float32)
                transaction.write("params/block_000", {"weight": weight})
                transaction.commit(step=step)
            if step < 2:
                source.create_snapshot(f"step-{step}")
        expected = contents(source, "step-1")
        assert pack_snapshots(source).objects
        copy_snapshot(source, target, "step-1")
    assert contents(target, "step-1") == expected
