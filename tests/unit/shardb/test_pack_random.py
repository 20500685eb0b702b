"""Is every snapshot what it was, whatever is packed, removed, remade and held in between?

Contents come from a few versions only, so that objects that were retired come back; readers hold
commits for long; the index is lost now and then; processes work beside each other.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import shardb
from shardb import branching, pack_choice
from shardb.gc import collect_garbage
from shardb.pack import pack_snapshots
from shardb.pack_undo import unpack_snapshots
from tests.support.small_stores import fsck
from tests.support.stores import Medium

SHARDS = ("params/a", "optim/a")
VERSIONS = 8
OPERATIONS = 100
Contents = dict[str, bytes]


@pytest.fixture(autouse=True)
def no_object_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_choice, "OBJECT_BYTES_MIN", 0)


def tensors_of(shard: str, version: int) -> dict[str, np.ndarray]:
    values = np.random.default_rng(len(shard)).integers(0, 256, 3000, dtype=np.uint8)
    values[:200] = version
    return {"w": values}


class Life:
    """One store and what it must hold."""

    def __init__(self, root: Path, medium: Medium, seed: int) -> None:
        self.root = root
        self.medium = medium
        self.source = random.Random(seed)
        self.store = shardb.open(root, create=True, files=medium)
        self.snapshots: dict[str, Contents] = {}
        self.head: Contents = {}
        self.step = 0
        self.readers: list[tuple[shardb.ReadView, Contents]] = []

    def commit(self) -> None:
        versions = {shard: self.source.randrange(VERSIONS) for shard in SHARDS}
        with self.store.begin() as transaction:
            for shard, version in versions.items():
                transaction.write(shard, tensors_of(shard, version))
            transaction.commit(step=self.step)
        self.head = {s: tensors_of(s, v)["w"].tobytes() for s, v in versions.items()}
        self.step += 1

    def snapshot(self) -> None:
        name = f"s{self.step}"
        if self.step and name not in self.snapshots:
            self.store.create_snapshot(name)
            self.snapshots[name] = self.head

    def delete(self) -> None:
        if self.snapshots:
            name = self.source.choice(sorted(self.snapshots))
            branching.delete_snapshot(self.store, name)
            del self.snapshots[name]

    def pack(self) -> None:
        pack_snapshots(self.store)

    def unpack(self) -> None:
        some = [name for name in sorted(self.snapshots) if self.source.random() < 0.5]
        unpack_snapshots(self.store, some)

    def hold(self) -> None:
        if self.snapshots and len(self.readers) < 3:
            name = self.source.choice(sorted(self.snapshots))
            self.readers.append((self.store.snapshot(name), self.snapshots[name]))

    def let_go(self) -> None:
        if self.readers:
            self.readers.pop(self.source.randrange(len(self.readers)))[0].close()

    def gc(self) -> None:
        collect_garbage(str(self.root), files=self.medium)

    def reopen(self) -> None:
        while self.readers:
            self.let_go()
        self.store.close()
        if self.source.random() < 0.5:
            (self.root / "index" / "data.mdb").unlink()
        self.store = shardb.open(self.root, files=self.medium)
        if self.source.random() < 0.3:
            self.store.appender._segment_limit_bytes = 1  # the next record begins a segment

    def check(self) -> None:
        found = {name: self.read(self.store.snapshot(name)) for name in self.store.snapshots()}
        assert found == self.snapshots
        if self.step:
            assert self.read(self.store.at()) == self.head
        for view, contents in self.readers:
            assert {shard: view.read(shard).raw("w").tobytes() for shard in SHARDS} == contents

    def read(self, view: shardb.ReadView) -> Contents:
        with view:
            return {shard: view.read(shard).raw("w").tobytes() for shard in SHARDS}


ACTS = (
    *[Life.commit, Life.snapshot, Life.pack] * 4,
    *[Life.delete] * 2,
    *[Life.unpack, Life.hold, Life.let_go, Life.gc, Life.reopen],
)


@pytest.mark.parametrize("seed", range(8))
def test_is_every_snapshot_what_it_was(root: Path, medium: Medium, seed: int) -> None:
    life = Life(root, medium, seed)
    done: list[str] = []
    try:
        for _ in range(OPERATIONS):
            act = life.source.choice(ACTS)
            done.append(act.__name__)
            act(life)
            life.check()
    except Exception as error:
        raise AssertionError(f"seed {seed}, after {' '.join(done)}") from error
    finally:
        while life.readers:
            life.let_go()
        life.store.close()
    assert not fsck(root).has_errors
    with shardb.open(root, files=medium) as store:
        store.appender.sweep()
    collect_garbage(str(root), files=medium)
    assert fsck(root).findings == []


def test_are_a_writer_and_a_reader_undisturbed_by_packing(root: Path) -> None:
    """Three handles of one store: one commits and names, one packs and unpacks, one reads."""
    told: dict[str, Contents] = {}
    ended = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        life = Life(root, Medium("disk"), seed=1)
        for number in range(40):
            life.commit()
            if number % 2:
                life.snapshot()
                told.update(life.snapshots)
            if number % 7 == 6:
                name = min(life.snapshots)
                del life.snapshots[name]
                told.pop(name)
                branching.delete_snapshot(life.store, name)
        life.store.close()

    def pack() -> None:
        with shardb.open(root, files=Medium("disk")) as store:
            while not ended.is_set():
                pack_snapshots(store)
                unpack_snapshots(store)

    def read() -> None:
        with ExitStack() as stack:
            store = stack.enter_context(shardb.open(root, files=Medium("disk"), cache_bytes=0))
            while not ended.is_set():
                for name, contents in list(told.items()):
                    try:
                        view = store.snapshot(name)
                    except shardb.errors.NotFoundError:
                        continue
                    with view:
                        found = {s: view.read(s).raw("w").tobytes() for s in SHARDS}
                    assert found == contents, name

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            failures.append(error)

    shardb.open(root, create=True, files=Medium("disk")).close()
    others = [threading.Thread(target=guarded, args=(work,)) for work in (pack, read)]
    for thread in others:
        thread.start()
    guarded(write)
    ended.set()
    for thread in others:
        thread.join()
    assert failures == []
    assert not fsck(root).has_errors
