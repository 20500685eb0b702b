"""Repairs that are cut short: recorded like a workload, crashed anywhere, and repaired again.

Owns a damaged store as a disk, the recording of its repair, and the disks that a crash of that may
leave, whose own repair can be recorded in turn. What a repair that nobody disturbs gives is what
every other one must give in the end.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import shardb
from shardb.errors import ShardbError
from shardb.repair import repair
from shardb.testing.bases import write_index
from shardb.testing.disk import DiskState, Image
from shardb.testing.explorer import STORE, Recorded
from shardb.testing.images import ImageLimits, choices
from shardb.testing.model import Expectation, Journal, Mend, ModelStore
from shardb.testing.oracle import QuickFileSystem, index_path, observe
from shardb.testing.recording import IndexImage, RecordingFileSystem, read_tree

QUICK = QuickFileSystem()


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A damaged store: its files, its index if it has one, how it is repaired, what that gives."""

    image: Image
    index: bytes | None
    how: dict[str, Any]
    mended: ModelStore

    def lay_out(self, root: str) -> str:
        """Write the store below an empty directory; its path."""
        self.image.materialise(root)
        path = os.path.join(root, STORE)
        if self.index is not None and os.path.isdir(os.path.dirname(index_path(path))):
            write_index(path, self.index)
        return path


def damaged_store(root: str, how: dict[str, Any], scratch: str) -> Damaged:
    """Take in the store `STORE` below `root`; `how` are the words of its repair."""
    state = DiskState(read_tree(root))
    index = index_path(os.path.join(root, STORE))
    data = None
    if os.path.exists(index):
        with open(index, "rb") as file:
            data = file.read()
    copy = os.path.join(scratch, "undisturbed")
    shutil.copytree(root, copy)
    path = os.path.join(copy, STORE)
    repair(path, yes=True, files=QUICK, **how)
    with shardb.open(path, files=QUICK) as store:
        mended = observe(store)
    shutil.rmtree(copy)
    return Damaged(image=state.image({}), index=data, how=how, mended=mended)


@contextmanager
def recorded_repair(damaged: Damaged, scratch: str) -> Iterator[Recorded]:
    """Record a repair for the length of a block; wherever it is stopped, another one mends it."""
    root = os.path.join(scratch, "repaired")
    os.mkdir(root)
    try:
        path = damaged.lay_out(root)
        files = RecordingFileSystem(root)
        if damaged.index is not None:
            place = index_path(STORE)
            files.index_images.append(IndexImage(number=-1, path=place, data=damaged.index))
        start = Expectation(settled=damaged.mended, attempted=None, mend=_again(damaged.how))
        journal = Journal(lambda: len(files.operations), start=start)
        repair(path, yes=True, files=files, **damaged.how)
        files.shut_down()
        yield Recorded(files=files, journal=journal)
    finally:
        shutil.rmtree(root)


def crashed_repairs(
    damaged: Damaged, recorded: Recorded, seed: int, count: int
) -> Iterator[tuple[str, Damaged]]:
    """Some disks that a crash within a recorded repair leaves, each with what it is called."""
    draw = random.Random(seed)
    points = range(1, len(recorded.files.operations) + 1)
    state, done = DiskState(recorded.files.initial), 0
    for point in sorted(draw.sample(points, min(count, len(points)))):
        for operation in recorded.files.operations[done:point]:
            state.advance(operation)
        done = point
        limits = ImageLimits(exhaustive_operations=2, random_subsets=1, point_images=4)
        label, choice = draw.choice(list(choices(state, limits=limits, seed=seed)))
        past = [i.data for i in recorded.files.index_images if i.number < point]
        index = draw.choice([past[-1] if past else None, None])
        name = f"crashed at operation {point}, [{label}], index {'there' if index else 'gone'}"
        yield name, replace(damaged, image=state.image(choice), index=index)


def _again(how: dict[str, Any]) -> Mend:
    def mend(path: str) -> list[str]:
        try:
            outcome = repair(path, yes=True, files=QUICK, **how)
        except ShardbError as error:
            return [f"repair was refused ({error.kind}): {error}"]
        return [f"repair has left {finding.kind}" for finding in outcome.remaining]

    return mend
