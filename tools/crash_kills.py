"""`make kills`: kill real trainers, readers, collectors, packers and publishers, again and again.

Processes work on one store at the same time, some are stopped and continued, each is killed with
SIGKILL at a random moment; then the store is opened and asked the four questions: is it at a step
that was made, not below the last one told as durable, of one step in all shards, and are snapshots
what they were? A run that is killed is the run that is not: every shard of every step has the
digest that a run without any kill gave it.

Exit codes: 0 nothing was lost; 1 something was; 2 usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import shardb
from shardb.errors import BranchLockedError, ConflictError, NotFoundError
from shardb.fsck import check_store
from shardb.gc import collect_garbage
from shardb.pack import pack_snapshots
from shardb.pack_undo import unpack_snapshots
from shardb.testing.oracle import QuickFileSystem
from shardb.transfer_publisher import Publisher
from tests.support.forked import Child, Tell
from tests.support.stores import MEDIA, Medium
from tools.crash import RAM_DISK
from tools.crash_training import stage_initial, stage_step

STEPS_MAX = 240
SNAPSHOT_EVERY = 7
SEGMENT_BYTES = 20_000
VICTIM_SECONDS = 0.12
OTHERS_SECONDS = 0.03
FSCK_EVERY = 4
Digests = Mapping[str, str]
Work = Callable[[Path, str, Tell], None]


class LostError(Exception):
    """The store is not what it must be."""


# What the processes do. Numbers told are durable steps; minus a step is a snapshot of it.


def train(root: Path, medium: str, tell: Tell, *, steps_max: int = STEPS_MAX) -> None:
    """Train on from wherever the store is; wait while another process is the writer."""
    with shardb.open(root, create=True, files=Medium(medium)) as store:
        store.appender._segment_limit_bytes = SEGMENT_BYTES
        head = -1
        while head < steps_max:
            while not _commit_next(store):
                time.sleep(0.001)
            head = store.resolve().step
            tell(head)
            if head % SNAPSHOT_EVERY == 0:
                store.create_snapshot(f"step-{head}")
                tell(-head)


def _commit_next(store: shardb.Store) -> bool:
    """Commit the next step; False beside another writer."""
    try:
        transaction = store.begin()
    except BranchLockedError:
        return False
    with transaction:
        base = transaction.base
        (stage_initial if base is None else stage_step)(transaction)
        step = 0 if base is None else base.step + 1
        transaction.commit(step=step, state={"position": step})
    return True


def train_with_child(root: Path, medium: str, tell: Tell) -> None:
    """Train while a forked child lives on, as a worker that loads data does."""
    if os.fork() == 0:
        time.sleep(VICTIM_SECONDS)
        os._exit(0)
    train(root, medium, tell)


def publish(root: Path, medium: str, tell: Tell) -> None:
    """Train in an active store beside the durable one, and publish every step."""
    with (
        shardb.open(active_of(root), create=True, files=Medium(MEDIA[1])) as active,
        shardb.open(root, create=True, files=Medium(medium)) as durable,
        Publisher(active, durable) as publisher,
    ):
        while True:
            _commit_next(active)
            publisher.publish()
            tell(publisher.wait() or 0)
            if active.resolve().step >= STEPS_MAX:
                return


def active_of(root: Path) -> Path:
    """Where the active store of a durable one lies."""
    return root.with_name(f"{root.name}-active")


def read(root: Path, medium: str, tell: Tell) -> None:
    """Hold a lease on the newest commit; its bytes must not change."""
    with shardb.open(root, create=True, files=Medium(medium), cache_bytes=0) as store:
        if not store.branches():
            return
        with store.at() as view:
            first = {name: view.read(name).image.tobytes() for name in view.names()}
            while True:
                tell(0)
                for name in view.names():
                    if view.read(name).image.tobytes() != first[name]:
                        raise LostError(f"{name} of step {view.commit.step} changed under a lease")


def collect(root: Path, medium: str, tell: Tell) -> None:
    """Collect garbage again and again."""
    with shardb.open(root, create=True, files=Medium(medium)):
        pass
    while True:
        collect_garbage(os.fspath(root), files=Medium(medium))
        tell(0)


def pack(root: Path, medium: str, tell: Tell) -> None:
    """Pack the snapshots, unpack them, and so on."""
    with shardb.open(root, create=True, files=Medium(medium)) as store:
        while True:
            try:
                if not pack_snapshots(store).objects:
                    unpack_snapshots(store)
            except (ConflictError, NotFoundError):
                time.sleep(0.001)
            tell(0)


WRITERS: Mapping[str, Work] = {
    "trainer": train,
    "trainer with a child": train_with_child,
    "publisher": publish,
}
OTHERS: Mapping[str, Work] = {
    "reader": read,
    "collector": collect,
    "packer": pack,
    "second trainer": train,
}


@dataclass(kw_only=True)
class World:
    """One store and everything that was told about it."""

    root: Path
    medium: str
    writer: str
    reference: Sequence[Digests]
    told: int = -1
    pinned: dict[str, str] = field(default_factory=dict)
    rounds: int = 0

    def round(self, draw: random.Random, kills: Counter[str]) -> None:
        """Let processes work, kill every one, check the store."""
        self.rounds += 1
        names = [name for name in OTHERS if draw.random() < 0.4]
        if self.writer == "publisher":
            names = [name for name in names if name != "second trainer"]
        children = {self.writer: self._start(WRITERS[self.writer])}
        children |= {name: self._start(OTHERS[name]) for name in names}
        try:
            if draw.random() < 0.8 and self.told < STEPS_MAX:
                children[self.writer].first()
            numbers = self._kill_all(children, draw, kills)
        finally:  # where one has failed, nobody may work on in what is about to be removed
            for child in children.values():
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
        self.told = max([self.told, *(number for number in numbers if number >= 0)])
        self.check({-number for number in numbers if number < 0}, writers=1 + len(names))

    def _kill_all(
        self, children: dict[str, Child], draw: random.Random, kills: Counter[str]
    ) -> list[int]:
        """Kill one after the other, some of them stopped; what the writers told."""
        numbers: list[int] = []
        for name in list(children):
            child = children.pop(name)
            if draw.random() < 0.25:
                os.kill(child.pid, signal.SIGSTOP)
                time.sleep(draw.random() * OTHERS_SECONDS)
                if draw.random() < 0.7:
                    os.kill(child.pid, signal.SIGCONT)
                kills["stopped"] += 1
            limit = VICTIM_SECONDS if name == self.writer else OTHERS_SECONDS
            heard = child.kill_after(draw.random() * limit)
            if name in (self.writer, "second trainer"):
                numbers += heard
            kills[name] += 1
        return numbers

    def _start(self, work: Work) -> Child:
        return Child(lambda tell: work(self.root, self.medium, tell))

    def check(self, pinned_steps: set[int], *, writers: int = 1) -> None:
        """The oracle; LostError says what is wrong."""
        with shardb.open(self.root, create=True, files=Medium(self.medium), cache_bytes=0) as store:
            head = store.branches().get("main")
            step = head.step if head is not None else -1
            if not self.told <= step <= self.told + writers:
                raise LostError(f"the store is at step {step}; step {self.told} was told")
            for commit in store.commits():
                self._check_commit(store, commit)
            snapshots = {name: commit.id for name, commit in store.snapshots().items()}
            for name, commit_id in self.pinned.items():
                if snapshots.get(name) != commit_id:
                    raise LostError(f"snapshot {name} is {snapshots.get(name)}, not {commit_id}")
            if lost := {f"step-{pin}" for pin in pinned_steps} - set(snapshots):
                raise LostError(f"snapshots {sorted(lost)} were told, and are gone")
            self.pinned = snapshots
        self.told = max(self.told, step)
        if self.rounds % FSCK_EVERY == 0:
            report = check_store(QuickFileSystem(), os.fspath(self.root))
            if report.has_errors:
                raise LostError(f"fsck: {report.to_json()}")

    def _check_commit(self, store: shardb.Store, commit: shardb.Commit) -> None:
        """Every shard has the digest of the run that was never killed, and its bytes have it."""
        found = {name: entry.digest for name, entry in commit.shards.items()}
        if found != self.reference[commit.step]:
            raise LostError(f"step {commit.step} is not that of the run that was never killed")
        with store.at(commit=commit.id) as view:
            for name in view.names():
                view.read(name)  # raises when the bytes do not have the digest


def reference_run(root: Path) -> list[Digests]:
    """The digests of every step of a run that nobody kills."""
    with shardb.open(root, create=True, files=QuickFileSystem()) as store:
        digests: list[Digests] = []
        for _ in range(STEPS_MAX + len(OTHERS) + 1):
            _commit_next(store)
            digests.append({n: entry.digest for n, entry in store.resolve().shards.items()})
    return digests


class Killing:
    """Worlds, one after the other, until enough processes were killed."""

    def __init__(self, scratch: Path, seed: int) -> None:
        self.kills: Counter[str] = Counter()
        self.reopened = 0
        self._scratch = scratch
        self._draw = random.Random(seed)
        self._reference = reference_run(scratch / "reference")

    @property
    def killed(self) -> int:
        """Processes killed so far."""
        return self.kills.total() - self.kills["stopped"]

    def run(self, kills: int, on_round: Callable[[], None]) -> None:
        """Kill at least so many; raises LostError, and AssertionError where a process failed."""
        number = 0
        while self.killed < kills:
            world = World(
                root=self._scratch / f"world-{number}",
                medium=MEDIA[number % len(MEDIA)],
                writer=list(WRITERS)[number % len(WRITERS)],
                reference=self._reference,
            )
            number += 1
            while self.killed < kills and world.told < STEPS_MAX - 1 and world.rounds < 60:
                world.round(self._draw, self.kills)
                self.reopened += 1
                on_round()
            shutil.rmtree(world.root)
            shutil.rmtree(active_of(world.root), ignore_errors=True)


def main() -> int:
    """Kill, and report."""
    arguments = _arguments()
    scratch = tempfile.mkdtemp(prefix="shardb-kills-", dir=arguments.scratch)
    began = said = time.monotonic()
    try:
        killing = Killing(Path(scratch), arguments.seed)

        def tell() -> None:
            nonlocal said
            if time.monotonic() - said > 10:
                said = time.monotonic()
                rate = killing.killed / (said - began)
                left = (arguments.kills - killing.killed) / rate / 60
                print(
                    f"{killing.killed:,} of {arguments.kills:,} killed, {left:.0f} min left",
                    file=sys.stderr,
                )

        killing.run(arguments.kills, tell)
    except (LostError, AssertionError, shardb.ShardbError) as error:
        kept = f"{scratch}-lost"
        os.rename(scratch, kept)
        print(f"kills: {error}\n  the stores are kept in {kept}")
        print(f"  again: python -m tools.crash_kills --seed {arguments.seed}")
        return 1
    except KeyboardInterrupt:
        print("kills: interrupted", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(", ".join(f"{name} {count:,}" for name, count in sorted(killing.kills.items())))
    print(
        f"{killing.killed:,} processes killed, the store reopened {killing.reopened:,} times and "
        "nothing lost"
    )
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog=(__doc__ or "").rpartition("\n\n")[2],
    )
    parser.add_argument("--kills", type=int, default=5_000, help="how many processes to kill")
    parser.add_argument("--seed", type=int, default=0, help="of the moments, which also vary")
    place = RAM_DISK if os.access(RAM_DISK, os.W_OK) else None
    parser.add_argument("--scratch", default=place, help="directory for the stores")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
