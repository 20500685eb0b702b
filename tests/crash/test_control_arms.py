"""Would the crash tests notice? On a disk that lies, or with a planted fault, they must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from shardb import frames, records
from shardb.appending import Appender
from shardb.log import Log, Position
from shardb.objects import ObjectFiles, StagedObject
from shardb.testing.explorer import ExploreLimits, explore
from shardb.testing.images import ImageLimits
from shardb.testing.model import Journal
from shardb.testing.operations import Kind, Operation
from shardb.testing.recording import Ignore, RecordingFileSystem
from shardb.testing.workloads import WORKLOADS, Script

# Few images of each point: what these arms plant shows in the coarsest of them.
FIRST_VIOLATION = ExploreLimits(
    images=ImageLimits(
        exhaustive_operations=0,
        random_subsets=1,
        single_operations=2,
        torn_writes=0,
        every_index=False,
    ),
    recovery_every=10_000,
    kill_every=10_000,
    go_on_every=10_000,
    audit_every=10_000,
    violations=1,
)
AUDITED = replace(FIRST_VIOLATION, audit_every=1)
KILLED = replace(FIRST_VIOLATION, kill_every=1, recovery_images=FIRST_VIOLATION.images)
GOING_ON = replace(FIRST_VIOLATION, go_on_every=1)


def _syncs(kind: Kind, *, of: str) -> Ignore:
    """Syncs of paths that contain `of`."""

    def ignore(operation: Operation) -> bool:
        return operation.kind is kind and of in f"/{operation.path}/"

    return ignore


LYING_DISKS: dict[str, tuple[str, Ignore]] = {
    "objects": ("commits", _syncs(Kind.SYNC, of="/spare/")),
    "directory of objects": ("commits", _syncs(Kind.SYNC_DIRECTORY, of="/objects/")),
    "log": ("commits", _syncs(Kind.SYNC, of=".wal/")),
    "new log segment": ("rotation", _syncs(Kind.SYNC, of=".wal.partial/")),
    "closed log segment": ("rotation", _syncs(Kind.SYNC, of=".zst")),
    "directory of the log": ("rotation", _syncs(Kind.SYNC_DIRECTORY, of="/wal/")),
    "FORMAT": ("commits", _syncs(Kind.SYNC, of="/FORMAT")),
    "directory of the store": ("commits", lambda o: o.kind is Kind.SYNC_DIRECTORY and not o.path),
}


@pytest.mark.parametrize("lie", sorted(LYING_DISKS))
def test_a_disk_that_ignores_syncs_loses_something(lie: str, scratch: str) -> None:
    workload, ignore = LYING_DISKS[lie]
    limits = AUDITED if lie == "closed log segment" else FIRST_VIOLATION
    counts = explore(WORKLOADS[workload], scratch=scratch, limits=limits, ignore=ignore)
    assert counts.violations, f"no harm done: {counts}"


def test_an_index_applied_before_the_log_is_synced(
    scratch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append(self: Appender, end: Position, record: records.Record, **given: object) -> None:
        payload = records.pack(record)
        frame, digest = frames.encode(lsn=end.lsn + 1, previous=end.digest, payload=payload)
        after = Position(
            sequence=end.sequence,
            offset=end.offset + len(frame),
            lsn=end.lsn + 1,
            digest=digest,
        )
        self._apply(record, after)
        self.append_durably(end, record, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(Appender, "append", append)
    assert explore(WORKLOADS["commits"], scratch=scratch, limits=FIRST_VIOLATION).violations


def test_a_record_of_a_killed_writer_that_is_believed_without_a_sync(
    scratch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only kill is that before the second commit's record is synced."""
    monkeypatch.setattr(Log, "harden", lambda *_: None)
    is_sync_of_log, syncs = _syncs(Kind.SYNC, of=".wal"), []

    def two_commits(files: RecordingFileSystem, path: str, journal: Journal) -> None:
        with Script(files, path, journal) as script:
            script.commit(0)
            script.commit(1)
        syncs.extend(o.number for o in files.operations if is_sync_of_log(o))

    def first(operation: Operation) -> bool:
        return operation.number == syncs[-1]

    assert explore(two_commits, scratch=scratch, limits=KILLED, first=first).violations


def test_a_file_that_is_believed_by_its_name(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retired object's rename may be lost after its file was overwritten."""
    place: Callable[[ObjectFiles, StagedObject], None] = ObjectFiles.place

    def believe(self: ObjectFiles, staged: StagedObject) -> None:
        if self.files.exists(self.path(staged.digest)):
            self.drop(staged)
        else:
            place(self, staged)

    monkeypatch.setattr(ObjectFiles, "place", believe)
    assert explore(_reuse, scratch=scratch, limits=GOING_ON, first=_is_reuse).violations


def _is_reuse(operation: Operation) -> bool:
    return operation.kind is Kind.RENAME and "/free." in operation.path


def _reuse(files: RecordingFileSystem, path: str, journal: Journal) -> None:
    """The fourth commit overwrites the files of the first."""
    with Script(files, path, journal) as script:
        for step in range(4):
            script.commit(step)
