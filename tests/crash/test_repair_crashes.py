"""A repair of each damage, crashed at any operation, and the repair of that crashed again.

Whatever was cut short, and however often: one more repair gives what an undisturbed one gives.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardb.filesystem import RealFileSystem
from shardb.repair_log_acts import _Mending
from shardb.repair_objects import Wishes
from shardb.repair_sources import StoreFiles
from shardb.testing.counts import Counts
from shardb.testing.explorer import STORE, ExploreLimits, explore_recorded
from shardb.testing.images import ImageLimits
from shardb.testing.repairs import crashed_repairs, damaged_store, recorded_repair
from tests.support import damage as d
from tests.support.ram_disk import scratch_directory
from tests.support.small_stores import copy_store, fill_store

COPY = "copy"
# Disks of each operation; `make crash-repairs` takes more of them.
IMAGES = int(os.environ.get("REPAIR_IMAGES", "1"))
LIMITS = ExploreLimits(
    images=ImageLimits(point_images=IMAGES),
    indexes="one",
    earlier_indexes=1,
    audit_every=2,
    violations=3,
)


def both(*damages: d.Damage) -> d.Damage:
    def damage(root: Path) -> None:
        for one in damages:
            one(root)

    return damage


def reserve_as_directory(root: Path) -> None:
    (root / "reserve").unlink()
    (root / "reserve").mkdir()


CASES: dict[str, tuple[d.Damage, dict[str, Any]]] = {
    "FORMAT": (d.remove("FORMAT"), {}),
    "index and FORMAT": (both(d.remove("index"), d.remove("FORMAT")), {}),
    "a record": (d.spoil_record(5), {}),
    "a record and the index": (d.without_index(d.spoil_record(5)), {}),
    "the last record, cut": (d.spoil_record(-1), {"wishes": Wishes(cut=True)}),
    "a closed segment": (d.spoil_closed_segment, {}),
    "an object of a snapshot": (d.spoil_object(2, "params/a"), {}),
    "an object of the head": (d.remove_object(-1, "params/a"), {}),
    "objects, from a copy": (
        both(d.spoil_object(2, "params/a"), d.remove_object(6, "optim/a")),
        {COPY: True},
    ),
    "log and objects, from a copy": (
        both(d.spoil_object(2, "params/a"), d.spoil_record(3), d.remove("index")),
        {COPY: True},
    ),
    "what lies in the way": (reserve_as_directory, {}),
}


@pytest.fixture(scope="module")
def whole() -> Iterator[Path]:
    """Steps 0 to 6, with a snapshot, and a second segment of the log."""
    with scratch_directory() as path:
        root = Path(path) / "whole"
        fill_store(root, range(7), snapshots=(2,), segment_bytes=6000)
        yield root


def explored(name: str, whole: Path, scratch: str, *, within: int = IMAGES) -> Counts:
    """Crash a repair everywhere, and then some of the repairs that such crashes need."""
    damage, how = CASES[name]
    if how.get(COPY):
        how = {"source": StoreFiles(RealFileSystem(), str(whole))}
    root = Path(scratch) / "damaged"
    root.mkdir()
    damage(copy_store(whole, root / STORE))
    damaged = damaged_store(str(root), how, scratch)
    shutil.rmtree(root)
    with recorded_repair(damaged, scratch) as recorded:
        counts = explore_recorded(recorded, scratch=scratch, limits=LIMITS, seed=len(name))
        inner = list(crashed_repairs(damaged, recorded, len(name), within))
    for number, (called, crashed) in enumerate(inner):
        with recorded_repair(crashed, scratch) as recorded:
            more = explore_recorded(recorded, scratch=scratch, limits=LIMITS, seed=number)
        counts.recoveries_crashed += 1
        counts.recovery_states += more.states
        counts.violations += more.violations
        assert not more.violations, f"{name}, {called}: {more.violations[0]}"
    return counts


@pytest.mark.parametrize("name", CASES)
def test_may_a_repair_be_crashed_and_its_repair_again(name: str, whole: Path, scratch: str) -> None:
    counts = explored(name, whole, scratch)
    print(f"{name}: {counts}")
    assert counts.states >= 3
    assert not counts.violations, "\n".join(map(str, counts.violations))


def test_would_a_log_cut_before_it_is_kept_aside_be_noticed(
    whole: Path, scratch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control arm: the log is emptied first, and written anew from what was remembered."""
    run = _Mending.run

    def careless(self: _Mending) -> None:
        path = self.log.path(self.told.sequences[-1])
        data = Path(path).read_bytes()
        file = self.files.open(path, 2)
        self.files.truncate(file, 0)
        self.files.fsync(file)
        self.files.pwrite(file, data, 0)
        self.files.fsync(file)
        self.files.close(file)
        run(self)

    monkeypatch.setattr(_Mending, "run", careless)
    assert explored("a record and the index", whole, scratch, within=0).violations
