"""Does an open store answer, lease, name and close as it says?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardb
from shardb.errors import (
    ConflictError,
    NotFoundError,
    ObjectCorruptError,
    ObjectMissingError,
    SnapshotExistsError,
    UsageError,
)
from shardb.filesystem import RealFileSystem
from tests.support.stores import (
    MEDIA,
    InterposedFiles,
    Medium,
    commit_step,
    filled,
    flip_bit,
    value_of,
    values_of,
)


def test_is_an_empty_store_empty(store: shardb.Store) -> None:
    assert (store.branches(), store.snapshots(), store.commits()) == ({}, {}, [])
    assert store.durable_step() is None
    assert store.durable_step("other") is None
    for use in (store.resolve, store.at):
        with pytest.raises(NotFoundError, match="no commit yet"):
            use()


def test_is_a_commit_read_in_every_way_it_can_be_named(store: shardb.Store) -> None:
    first, second = commit_step(store, 1), commit_step(store, 2)
    store.create_snapshot("good", "step-1")
    ways: list[tuple[dict[str, Any], shardb.Commit]] = [
        ({}, second),
        ({"branch": "main"}, second),
        ({"step": 1}, first),
        ({"commit": first.id}, first),
        ({"snapshot": "good"}, first),
        ({"ref": "good"}, first),
        ({"ref": first.id[:14]}, first),
    ]
    for named, expected in ways[:-1]:
        with store.at(**named) as view:
            assert view.commit == expected
            assert values_of(view) == {"params/a": expected.step, "params/b": expected.step + 0.25}
    with store.snapshot("good") as view:
        assert view.commit == first
    assert store.durable_step() == 2


def test_is_a_wrong_name_refused_by_the_views_too(store: shardb.Store) -> None:
    commit_step(store, 1)
    with pytest.raises(NotFoundError, match="no snapshot 'x'"):
        store.snapshot("x")
    with pytest.raises(UsageError, match="in one way"):
        store.at(step=1, branch="main")
    with store.at() as view, pytest.raises(NotFoundError, match="did you mean params/"):
        view.read("params/A")
    assert list((Path(store.root) / "leases").iterdir()) == []


def test_is_a_closed_view_refused(store: shardb.Store) -> None:
    commit_step(store, 1)
    view = store.at()
    assert view.names() == ["params/a", "params/b"]
    view.close()
    view.close()
    with pytest.raises(UsageError, match="closed"):
        view.read("params/a")


def test_does_a_view_keep_its_commit_while_others_go(store: shardb.Store) -> None:
    commit_step(store, 1)
    with store.at() as view:
        for step in range(2, 8):
            commit_step(store, step)
            assert values_of(view) == {"params/a": 1.0, "params/b": 1.25}
        assert [commit.step for commit in store.commits()] == [6, 7]
        assert len(os.listdir(f"{store.root}/objects")) == 6
    commit_step(store, 8)
    assert len(os.listdir(f"{store.root}/objects")) == 4


def test_does_a_view_of_another_open_store_count_too(store: shardb.Store) -> None:
    commit_step(store, 1)
    with shardb.open(store.root, cache_bytes=0) as reader, reader.at() as view:
        for step in range(2, 6):
            commit_step(store, step)
        assert values_of(view) == {"params/a": 1.0, "params/b": 1.25}
        with reader.at() as newest:
            assert values_of(newest) == {"params/a": 5.0, "params/b": 5.25}


def test_are_retired_files_used_again_and_bounded(store: shardb.Store) -> None:
    def files() -> int:
        return len(os.listdir(f"{store.root}/objects")) + len(os.listdir(f"{store.root}/spare"))

    for step in range(1, 6):
        commit_step(store, step)
    before = files()
    for step in range(6, 26):
        commit_step(store, step)
    assert files() <= before + 2


def test_is_a_staged_shard_of_another_process_not_touched(store: shardb.Store) -> None:
    """Two writers on two branches: each one's staging is its own."""
    with (
        shardb.open(store.root) as other,
        store.begin("a.b") as first,
        other.begin("a") as second,
    ):
        for number, transaction in enumerate((first, second)):
            transaction.write("x", filled(number))
            transaction.commit(step=1)
    for branch, value in (("a.b", 0), ("a", 1)):
        with store.at(branch=branch) as view:
            assert value_of(view.read("x")) == value


def test_does_recommitting_a_leased_condemned_object_hurt_nobody(store: shardb.Store) -> None:
    commit_step(store, 1)
    with store.at() as view:
        for step in (2, 3, 4):
            commit_step(store, step)
        commit_step(store, 5, fill=1)
        assert values_of(view) == {"params/a": 1.0, "params/b": 1.25}
    for step in (6, 7):
        commit_step(store, step)
        with store.at(step=max(5, step - 1)) as view:
            assert value_of(view.read("params/a")) == (1.0 if step == 6 else 6.0)


def test_does_recommitting_after_the_lease_ended_hurt_nobody(store: shardb.Store) -> None:
    commit_step(store, 1)
    with store.at() as view:
        for step in (2, 3):
            commit_step(store, step)
        assert values_of(view)
    commit_step(store, 4, fill=1)
    for step in (5, 6, 7):
        with store.at() as view:
            assert value_of(view.read("params/a")) == (1.0 if step == 5 else step - 1)
        commit_step(store, step)


@pytest.mark.parametrize("medium_name", MEDIA)
def test_is_what_another_process_recycled_never_read_from_memory(
    root: Path, medium_name: str
) -> None:
    """The first store has step 1 in memory; the second recycles its files, then makes it anew."""
    files = Medium(medium_name)
    with shardb.open(root, create=True, files=files) as first:
        commit_step(first, 1)
        first.locks.release_branch("main")
        with shardb.open(root, files=files) as second:
            for step in (2, 3, 4, 5):
                commit_step(second, step)
            commit_step(second, 6, fill=1)
            with first.at() as view:
                assert values_of(view) == {"params/a": 1.0, "params/b": 1.25}
            second.locks.release_branch("main")
        for step in (7, 8, 9, 10):
            commit_step(first, step)
            with first.at() as view:
                assert values_of(view) == {"params/a": step, "params/b": step + 0.25}


def test_is_damage_found_when_a_shard_is_first_read(root: Path) -> None:
    with shardb.open(root, create=True) as store:
        commit = commit_step(store, 1)
    path = root / "objects" / f"{commit.shards['params/a'].digest}.safetensors"
    flip_bit(path, 4200)
    with shardb.open(root) as store, store.at() as view:
        with pytest.raises(ObjectCorruptError, match="fsck"):
            view.read("params/a")
        assert value_of(view.read("params/b")) == 1.25
    with shardb.open(root, verify=False) as store, store.at() as view:
        assert view.read("params/a").bytes == path.stat().st_size
    path.unlink()
    with (
        shardb.open(root) as store,
        store.begin() as transaction,
        pytest.raises(ObjectMissingError, match="missing"),
    ):
        transaction.read("params/a")


# Snapshots


def test_does_a_snapshot_pin_its_commit_for_good(store: shardb.Store) -> None:
    commit_step(store, 1)
    assert store.create_snapshot("step-1").step == 1
    assert store.create_snapshot("newest").step == 1
    for step in range(2, 6):
        commit_step(store, step)
    assert {n: c.step for n, c in store.snapshots().items()} == {"step-1": 1, "newest": 1}
    with store.snapshot("step-1") as view:
        assert values_of(view) == {"params/a": 1.0, "params/b": 1.25}


def test_is_the_same_snapshot_again_fine_and_another_refused(store: shardb.Store) -> None:
    commit_step(store, 1)
    store.create_snapshot("good")
    before = len(list(store.history()))
    assert store.create_snapshot("good").step == 1
    assert len(list(store.history())) == before
    commit_step(store, 2)
    with pytest.raises(SnapshotExistsError, match="pins step 1") as caught:
        store.create_snapshot("good")
    assert caught.value.exit_code == 5
    assert store.create_snapshot("good", "step-1").step == 1


@pytest.mark.parametrize("name", ["", "a b", "../x", "a\n"])
def test_is_a_bad_snapshot_name_refused(store: shardb.Store, name: str) -> None:
    commit_step(store, 1)
    with pytest.raises(UsageError, match="not a valid name"):
        store.create_snapshot(name)


def test_may_no_name_mean_two_things(store: shardb.Store) -> None:
    commit_step(store, 1)
    store.create_snapshot("good")
    with pytest.raises(ConflictError, match="is a branch"):
        store.create_snapshot("main")
    with pytest.raises(ConflictError, match="is a snapshot"):
        store.begin("good")
    with pytest.raises(UsageError, match="mean steps"):
        store.begin("step-4")
    with pytest.raises(NotFoundError, match="step 9 is not retained; retained steps: 1"):
        store.create_snapshot("step-9")


def test_does_a_snapshot_read_no_object(root: Path) -> None:
    files = InterposedFiles("open", lambda *_: None)
    with shardb.open(root, create=True, files=files) as store:
        commit_step(store, 1)

        def refuse(path: str, *_: object) -> None:
            assert "/objects/" not in path

        files.before = refuse
        assert store.create_snapshot("good").step == 1


# Opening


def test_are_network_file_systems_refused_unless_forced(root: Path) -> None:
    files = Medium("network:nfs")
    shardb.open(root, create=True, files=RealFileSystem()).close()
    with pytest.raises(UsageError, match=r"network file system \(nfs\)"):
        shardb.open(root, files=files)
    with shardb.open(root, files=files, allow_network=True) as store:
        commit_step(store, 1)


def test_is_a_volatile_medium_told(root: Path) -> None:
    with shardb.open(root, create=True, files=Medium("memory:tmpfs")) as store:
        assert [w["what"] for w in store.recovery.warnings] == ["volatile medium"]


def test_is_the_path_of_a_store_whatever_the_directory_becomes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir()
    monkeypatch.chdir(root.parent)
    with shardb.open("run", create=True) as store:
        monkeypatch.chdir("/")
        commit_step(store, 1)
        assert store.root == str(root)


def test_does_importing_the_store_import_no_torch() -> None:
    code = "import sys, shardb; sys.exit('torch' in sys.modules or 'typer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
