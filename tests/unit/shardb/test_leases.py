"""Is a lease alive as long as its reader, and not a moment longer?"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardb.errors import LogDamagedError
from shardb.filesystem import RealFileSystem
from shardb.leases import Leases
from tests.support.stores import InterposedFiles

COMMIT, OTHER = "ab" * 16, "cd" * 16


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "leases").mkdir()
    return tmp_path


@pytest.fixture
def leases(directory: Path) -> Leases:
    return Leases(RealFileSystem(), str(directory))


@pytest.fixture
def others(directory: Path) -> Leases:
    """What another process would use."""
    return Leases(RealFileSystem(), str(directory))


def test_does_a_lease_live_until_it_is_given_up(leases: Leases, others: Leases) -> None:
    lease = leases.take(COMMIT)
    assert leases.still_there(lease)
    assert others.leased_commits() == {COMMIT}
    leases.release(lease)
    assert others.leased_commits() == set()
    assert not Path(lease.path).exists()


@pytest.mark.parametrize("commit", ["", "x", "../" + COMMIT, COMMIT + "\n", COMMIT.upper(), "\0"])
def test_is_an_id_refused_that_would_be_another_files_name(leases: Leases, commit: str) -> None:
    with pytest.raises(LogDamagedError, match="no commit's id"):
        leases.take(commit)
    assert os.listdir(leases.directory) == []


def test_are_leases_of_one_commit_counted_apart(leases: Leases, others: Leases) -> None:
    first, second = leases.take(COMMIT), leases.take(COMMIT)
    leases.take(OTHER)
    leases.release(first)
    assert others.leased_commits() == {COMMIT, OTHER}
    leases.release(second)
    assert others.leased_commits() == {OTHER}
    leases.release_all()
    assert others.leased_commits() == set()


def test_is_giving_up_twice_harmless(leases: Leases) -> None:
    """The second time the number of the descriptor may belong to somebody else."""
    lease = leases.take(COMMIT)
    leases.release(lease)
    innocent = os.open(leases.directory, os.O_RDONLY)
    assert innocent == lease.file
    leases.release(lease)
    assert os.fstat(innocent)
    os.close(innocent)


def test_is_the_lease_of_a_dead_reader_removed(leases: Leases, others: Leases) -> None:
    lease = leases.take(COMMIT)
    os.close(lease.file)
    assert others.leased_commits() == set()
    assert os.listdir(leases.directory) == []


def test_is_a_lease_noticed_that_was_taken_for_dead(leases: Leases) -> None:
    lease = leases.take(COMMIT)
    os.unlink(lease.path)
    assert not leases.still_there(lease)
    Path(lease.path).touch()
    assert not leases.still_there(lease)
    leases.release(lease)


def test_is_a_lease_removed_before_it_was_locked_no_error(directory: Path) -> None:
    """Between creation and lock the file is anybody's: the caller sees it and tries again."""

    def remove(*_: object, **__: object) -> None:
        for name in os.listdir(directory / "leases"):
            os.unlink(directory / "leases" / name)

    leases = Leases(InterposedFiles("lock", remove), str(directory))
    lease = leases.take(COMMIT)
    assert not leases.still_there(lease)
    leases.release(lease)


def test_does_a_lease_need_no_space(directory: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    leases = Leases(InterposedFiles("pwrite", full), str(directory))
    lease = leases.take(COMMIT)
    assert leases.leased_commits() == {COMMIT}
    leases.release(lease)


def test_is_the_owner_of_a_lease_named(leases: Leases, others: Leases) -> None:
    lease = leases.take(COMMIT)
    [described] = others.describe_all()
    assert described["commit"] == COMMIT
    assert described["pid"] == os.getpid()
    assert set(described) == {"commit", "host", "pid", "since"}
    leases.release(lease)


def test_does_describing_remove_nothing(leases: Leases, others: Leases) -> None:
    lease = leases.take(COMMIT)
    os.close(lease.file)
    assert others.describe_all() == []
    assert os.path.exists(lease.path)


def test_is_a_garbled_description_no_obstacle(leases: Leases, others: Leases) -> None:
    lease = leases.take(COMMIT)
    for text in (b"", b"[]", b"\xff", b"{"):
        os.truncate(lease.path, 0)
        os.pwrite(lease.file, text, 0)
        assert others.describe_all() == [{"commit": COMMIT}]
    leases.release(lease)


def test_are_foreign_files_left_alone(leases: Leases, directory: Path) -> None:
    for name in (".DS_Store", "notes.txt", COMMIT, f"{COMMIT}.short", "x" * 32 + "." + "0" * 16):
        (directory / "leases" / name).touch()
    (directory / "leases" / "folder").mkdir()
    before = sorted(os.listdir(directory / "leases"))
    assert leases.leased_commits() == set()
    assert sorted(os.listdir(directory / "leases")) == before


def test_does_a_lease_that_cannot_be_asked_count(leases: Leases, directory: Path) -> None:
    """Better to keep a commit too long than to recycle what somebody may be reading."""
    lease = leases.take(COMMIT)
    os.close(lease.file)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    strict = Leases(InterposedFiles("open", refused), str(directory))
    assert strict.leased_commits() == {COMMIT}
    assert leases.leased_commits() == set()


def test_does_a_forked_child_let_the_lease_be_its_parents(leases: Leases, others: Leases) -> None:
    lease = leases.take(COMMIT)
    copy = os.dup(lease.file)
    leases.abandon()
    assert os.path.exists(lease.path)
    assert others.leased_commits() == {COMMIT}
    leases.release(lease)
    assert os.path.exists(lease.path)
    os.close(copy)
    assert others.leased_commits() == set()
