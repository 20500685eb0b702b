"""Does a lock keep others out, name its owner, and end with it?"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardb import locks as locks_module
from shardb.errors import BranchLockedError
from shardb.filesystem import RealFileSystem
from shardb.locks import Locks
from tests.support.stores import InterposedFiles


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "locks").mkdir()
    return tmp_path


@pytest.fixture
def first(directory: Path) -> Iterator[Locks]:
    made = Locks(RealFileSystem(), str(directory))
    yield made
    made.close()


@pytest.fixture
def second(directory: Path) -> Iterator[Locks]:
    made = Locks(RealFileSystem(), str(directory))
    yield made
    made.close()


def test_is_the_second_writer_told_who_the_first_one_is(first: Locks, second: Locks) -> None:
    first.take_branch("main")
    with pytest.raises(BranchLockedError) as caught:
        second.take_branch("main")
    message = str(caught.value)
    assert f"process {os.getpid()} on host {socket.gethostname()}" in message
    assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", message)
    assert caught.value.exit_code == 5
    assert not second.holds_branch("main")


def test_is_a_nameless_owner_no_riddle(first: Locks, second: Locks, directory: Path) -> None:
    first.take_branch("main")
    (directory / "locks" / "branch-main").write_bytes(b"\xff not json")
    with pytest.raises(BranchLockedError, match="did not leave its name"):
        second.take_branch("main")


def test_may_two_branches_have_a_writer_each(first: Locks, second: Locks) -> None:
    first.take_branch("main")
    second.take_branch("runs/warm")
    assert first.branch_is_locked("runs/warm")
    assert second.branch_is_locked("main")
    assert not first.branch_is_locked("other")


def test_may_a_writer_take_its_branch_twice(first: Locks, second: Locks) -> None:
    first.take_branch("main")
    first.take_branch("main")
    first.release_branch("main")
    assert not second.branch_is_locked("main")


def test_is_a_branch_free_when_its_writer_closes(first: Locks, second: Locks) -> None:
    first.take_branch("main")
    first.close()
    second.take_branch("main")
    assert second.holds_branch("main")


def test_does_asking_for_a_writer_keep_nobody_out(first: Locks, directory: Path) -> None:
    """Somebody asks at the very moment when the writer takes its lock, and lets go."""
    first.take_branch("main")
    first.release_branch("main")
    asking = os.open(directory / "locks" / "branch-main", os.O_RDWR)
    files = RealFileSystem()
    assert files.lock(asking, exclusive=False, blocking=False)
    threading.Timer(0.015, os.close, [asking]).start()
    first.take_branch("main")
    assert first.holds_branch("main")


def test_may_a_full_disk_stop_the_name_but_not_the_lock(directory: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    made = Locks(InterposedFiles("pwrite", full), str(directory))
    made.take_branch("main")
    assert made.holds_branch("main")
    made.close()


def test_does_the_log_lock_keep_another_store_out(first: Locks, second: Locks) -> None:
    order: list[str] = []
    entered = threading.Event()

    def other() -> None:
        entered.set()
        with second.wal():
            order.append("second")

    with first.wal():
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait()
        time.sleep(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_does_the_log_lock_keep_another_thread_out(first: Locks) -> None:
    """flock(2) lets every thread in that has the descriptor: threads need a lock of their own."""
    order: list[str] = []
    entered = threading.Event()

    def other() -> None:
        entered.set()
        with first.wal():
            order.append("thread")

    with first.wal():
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait()
        time.sleep(0.05)
        order.append("main")
    thread.join()
    assert order == ["main", "thread"]


def test_is_the_log_lock_let_go_after_an_error(first: Locks, second: Locks) -> None:
    with pytest.raises(ValueError, match="inside"), first.wal():
        raise ValueError("inside")
    order = []
    with second.wal():
        order.append("second")
    assert order == ["second"]


def test_is_one_that_opens_the_index_alone_alone(first: Locks, second: Locks) -> None:
    assert first.share_index()
    first.settle_index()
    assert not second.share_index()
    second.settle_index()
    first.close()
    assert not Locks(RealFileSystem(), first.directory.removesuffix("/locks")).share_index()
    second.close()
    alone = Locks(RealFileSystem(), first.directory.removesuffix("/locks"))
    assert alone.share_index()
    alone.close()


def test_is_the_wait_for_a_writer_bounded() -> None:
    assert locks_module.TAKE_ATTEMPTS * locks_module.TAKE_PAUSE_SECONDS < 1


def test_are_all_writers_named_for_people(first: Locks, second: Locks, directory: Path) -> None:
    first.take_branch("main")
    second.take_branch("runs/warm")
    second.take_branch("gone")
    second.release_branch("gone")
    (directory / "locks" / "branch-main").write_bytes(b"[]")
    found = {writer.pop("branch"): writer for writer in first.writers()}
    assert set(found) == {"main", "runs/warm"}
    assert found["main"] == {}
    assert found["runs/warm"]["pid"] == os.getpid()
