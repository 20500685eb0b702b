"""Does opening a store mend what a check only warns of, and say so?"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

import shardb
from shardb.errors import LogTruncatedError, StorageFullError
from shardb.filesystem import RealFileSystem
from tests.support.small_stores import (
    SHARDS,
    commit_step,
    copy_store,
    flip_bit,
    fsck,
    kinds,
)
from tests.support.stores import Medium


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of the store."""
    return copy_store(whole, tmp_path / "run")


@pytest.mark.parametrize("name", ["spare", "leases", "locks"])
def test_is_an_empty_directory_that_a_copy_lost_made_anew(run: Path, name: str) -> None:
    shutil.rmtree(run / name)
    assert kinds(fsck(run)) == ["directory_missing"]
    with shardb.open(run) as store:
        assert [item["what"] for item in store.recovery.rebuilt] == ["directory"]
        commit_step(store, 7)
    assert fsck(run).findings == []


def test_is_a_lost_log_never_made_anew(run: Path) -> None:
    shutil.rmtree(run / "wal")
    with pytest.raises(LogTruncatedError):
        shardb.open(run)
    assert not (run / "wal").exists()
    assert kinds(fsck(run)) == ["log_missing", "log_truncated"]


def test_is_a_spare_file_of_another_size_not_reused(run: Path) -> None:
    for path in (run / "spare").iterdir():
        path.write_bytes(path.read_bytes() + b"behind the image")
    assert kinds(fsck(run)) == ["spare_misnamed"]
    with shardb.open(run) as store:
        commit_step(store, 7)
    assert not fsck(run).has_errors
    with shardb.open(run) as store, store.at(step=7) as view:
        assert [view.read(name).array("w")[0] for name in SHARDS] == [70, 71, 72]


@pytest.mark.parametrize("medium", ["disk", "memory:tmpfs"])
def test_is_a_spare_file_that_was_cut_used_whole(run: Path, medium: str) -> None:
    for path in (run / "spare").iterdir():
        path.write_bytes(b"")
    with shardb.open(run, files=Medium(medium)) as store:
        commit_step(store, 7)
    assert not fsck(run).has_errors
    with shardb.open(run) as store, store.at(step=7) as view:
        assert [view.read(name).array("w")[-1] for name in SHARDS] == [70, 71, 72]


def test_does_no_flipped_bit_of_the_index_change_an_answer(run: Path, tmp_path: Path) -> None:
    """Every 331st byte of the index, one at a time: set aside, or of no consequence."""
    with shardb.open(run) as store:
        good = {commit.id: commit.shards for commit in store.commits()}
    pristine = (run / "index/data.mdb").read_bytes()
    set_aside = 0
    for offset in range(0, len(pristine), 331):
        (run / "index/data.mdb").write_bytes(pristine)
        flip_bit(run / "index/data.mdb", offset, offset % 8)
        try:
            with shardb.open(run) as store:
                assert {commit.id: commit.shards for commit in store.commits()} == good
                set_aside += bool(store.recovery.rebuilt)
        except LogTruncatedError:
            # The witness itself was hit: nobody can tell that from a log that was cut.
            assert "log_truncated" in kinds(fsck(run))
    assert set_aside > 3, "the control: some of them do matter"


class NoSpaceForLocks(RealFileSystem):
    """A disk without room for the blocks of LMDB's lock file."""

    def allocate(self, file: int, length: int, *, keep_size: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_is_a_lock_file_without_blocks_refused_before_it_is_mapped(run: Path) -> None:
    (run / "index/lock.mdb").unlink()
    with pytest.raises(StorageFullError):
        shardb.open(run, files=NoSpaceForLocks())
    shardb.open(run).close()
    assert (run / "index/lock.mdb").stat().st_blocks * 512 >= 32 << 10
