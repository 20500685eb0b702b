"""Has every branch one writer, and the log one order?"""

from __future__ import annotations

import os
import threading

import pytest

import shardb
from shardb.errors import (
    BranchLockedError,
    ConflictError,
)
from tests.support.stores import (
    commit_step,
    filled,
    values_of,
)


def test_is_a_second_writer_of_a_branch_refused(store: shardb.Store) -> None:
    commit_step(store, 1)
    with shardb.open(store.root) as other:
        with pytest.raises(BranchLockedError, match=f"process {os.getpid()} on host"):
            other.begin()
        with other.begin("side") as transaction:
            transaction.write("a", filled(1))
            transaction.commit(step=1)
        commit_step(store, 2)
    assert {n: c.step for n, c in store.branches().items()} == {"main": 2, "side": 1}


def test_is_a_moved_branch_noticed_at_the_commit(store: shardb.Store) -> None:
    from shardb import branching

    commit_step(store, 1)
    commit_step(store, 2)
    transaction = store.begin()
    for name in ("params/a", "params/b"):
        transaction.write(name, filled(3))
    branching.rewind(store, "main", "step-1")
    with pytest.raises(ConflictError, match="has moved"):
        transaction.commit(step=3)
    commit_step(store, 3)


def test_may_threads_write_to_branches_of_their_own(store: shardb.Store) -> None:
    """The log's lock orders them: no record is lost, none overwritten."""
    failures: list[BaseException] = []

    def work(branch: str) -> None:
        try:
            for step in range(1, 16):
                commit_step(store, step, branch=branch)
                with store.at(branch=branch) as view:
                    assert values_of(view) == {"params/a": step, "params/b": step + 0.25}
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"b{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    steps = [(r["branch"], r["step"]) for r in store.history() if r["kind"] == "commit"]
    assert sorted(steps) == [(f"b{n}", step) for n in range(4) for step in range(1, 16)]


def test_does_one_thread_get_a_branch(store: shardb.Store) -> None:
    got: list[object] = []
    gate = threading.Barrier(4)

    def work() -> None:
        gate.wait()
        try:
            got.append(store.begin())
        except ConflictError as error:
            got.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(one, shardb.Transaction) for one in got) == 1
