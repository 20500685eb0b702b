"""The crash explorer: every operation, every image, reopened and checked.

Runs a workload once on a recording file system. For each of its operations it builds the disks that
a crash before it may leave, crosses them with the states the index may be in, and asks the oracle
about each. Recovery of a sample of them is recorded in turn and crashed at each of its operations.

A violation names operation, image, index and seed: the same call finds it again.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import shardb
from shardb.errors import FormatError, NotFoundError
from shardb.testing.counts import Counts, Violation
from shardb.testing.disk import DiskState, Image
from shardb.testing.images import ImageLimits, choices, fault_class
from shardb.testing.model import Expectation, Journal
from shardb.testing.operations import Kind, Operation
from shardb.testing.oracle import Audit, check, commit_version, fsck_audit, no_audit, observe
from shardb.testing.recording import (
    Ignore,
    IndexImage,
    Past,
    RecordingFileSystem,
    ignore_nothing,
)

# A workload gets a file system, the path of its store and the journal it must keep.
Workload = Callable[[RecordingFileSystem, str, Journal], None]
OnPoint = Callable[[int, "Counts"], None]
STORE = "run"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExploreLimits:
    """How far to go: images of a point, indexes of an image, and recoveries crashed in turn.

    `indexes` says how many states of the index an image meets, of all those that
    `earlier_indexes` allows: the images of all and of nothing meet every one, the others two.

    One state of `audit_every` is audited, one of `go_on_every` gets a further commit. One of
    `recovery_every` has its recovery crashed at all operations, with `recovery_images`. Before one
    sync of `kill_every` the process alone is killed, and the recovery and the next commit are
    crashed at all operations.
    """

    images: ImageLimits = field(default_factory=ImageLimits)
    indexes: Literal["one", "two", "every"] = "two"
    earlier_indexes: int = 2
    recovery_every: int = 500
    kill_every: int = 3
    recovery_images: ImageLimits = field(
        default_factory=lambda: ImageLimits(
            exhaustive_operations=2,
            random_subsets=2,
            single_operations=2,
            torn_writes=1,
            every_index=False,
        )
    )
    go_on_every: int = 8
    audit_every: int = 1
    violations: int = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A workload that has run: what it did, what it asked for, and the first crash to try."""

    files: RecordingFileSystem
    journal: Journal
    first_point: int = 0

    @property
    def points(self) -> int:
        """How many crashes there are: one before each operation, and one after the last."""
        return len(self.files.operations) + 1 - self.first_point


def explore(
    workload: Workload,
    *,
    scratch: str,
    limits: ExploreLimits | None = None,
    seed: int = 0,
    audit: Audit = fsck_audit,
    ignore: Ignore = ignore_nothing,
    first: Callable[[Operation], bool] | None = None,
    on_point: OnPoint | None = None,
) -> Counts:
    """Record `workload` and explore its crashes below the directory `scratch`, best on a RAM disk.

    `on_point` is told the number of each operation that is done, and the counts so far.
    `first` knows the operation before which to crash first: without it the first of all.
    `ignore` makes the disk lie about syncs: the control arm, which must give violations.
    """
    root = os.path.join(scratch, "recorded")
    os.mkdir(root)
    files = RecordingFileSystem(root, ignore=ignore)
    journal = Journal(lambda: len(files.operations))
    try:
        workload(files, os.path.join(files.root, STORE), journal)
    finally:
        files.shut_down()
        shutil.rmtree(root)
    begin = 0 if first is None else next(o.number for o in files.operations if first(o))
    recorded = Recorded(files=files, journal=journal, first_point=begin)
    return explore_recorded(
        recorded, scratch=scratch, limits=limits, seed=seed, audit=audit, on_point=on_point
    )


def explore_recorded(
    recorded: Recorded,
    *,
    scratch: str,
    limits: ExploreLimits | None = None,
    seed: int = 0,
    audit: Audit = fsck_audit,
    on_point: OnPoint | None = None,
) -> Counts:
    """Explore the crashes of a workload that has run, from its first point on."""
    exploration = _Exploration(scratch, limits or ExploreLimits(), seed, audit)
    exploration.counts.operations = recorded.points - 1
    exploration.crash_everywhere(recorded, on_point or _say_nothing)
    return exploration.counts


class _Exploration:
    """One exploration under way."""

    def __init__(self, scratch: str, limits: ExploreLimits, seed: int, audit: Audit) -> None:
        self.counts = Counts()
        self._scratch = scratch
        self._limits = limits
        self._seed = seed
        self._audit = audit
        self._seen: set[tuple[bytes, bytes, tuple[int, int]]] = set()
        self._expectations: list[Expectation] = []
        self._directories = 0
        self._syncs = 0

    def fresh_directory(self) -> str:
        self._directories += 1
        path = os.path.join(self._scratch, f"disk-{self._directories}")
        os.mkdir(path)
        return path

    def crash_everywhere(self, recorded: Recorded, on_point: OnPoint) -> None:
        """Try the crashes before each operation, and after the last one."""
        files = recorded.files
        state = DiskState(files.initial)
        for operation in files.operations[: recorded.first_point]:
            state.advance(operation)
        for point in range(recorded.first_point, len(files.operations) + 1):
            expectation = recorded.journal.at(point)
            if not expectation.skipped:
                self._crash_at(state, files, point, expectation)
            if len(self.counts.violations) >= self._limits.violations:
                return
            on_point(point, self.counts)
            if point < len(files.operations):
                state.advance(files.operations[point])

    def _crash_at(
        self, state: DiskState, files: RecordingFileSystem, point: int, expectation: Expectation
    ) -> None:
        """Try the crashes before one operation."""
        for label, image, index in self._states_at(state, files, point, self._limits.images):
            if not self._is_new(image, index, expectation):
                continue
            where = _Point(
                number=point,
                operation=_text(files.operations, point),
                image=label,
                index=index,
                expectation=expectation,
            )
            self._try_state(image, where)
            if len(self.counts.violations) >= self._limits.violations:
                return
        if self._is_turn_to_kill(files.operations[point : point + 1]) and not expectation.mend:
            self._kill(state, files, point, expectation)

    def _is_turn_to_kill(self, following: Sequence[Operation]) -> bool:
        """Syncs count: before one of them there is something that can be read and still be lost."""
        if not following or following[0].kind not in (Kind.SYNC, Kind.SYNC_DIRECTORY):
            return False
        self._syncs += 1
        return self._syncs % self._limits.kill_every == 0

    def _kill(
        self, state: DiskState, files: RecordingFileSystem, point: int, expectation: Expectation
    ) -> None:
        """Kill the process alone: the next one sees all it wrote, durable or not. Then crash."""
        where = _Point(
            number=point,
            operation=_text(files.operations, point),
            image="process killed",
            index=next(self._indexes_at(files.index_images, point)),
            expectation=expectation,
        )
        past = Past(operations=files.operations[:point], entries=state.live_entries())
        image = state.image(state.everything())
        self.counts.processes_killed += 1
        self._crash_recovery(image, where, state=state.copy(), past=past)

    def _states_at(
        self, state: DiskState, files: RecordingFileSystem, point: int, limits: ImageLimits
    ) -> Iterator[tuple[str, Image, _Index]]:
        """The images of one point, each with the current index and one other; two with all."""
        indexes = list(self._indexes_at(files.index_images, point))
        for label, choice in choices(state, limits=limits, seed=self._seed + point):
            self.counts.images += 1
            image = state.image(choice)
            for index in self._indexes_of(label, indexes, limits):
                yield label, image, index

    def _indexes_of(self, label: str, indexes: list[_Index], limits: ImageLimits) -> list[_Index]:
        """Those that an image meets: every one, the current and one other, or one in turn."""
        turn = self.counts.images
        if self._limits.indexes == "one":
            return [indexes[turn // 2 % len(indexes) if turn % 2 else 0]]
        if self._limits.indexes == "every" or (label in ("all", "none") and limits.every_index):
            return indexes
        return [indexes[0], indexes[1 + turn % (len(indexes) - 1)]]

    def _indexes_at(self, images: list[IndexImage], point: int) -> Iterator[_Index]:
        """The states of the index to try: current first, then earlier, missing, unreadable."""
        past = [image.data for image in images if image.number < point]
        yield _Index(label="current" if past else "missing", data=past[-1] if past else None)
        source = random.Random(f"index {self._seed} {point}")
        count = min(self._limits.earlier_indexes, max(0, len(past) - 1))
        for number in sorted(source.sample(range(len(past) - 1), count) if count else ()):
            yield _Index(label=f"earlier {number}", data=past[number])
        yield _Index(label="missing", data=None)
        yield _Index(label="garbage", data=source.randbytes(8192))
        last = past[-1] if past else b""
        yield _Index(label="truncated", data=last[: len(last) // 2])

    def _try_state(self, image: Image, where: _Point) -> None:
        self.counts.states += 1
        self._count(where.image, where.index)
        replay = None
        if self.counts.states % self._limits.go_on_every == 0:
            replay = self.counts.further_commits
            self.counts.further_commits += 1
        root = self._build(image, where.index)
        audit = self._audit if self.counts.states % self._limits.audit_every == 0 else no_audit
        reasons = check(os.path.join(root, STORE), where.expectation, audit=audit, replay=replay)
        shutil.rmtree(root)
        self._report(reasons, where, "")
        crash_recovery = self.counts.states % self._limits.recovery_every == 0
        if not reasons and crash_recovery and not where.expectation.mend:
            self._crash_recovery(image, where)

    def _crash_recovery(
        self,
        image: Image,
        where: _Point,
        *,
        state: DiskState | None = None,
        past: Past | None = None,
    ) -> None:
        """Record the recovery of one image and crash before each of its operations.

        With `state` and `past` the machine runs on and only its process was killed: what was
        pending still is. Then a further commit is crashed as well.
        """
        root = self._build(image, where.index)
        files = RecordingFileSystem(root, past=past)
        state = state or DiskState(files.initial)
        start = len(files.operations)
        path = os.path.join(STORE, "index", "data.mdb")
        if where.index.data is not None:
            files.index_images.append(IndexImage(number=-1, path=path, data=where.index.data))
        journal = Journal(lambda: len(files.operations), start=where.expectation)
        try:
            with _opened(os.path.join(files.root, STORE), files, where.expectation) as store:
                journal.opened(observe(store))
                if past is not None:
                    versions = where.expectation.allowed()[-1].commits
                    commit_version(store, journal, versions[0] if versions else None)
        finally:
            files.shut_down()
        shutil.rmtree(root)
        self.counts.recoveries_crashed += 1
        for point in range(start, len(files.operations) + 1):
            self._try_recovery_point(state, files, point, journal.at(point), where)
            if len(self.counts.violations) >= self._limits.violations:
                return
            if point < len(files.operations):
                state.advance(files.operations[point])

    def _try_recovery_point(
        self,
        state: DiskState,
        files: RecordingFileSystem,
        point: int,
        expectation: Expectation,
        where: _Point,
    ) -> None:
        limits = self._limits.recovery_images
        for label, image, index in self._states_at(state, files, point, limits):
            if not self._is_new(image, index, expectation):
                continue
            self.counts.recovery_states += 1
            self._count(label, index)
            root = self._build(image, index)
            reasons = check(os.path.join(root, STORE), expectation, audit=self._audit)
            shutil.rmtree(root)
            recovery = f"[{_text(files.operations, point)}] [{label}] index {index.label}"
            self._report(reasons, where, recovery)

    def _count(self, label: str, index: _Index) -> None:
        self.counts.faults[fault_class(label)] += 1
        self.counts.indexes[index.label.split(" ")[0]] += 1

    def _is_new(self, image: Image, index: _Index, expectation: Expectation) -> bool:
        states = (id(expectation.settled), id(expectation.attempted))
        self._expectations.append(expectation)  # Kept alive, so that no identity is used twice.
        key = (image.key, _index_key(index), states)
        new = key not in self._seen
        self._seen.add(key)
        return new

    def _build(self, image: Image, index: _Index) -> str:
        root = self.fresh_directory()
        image.materialise(root)
        if index.data is not None and os.path.join(STORE, "index") in image.files:
            with open(os.path.join(root, STORE, "index", "data.mdb"), "wb") as file:
                file.write(index.data)
        return root

    def _report(self, reasons: list[str], where: _Point, recovery: str) -> None:
        self.counts.violations.extend(
            Violation(
                seed=self._seed,
                point=where.number,
                operation=where.operation,
                image=where.image,
                index=where.index.label,
                recovery=recovery,
                reason=reason,
            )
            for reason in reasons
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Index:
    """One state of the index: its bytes, or None when the file is missing."""

    label: str
    data: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """Where the workload was stopped, and what that may leave."""

    number: int
    operation: str
    image: str
    index: _Index
    expectation: Expectation


def _opened(path: str, files: RecordingFileSystem, expectation: Expectation) -> shardb.Store:
    """Open a store; where its creation may have been cut short, create it."""
    try:
        return shardb.open(path, files=files, writer_threads=1)
    except (NotFoundError, FormatError):
        if not expectation.may_be_absent:
            raise
        return shardb.open(path, create=True, files=files, writer_threads=1)


def _say_nothing(_: int, __: Counts) -> None:
    pass


def _index_key(index: _Index) -> bytes:
    if index.data is None:
        return b"missing"
    return hash(index.data).to_bytes(8, "little", signed=True)


def _text(operations: list[Operation], point: int) -> str:
    return str(operations[point]) if point < len(operations) else "the end"
