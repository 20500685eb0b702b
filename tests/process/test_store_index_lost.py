"""Does a store give the same answers whatever happened to its index?"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import shardb
from shardb.errors import LogTruncatedError
from tests.support.stores import answers_at, commit_step, copied, flip_bit, values_of


@pytest.fixture
def closed(root: Path) -> Path:
    """A closed store of five steps with a snapshot of the second."""
    with shardb.open(root, create=True) as store:
        for step in (1, 2):
            commit_step(store, step)
        store.create_snapshot("second", "step-2")
        for step in (3, 4, 5):
            commit_step(store, step)
    return root


def test_are_the_answers_the_same_without_the_index(closed: Path) -> None:
    before = answers_at(closed)
    shutil.rmtree(closed / "index")
    assert answers_at(closed) == before


def test_is_a_lost_index_told(closed: Path) -> None:
    (closed / "index" / "data.mdb").unlink()
    with shardb.open(closed) as store:
        [rebuilt] = store.recovery.rebuilt
    assert rebuilt["what"] == "index"
    assert rebuilt["why"] == "missing"
    with shardb.open(closed) as store:
        assert store.recovery.rebuilt == []


@pytest.mark.parametrize("length", [0, 1, 4096, 8192, 20_000])
def test_are_the_answers_the_same_with_a_truncated_index(closed: Path, length: int) -> None:
    before = answers_at(closed)
    index = closed / "index" / "data.mdb"
    index.write_bytes(index.read_bytes()[:length])
    with shardb.open(closed) as store:
        assert [entry["what"] for entry in store.recovery.rebuilt] == ["index"]
    assert answers_at(closed) == before


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 8192, None])
def test_are_the_answers_the_same_whatever_the_lock_file_of_the_index_holds(
    closed: Path, content: bytes | None
) -> None:
    before = answers_at(closed)
    lock = closed / "index" / "lock.mdb"
    if content is None:
        lock.unlink()
    else:
        lock.write_bytes(content)
    assert answers_at(closed) == before


@pytest.mark.parametrize("seed", range(3))
def test_are_the_answers_the_same_with_flipped_bits_in_the_index(
    closed: Path, tmp_path: Path, seed: int
) -> None:
    """Or the witness itself is hit, and the log is refused; a wrong answer never."""
    before = answers_at(closed)
    data, source, refused = (closed / "index" / "data.mdb").read_bytes(), random.Random(seed), 0
    used = [offset for offset, byte in enumerate(data) if byte]
    for number in range(15):
        root = copied(closed, tmp_path / f"copy-{number}")
        flip_bit(root / "index" / "data.mdb", source.choice(used))
        try:
            assert answers_at(root) == before
        except LogTruncatedError:
            refused += 1
    assert refused <= 1


def test_are_the_answers_the_same_with_an_older_index(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with shardb.open(root, create=True) as store:
        commit_step(store, 1)
    copied(root / "index", tmp_path / "older")
    with shardb.open(root) as store:
        for step in (2, 3, 4):
            commit_step(store, step)
        store.create_snapshot("third", "step-3")
    before = answers_at(root)
    shutil.rmtree(root / "index")
    copied(tmp_path / "older", root / "index")
    assert answers_at(root) == before


@pytest.mark.parametrize("older", [False, True])
def test_is_a_shard_stored_again_when_its_object_was_retired_long_ago(
    tmp_path: Path, older: bool
) -> None:
    """Sweeping is not in the log: an index made anew must not believe in what was swept."""
    root = tmp_path / "run"
    with shardb.open(root, create=True) as store:
        commit_step(store, 1)
    copied(root / "index", tmp_path / "older")
    with shardb.open(root) as store:
        for step in (2, 3, 4, 5):
            commit_step(store, step)
    shutil.rmtree(root / "index")
    if older:
        copied(tmp_path / "older", root / "index")
    with shardb.open(root) as store:
        commit_step(store, 6, fill=1)
    with shardb.open(root) as store, store.at(step=6) as view:
        assert values_of(view) == {"params/a": 1.0, "params/b": 1.25}
