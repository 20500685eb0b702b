"""Do copies of a packed store hold the same objects, whole, and does a killed packing lose none?"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardb
from shardb.errors import ObjectCorruptError
from shardb.pack import pack_snapshots
from shardb.transfer import clone, copy_snapshot
from tests.support.commands import REPOSITORY
from tests.support.pack_stores import contents, digest_at, fill, stored
from tests.support.small_stores import flip_bit, fsck

PACKING = "import shardb.cli as c, sys; sys.exit(c.run(['{verb}', sys.argv[1]]))"
KILLS = 6


@pytest.fixture
def packed(root: Path) -> Path:
    """A closed store with packed snapshots of steps 1, 3 and 5; its head is at step 8."""
    with shardb.open(root, create=True) as store:
        fill(store, range(9), snapshots=(1, 3, 5))
        pack_snapshots(store)
    return root


def test_is_a_clone_of_a_packed_store_the_same_and_whole(packed: Path, tmp_path: Path) -> None:
    with (
        shardb.open(packed) as source,
        shardb.open(tmp_path / "copy", create=True) as target,
    ):
        clone(source, target)
        assert contents(target) == contents(source)
        assert {n: c.shards for n, c in target.snapshots().items()} == {
            n: c.shards for n, c in source.snapshots().items()
        }
    assert stored(tmp_path / "copy")["pack"] == set()
    assert fsck(tmp_path / "copy").findings == []


def test_is_a_packed_target_not_given_what_it_has(packed: Path, tmp_path: Path) -> None:
    with shardb.open(packed) as source, shardb.open(tmp_path / "copy", create=True) as target:
        clone(source, target, branches=["main"], snapshots=["step-3"])
        fill(target, (9, 10))
        pack_snapshots(target)
        before = stored(tmp_path / "copy")
        copy_snapshot(source, target, "step-3")
        copy_snapshot(source, target, "step-5")
        after = stored(tmp_path / "copy")
        assert after["pack"] == before["pack"]
        assert len(after["safetensors"]) == len(before["safetensors"]) + 2
        assert contents(target) == {n: contents(source)[n] for n in ("step-3", "step-5")}


def test_is_damage_not_copied(packed: Path, tmp_path: Path) -> None:
    with shardb.open(packed) as source:
        digest = digest_at(source, "step-1")
    flip_bit(packed / "objects" / f"{digest}.pack", -5)
    with (
        shardb.open(packed) as source,
        shardb.open(tmp_path / "copy", create=True) as target,
        pytest.raises(ObjectCorruptError, match=digest),
    ):
        copy_snapshot(source, target, "step-5")


def killed(root: Path, verb: str, after_seconds: float) -> bool:
    """Start a command, kill it; False when it had ended by itself."""
    command = [sys.executable, "-c", PACKING.format(verb=verb), str(root)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    began = time.monotonic()
    # The kill is timed from the first sign of work, because starting takes longer than working.
    while process.poll() is None and time.monotonic() < began + 20:
        if any(path.name.startswith("staged.@pack") for path in (root / "spare").iterdir()):
            break
    time.sleep(after_seconds)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def test_does_a_killed_packing_lose_nothing(root: Path) -> None:
    with shardb.open(root, create=True) as store:
        fill(store, range(40), snapshots=range(38))
        before = contents(store)
    source, kills = random.Random(3), 0
    for number in range(KILLS):
        verb = "unpack" if number % 3 == 2 else "pack"
        kills += killed(root, verb, source.uniform(0, 0.05))
        with shardb.open(root) as store:
            assert contents(store) == before
        assert not fsck(root).has_errors
    assert kills
    with shardb.open(root) as store:
        pack_snapshots(store)
        assert contents(store) == before
    assert [p for p in (root / "spare").iterdir() if p.name.startswith("staged.")] == []
    assert fsck(root).findings == []
