"""Deciding how a damaged log is mended.

Owns the choice: what another copy of the log can fill in, which state to go on with, and what has
to be cut, kept aside or begun anew for that. Changes nothing; `shardb.repair_log_acts` does.

What is damaged before the newest state is history only: the run goes on, and what cannot be filled
in is acknowledged by a record (`repair`), so that a check does not find it for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shardb import records
from shardb.errors import LogDamagedError, LogTruncatedError
from shardb.filesystem import FileSystem
from shardb.frames import Frame
from shardb.fsck_log import CHANGED_FILE, Replay, check_log
from shardb.fsck_view import View
from shardb.history import FaultKey
from shardb.index_state import IndexState, foreign_store
from shardb.listing import listed
from shardb.log import START
from shardb.recovery import read_end
from shardb.repair_fill import FilledLog, filled_from, is_idle
from shardb.repair_plan import Plan
from shardb.repair_sources import StoreFiles
from shardb.repair_state import (
    End,
    Ends,
    all_frames,
    choose,
    has_effect,
    known_ends,
    only_in,
    records_behind,
    salvage,
)
from shardb.state import DictTables


@dataclass(kw_only=True)
class LogPlan:
    """What is to be done to a log, to end at the state of `end`.

    `fills` are segments that take the place of damaged ones, or, where they are `rewritten`, of
    files of the same records that have changed. `replaced` are records that went another way, of
    segments that are kept aside for one of `fills`. `aside` are those that are of no use.
    Behind `cut_at` in the segment of `end` nothing is left. `begins_anew` says that a new segment
    begins with the state, `index_aside` why the index is made anew, `index_knew` the steps that
    it knew alone.
    """

    end: End
    sequences: list[int]
    next_sequence: int
    fills: dict[int, bytes] = field(default_factory=dict)
    rewritten: frozenset[int] = frozenset()
    replaced: dict[int, list[Frame]] = field(default_factory=dict)
    aside: list[int] = field(default_factory=list)
    cut_at: int | None = None
    begins_anew: bool = False
    index_aside: str | None = None
    index_knew: list[str] = field(default_factory=list)

    @property
    def changes_files(self) -> bool:
        """Whether something has to be done before the store can be opened."""
        cuts = self.cut_at is not None or self.begins_anew or self.index_aside is not None
        return bool(self.fills or self.aside) or cuts


def plan_log(
    files: FileSystem,
    view: View,
    index: IndexState | None,
    store_id: str | None,
    plan: Plan,
    *,
    copy: StoreFiles | None,
    cut: bool,
    ahead: bool = False,
) -> LogPlan | None:
    """Decide, and say it in `plan`; None where neither log nor index give any state.

    `store_id` is that of FORMAT, if FORMAT is whole; `copy` a store that may have the log too. With
    `cut` a damaged log ends at its first damaged record, whatever is known behind it; with `ahead`
    a log without a fault goes on with what the copy has behind its end.
    """
    log, superseded = FilledLog(files, view), False
    replaced: dict[int, list[Frame]] = {}
    checked = check_log(files, view, index, log=log)
    doubtful = (
        ahead or index is None or any(finding.severity != "info" for finding in checked.findings)
    )
    if copy is not None and doubtful:
        known_id = _known_id(checked, index) or store_id
        idle = ahead and index is not None and is_idle(log, view.sequences, index.applied.lsn)
        seen = None if idle else index
        fills = filled_from(
            log, copy, view.sequences, seen, checked, store_id=known_id, ahead=ahead
        )
        replaced = _only_ours(log, view, fills)
        log.fills = fills
        superseded = idle and max(view.sequences) in log.fills
        view, checked = _checked_again(files, log, view, index)
    rewrites = _rewrites(log, checked)
    if rewrites:
        log.fills |= rewrites
        view, checked = _checked_again(files, log, view, index)
    ends = known_ends(view.sequences, log.content, index)
    opens = _opens(log, index, ends.of_log)
    end = ends.of_log if opens else _chosen_end(log, view, ends, store_id, cut=cut)
    if end is None:
        return None
    told = LogPlan(
        end=end,
        sequences=view.sequences,
        fills=log.fills,
        rewritten=frozenset(rewrites),
        replaced=replaced,
        next_sequence=_next_sequence(log, view, end),
    )
    if not opens:
        _mend_end(told, log, ends)
    _mend_index(told, index, checked, is_other=ends.is_other)
    if index is not None and foreign_store(log, index, store_id) is not None:
        told.index_aside, told.index_knew = "it is that of another store", []
    elif superseded:
        told.index_knew = []  # the log goes on from all that the index knew
    whole = copy.root if copy is not None and _has_seen_end(copy, index) else None
    _Telling(plan, log, told, checked, copy, whole).tell()
    return told


# The end of the log


def _opens(log: FilledLog, index: IndexState | None, of_log: End | None) -> bool:
    """Whether a store opens with this log and index as they are."""
    try:
        scan, _ = read_end(log, index.applied if index is not None else START, whole=True)
    except (OSError, LogDamagedError, LogTruncatedError):
        return False
    return of_log is not None and of_log.position.lsn == scan.frames[-1].lsn


def _checked_again(
    files: FileSystem, log: FilledLog, view: View, index: IndexState | None
) -> tuple[View, Replay]:
    """The sight of a log with its fills, and what is still wrong with it."""
    sequences = log.sequences()
    newest = log.content(sequences[-1]) if sequences else None
    view = replace(view, sequences=sequences, last=newest)
    return view, check_log(files, view, index, log=log)


def _only_ours(log: FilledLog, view: View, fills: dict[int, bytes]) -> dict[int, list[Frame]]:
    """The records of ours that say something, and that are not in what takes their place."""
    found = {s: only_in(log.content(s), data) for s, data in fills.items() if s in view.sequences}
    told = {s: [frame for frame in alone if has_effect(frame)] for s, alone in found.items()}
    return {sequence: alone for sequence, alone in told.items() if alone}


def _rewrites(log: FilledLog, checked: Replay) -> dict[int, bytes]:
    """Closed segments whose records are whole, and whose files are not as they were closed."""
    changed = [sequence for (sequence, kind, _), _ in checked.faults if kind == CHANGED_FILE]
    return {sequence: log.read(sequence) for sequence in changed}


def _known_id(checked: Replay, index: IndexState | None) -> str | None:
    """The store's id as log or index tell it."""
    for tables in (checked.tables, index.tables if index is not None else None):
        if tables is not None and (told := tables.get("meta", "store_id")) is not None:
            return str(told)
    return None


def _next_sequence(log: FilledLog, view: View, end: End) -> int:
    """The number of a new segment: no other one had it.

    A closed segment had one behind it. Where that is gone its number stays free, so that the gap
    is seen.
    """
    last = max([1, end.position.sequence, *view.sequences])
    return last + (2 if last in view.sequences and log.is_closed(last) else 1)


def _chosen_end(
    log: FilledLog, view: View, ends: Ends, store_id: str | None, *, cut: bool
) -> End | None:
    """The state that a log which does not open goes on with."""
    if cut and ends.of_log is not None:
        return ends.of_log
    names = view.names.get("objects", [])
    end = choose(ends, store_id, set(names))
    if ends.is_other:
        return end
    return salvage(end, store_id, view.sequences, log.content, set(names)) or end


def _mend_end(told: LogPlan, log: FilledLog, ends: Ends) -> None:
    """Cut, keep aside or begin anew, so that the log ends at the chosen state."""
    end = told.end
    if ends.is_other and end.origin == "index":
        told.aside, told.begins_anew = list(told.sequences), True
        return
    at = end.position
    if end.origin == "salvage":
        told.aside = [s for s in told.sequences if log.content(s) is None and not log.is_closed(s)]
        told.begins_anew = True
        return
    told.aside = [s for s in told.sequences if s > at.sequence]
    data = log.content(at.sequence) if at.sequence in told.sequences else None
    if data is None and at.sequence in told.sequences:
        told.aside.insert(0, at.sequence)
    is_raw = data is not None and not log.is_closed(at.sequence)
    if data is not None and is_raw and len(data) > at.offset:
        told.cut_at = at.offset
    told.begins_anew = end.origin == "index" or not is_raw


def _mend_index(
    told: LogPlan, index: IndexState | None, checked: Replay, *, is_other: bool
) -> None:
    """An index that knows more than is left of the log, or something else, is made anew."""
    if index is None:
        return
    end = told.end
    if end.origin == "log" and (is_other or index.applied.lsn > end.position.lsn):
        told.index_aside = "it knows what is not in the log any more"
        told.index_knew = _only_in(index, end.tables)
    elif any(finding.kind == "index_differs" for finding in checked.findings):
        told.index_aside = "it is not what the log says"


def _only_in(index: IndexState, tables: DictTables) -> list[str]:
    """Name the steps and snapshots that an index knows and a state does not."""
    known = dict(tables.items("commits"))
    commits = [row for commit, row in index.tables.items("commits") if commit not in known]
    steps = sorted((row["step"], str(row["branch"])) for row in commits)
    names = [name for name, _ in index.tables.items("snapshots")]
    lost = [name for name in names if tables.get("snapshots", name) is None]
    return [
        *(f"step {step} of {branch}" for step, branch in steps),
        *(f"snapshot {n}" for n in lost),
    ]


def _has_seen_end(copy: StoreFiles, index: IndexState | None) -> bool:
    """Whether a copy's log ends with the record that our index applied last."""
    sequences = copy.sequences()
    frames = all_frames(copy.segment(sequences[-1])) if sequences else []
    applied = index.applied if index is not None else START
    return bool(frames) and (frames[-1].lsn, frames[-1].digest) == (applied.lsn, applied.digest)


# In words

ORIGINS = {
    "log": "the log tells before the damage",
    "index": "the index knows",
    "salvage": "the whole records before and behind the damage tell",
}


class _Telling:
    """Says in a plan what is done to a log and what is lost by it."""

    def __init__(
        self,
        plan: Plan,
        log: FilledLog,
        told: LogPlan,
        checked: Replay,
        copy: StoreFiles | None,
        whole: str | None,
    ) -> None:
        """`whole` is the root of a copy that has all of the log, if there is one."""
        self.plan = plan
        self.whole = whole
        self.log = log
        self.told = told
        self.checked = checked
        self.copy_name = copy.name if copy is not None else ""

    def tell(self) -> None:
        for sequence in self.told.fills:
            what, does = "log_fill", f"is put back, with what {self.copy_name} has of it"
            if sequence in self.told.rewritten:
                what, does = "log_rewrite", "is written anew: its file has changed, not its records"
            lost = _named(self.told.replaced.get(sequence, []))
            if lost is not None:
                does += "; the file there, which is not the one that the index has seen, is kept"
                does += " aside"
            self.plan.add(what, self.log.path(sequence), f"log segment {sequence} {does}", lost)
        self._tell_end()
        if self.told.index_aside:
            path = f"{self.log.directory.rpartition('/')[0]}/index/data.mdb"
            does = f"the index is made anew from the log: {self.told.index_aside}"
            self.plan.add("index_rebuild", path, does, listed(self.told.index_knew) or None)
        for finding in self.checked.findings:
            if finding.kind == "log_torn_tail" and self.told.cut_at is None:
                does = "an unfinished record at the end of the log is cut; it was never reported"
                self.plan.add("log_cut_torn", finding.path, does)
        for key, finding in self.checked.faults:
            if not self._is_over(key):
                lost = f"{finding.expected} (found {finding.found})"
                does = "a part of the history is given up; the newest state is not affected"
                self.plan.add("history_acknowledge", finding.path, does, lost)

    def _tell_end(self) -> None:
        told = self.told
        lost = self._lost_text()
        if lost is not None and told.end.origin == "index" and self.whole is not None:
            place = f"{self.whole}/wal"
            lost += f" ({place} has all of it: with that in the place of wal/, nothing is lost)"
        for sequence in told.aside:
            does = f"log segment {sequence}, which is of no use, is kept aside"
            self.plan.add("log_set_aside", self.log.stored_path(sequence), does, lost)
            lost = None
        if told.cut_at is not None:
            path = self.log.path(told.end.position.sequence)
            does = f"the log is cut at byte {told.cut_at}; what is behind it is kept aside"
            self.plan.add("log_cut", path, does, lost)
            lost = None
        if told.begins_anew:
            does = f"the log goes on in a new segment, with what {ORIGINS[told.end.origin]}: "
            path = self.log.path(told.next_sequence)
            self.plan.add("log_go_on", path, does + heads_text(told.end.tables), lost)

    def _is_over(self, key: FaultKey) -> bool:
        """Whether a fault goes with what is kept aside or cut."""
        sequence, _, offset = key
        end = self.told.end.position
        is_cut = self.told.cut_at is not None and sequence == end.sequence
        return sequence in self.told.aside or (is_cut and offset >= end.offset)

    def _lost_text(self) -> str | None:
        """What was told behind the state that the log goes on with."""
        told, end = self.told, self.told.end
        if told.aside and told.aside == told.sequences and told.end.origin == "index":
            return "the log that lies there, which is not the one that the index has seen"
        behind = records_behind(told.sequences, self.log.content, told.end.position)
        if (named := _named(behind)) is not None:
            return named
        if not (told.aside or told.cut_at is not None or told.begins_anew):
            return None
        if end.origin == "log":
            return f"what came behind {heads_text(end.tables)}"
        return self._gap_text(end.position.lsn)

    def _gap_text(self, reached_lsn: int) -> str | None:
        """The records at the end that the index has seen, and that the log has not any more."""
        for sequence in reversed(self.told.sequences):
            there = [frame.lsn for frame in all_frames(self.log.content(sequence))]
            if there:
                lost = (max(there) + 1, reached_lsn)
                return _records_text(*lost) if lost[0] <= lost[1] else None
        return _records_text(1, reached_lsn)


def _named(found: list[Frame]) -> str | None:
    """What records tell: steps, snapshots and branches by name, others by number."""
    named, others = [], 0
    for frame in found:
        try:
            record = records.unpack(frame.payload)
        except LogDamagedError:
            others += 1
            continue
        if record["kind"] == "commit":
            named.append(f"step {record.get('step')} of {record.get('branch')}")
        elif record["kind"] in ("snapshot", "branch"):
            named.append(f"{record['kind']} {record.get('name')}")
        else:
            others += 1
    counted = f"{others} other record{'s' * (others != 1)}"
    return listed([*named, *([counted] if others else [])]) or None


def _records_text(first: int, last: int) -> str:
    named = f"record {first}" if first == last else f"records {first} to {last}"
    return f"the history that {named} told"


def heads_text(tables: DictTables) -> str:
    """Where the branches are in a state."""
    heads = {
        name: tables.get("commits", row["head"])["step"] for name, row in tables.items("branches")
    }
    return listed(f"{name} at step {step}" for name, step in heads.items()) or "no commit yet"
