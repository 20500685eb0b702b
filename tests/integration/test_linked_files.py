"""Does a store stay what it was when another directory has some of its files too?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

import shardb
from shardb.errors import ConflictError
from shardb.filesystem import RealFileSystem
from shardb.hard_links import make_own
from shardb.repair import repair
from tests.support.small_stores import commit_step, copy_store, fill_store, fsck, kinds

FIRST, LAST = 6, 12


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder on a disk, and one on a RAM disk, where objects are mapped and reused in place."""
    if request.param == "disk":
        return tmp_path
    active: Path = request.getfixturevalue("active")
    return active.parent


def go_on(root: Path, steps: Iterable[int]) -> None:
    with shardb.open(root) as store:
        for step in steps:
            commit_step(store, step)


def digests(root: Path) -> dict[str, dict[str, str]]:
    with shardb.open(root) as store:
        commits = {"main": store.resolve("main")} | store.snapshots()
        return {
            name: {shard: entry.digest for shard, entry in commit.shards.items()}
            for name, commit in commits.items()
        }


def linked(source: Path, target: Path, *, parts: tuple[str, ...] = ()) -> Path:
    """What `cp -al` makes of a store, or of some directories in it."""
    for part in parts or ("",):
        shutil.rmtree(target / part, ignore_errors=True)
        shutil.copytree(source / part, target / part, copy_function=os.link)
    return target


@pytest.fixture
def run(place: Path) -> Path:
    fill_store(place / "run", range(FIRST), snapshots=(2,))
    return place / "run"


def test_are_objects_that_a_copy_has_too_not_written_again(run: Path, place: Path) -> None:
    """What a tool leaves that replaces equal files of two copies by links."""
    copy = linked(run, copy_store(run, place / "copy"), parts=("objects", "spare"))
    before = digests(copy)
    go_on(run, range(FIRST, LAST))
    assert digests(copy) == before
    assert not fsck(copy).has_errors
    assert not fsck(run).has_errors
    go_on(copy, range(FIRST, LAST + 2))
    assert not fsck(run).has_errors


def test_are_objects_that_are_links_into_a_pool_not_written_through(run: Path, place: Path) -> None:
    pool = place / "pool"
    pool.mkdir()
    for path in (run / "objects").iterdir():
        path.rename(pool / path.name)
        path.symlink_to(pool / path.name)
    before = {path.name: path.read_bytes() for path in pool.iterdir()}
    go_on(run, range(FIRST, LAST))
    assert {path.name: path.read_bytes() for path in pool.iterdir()} == before
    assert not fsck(run).has_errors


def test_is_nothing_given_up_for_a_pool_that_is_not_there(run: Path, place: Path) -> None:
    with shardb.open(run) as store:
        head = store.resolve("main").shards["params/a"].digest
    path = run / "objects" / f"{head}.safetensors"
    path.rename(place / "elsewhere")
    path.symlink_to(place / "pool")
    [found] = [each for each in fsck(run).findings if each.severity == "error"]
    assert (found.kind, found.found) == ("object_unreadable", "a link that leads nowhere")
    outcome = repair(str(run), yes=True)
    assert outcome.plan.unmended
    assert path.is_symlink()
    (place / "elsewhere").rename(place / "pool")
    assert not fsck(run).has_errors
    with shardb.open(run) as store:
        assert store.resolve("main").step == FIRST - 1


@pytest.mark.parametrize("first", ["copy", "run"])
def test_are_a_run_and_its_linked_copy_two_stores(run: Path, place: Path, first: str) -> None:
    copy = linked(run, place / "copy")
    before = digests_of_files(copy)
    one, other = (copy, run) if first == "copy" else (run, copy)
    assert {f.kind for f in fsck(one).findings} >= {"shared_file"}, "a check says so before"
    go_on(one, range(FIRST, LAST))
    assert digests_of_files(other) == before, "nothing of the other directory was written to"
    assert "shared_file" not in kinds(fsck(other))
    with shardb.open(other) as store:
        assert store.resolve("main").step == FIRST - 1
    go_on(other, range(FIRST, LAST + 1))
    for root, step in ((one, LAST - 1), (other, LAST)):
        with shardb.open(root) as store:
            assert store.resolve("main").step == step
        assert not fsck(root).has_errors


def digests_of_files(root: Path) -> dict[str, bytes]:
    """Every file that tells of commits, or holds them; the index's lock is nobody's content."""
    paths = [p for name in ("wal", "objects") for p in (root / name).iterdir()]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def test_does_a_repair_of_a_copy_leave_the_original_alone(run: Path, place: Path) -> None:
    copy = linked(run, place / "copy")
    with shardb.open(copy) as store:
        head = store.resolve("main").shards["params/a"].digest
    (copy / "objects" / f"{head}.safetensors").unlink()
    for name in ("wal", "index"):  # as if nobody had opened it since it was made
        linked(run, copy, parts=(name,))
    before = digests_of_files(run)
    repair(str(copy), yes=True)
    assert digests_of_files(run) == before
    with shardb.open(run) as store:
        assert store.resolve("main").step == FIRST - 1


def test_is_a_copy_refused_while_the_original_is_open(run: Path, place: Path) -> None:
    with shardb.open(run) as store:
        copy = linked(run, place / "copy")
        for one in (copy, run):
            with pytest.raises(ConflictError, match="Remove the other directory, or wait") as said:
                make_own(RealFileSystem(), str(one), alone=False)
            assert "shardb clone" not in str(said.value), "it is refused as well"
        with pytest.raises(ConflictError, match="hard-linked copy"):
            shardb.open(copy)
        commit_step(store, FIRST)
    with shardb.open(run) as store:
        assert store.resolve("main").step == FIRST
