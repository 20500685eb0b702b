"""What does a power loss at any operation of a copy leave in the store that receives it?

Every operation of a workload of copies is stopped at, on disks that kept all, none and some of what
was not synced, with every index; the store opens as it was before a copy or after it, and its next
commit works.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import shardb
from shardb.errors import ObjectCorruptError
from shardb.records import ShardEntry
from shardb.testing.explorer import ExploreLimits, explore
from shardb.testing.images import ImageLimits
from shardb.testing.model import Journal, ModelStore
from shardb.testing.operations import Kind, Operation
from shardb.testing.oracle import fsck_audit, observe_commit
from shardb.testing.recording import RecordingFileSystem
from shardb.transfer import copy_commit, copy_snapshot
from shardb.transfer_source import StoreSource
from tests.support.transfer_stores import commit

LIMITS = ExploreLimits(
    images=ImageLimits(
        exhaustive_operations=0,
        random_subsets=1,
        single_operations=1,
        torn_writes=1,
        every_index=False,
    ),
    earlier_indexes=1,
    recovery_every=10_000,
    kill_every=10_000,
    go_on_every=20,
)


@pytest.fixture
def source(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[shardb.Store]:
    """Steps 0 to 3, step 1 pinned; objects are copied one after another."""
    monkeypatch.setattr(StoreSource, "copies_at_once", 1)
    with shardb.open(quick_path / "source", create=True) as store:
        for step in range(4):
            commit(store, step, size=500, shards=("params/block_000", "optim/block_000"))
            if step == 1:
                store.create_snapshot("one")
        yield store


def copies(source: shardb.Store, *refs: str) -> Callable[[RecordingFileSystem, str, Journal], None]:
    """A workload: copies that are interrupted and gone on with, then a snapshot."""
    commits = [source.resolve(ref) for ref in refs]
    pinned = source.resolve("one")

    def workload(files: RecordingFileSystem, path: str, journal: Journal) -> None:
        model = ModelStore()
        journal.attempt(model)
        with shardb.open(path, create=True, files=files, writer_threads=1) as target:
            journal.acknowledge()
            for wanted in commits:
                known = observe_commit(source, wanted)
                model = replace(model.with_branch("main", known), commits=(*model.commits, known))
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(StoreSource, "chunks", broken_after(1))
                    with pytest.raises(ObjectCorruptError):
                        copy_commit(source, target, wanted.id)
                journal.attempt(model)
                copy_commit(source, target, wanted.id)
                journal.acknowledge()
            known = observe_commit(source, pinned)
            model = replace(model.with_snapshot("one", known), commits=(*model.commits, known))
            journal.attempt(model)
            copy_snapshot(source, target, "one")
            journal.acknowledge()

    return workload


def broken_after(objects: int) -> Callable[[StoreSource, ShardEntry], Iterator[memoryview]]:
    """Chunks of a source that breaks after some objects."""
    plain, left = StoreSource.chunks, [objects]

    def chunks(self: StoreSource, entry: ShardEntry) -> Iterator[memoryview]:
        left[0] -= 1
        if left[0] < 0:
            raise ObjectCorruptError("the source broke")
        yield from plain(self, entry)

    return chunks


def test_is_every_crash_of_a_copy_recovered(source: shardb.Store, quick_path: Path) -> None:
    counts = explore(
        copies(source, "step-2", "step-3"),
        scratch=scratch(quick_path),
        limits=LIMITS,
        audit=fsck_audit,
    )
    print(counts)
    assert counts.states > 500
    assert not counts.violations, "\n".join(map(str, counts.violations[:5]))


def test_would_the_explorer_notice_a_lying_sync(source: shardb.Store, quick_path: Path) -> None:
    """The control arm: objects that are reported as synced and are not."""

    def ignore(operation: Operation) -> bool:
        return operation.kind is Kind.SYNC and "spare" in str(operation)

    counts = explore(
        copies(source, "step-3"),
        scratch=scratch(quick_path),
        limits=replace(LIMITS, violations=1),
        ignore=ignore,
        audit=fsck_audit,
    )
    assert counts.violations


def scratch(quick_path: Path) -> str:
    path = quick_path / "scratch"
    path.mkdir()
    return os.fspath(path)
