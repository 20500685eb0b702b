"""Reading every object that commits need, and what is wrong with them.

Owns the order, the budget and the progress of reading, and when a fault is believed: beside a live
writer an object may be retired and its file recycled while it is read. So it counts only when a
fresh view still needs the object, before and after it was read once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from shardb import references
from shardb.filesystem import FileSystem
from shardb.fsck_impact import needed_objects
from shardb.fsck_objects import Checked, ObjectFault, Wanted, check_objects, inspect_object
from shardb.fsck_view import take_view
from shardb.index_state import IndexUnreadableError, read_index
from shardb.state import DictTables


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a check has come."""

    objects: int
    objects_total: int
    bytes: int
    bytes_total: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How objects are read: until when, which first, and who is told.

    `deadline` is a moment of `time.monotonic()`, `verified` says when an object was last found
    good, and `on_verified` is told of each that is now.
    """

    deadline: float | None = None
    verified: Mapping[str, float] = field(default_factory=dict)
    on_progress: Callable[[Progress], None] | None = None
    on_verified: Callable[[str], None] | None = None


@dataclass(kw_only=True)
class Audit:
    """What was read: what is `sound`, and the damaged objects by digest.

    It is `complete` unless a deadline came first.
    """

    sound: set[Wanted] = field(default_factory=set)
    faults: dict[str, ObjectFault] = field(default_factory=dict)
    objects: int = 0
    bytes: int = 0
    complete: bool = True


def audit_objects(
    files: FileSystem,
    root: str,
    tables: DictTables,
    *,
    applied_lsn: int,
    reading: Reading,
    sound: Collection[Wanted] = (),
) -> Audit:
    """Read the objects that the commits of `tables` need, which the log gave up to `applied_lsn`.

    Those that were not verified for longest come first; those that an audit before this one found
    `sound` are not read again.
    """
    return _Auditing(files, root, applied_lsn, reading).run(tables, sound)


class _Auditing:
    """One pass over the objects."""

    def __init__(self, files: FileSystem, root: str, applied_lsn: int, reading: Reading) -> None:
        self.files = files
        self.root = root
        self.applied_lsn = applied_lsn
        self.reading = reading
        self.started = time.monotonic()
        self.audit = Audit()
        self.objects_total = 0
        self.bytes_total = 0

    def run(self, tables: DictTables, sound: Collection[Wanted]) -> Audit:
        needed = needed_objects(tables)
        wanted = self._in_order({d: item for d, item in needed.items() if item not in sound})
        self.objects_total = len(wanted)
        self.bytes_total = sum(item.file_bytes for item in wanted)
        suspected: list[Checked] = []

        def on_checked(checked: Checked) -> None:
            self.audit.objects += 1
            self.audit.bytes += checked.wanted.file_bytes
            if checked.fault is not None:
                suspected.append(checked)
            else:
                self.audit.sound.add(checked.wanted)
                if self.reading.on_verified is not None:
                    self.reading.on_verified(checked.wanted.digest)
            self._show_progress()

        self.audit.complete = check_objects(
            self.files, self.root, wanted, deadline=self.reading.deadline, on_checked=on_checked
        )
        self.audit.faults = self._confirmed(suspected)
        return self.audit

    def _in_order(self, needed: dict[str, Wanted]) -> list[Wanted]:
        """Least recently verified first; those of the newest steps first among equals."""
        newest_first = list(reversed(needed.values()))
        newest_first.sort(key=lambda item: self.reading.verified.get(item.digest, 0.0))
        return newest_first

    def _show_progress(self) -> None:
        if self.reading.on_progress is not None:
            self.reading.on_progress(
                Progress(
                    objects=self.audit.objects,
                    objects_total=self.objects_total,
                    bytes=self.audit.bytes,
                    bytes_total=self.bytes_total,
                    seconds=time.monotonic() - self.started,
                )
            )

    def _confirmed(self, suspected: list[Checked]) -> dict[str, ObjectFault]:
        """The faults that are none of a live writer's doing, by digest."""
        faults: dict[str, ObjectFault] = {}
        for checked in suspected:
            wanted = checked.wanted
            if not self._is_needed_now(wanted.digest):
                self.audit.objects -= 1
                self.audit.bytes -= wanted.file_bytes
                continue
            fault = inspect_object(self.files, self.root, wanted)
            if fault is not None and self._is_needed_now(wanted.digest):
                faults[wanted.digest] = fault
        return faults

    def _is_needed_now(self, digest: str) -> bool:
        """Whether a fresh view needs an object. An index that has not moved has no live writer."""
        index = take_view(self.files, self.root).index
        try:
            now = read_index(index) if index is not None else None
        except IndexUnreadableError:
            return True
        if now is None or now.applied.lsn <= self.applied_lsn:
            return True
        return bool(references.held(now.tables, {digest}))
