"""Do several processes write to one store, each to a branch of its own?"""

from __future__ import annotations

import os
import re
import socket
from functools import partial
from pathlib import Path

import pytest

import shardb
from shardb.errors import BranchLockedError
from tests.support.forked import Tell
from tests.support.nursery import SmallChild
from tests.support.store_workers import hold_writer, started
from tests.support.stores import answers_at, commit_step, values_of

STEPS = 25


def test_is_a_second_process_told_who_the_writer_is(root: Path) -> None:
    with shardb.open(root, create=True) as store:
        commit_step(store, 1)
    with started(hold_writer, root) as writer:
        assert writer.line() == "writing"
        with shardb.open(root) as store:
            with pytest.raises(BranchLockedError) as caught:
                store.begin()
            message = str(caught.value)
            assert f"process {writer.process.pid} on host {socket.gethostname()}" in message
            assert re.search(r"since \d{4}-\d\d-\d\d", message)
            assert store.resolve().step == 1
            writer.kill()
            commit_step(store, 2)


def write_branch(root: Path, branch: str, tell: Tell) -> None:
    with shardb.open(root, create=True) as store:
        store.appender._segment_limit_bytes = 10_000
        for step in range(1, STEPS + 1):
            commit_step(store, step, branch=branch)
            with store.at(branch=branch) as view:
                assert values_of(view) == {"params/a": step, "params/b": step + 0.25}
            tell(step)


def test_do_writers_of_several_branches_lose_nothing(root: Path) -> None:
    """They also make the store at the same moment, and share its log, index and spare files."""
    branches = ["main", "side", "side.b"]
    writers = [SmallChild(partial(write_branch, root, branch)) for branch in branches]
    for writer in writers:
        assert writer.finish() == list(range(1, STEPS + 1))
    with shardb.open(root) as store:
        assert {n: c.step for n, c in store.branches().items()} == dict.fromkeys(branches, STEPS)
        committed = [(r["branch"], r["step"]) for r in store.history() if r["kind"] == "commit"]
        for branch in branches:
            own = [step for name, step in committed if name == branch]
            assert own == list(range(1, STEPS + 1))
        assert len({commit.id for commit in store.commits()}) == 2 * len(branches)
    before = answers_at(root)
    for name in os.listdir(root / "index"):
        os.unlink(root / "index" / name)
    assert answers_at(root) == before
