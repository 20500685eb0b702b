"""Does a repair find nothing beside a live writer, and mend what a killed one left?"""

from __future__ import annotations

from pathlib import Path

import pytest

import shardb
from shardb.repair import repair
from tests.support.commands import shardb_command
from tests.support.small_stores import flip_bit, fsck, object_of
from tests.support.store_workers import commit_steps, started


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of checks does not leave the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_does_a_repair_find_nothing_beside_a_writer(root: Path) -> None:
    """Objects are retired and their files recycled all the while."""
    with started(commit_steps, root) as writer:
        writer.line()
        first = int(writer.line())
        for _ in range(20):
            assert repair(str(root)).plan.is_empty
        for _ in range(3):
            assert repair(str(root), yes=True).plan.is_empty
        writer.kill()
    with shardb.open(root) as store:
        assert store.resolve().step > first + 5, "the writer went on meanwhile"
    assert not fsck(root).has_errors


def test_is_a_snapshot_mended_beside_a_writer(root: Path, tmp_path: Path) -> None:
    with started(commit_steps, root) as writer:
        writer.line()
        assert shardb_command("snapshot", root, "kept").code == 0
        copy = tmp_path / "copy"
        assert shardb_command("clone", root, copy, "--snapshot", "kept").code == 0
        with shardb.open(root) as store:
            step = store.snapshots()["kept"].step
        flip_bit(object_of(root, step, "params/a"), -1)
        assert shardb_command("repair", root, "--from", copy).code == 1
        assert shardb_command("repair", root, "--from", copy, "--yes").code == 0
        writer.line()
        writer.kill()
    assert not fsck(root).has_errors
    with shardb.open(root) as store:
        assert store.snapshots()["kept"].step == step


def test_is_a_killed_writer_no_damage(root: Path) -> None:
    with started(commit_steps, root) as writer:
        for _ in range(5):
            writer.line()
        writer.kill()
    outcome = repair(str(root), yes=True)
    assert not outcome.plan.loses
    assert outcome.exit_code == 0
