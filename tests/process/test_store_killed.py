"""Killed at any moment: does the store open at the old or the new step, and nothing else?"""

from __future__ import annotations

import os
import random
import shutil
from functools import partial
from pathlib import Path

import pytest

import shardb
from shardb.errors import CorruptionError
from tests.support.forked import Tell
from tests.support.nursery import SmallChild
from tests.support.stores import (
    MEDIA,
    Medium,
    commit_step,
    copied,
    last_segment,
    values_of,
)

KILLS = 30
KILLS_MAX = 4 * KILLS
DELAY_SECONDS_MAX = 0.06
SNAPSHOT_EVERY = 7
SEGMENT_BYTES = 6_000


def write_steps(root: Path, medium: str, tell: Tell) -> None:
    """Commit step after step, in small log segments, with a snapshot now and then."""
    with shardb.open(root, create=True, files=Medium(medium)) as store:
        store.appender._segment_limit_bytes = SEGMENT_BYTES
        head = store.branches().get("main")
        step = head.step if head else 0
        tell(step)
        while True:
            step += 1
            commit_step(store, step)
            tell(step)
            if step % SNAPSHOT_EVERY == 0:
                store.create_snapshot(f"step-{step}")
                tell(-step)


def check_store(root: Path, medium: str, told: list[int]) -> int:
    """The oracle: nothing told is lost, nothing is mixed, every snapshot is whole; gives the step.

    Numbers told are steps that were durable, and snapshots with a minus sign.
    """
    acknowledged = max([number for number in told if number > 0], default=0)
    with shardb.open(root, create=True, files=Medium(medium), cache_bytes=0) as store:
        head = store.branches().get("main")
        step = head.step if head else 0
        assert acknowledged <= step <= acknowledged + 1, f"step {step}, told {acknowledged}"
        for commit in store.commits():
            with store.at(commit=commit.id) as view:
                expected = {"params/a": commit.step, "params/b": commit.step + 0.25}
                assert values_of(view) == expected
                assert {entry.step for entry in commit.shards.values()} == {commit.step}
        snapshots = {commit.step for commit in store.snapshots().values()}
        assert {-number for number in told if number < 0} <= snapshots
        committed = [r["step"] for r in store.history() if r["kind"] == "commit"]
        assert committed == list(range(1, step + 1))
    return step


@pytest.mark.parametrize("medium", MEDIA)
def test_does_a_store_survive_being_killed_at_any_moment(tmp_path: Path, medium: str) -> None:
    source = random.Random(medium)
    root, told, steps = tmp_path / "run", [0], []
    # On a busy machine many a child dies before its first step: those kills count for little.
    while len(steps) < KILLS or (steps[-1] <= KILLS / 2 and len(steps) < KILLS_MAX):
        child = SmallChild(partial(write_steps, root, medium))
        if source.random() < 0.8:
            assert child.first() == steps[-1] if steps else True
        told += child.kill_after(source.random() * DELAY_SECONDS_MAX)
        steps.append(check_store(root, medium, told))
    assert steps[-1] > KILLS / 2, "the writer hardly got anywhere: the test shows little"
    assert len(list((root / "wal").iterdir())) > 1


def test_would_a_lost_step_be_noticed(tmp_path: Path) -> None:
    """The control arm: the same oracle, shown a store that lost its last record."""
    root = tmp_path / "run"
    with shardb.open(root, create=True) as store:
        for step in range(1, 9):
            commit_step(store, step)
    assert check_store(root, "disk", [8]) == 8
    lost = copied(root, tmp_path / "lost")
    shutil.rmtree(lost / "index")
    os.truncate(last_segment(lost), last_segment(lost).stat().st_size - 5)
    with pytest.raises(AssertionError, match="step 7, told 8"):
        check_store(lost, "disk", [8])
    with pytest.raises(AssertionError):
        check_store(root, "disk", [8, -4])
    refused = copied(root, tmp_path / "refused")
    os.truncate(last_segment(refused), 300)
    with pytest.raises(CorruptionError):
        check_store(refused, "disk", [8])


def test_does_a_killed_opening_change_nothing(tmp_path: Path) -> None:
    """Killed while it makes the store, or rebuilds the index, or catches up."""
    source = random.Random(5)
    root = tmp_path / "run"
    for number in range(KILLS):
        if number % 3 == 0:
            shutil.rmtree(root / "index", ignore_errors=True)
        child = SmallChild(partial(open_only, root))
        child.kill_after(source.random() * 0.02)
    with shardb.open(root, create=True) as store:
        assert store.branches() == {}
        commit_step(store, 1)


def open_only(root: Path, tell: Tell) -> None:
    with shardb.open(root, create=True) as store:
        tell(len(store.branches()))
