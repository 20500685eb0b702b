"""Does a reader in another process see one whole commit, for as long as it lives and no longer?"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

import shardb
from tests.support.forked import Tell
from tests.support.nursery import SmallChild
from tests.support.store_workers import hold_lease, read_heads, started
from tests.support.stores import MEDIA, Medium, commit_step, values_of


def test_is_a_leased_commit_never_recycled_and_a_dead_readers_lease_gone(root: Path) -> None:
    with shardb.open(root, create=True) as store:
        commit_step(store, 1)
        with started(hold_lease, root, "step-1") as reader:
            assert reader.line() == "[1.0, 1.25]"
            [lease] = store.leases.describe_all()
            assert lease["pid"] == reader.process.pid
            for step in range(2, 40):
                commit_step(store, step)
            assert reader.process.poll() is None, "the reader saw its commit change"
            assert len(list((root / "objects").iterdir())) == 6
            reader.kill()
            assert store.leases.describe_all() == []
            commit_step(store, 40)
            assert len(list((root / "objects").iterdir())) == 4
            assert list((root / "leases").iterdir()) == []


def test_does_a_follower_see_whole_commits_in_order(root: Path) -> None:
    with shardb.open(root, create=True) as store:
        commit_step(store, 1)
        with started(read_heads, root) as reader:
            reader.line()
            for step in range(2, 60):
                commit_step(store, step)
            seen = [int(reader.line()) for _ in range(20)]
            assert reader.process.poll() is None
            assert seen == sorted(seen)


def read_one(root: Path, medium: str, tell: Tell) -> None:
    """Lease what is newest and read it again and again: it never changes."""
    files = Medium(medium)
    with shardb.open(root, files=files, cache_bytes=0) as store, store.at() as view:
        step = view.commit.step
        while True:
            assert values_of(view) == {"params/a": step, "params/b": step + 0.25}
            tell(step)


@pytest.mark.parametrize("medium", MEDIA)
def test_do_readers_killed_at_random_disturb_nobody(root: Path, medium: str) -> None:
    source = random.Random(medium)
    with shardb.open(root, create=True, files=Medium(medium)) as store:
        commit_step(store, 1)
    step = 1
    for _ in range(4):
        leased = step
        readers = [SmallChild(partial(read_one, root, medium)) for _ in range(3)]
        assert {reader.first() for reader in readers} == {leased}
        with shardb.open(root, files=Medium(medium)) as store:
            for reader in readers:
                for _ in range(4):
                    step += 1
                    commit_step(store, step)
                assert set(reader.kill_after(source.random() * 0.01)) == {leased}
            step += 1
            commit_step(store, step)
            assert store.leases.leased_commits() == set()
    with shardb.open(root, files=Medium(medium)) as store, store.at() as view:
        assert values_of(view) == {"params/a": step, "params/b": step + 0.25}
