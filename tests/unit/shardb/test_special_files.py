"""Is a pipe or a device in the place of a store's file refused, and never waited for?

An alarm ends a test that waits: a pipe that is opened for reading waits for a writer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shardb
from shardb.errors import ShardbError, StorageFailedError
from shardb.repair import repair
from tests.support.small_stores import fill_store, fsck, kinds, object_of, tree

PLACES = ("FORMAT", "wal/0000000001.wal", "index/data.mdb", "locks/wal")


def made_pipe(path: Path) -> None:
    os.mkfifo(path)


def linked_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.fixture(autouse=True)
def never_waiting() -> Iterator[None]:
    def stop(_number: int, _frame: object) -> None:
        pytest.fail("a pipe is waited for")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(root: Path) -> Path:
    fill_store(root, range(3), snapshots=(2,))
    return root


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("put", [made_pipe, linked_device])
def test_is_it_named(run: Path, place: str, put: Callable[[Path], None]) -> None:
    (run / place).unlink()
    put(run / place)
    with pytest.raises(StorageFailedError, match="a pipe, a socket or a device") as caught:
        shardb.open(run)
    assert caught.value.path == str(run / place)


@pytest.mark.parametrize("place", ["FORMAT", "index/data.mdb", "locks/wal"])
def test_does_a_repair_leave_everything_where_it_is(run: Path, place: str) -> None:
    (run / place).unlink()
    made_pipe(run / place)
    before = {name for name in tree(run) if "objects/" in name or "wal/" in name}
    with pytest.raises(ShardbError):
        repair(str(run), yes=True)
    assert before <= set(tree(run))


def test_is_a_pipe_in_the_place_of_an_object_found(run: Path) -> None:
    path = object_of(run, 2, "params/a")
    path.unlink()
    made_pipe(path)
    assert kinds(fsck(run)) == ["object_unreadable"]
    assert repair(str(run), yes=True).plan.unmended, "its bytes may be whole elsewhere"
