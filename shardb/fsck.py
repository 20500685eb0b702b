"""Checking a whole store without changing anything in it.

Owns the order of a check: FORMAT, one consistent view, the log, the index against the log, every
object that a commit needs, leftovers; and who is hit by a damaged object. The parts are in the
`fsck_*` modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from shlex import quote

from shardb import format as store_format
from shardb import state
from shardb.errors import FormatError
from shardb.filesystem import FileSystem
from shardb.findings import Finding, Report, command
from shardb.fsck_audit import Progress, Reading, audit_objects
from shardb.fsck_impact import needed_objects, object_finding, with_deltas
from shardb.fsck_leftovers import find_leftovers
from shardb.fsck_log import check_log
from shardb.fsck_view import View, refused, take_view
from shardb.index_state import IndexState, IndexUnreadableError, foreign_store, read_index
from shardb.log import Log
from shardb.obstacles import find_obstacles
from shardb.state import DictTables
from shardb.unshown import command_to_see


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
    there is no store, FormatError for one of a newer version, and StorageFailedError where the
    storage refuses to show it at all.
    """
    reading = Reading(verified=verified or {}, on_progress=on_progress, on_verified=on_verified)
    return _Check(files, root, budget_seconds, reading).run()


class _Check:
    """One check of one store."""

    def __init__(
        self, files: FileSystem, root: str, budget_seconds: float | None, reading: Reading
    ) -> None:
        self.files = files
        self.root = root
        self.started = time.monotonic()
        self.reading = reading
        if budget_seconds is not None:
            self.reading = replace(reading, deadline=self.started + budget_seconds)
        self.report = Report()
        self.applied_lsn = 0

    def run(self) -> Report:
        store_id = self._check_format()
        if not self._check_places():
            self.report.complete = False
            return self.report
        self._check_renaming()
        view = take_view(self.files, self.root)
        index = self._own_index(self._read_index(view), store_id)
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
        leftovers = find_leftovers(self.files, view, needed, packed)
        self.report.findings.extend(map(self._kept_while_damaged, leftovers))
        self.report.seconds = time.monotonic() - self.started
        return self.report

    def _kept_while_damaged(self, finding: Finding) -> Finding:
        """What no commit needs may be of one that the log has lost: nothing is freed before."""
        if finding.kind != "object_unreferenced" or not self.report.has_errors:
            return finding
        found = "it may be of a step that was lost: keep it until the errors are mended"
        return replace(finding, found=found, next_command=None)

    def _add(self, finding: Finding) -> None:
        self.report.findings.append(finding)

    # FORMAT

    def _check_format(self) -> str | None:
        """The store's id as FORMAT says it; None when it is damaged, which is a finding."""
        path = store_format.format_path(self.root)
        try:
            return store_format.read_format(self.files, self.root).store_id
        except OSError as error:
            raise refused(self.files, path, error) from error
        except FormatError as error:
            if store_format.has_whole_format(self.files, self.root):
                raise
            self._add(
                Finding(
                    kind="format_damaged",
                    severity="error",
                    path=path,
                    offset=0,
                    expected="the line that was written when the store was made",
                    found=error.message,
                    next_command=command("repair", self.root),
                )
            )
            return None

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
                next_command=command("repair", self.root),
            )
        )

    # Places

    def _check_places(self) -> bool:
        """What lies in the way is told; False when it hides everything else."""
        try:
            obstacles = find_obstacles(self.files, self.root)
        except OSError as error:
            raise refused(self.files, self.root, error) from error
        for obstacle in obstacles:
            path = f"{self.root}/{obstacle.name}"
            moved = f"{self.root}/moved-{obstacle.name.replace('/', '@')}-{int(time.time())}"
            expected = obstacle.expected
            self._add(
                Finding(
                    kind="place_taken",
                    severity="error",
                    path=path,
                    expected=f"{expected}: put it back" if obstacle.is_needed else expected,
                    found=obstacle.found,
                    next_command=f"mv {quote(path)} {quote(moved)}",
                )
            )
        return not any(obstacle.hides_the_store for obstacle in obstacles)

    def _check_renaming(self) -> None:
        """A store whose files cannot be renamed from `spare/` to `objects/` is refused."""
        objects, spare = f"{self.root}/objects", f"{self.root}/spare"
        if not (self.files.exists(objects) and self.files.exists(spare)):
            return  # told elsewhere
        if not self.files.can_rename(spare, objects):
            self._add(
                Finding(
                    kind="directory_elsewhere",
                    severity="error",
                    path=objects,
                    expected="the file system of spare/: what is written there is renamed to here",
                    found="another one, mounted or linked; what is in it can be read, and copied",
                    next_command=f"{command('clone', self.root)} {quote(f'{self.root}-whole')}",
                )
            )

    # Index

    def _read_index(self, view: View) -> IndexState | None:
        path = f"{self.root}/index/data.mdb"
        recover = command("recover", self.root)
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

    def _own_index(self, index: IndexState | None, store_id: str | None) -> IndexState | None:
        """None too for the index of another store: what it knows is not missing here."""
        log = Log(self.files, f"{self.root}/wal")
        other = None if index is None else foreign_store(log, index, store_id)
        if other is None:
            return index
        self._add(
            Finding(
                kind="index_foreign",
                severity="error",
                path=f"{self.root}/index/data.mdb",
                expected=f"store id {store_id}, as in FORMAT and the log",
                found=f"store id {other}",
                next_command=command("repair", self.root),
            )
        )
        return None

    # Objects

    def _check_objects(self, tables: DictTables) -> None:
        audit = audit_objects(
            self.files, self.root, tables, applied_lsn=self.applied_lsn, reading=self.reading
        )
        self.report.objects_checked = audit.objects
        self.report.bytes_checked = audit.bytes
        self.report.complete = audit.complete
        damaged = with_deltas(audit.faults, tables)
        for digest, fault in audit.faults.items():
            following: str | None = command("repair", self.root)
            if fault.kind == "object_unreadable":
                following = command_to_see(self.files, self.root, fault.path, fault.error)
            found = object_finding(digest, fault, tables, damaged, next_command=following)
            self._add(found)
