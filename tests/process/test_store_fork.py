"""Is a store safe from the children its process forks?"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import shardb
from shardb.errors import UsageError
from tests.support.store_workers import leave_orphan, started
from tests.support.stores import commit_step, filled, values_of


def in_child(work: Callable[[], None]) -> str:
    """Run `work` in a forked child; give the name of the exception that ended it, if one did."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        name = b"nothing"
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, its name is the answer
            name = type(error).__name__.encode()
        finally:
            os.write(writing, name)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        name = pipe.read()
    os.waitpid(child, 0)
    return name.decode()


def test_is_a_store_refused_in_a_forked_child(root: Path) -> None:
    with shardb.open(root, create=True) as store:
        commit_step(store, 1)
        for use in (store.branches, store.at, store.begin, store.commits, store.resolve):
            assert in_child(use) == UsageError.__name__
        assert in_child(lambda: None) == "nothing"
        commit_step(store, 2)


def test_may_a_child_open_the_store_itself(root: Path) -> None:
    def read() -> None:
        with shardb.open(root) as mine, mine.at() as view:
            assert values_of(view) == {"params/a": 1.0, "params/b": 1.25}

    with shardb.open(root, create=True) as store:
        commit_step(store, 1)
        assert in_child(read) == "nothing"


def test_does_a_child_that_unwinds_leave_the_parents_work_alone(root: Path) -> None:
    """sys.exit in a child runs the ends of all blocks that the parent is in."""
    with shardb.open(root, create=True) as store:
        commit_step(store, 1)
        with store.at() as view, store.begin() as transaction:
            for name in ("params/a", "params/b"):
                transaction.write(name, filled(2))
            before = {p.name for p in root.glob("leases/*")}

            def unwind() -> None:
                transaction.__exit__(None, None, None)
                view.__exit__(None, None, None)
                store.__exit__(None, None, None)

            assert in_child(unwind) == "nothing"
            assert {p.name for p in root.glob("leases/*")} == before
            transaction.commit(step=2)
            assert values_of(view) == {"params/a": 1.0, "params/b": 1.25}
        with store.at() as view:
            assert values_of(view) == {"params/a": 2.0, "params/b": 2.0}


def test_does_a_child_left_behind_hold_no_lock_for_its_dead_parent(root: Path) -> None:
    with shardb.open(root, create=True) as store:
        commit_step(store, 1)
    with started(leave_orphan, root) as worker:
        child = int(worker.line())
        try:
            worker.kill()
            with shardb.open(root) as store:
                commit_step(store, 2)
                assert store.leases.leased_commits() == set()
        finally:
            os.kill(child, signal.SIGKILL)
