"""Repairing a damaged store: first saying what would be done and lost, then doing it.

Owns the order: what is wrong is found as `shardb fsck` finds it; FORMAT and the log are mended with
nobody else in the store, so that it opens; then, in the open store, objects and what needs them.
The parts are in the `repair_*` modules.

Invariants: nothing is changed unless asked; what has to be given up is named before; damaged bytes
of the log and of objects are kept aside; a store that nobody can make sense of is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardb import format as store_format
from shardb import state
from shardb.errors import CorruptionError, FormatError
from shardb.filesystem import FileSystem, RealFileSystem
from shardb.fsck import check_store
from shardb.fsck_audit import Reading, audit_objects
from shardb.fsck_impact import needed_objects
from shardb.fsck_leftovers import SET_ASIDE_PREFIX
from shardb.fsck_objects import Wanted
from shardb.fsck_view import View, take_view
from shardb.index_state import IndexState, IndexUnreadableError, read_index
from shardb.obstacles import check_readable, find_obstacles, obstacle_at
from shardb.records import new_id
from shardb.repair_log import LogPlan, plan_log
from shardb.repair_log_acts import alone, check_unchanged, mend_log
from shardb.repair_object_acts import mend_objects
from shardb.repair_objects import ObjectPlan, Wishes, plan_objects
from shardb.repair_plan import Outcome, Plan
from shardb.repair_salvage import has_file
from shardb.repair_sources import RepairSource, StoreFiles
from shardb.state import DictTables
from shardb.storage_errors import storage_errors
from shardb.store import open as open_store

EVERYTHING = Wishes()
QUIETLY = Reading()


def repair(
    root: str,
    *,
    yes: bool = False,
    source: RepairSource | None = None,
    wishes: Wishes = EVERYTHING,
    files: FileSystem | None = None,
    reading: Reading = QUIETLY,
    on_planned: Callable[[Plan], None] | None = None,
    allow_network: bool = False,
) -> Outcome:
    """Say how the store at `root` would be mended; with `yes` do it.

    `source` has what is lost here: another store, which need not be whole. `on_planned` is told
    before anything is changed. Raises NotFoundError where there is no store, FormatError for one of
    a newer version, UsageError for wishes that do not fit, CorruptionError where neither log nor
    index say what belongs together, and ConflictError when somebody has the store open whose log
    must be mended.
    """
    repairing = _Repairing(files or RealFileSystem(), root, source, wishes, reading)
    with storage_errors(repairing.files, root, "repairing the store"):
        cleared = repairing.plan_places()
        if cleared.actions:
            if on_planned is not None:
                on_planned(cleared)
            if not yes:
                return Outcome(plan=cleared, done=False)
            repairing.clear_places()
        check_readable(repairing.files, root)
        told = repairing.plan_best()
        if on_planned is not None and (told.plan.actions or not cleared.actions):
            on_planned(told.plan)
        if not yes or not told.plan.actions:
            told.plan.actions[:0] = cleared.actions
            return Outcome(plan=told.plan, done=yes)
        outcome = repairing.act(told, allow_network=allow_network)
        told.plan.actions[:0] = cleared.actions
        return outcome


@dataclass(kw_only=True)
class Told:
    """Everything that was decided; `format_id` is there when FORMAT has to be written."""

    plan: Plan
    view: View
    format_id: str | None
    log: LogPlan
    objects: ObjectPlan


class _Repairing:
    """One repair."""

    def __init__(
        self,
        files: FileSystem,
        root: str,
        source: RepairSource | None,
        wishes: Wishes,
        reading: Reading,
    ) -> None:
        self.files = files
        self.root = root
        self.source = source
        self.wishes = wishes
        self.reading = reading
        self.sound: set[Wanted] = set()  # found so by the plans until now

    # What lies in the way, of which nothing else can be told before it is moved

    def plan_places(self) -> Plan:
        """What has to be moved aside; CorruptionError where what was there is needed."""
        self._format_id()  # is this a store at all?
        plan = Plan()
        for obstacle in find_obstacles(self.files, self.root):
            path = f"{self.root}/{obstacle.name}"
            if obstacle.is_needed:
                raise CorruptionError(
                    f"{path}: {obstacle.found} lies where {obstacle.expected} of the store should "
                    "be, so there is no telling what is lost; put back what was there (is a disk "
                    "not mounted?). If it is gone for good, move this away and run the same "
                    "command again",
                    path=path,
                )
            plan.add("place_clear", path, f"{obstacle.found} in the store's way is moved aside")
        return plan

    def clear_places(self) -> None:
        for obstacle in find_obstacles(self.files, self.root):
            self.files.rename(f"{self.root}/{obstacle.name}", self._aside(obstacle.name))
        store_format.create_directories(self.files, self.root)

    def _aside(self, name: str) -> str:
        return f"{self.root}/{SET_ASIDE_PREFIX}{name.replace('/', '@')}.{new_id()[-8:]}"

    # Deciding

    def plan_best(self) -> Told:
        """The plan; where ours has lost its end, the log of a copy may go on behind it.

        It may have lost it to the byte, and the index too. Then nothing tells of it but that the
        objects of its last steps were used again, or that those of lost steps are still there.
        """
        told = self.plan()
        chosen = self.wishes.chosen or self.wishes.cut
        if chosen or not isinstance(self.source, StoreFiles):
            return told
        if not told.plan.loses:
            return self.plan(ahead=True) if self._has_more(told, self.source) else told
        further = self.plan(ahead=True)
        return further if further.plan.losses < told.plan.losses else told

    def _has_more(self, told: Told, copy: StoreFiles) -> bool:
        """Whether an object lies here that only what comes behind our end needs."""
        view, unsaid = told.view, Plan()
        index, store_id = self._index(view, unsaid), self._format_id()
        further = plan_log(
            self.files, view, index, store_id, unsaid, copy=copy, cut=False, ahead=True
        )
        assert further is not None, "there was a state without the copy"
        ends = (further.end.tables, told.log.end.tables)
        theirs, ours = (needed_objects(tables).keys() for tables in ends)
        names = set(view.names.get("objects", []))
        return any(has_file(digest, names) for digest in theirs - ours)

    def plan(self, *, ahead: bool = False) -> Told:
        plan = Plan()
        told_id = self._format_id()
        view = take_view(self.files, self.root)
        index = self._index(view, plan)
        log = plan_log(
            self.files,
            view,
            index,
            told_id,
            plan,
            copy=self.source if isinstance(self.source, StoreFiles) else None,
            cut=self.wishes.cut,
            ahead=ahead,
        )
        if log is None:
            raise CorruptionError(
                f"{self.root}: neither the log nor the index say which objects belong together, so "
                "there is nothing to repair; what is there was left as it is. Clone the store "
                "from a copy",
                path=self.root,
            )
        self._plan_directories(view, plan)
        format_id = self._plan_format(told_id, log.end.tables, plan)
        tables = DictTables.copy_of(log.end.tables)
        state.sweep(tables, view.leased(self.files))
        applied_lsn = index.applied.lsn if index is not None else 0
        audit = audit_objects(
            self.files,
            self.root,
            tables,
            applied_lsn=applied_lsn,
            reading=self.reading,
            sound=self.sound,
        )
        self.sound |= audit.sound
        objects = plan_objects(
            self.files,
            self.root,
            tables,
            audit.faults,
            plan,
            source=self.source,
            wishes=self.wishes,
        )
        return Told(plan=plan, view=view, format_id=format_id, log=log, objects=objects)

    def _format_id(self) -> str | None:
        """The store's id as FORMAT says it; None when it is damaged or not there."""
        try:
            return store_format.read_format(self.files, self.root).store_id
        except FormatError:
            if store_format.has_whole_format(self.files, self.root):
                raise
            return None

    def _plan_format(self, told_id: str | None, tables: DictTables, plan: Plan) -> str | None:
        logged: str = tables.get("meta", "store_id")
        if told_id == logged:
            return None
        why = "it is damaged" if told_id is None else f"it names another store, {told_id}"
        path = store_format.format_path(self.root)
        plan.add("format_write", path, f"FORMAT is written anew from the log: {why}")
        return logged

    def _index(self, view: View, plan: Plan) -> IndexState | None:
        path, why = f"{self.root}/index/data.mdb", "it is missing"
        try:
            if view.index is not None:
                return read_index(view.index)
        except IndexUnreadableError as error:
            why = f"it cannot be read ({error})"
        plan.add("index_rebuild", path, f"the index is made anew from the log: {why}")
        return None

    def _plan_directories(self, view: View, plan: Plan) -> None:
        for name in store_format.DIRECTORIES:
            if name not in view.names and name not in ("wal", "index"):
                path = f"{self.root}/{name}"
                plan.add("directory_make", path, f"the directory {name} is made again")

    # Acting

    def act(self, told: Told, *, allow_network: bool) -> Outcome:
        if told.format_id is not None or told.log.changes_files:
            with alone(self.files, self.root):
                check_unchanged(self.files, told.view)
                if told.format_id is not None:
                    self._write_format(told.format_id)
                if told.log.changes_files:
                    mend_log(self.files, self.root, told.log)
        with open_store(self.root, files=self.files, allow_network=allow_network) as store:
            mend_objects(store, told.objects)
        report = check_store(self.files, self.root, budget_seconds=0.0)
        errors = tuple(finding for finding in report.findings if finding.severity == "error")
        return Outcome(plan=told.plan, done=True, remaining=errors)

    def _write_format(self, store_id: str) -> None:
        path = store_format.format_path(self.root)
        if obstacle_at(self.files, path) is not None:
            self.files.rename(path, self._aside("FORMAT"))
        store_format.write_format(self.files, self.root, store_id)
