"""Killed, stopped, rivalled and out of power: a slice of `make kills` and `make realfaults`.

Real processes and, where the machine lets us mount, real file systems.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import shardb
from shardb import branching
from tests.support.nursery import SmallChild
from tests.support.stores import MEDIA, last_segment
from tools import crash_devices
from tools.crash_devices import SkippedError, cut_power, full_disks, make_loop_file, mounted
from tools.crash_kills import OTHERS, WRITERS, Digests, LostError, World, reference_run, train

ROUNDS = 5
STEPS = 24
CUTS = 2


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[Digests]:
    """Give the digests of a run that nobody kills."""
    return reference_run(tmp_path_factory.mktemp("reference") / "run")


@pytest.fixture
def world(scratch: str, reference: list[Digests]) -> World:
    """Give a world without a store yet."""
    root = Path(scratch) / "run"
    return World(root=root, medium="disk", writer="trainer", reference=reference)


@contextmanager
def skipping() -> Iterator[None]:
    """Skip where the machine does not allow it."""
    try:
        yield
    except SkippedError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_is_nothing_lost_when_everybody_is_killed(writer: str, medium: str, world: World) -> None:
    world.writer, world.medium = writer, medium
    draw, kills = random.Random(), Counter[str]()
    for _ in range(ROUNDS):
        world.round(draw, kills)
    assert kills[writer] == ROUNDS
    assert set(kills) <= {writer, "stopped", *OTHERS}
    assert world.told >= 0, "some step was made"


def stopped_after(world: World, steps: int) -> None:
    """Train so many steps, and end."""
    child = SmallChild(partial(train, world.root, world.medium, steps_max=steps))
    world.told = max(child.finish())


def test_would_a_lost_step_be_noticed(world: World) -> None:
    """The control arm: the log without its last record, and no index that knows of it."""
    stopped_after(world, STEPS)
    world.check(set())
    shutil.rmtree(world.root / "index")
    segment = last_segment(world.root)
    os.truncate(segment, segment.stat().st_size - 5)
    with pytest.raises(LostError, match=f"step {world.told} was told"):
        world.check(set())


def test_would_another_run_or_a_lost_snapshot_be_noticed(world: World) -> None:
    stopped_after(world, STEPS)
    with pytest.raises(LostError, match="snapshots"):
        world.check({STEPS + 1})
    with shardb.open(world.root) as store:
        branching.delete_snapshot(store, "step-7")
    world.pinned = {"step-7": "it had an id"}
    with pytest.raises(LostError, match="step-7"):
        world.check(set())
    world.pinned = {}
    world.reference = [world.reference[0]] * len(world.reference)
    with pytest.raises(LostError, match="never killed"):
        world.check(set())


def test_is_nothing_lost_when_a_file_system_loses_power(tmp_path: Path) -> None:
    with skipping():
        reached = crash_devices.power_cuts(tmp_path, CUTS, random.Random())
    assert reached >= 0


def test_does_a_cut_of_power_lose_what_is_not_synced(tmp_path: Path) -> None:
    """The control arm of the instrument: a file that was written and never synced is gone."""
    image = tmp_path / "disk.ext4"
    with skipping():
        make_loop_file(image)
        with mounted(tmp_path / "mounted", ["-o", "loop", str(image)]) as place:
            (place / "synced").write_bytes(b"x" * 5000)
            subprocess.run(["sync", "-f", str(place)], check=True)
            (place / "lost").write_bytes(b"x" * 5000)
            cut_power(place)
        with mounted(tmp_path / "mounted", ["-o", "loop", str(image)]) as place:
            assert (place / "synced").read_bytes() == b"x" * 5000
            assert not (place / "lost").exists()


def test_is_nothing_lost_on_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_devices, "STEP_BYTES", 24 << 10)
    with skipping():
        counts = full_disks(tmp_path, ["commit", "pack"], random.Random(), passes=1)
    for verb in ("commit", "pack"):
        assert 0 < counts[f"{verb}, full"] < counts[f"{verb}, runs"]
