"""Does giving space back remove all that nothing needs, and nothing else?"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

import shardb
from shardb import reserve
from shardb.branching import rewind
from shardb.errors import NotFoundError, StorageFullError
from shardb.filesystem import RealFileSystem
from shardb.gc import Collected, collect_garbage
from tests.support.small_stores import commit_step, copy_store, fsck, kinds, tree


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of the store, for spoiling."""
    return copy_store(whole, tmp_path / "run")


def litter(run: Path) -> set[str]:
    """Leave everything that a crash can leave; give the paths."""
    paths = {
        f"objects/{'0' * 32}.safetensors",
        "spare/staged.main.0123",
        "spare/held.4096.0123",
        "wal/0000000002.wal.partial",
        "index/unreadable-1.mdb",
        f"leases/{'1' * 32}.0123456789abcdef",
        "FORMAT.partial",
    }
    for path in paths:
        (run / path).write_bytes(b"litter")
    return paths


def removed(run: Path, collected: Collected) -> set[str]:
    """The paths that were removed, free files left out."""
    paths = {Path(item.path).relative_to(run).as_posix() for item in collected.removed}
    return {path for path in paths if not path.startswith("spare/free.")}


def test_does_it_free_all_that_nothing_needs(run: Path) -> None:
    littered = litter(run)
    collected = collect_garbage(str(run))
    assert removed(run, collected) | {f"objects/{'0' * 32}.safetensors"} == littered
    assert collected.freed_bytes > 0
    assert not littered & set(tree(run))
    assert list((run / "spare").iterdir()) == []
    assert fsck(run).findings == []


def test_does_it_leave_every_commit_as_it_was(run: Path) -> None:
    litter(run)
    before = {path: content for path, (content, _) in tree(run / "objects").items()}
    collect_garbage(str(run))
    after = {path: content for path, (content, _) in tree(run / "objects").items()}
    del before[f"{'0' * 32}.safetensors"]
    assert after == before
    with shardb.open(run) as store:
        assert [commit.step for commit in store.commits()] == [2, 5, 6]
        commit_step(store, 7)
    assert fsck(run).findings == []


def test_does_a_dry_run_say_it_all_and_remove_nothing(run: Path) -> None:
    littered = litter(run)
    before = {path: content for path, (content, _) in tree(run).items()}
    told = collect_garbage(str(run), dry_run=True)
    assert {path: content for path, (content, _) in tree(run).items()} == before
    assert removed(run, told) == littered
    assert told.freed_bytes == collect_garbage(str(run)).freed_bytes


def test_is_the_second_time_nothing_left(run: Path) -> None:
    litter(run)
    collect_garbage(str(run))
    before = tree(run)
    assert collect_garbage(str(run)).removed == []
    assert set(tree(run)) == set(before)


def test_is_what_is_in_use_left_alone(run: Path) -> None:
    with shardb.open(run) as store, store.at(step=5) as view, store.begin() as txn:
        shard = txn.stage("params/a", like=txn.read("params/a"))
        shard.array("w")[:] = 1
        shard.seal()
        while store.writer.pending:
            pass
        collected = collect_garbage(str(run))
        assert removed(run, collected) == set()
        for name in ("params/b", "optim/a"):
            txn.stage(name, like=txn.read(name)).array("w")[:] = 2
        txn.commit(step=7)
        assert view.read("params/a").array("w")[0] == 50
    assert fsck(run).findings == []


def test_is_a_commit_given_up_when_its_last_reader_has_died(run: Path) -> None:
    with shardb.open(run) as store:
        view = store.at(step=5)
        for step in (7, 8, 9):
            commit_step(store, step)
        step_5 = {f"{entry.digest}.safetensors" for entry in view.commit.shards.values()}
        shared = {f"{e.digest}.safetensors" for e in store.resolve().shards.values()}
        collect_garbage(str(run))
        present = {path.name for path in (run / "objects").iterdir()}
        assert step_5 <= present
        view.close()
    collect_garbage(str(run))
    assert not (step_5 - shared) & {path.name for path in (run / "objects").iterdir()}
    assert fsck(run).findings == []


def test_are_the_commits_behind_a_rewind_given_up(run: Path) -> None:
    with shardb.open(run) as store:
        left = store.resolve()
        rewind(store, "main", "step-5")
    assert collect_garbage(str(run), dry_run=True).abandoned == [left.id]
    with shardb.open(run) as store:
        assert store.resolve(left.id) == left
    assert collect_garbage(str(run)).abandoned == [left.id]
    with shardb.open(run) as store, pytest.raises(NotFoundError):
        store.resolve(left.id)
    assert fsck(run).findings == []


def test_does_no_record_appear_where_nothing_was_rewound(run: Path) -> None:
    before = tree(run / "wal")
    collect_garbage(str(run))
    assert tree(run / "wal") == before


def test_is_a_place_without_a_store_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        collect_garbage(str(tmp_path))


# The reserve


class FullDisk(RealFileSystem):
    """A disk with a given number of free bytes for the reserve."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes

    def allocate(self, file: int, length: int, *, keep_size: bool) -> None:
        if length > self.free_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().allocate(file, length, keep_size=keep_size)


def test_has_every_new_store_a_reserve(whole: Path) -> None:
    assert (whole / "reserve").stat().st_blocks * 512 >= reserve.RESERVE_BYTES


@pytest.mark.parametrize(
    ("free_bytes", "size_bytes"),
    [(2 << 20, 1 << 20), (1 << 20, 1 << 20), (200 << 10, 192 << 10), (1000, None), (0, None)],
)
def test_is_the_reserve_as_large_as_there_is_room(
    tmp_path: Path, free_bytes: int, size_bytes: int | None
) -> None:
    made = reserve.ensure(FullDisk(free_bytes), str(tmp_path))
    assert made == (size_bytes is not None)
    path = tmp_path / "reserve"
    assert (path.stat().st_size if path.exists() else None) == size_bytes


def test_does_a_partial_reserve_grow_when_there_is_room(tmp_path: Path) -> None:
    reserve.ensure(FullDisk(200 << 10), str(tmp_path))
    reserve.ensure(FullDisk(2 << 20), str(tmp_path))
    assert (tmp_path / "reserve").stat().st_size == reserve.RESERVE_BYTES


def test_is_the_reserve_given_up_once_and_only_when_needed(tmp_path: Path) -> None:
    files = RealFileSystem()
    reserve.ensure(files, str(tmp_path))
    assert reserve.with_reserve(files, str(tmp_path), lambda: 7) == 7
    tries: list[bool] = []

    def act() -> str:
        tries.append((tmp_path / "reserve").exists())
        if tries[-1]:
            raise StorageFullError("full")
        return "done"

    assert reserve.with_reserve(files, str(tmp_path), act) == "done"
    assert tries == [True, False]
    assert (tmp_path / "reserve").exists()


def test_is_a_full_disk_reported_where_the_reserve_is_gone(tmp_path: Path) -> None:
    def act() -> None:
        raise StorageFullError("full")

    with pytest.raises(StorageFullError):
        reserve.with_reserve(RealFileSystem(), str(tmp_path), act)


def test_does_collecting_make_the_reserve_anew(run: Path) -> None:
    (run / "reserve").unlink()
    collect_garbage(str(run))
    assert (run / "reserve").exists()


def test_is_an_index_that_is_gone_no_hindrance(run: Path) -> None:
    shutil.rmtree(run / "index")
    litter_path = run / "objects" / f"{'0' * 32}.safetensors"
    litter_path.write_bytes(b"litter")
    collect_garbage(str(run))
    assert not litter_path.exists()
    assert kinds(fsck(run)) == []


# Interrupted


class Killed(BaseException):
    """The process ends here."""


class Mortal(RealFileSystem):
    """A file system whose process is killed before the n-th change."""

    def __init__(self, dies_at: int) -> None:
        self.changes = 0
        self.dies_at = dies_at

    def count(self) -> None:
        self.changes += 1
        if self.changes == self.dies_at:
            raise Killed

    def unlink(self, path: str) -> None:
        self.count()
        super().unlink(path)

    def rename(self, source: str, target: str) -> None:
        self.count()
        super().rename(source, target)

    def allocate(self, file: int, length: int, *, keep_size: bool) -> None:
        self.count()
        super().allocate(file, length, keep_size=keep_size)

    def database_committed(self, path: str) -> None:
        self.count()


def test_does_an_interrupt_anywhere_leave_the_store_whole(run: Path, tmp_path: Path) -> None:
    with shardb.open(run) as store:
        rewind(store, "main", "step-5")
    litter(run)
    points = 0
    while True:
        points += 1
        copy = copy_store(run, tmp_path / f"copy-{points}")
        try:
            collect_garbage(str(copy), files=Mortal(points))
        except Killed:
            assert not fsck(copy).has_errors, f"killed at change {points}"
            collect_garbage(str(copy))
            assert fsck(copy).findings == [], f"killed at change {points}"
            shutil.rmtree(copy)
        else:
            break
    assert points > 15
