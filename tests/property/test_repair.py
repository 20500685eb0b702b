"""Whatever is damaged, does a repair leave a store that is whole, of commits that were made?

It may refuse, with a typed error, when nothing is left that says what belongs together; and it may
say that something stays damaged. It never invents a commit, and never opens empty.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardb
from shardb.errors import CorruptionError
from shardb.filesystem import RealFileSystem
from shardb.repair import repair
from shardb.repair_sources import StoreFiles
from tests.support.damage import Known, check_repaired
from tests.support.small_stores import copy_store, fill_store, flip_bit, fsck

EXAMPLES = 60


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="shardb-repair-", dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def wholes(place: Path) -> list[tuple[Path, Known]]:
    """One store with a short log, one with a log of several segments."""
    fill_store(place / "short", range(7), snapshots=(2,))
    fill_store(place / "long", range(12), snapshots=(3,), segment_bytes=3000)
    return [(root, Known.of(root)) for root in (place / "short", place / "long")]


def damage(root: Path, source: random.Random) -> str:
    """Flip a bit, cut, empty or remove a file at random; of the log more often than of the rest."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != "lock.mdb"]
    wanted = source.choice(["wal", "wal", "index", "objects", "FORMAT", "wal"])
    among = [path for path in files if str(path.relative_to(root)).startswith(wanted)] or files
    path = source.choice(among)
    size = path.stat().st_size
    kind = source.choice(["flip", "flip", "flip", "cut", "empty", "remove", "append"])
    if kind == "flip" and size:
        flip_bit(path, source.randrange(size), source.randrange(8))
    elif kind == "cut" and size:
        path.write_bytes(path.read_bytes()[: source.randrange(size)])
    elif kind == "append":
        path.write_bytes(path.read_bytes() + source.randbytes(source.randrange(1, 200)))
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    return f"{kind} {path.relative_to(root)}"


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 4), which=st.integers(0, 1))
def test_is_any_damage_repaired_or_said_to_stay(
    wholes: list[tuple[Path, Known]], place: Path, seed: int, count: int, which: int
) -> None:
    source = random.Random(seed)
    whole, known = wholes[which]
    run = copy_store(whole, place / "run")
    try:
        done = [damage(run, source) for _ in range(count)]
        try:
            outcome = repair(str(run), yes=True)
        except CorruptionError as error:
            if "neither the log nor the index" in str(error):
                return
            raise
        if outcome.plan.unmended:
            assert outcome.exit_code == 1
            check_honest(run, known)
            return
        assert outcome.remaining == (), done
        # A log cut to its first record, and no index: nobody knows that there was more.
        lost = [text for text in done if "wal/" in text], [text for text in done if "index" in text]
        if not outcome.plan.loses and not all(lost):
            with shardb.open(run) as store, shardb.open(whole) as expected:
                assert store.branches() == expected.branches(), done
                assert store.snapshots() == expected.snapshots(), done
        check_repaired(run, known, may_be_empty=all(lost))
        assert repair(str(run)).plan.is_empty, done
    finally:
        shutil.rmtree(run)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 6), which=st.integers(0, 1))
def test_does_a_whole_copy_mend_everything(
    wholes: list[tuple[Path, Known]], place: Path, seed: int, count: int, which: int
) -> None:
    """The newest step and every snapshot are there again, though the index be lost."""
    source = random.Random(seed)
    whole, known = wholes[which]
    run = copy_store(whole, place / "run")
    try:
        done = [damage(run, source) for _ in range(count)]
        copy = StoreFiles(RealFileSystem(), str(whole))
        try:
            outcome = repair(str(run), yes=True, source=copy)
        except CorruptionError:
            # With FORMAT, the log and the index gone nobody knows whose copy that is.
            if any("FORMAT" in text for text in done):
                return
            raise
        assert outcome.plan.unmended == [], done
        assert not outcome.plan.loses, (done, outcome.plan.actions)
        with shardb.open(run) as store, shardb.open(whole) as expected:
            assert store.branches() == expected.branches(), done
            assert store.snapshots() == expected.snapshots(), done
        check_repaired(run, known)
    finally:
        shutil.rmtree(run)


def check_honest(run: Path, known: Known) -> None:
    """What stays damaged is still found, and no commit was invented."""
    assert fsck(run).has_errors
    with shardb.open(run) as store:
        assert {commit.id for commit in store.commits()} <= set(known.commits)
