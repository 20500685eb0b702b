"""What does a power loss at any operation of a packing, or of an unpacking, leave?

Packing changes nothing that can be read: so after every crash each snapshot must be what it was,
byte for byte, a check must find no error, and the next commit must work.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import shardb
from shardb import branching, pack_choice
from shardb.pack import pack_snapshots
from shardb.pack_undo import unpack_snapshots
from shardb.testing.explorer import ExploreLimits, explore
from shardb.testing.images import ImageLimits
from shardb.testing.model import Journal, ModelStore
from shardb.testing.operations import Kind, Operation
from shardb.testing.oracle import fsck_audit
from shardb.testing.recording import RecordingFileSystem

LIMITS = ExploreLimits(
    images=ImageLimits(
        exhaustive_operations=0,
        random_subsets=0,
        single_operations=1,
        torn_writes=1,
        every_index=False,
    ),
    earlier_indexes=0,
    recovery_every=500,
    kill_every=10_000,
    go_on_every=10,
)
# A control arm has shown what it is for with the first violation.
UNTIL_ONE = replace(LIMITS, violations=1)
SHARD = "params/a"
# Two snapshots, and the heads that retention keeps.
SNAPSHOTS, STEPS = range(2), range(4)


@pytest.fixture(autouse=True)
def no_object_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_choice, "OBJECT_BYTES_MIN", 0)


@pytest.fixture
def scratch(quick_path: Path) -> str:
    path = quick_path / "scratch"
    path.mkdir()
    return os.fspath(path)


def tensors_of(step: int) -> dict[str, np.ndarray]:
    """A start that all steps share, and a mark of each step: worth a difference."""
    values = np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8)
    values[:100] = step
    return {"w": values}


def packing(files: RecordingFileSystem, path: str, journal: Journal) -> None:
    """Pack two snapshots, remove the base, unpack the other, pack it again, remove it."""
    model = ModelStore()
    journal.attempt(model)
    with shardb.open(path, create=True, files=files, writer_threads=1) as store:
        journal.acknowledge()
        for step in STEPS:
            with store.begin() as transaction:
                transaction.write(SHARD, tensors_of(step))
                contents = {SHARD: {"w": tensors_of(step)["w"].tobytes()}}
                model = model.with_commit(step=step, shards=contents, state={})
                journal.attempt(model)
                transaction.commit(step=step)
            journal.acknowledge()
            if step in SNAPSHOTS:
                model = model.with_snapshot(f"s{step}", model.heads["main"])
                journal.attempt(model)
                store.create_snapshot(f"s{step}")
                journal.acknowledge()
        assert [item.base_step for item in pack_snapshots(store).objects] == [None, 0]
        model = removed(store, model, "s0", journal)
        assert unpack_snapshots(store, ["s1"]).objects == 1
        assert [item.base_step for item in pack_snapshots(store).objects] == [None]
        removed(store, model, "s1", journal)


def removed(store: shardb.Store, model: ModelStore, snapshot: str, journal: Journal) -> ModelStore:
    model = model.without_snapshot(snapshot)
    journal.attempt(model)
    branching.delete_snapshot(store, snapshot)
    journal.acknowledge()
    return model


def is_of_packing(operation: Operation) -> bool:
    """The first of them takes the lock; crashes of the commits before are explored elsewhere."""
    return "@pack" in str(operation)


@pytest.mark.slow
def test_is_every_crash_of_a_packing_recovered(scratch: str) -> None:
    counts = explore(packing, scratch=scratch, limits=LIMITS, audit=fsck_audit, first=is_of_packing)
    print(counts)
    assert counts.states > 500
    assert not counts.violations, "\n".join(map(str, counts.violations[:5]))


def is_sync_of_a_packed_file(operation: Operation) -> bool:
    return operation.kind is Kind.SYNC and "staged.@pack" in str(operation)


def is_sync_of_objects(operation: Operation) -> bool:
    return operation.kind is Kind.SYNC_DIRECTORY and str(operation).endswith("objects")


@pytest.mark.parametrize("ignore", [is_sync_of_a_packed_file, is_sync_of_objects])
def test_would_a_lying_sync_be_noticed(scratch: str, ignore: object) -> None:
    """The control arms: a packed file, or its name, that is not durable when the image goes."""
    counts = explore(
        packing,
        scratch=scratch,
        limits=UNTIL_ONE,
        ignore=ignore,
        audit=fsck_audit,
        first=is_of_packing,
    )
    assert counts.violations


def test_would_recycled_images_be_noticed(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control arm: an image that is overwritten while a crash may bring its name back."""
    plain = RecordingFileSystem.unlink

    def overwrite(files: RecordingFileSystem, path: str) -> None:
        if "staged.@pack" in path:
            file = files.open(path, os.O_RDWR)
            files.pwrite(file, b"other bytes" * 500, 0)
            files.fsync(file)
            files.close(file)
        plain(files, path)

    monkeypatch.setattr(RecordingFileSystem, "unlink", overwrite)
    counts = explore(
        packing, scratch=scratch, limits=UNTIL_ONE, audit=fsck_audit, first=is_of_packing
    )
    assert counts.violations
