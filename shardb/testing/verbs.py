"""Generated workloads: any verbs in any order, each of them possible after every other one.

Owns `Scene`, in which a verb chooses its own object, and the recording of a sequence of verbs from
a base. Every verb works on whatever the store holds by then. Deterministic but for ids and times.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

import shardb
from shardb import Transaction, branching, frames
from shardb.errors import ShardbError
from shardb.filesystem import READ, WRITE, opened
from shardb.format import format_path
from shardb.gc import collect_garbage
from shardb.pack import pack_snapshots
from shardb.pack_undo import unpack_snapshots
from shardb.records import Commit
from shardb.repair import repair
from shardb.repair_sources import StoreFiles
from shardb.testing.bases import Base, make_base
from shardb.testing.explorer import STORE, Recorded
from shardb.testing.model import Journal, Mend, Tensors
from shardb.testing.oracle import QuickFileSystem, observe_commit
from shardb.testing.recording import Ignore, RecordingFileSystem, ignore_nothing
from shardb.testing.workloads import FROZEN_SHARD, Script
from shardb.transfer import copy_commit
from shardb.transfer_publisher import Publisher
from shardb.transfer_source import StoreSource

QUICK = QuickFileSystem()
# Above the least size that is packed, a few pages, and below one; all worth compressing.
SHARD_BYTES = {"params/block_000": 20_000, "optim/block_000": 5_000, "params/final_norm": 700}
Stage = Callable[[Transaction], Any]


class Scene(Script):
    """A store in the middle of some workload; the public methods are verbs and their parts.

    `side` is where active stores and copies lie, by default beside the recorded disk.
    """

    side: str | None = None

    def commit_with(self, stage: Stage) -> None:
        """Commit the next step of main, staged by a function."""
        with self.store.begin() as transaction:
            base = transaction.base
            step = base.step + 1 if base is not None else 0
            stage(transaction)
            names = transaction.names()
            if base is not None:
                names = [name for name, entry in base.shards.items() if entry.trainable]
            contents = {name: contents_of(transaction, name) for name in names}
            self._announce(step, contents)
            transaction.commit(step=step, state={"position": step})
        self._journal.acknowledge()

    def commit_next(self) -> None:
        """The next step of main: every trainable shard a little different."""
        self.commit_with(stage_next)

    def snapshot_head(self) -> None:
        """Pin the head of main under a new name."""
        self.snapshot(f"pin-{self._position()}")

    def branch_head(self) -> None:
        """Make a new branch at the head of main."""
        self.branch(f"side-{self._position()}")

    def rewind_main(self) -> None:
        """Move main to the nearest earlier commit that is kept, else to a later one."""
        head = self.store.resolve("main")
        others = [commit for commit in self.store.commits() if commit.id != head.id]
        if not others:
            return
        target = min(others, key=lambda commit: (commit.step > head.step, -commit.step))
        found = observe_commit(self.store, target)
        self._journal.attempt(self.model.with_branch("main", found))
        branching.rewind(self.store, "main", target.id)
        self._journal.acknowledge()

    def remove_name(self) -> None:
        """Remove a branch beside main; where there is none, the oldest snapshot."""
        branches = [name for name in self.store.branches() if name != "main"]
        snapshots = self.store.snapshots()
        if branches:
            self.delete_branch(branches[0])
        elif snapshots:
            self.delete_snapshot(min(snapshots, key=lambda name: snapshots[name].step))

    def collect(self) -> None:
        """Give back what nothing needs, as `shardb gc` does in a process of its own."""
        self.store.close()
        self._journal.attempt(self.model)
        collect_garbage(self._path, files=self._files)
        self._journal.acknowledge()
        self.store = self._open(create=False)

    def publish(self) -> None:
        """Receive the next step from an active store that has the same history."""
        with shardb.open(self._beside("active"), create=True, files=QUICK) as active:
            copy_commit(self.store, active, "main")

            def send(commit: Commit) -> None:
                with Publisher(active, self.store) as publisher:
                    publisher.publish(commit)
                    publisher.wait()

            self.receive(active, stage_next, send)

    def receive(self, active: shardb.Store, stage: Stage, send: Callable[[Commit], object]) -> None:
        """Make the next step of main in another store, and have it sent here."""
        with active.begin() as transaction:
            assert transaction.base is not None
            step = transaction.base.step + 1
            stage(transaction)
            trained = [n for n, entry in transaction.base.shards.items() if entry.trainable]
            contents = {name: contents_of(transaction, name) for name in trained}
            commit = transaction.commit(step=step, state={"position": step})
        self._announce(step, contents)
        with mock.patch.object(StoreSource, "copies_at_once", 1):
            send(commit)
        self._journal.acknowledge()

    def open_within(self, name: str) -> shardb.Store:
        """Another store on the recorded disk: what fails there fails in it, too."""
        assert isinstance(self._files, RecordingFileSystem)
        path = os.path.join(self._files.root, name)
        return shardb.open(path, create=True, files=self._files, writer_threads=1)

    def rotate(self) -> None:
        """Begin a new segment of the log with the next record, which changes nothing."""
        self.store.appender._segment_limit_bytes = 1
        self._journal.attempt(self.model)
        branching.set_policy(self.store, branching.policy_of(self.store))
        self._journal.acknowledge()

    def pack(self) -> None:
        """Pack what is cold; where all of it is packed, unpack it."""
        self._journal.attempt(self.model)
        if not pack_snapshots(self.store).objects:
            unpack_snapshots(self.store)
        self._journal.acknowledge()

    def repair(self) -> None:
        """Damage FORMAT, an object and the log, and have it all restored from a copy."""
        digest = self.store.resolve("main").shards[min(SHARD_BYTES)].digest
        self.store.close()
        copy = self._beside("whole")
        shutil.copytree(self._path, copy)
        self._journal.skip()
        self._damage(digest)
        self._journal.attempt(self.model, mend=_mend_from(copy))
        repair(self._path, yes=True, source=StoreFiles(QUICK, copy), files=self._files)
        self._journal.acknowledge()
        self.store = self._open(create=False)

    # Parts

    def _announce(self, step: int, shards: Mapping[str, Tensors]) -> None:
        """Note that the next commit of main is about to be made."""
        expected = self.model.with_commit(step=step, shards=shards, state={"position": step})
        self._journal.attempt(expected)

    def _position(self) -> int:
        assert isinstance(self._files, RecordingFileSystem)
        return len(self._files.operations)

    def _beside(self, name: str) -> str:
        """A path out of the crash's reach, removed with the recording."""
        assert isinstance(self._files, RecordingFileSystem)
        side = self.side or beside(self._files.root)
        os.makedirs(side, exist_ok=True)
        return os.path.join(side, f"{name}-{self._position()}")

    def _damage(self, digest: str) -> None:
        """Flip bits of FORMAT, of an object and, behind and before others, of a record."""
        assert isinstance(self._files, RecordingFileSystem)
        with self._files.undisturbed():
            self._damage_undisturbed(digest)

    def _damage_undisturbed(self, digest: str) -> None:
        self._flip(format_path(self._path), 20)
        self._flip(f"{self._path}/objects/{digest}.safetensors", 4096 + 100)
        directory = f"{self._path}/wal"
        raw = [name for name in self._files.list(directory) if name.endswith(".wal")]
        segment = f"{directory}/{max(raw)}"
        offsets = self._record_offsets(segment)
        if len(offsets) > 2:
            self._flip(segment, offsets[len(offsets) // 2] + frames.HEADER_BYTES + 3)

    def _record_offsets(self, segment: str) -> list[int]:
        with opened(self._files, segment, READ) as file:
            data = memoryview(self._files.pread(file, self._files.status(segment).size_bytes, 0))
        offsets = [0]
        while (frame := frames.decode(data, offsets[-1])) is not None:
            offsets.append(frame.end)
        return offsets[:-1]

    def _flip(self, path: str, offset: int) -> None:
        with opened(self._files, path, WRITE) as file:
            [byte] = self._files.pread(file, 1, offset)
            self._files.pwrite(file, bytes([byte ^ 8]), offset)
            self._files.fsync(file)


Verb = Callable[[Scene], None]
VERBS: Mapping[str, Verb] = {
    "branch": Scene.branch_head,
    "commit": Scene.commit_next,
    "gc": Scene.collect,
    "pack": Scene.pack,
    "publish": Scene.publish,
    "repair": Scene.repair,
    "rewind": Scene.rewind_main,
    "rm": Scene.remove_name,
    "rotate": Scene.rotate,
    "snapshot": Scene.snapshot_head,
}


def stage_first(transaction: Transaction) -> None:
    """The first version of every shard."""
    for name, size in SHARD_BYTES.items():
        transaction.write(name, {"tensor": np.resize(np.arange(97, dtype=np.uint8), size)})


def stage_next(transaction: Transaction) -> None:
    """A version of every trainable shard that differs from the last one in a few low bytes."""
    base = transaction.base
    assert base is not None
    for name in [name for name, entry in base.shards.items() if entry.trainable]:
        view = transaction.read(name)
        staged = transaction.stage(name, like=view)
        for tensor in view.specs:
            raw = staged.raw(tensor)
            raw[:] = view.raw(tensor)
            # Every hundredth word: its low byte, so that numbers stay numbers near by.
            raw[::400] += np.uint8(1 + base.step % 100)
            del raw
        staged.seal()


def contents_of(transaction: Transaction, name: str) -> dict[str, bytes]:
    """The tensors of a sealed shard."""
    view = transaction.read(name)
    return {tensor: view.raw(tensor).tobytes() for tensor in view.specs}


def small_base(root: str, first: Stage = stage_first, following: Stage = stage_next) -> Base:
    """A store with four steps, two snapshots and a branch, made in the empty directory `root`."""

    def begin(transaction: Transaction) -> None:
        first(transaction)
        transaction.write(FROZEN_SHARD, {"json": np.zeros(40, np.uint8)}, trainable=False)

    def fill(files: RecordingFileSystem, path: str, journal: Journal) -> Script:
        scene = Scene(files, path, journal)
        scene.commit_with(begin)
        scene.snapshot("first")
        scene.commit_with(following)
        scene.snapshot("second")
        scene.commit_with(following)
        scene.branch("side")
        scene.commit_with(following)
        return scene

    return make_base(root, fill)


@contextmanager
def recorded(
    base: Base,
    sequence: Sequence[str],
    scratch: str,
    verbs: Mapping[str, Verb] = VERBS,
    *,
    ignore: Ignore = ignore_nothing,
    whole: bool = False,
) -> Iterator[Recorded]:
    """Record a sequence of verbs for the length of a block.

    Its first crash is in the last verb, since shorter sequences have the rest; with `whole` in the
    first one.
    """
    root = os.path.join(scratch, "sequence")
    os.mkdir(root)
    first_point = 0
    try:
        files, journal = base.recording(root, ignore=ignore)
        with Scene(files, os.path.join(files.root, STORE), journal, create=False) as scene:
            for number, verb in enumerate(sequence):
                if number and not whole:
                    first_point = len(files.operations) + 1
                verbs[verb](scene)
        files.shut_down()
        yield Recorded(files=files, journal=journal, first_point=first_point)
    finally:
        shutil.rmtree(root)
        shutil.rmtree(beside(root), ignore_errors=True)


def beside(root: str) -> str:
    """Where a recording below `root` keeps what is not part of its disk."""
    return f"{root}-beside"


def _mend_from(copy: str) -> Mend:
    def mend(path: str) -> list[str]:
        try:
            outcome = repair(path, yes=True, source=StoreFiles(QUICK, copy), files=QUICK)
        except ShardbError as error:
            return [f"repair was refused ({error.kind}): {error}"]
        return [f"repair has left {finding.kind}" for finding in outcome.remaining]

    return mend
