"""Checking a whole store without changing anything in it.

Owns the order of a check: FORMAT, one consistent view, the log, the index against the log, every
object that a commit needs, leftovers; and who is hit by a damaged object. The parts are in the
`fsck_*` modules.

Beside a live writer an object may be retired and its file recycled while it is read. So a fault is
believed only when a fresh view still needs the object, before and after it was read once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardb import format as store_format
from shardb import references, state
from shardb.errors import CorruptionError, FormatError
from shardb.filesystem import FileSystem, read_file
from shardb.findings import Finding, Report
from shardb.fsck_impact import needed_objects, object_finding, with_deltas
from shardb.fsck_leftovers import find_leftovers
from shardb.fsck_log import check_log, restore_command
from shardb.fsck_objects import Checked, ObjectFault, Wanted, check_objects, inspect_object
from shardb.fsck_view import View, take_view
from shardb.index_state import IndexState, IndexUnreadableError, read_index
from shardb.state import DictTables


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a check has come."""

    objects: int
    objects_total: int
    bytes: int
    bytes_total: int
    seconds: float


def check_store(
    files: FileSystem,
    root: str,
    *,
    budget_seconds: float | None = None,
    verified: Mapping[str, float] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_verified: Callable[[str], None] | None = None,
) -> Report:
    """Check the store at `root`; it is not changed, and may be in use.

    `verified` says when an object was last found good, `on_verified` is told of each that is now:
    with a budget, those that were not looked at for longest come first. Raises NotFoundError where
    there is no store, FormatError for one of a newer version, and CorruptionError where the
    storage refuses to show it at all.
    """
    check = _Check(files, root, budget_seconds, verified or {}, on_progress, on_verified)
    return check.run()


class _Check:
    """One check of one store."""

    def __init__(
        self,
        files: FileSystem,
        root: str,
        budget_seconds: float | None,
        verified: Mapping[str, float],
        on_progress: Callable[[Progress], None] | None,
        on_verified: Callable[[str], None] | None,
    ) -> None:
        self.files = files
        self.root = root
        self.started = time.monotonic()
        self.deadline = None if budget_seconds is None else self.started + budget_seconds
        self.verified = verified
        self.on_progress = on_progress
        self.on_verified = on_verified
        self.report = Report()
        self.applied_lsn = 0
        self.bytes_total = 0
        self.objects_total = 0

    def run(self) -> Report:
        store_id = self._check_format()
        view = take_view(self.files, self.root)
        index = self._read_index(view)
        self.applied_lsn = index.applied.lsn if index is not None else 0
        replay = check_log(self.files, view, index)
        self.report.findings.extend(replay.findings)
        tables = replay.tables
        if tables is None and index is not None:
            tables = index.tables  # the log is damaged: what the index knows is the best there is
            state.sweep(tables, view.leased(self.files))
        if tables is None:
            self.report.complete = False  # nobody knows which objects are needed
        else:
            self._check_store_id(store_id, tables)
            self._check_objects(tables)
        # What only waits to be retired is no leftover: the index knows it still.
        waiting = index.tables.tables["objects"].keys() if index is not None else set()
        needed = None if tables is None else needed_objects(tables).keys() | waiting
        # The index knows best what readers keep; a store without one has the log's word.
        known = index.tables if index is not None else tables
        packed = known.tables["packs"].keys() if known is not None else set()
        self.report.findings.extend(find_leftovers(self.files, view, needed, packed))
        self.report.seconds = time.monotonic() - self.started
        return self.report

    def _add(self, finding: Finding) -> None:
        self.report.findings.append(finding)

    # FORMAT

    def _check_format(self) -> str | None:
        """The store's id as FORMAT says it; None when it is damaged, which is a finding."""
        path = store_format.format_path(self.root)
        try:
            return store_format.read_format(self.files, self.root).store_id
        except OSError as error:
            raise CorruptionError(f"{path}: cannot be read: {error.strerror}", path=path) from error
        except FormatError as error:
            if self._is_newer(path):
                raise
            self._add(
                Finding(
                    kind="format_damaged",
                    severity="error",
                    path=path,
                    offset=0,
                    expected="the line that was written when the store was made",
                    found=error.message,
                    next_command=restore_command(self.root, path),
                )
            )
            return None

    def _is_newer(self, path: str) -> bool:
        """Whether FORMAT is whole and of a newer version, rather than damaged."""
        try:
            limit_bytes = store_format.FORMAT_LIMIT_BYTES
            data = read_file(self.files, path, limit_bytes=limit_bytes)
        except OSError:
            return False
        return store_format.is_whole(data)

    def _check_store_id(self, told: str | None, tables: DictTables) -> None:
        logged = tables.get("meta", "store_id")
        if told is None or logged is None or told == logged:
            return
        path = store_format.format_path(self.root)
        self._add(
            Finding(
                kind="format_foreign",
                severity="error",
                path=path,
                expected=f"store id {logged}, as in the log",
                found=f"store id {told}",
                next_command=restore_command(self.root, path),
            )
        )

    # Index

    def _read_index(self, view: View) -> IndexState | None:
        path = f"{self.root}/index/data.mdb"
        recover = f"shardb recover {self.root}"
        if view.index is None:
            self._add(
                Finding(kind="index_missing", severity="info", path=path, next_command=recover)
            )
            return None
        try:
            return read_index(view.index)
        except IndexUnreadableError as error:
            self._add(
                Finding(
                    kind="index_unreadable",
                    severity="warning",
                    path=path,
                    found=str(error),
                    next_command=recover,
                )
            )
            return None

    # Objects

    def _check_objects(self, tables: DictTables) -> None:
        wanted = self._in_order(needed_objects(tables))
        self.objects_total = len(wanted)
        self.bytes_total = sum(item.file_bytes for item in wanted)
        suspected: list[Checked] = []

        def on_checked(checked: Checked) -> None:
            self.report.objects_checked += 1
            self.report.bytes_checked += checked.wanted.file_bytes
            if checked.fault is not None:
                suspected.append(checked)
            elif self.on_verified is not None:
                self.on_verified(checked.wanted.digest)
            self._show_progress()

        self.report.complete = check_objects(
            self.files, self.root, wanted, deadline=self.deadline, on_checked=on_checked
        )
        faults = self._confirmed(suspected)
        damaged = with_deltas(faults, tables)
        for digest, fault in faults.items():
            self._add(object_finding(self.root, digest, fault, tables, damaged))

    def _in_order(self, needed: dict[str, Wanted]) -> list[Wanted]:
        """Least recently verified first; those of the newest steps first among equals."""
        newest_first = list(reversed(needed.values()))
        newest_first.sort(key=lambda item: self.verified.get(item.digest, 0.0))
        return newest_first

    def _show_progress(self) -> None:
        if self.on_progress is not None:
            self.on_progress(
                Progress(
                    objects=self.report.objects_checked,
                    objects_total=self.objects_total,
                    bytes=self.report.bytes_checked,
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
                self.report.objects_checked -= 1
                self.report.bytes_checked -= wanted.file_bytes
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
