"""What a log tells: one row a commit, with what happened to it noted.

Owns turning records into rows, and which part of the log has to be read. Reads past damage and
names it; opens nothing and changes nothing. Knows nothing of printing.

A row is light: this is read for a hundred thousand commits at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shardb.errors import FormatError, LogDamagedError
from shardb.filesystem import FileSystem, read_file
from shardb.format import read_format
from shardb.history import (
    FaultKey,
    LogEntry,
    LogFault,
    acknowledged_by,
    key_of,
    quiet_log,
    read_log,
    read_newest,
)
from shardb.index import MAP_BYTES
from shardb.index_state import IndexUnreadableError, read_index
from shardb.log import START, Log, Position
from shardb.records import Record
from shardb.storage_errors import storage_error
from shardb.transfer_lineage import PastStep
from shardb.unshown import UNSHOWN

LEFT_BEHIND = "left behind"


@dataclass(kw_only=True, slots=True)
class Row:
    """A commit as the log tells it; `bytes` are those of the shards that this step wrote.

    `before` is the commit that it really continues: in a copy, the parent is what the branch of
    this store was at. `is_left` says that no branch and no snapshot comes from it.
    """

    commit: str
    step: int
    time: float
    branch: str
    parent: str | None
    before: str | None
    bytes: int
    metrics: dict[str, Any]
    is_left: bool = False
    events: list[tuple[str, str]] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """What happened to it, for people."""
        left = [LEFT_BEHIND] if self.is_left else []
        return [text for _, text in self.events] + left

    def to_json(self) -> dict[str, Any]:
        return {
            "commit": self.commit,
            "step": self.step,
            "time": self.time,
            "metrics": self.metrics,
            "branch": self.branch,
            "parent": self.parent,
            "bytes": self.bytes,
            "left_behind": self.is_left,
            "notes": self.notes,
        }


@dataclass(kw_only=True)
class Timeline:
    """The commits of a log, oldest first, and where it is damaged."""

    rows: list[Row]
    faults: list[str]


@dataclass(frozen=True, kw_only=True)
class Span:
    """The part that is wanted: the newest `count` rows, from a step on, from a moment on."""

    count: int | None = None
    step: int | None = None
    time: float | None = None

    def of(self, rows: list[Row]) -> list[Row]:
        """The rows that are in it."""
        if self.step is not None:
            rows = [row for row in rows if row.step >= self.step]
        if self.time is not None:
            rows = [row for row in rows if row.time >= self.time]
        return rows if self.count is None else rows[-self.count :]


EVERYTHING = Span()


def read_timeline(files: FileSystem, root: str, span: Span = EVERYTHING) -> Timeline:
    """Read the log of a store as far back as `span` asks.

    NotFoundError where there is none; StorageFailedError where the storage shows nothing of it.
    """
    faults = []
    try:
        read_format(files, root)
    except FormatError as error:
        faults.append(error.message)
    log = Log(files, f"{root}/wal")
    with quiet_log(files, root):
        sequences, last = read_newest(log)
        index = _index(files, root)
    applied = _applied(index)
    wanted = _wanted_segments(log, sequences, last, span)
    teller, met = _Teller(), []
    last_lsn, is_other = 0, False
    for item in read_log(log, wanted, last=last, first=wanted[0] if wanted != sequences else 1):
        if isinstance(item, LogEntry):
            teller.meet(item.record)
            last_lsn, digest = item.frame.lsn, item.frame.digest
            is_other = is_other or (last_lsn == applied.lsn and digest != applied.digest)
        elif not _is_unfinished(item, sequences):
            met.append(item)
    hidden = next((fault for fault in met if fault.error in UNSHOWN), None)
    if hidden is not None and not last_lsn:
        raise storage_error(files, hidden.path, "reading the log", hidden.refusal())
    faults += [_fault_text(fault) for fault in met if key_of(fault) not in teller.acknowledged]
    if not sequences:
        faults.append(f"{root}/wal: the log is missing; put it back, or run `shardb repair`")
    elif not met and (is_other or last_lsn < applied.lsn):
        faults.append(
            f"{log.stored_path(sequences[-1])}: the log ends before record {applied.lsn}, or has "
            "another one, and the index has applied that: it was cut or replaced by another copy. "
            "Put the right one back, or run `shardb fsck`, then `shardb repair`"
        )
    return Timeline(rows=span.of(teller.ended()), faults=[*faults, *teller.faults])


def _index(files: FileSystem, root: str) -> bytes | None:
    """The bytes of the index as it is now; None where they cannot be read."""
    with suppress(OSError):
        return read_file(files, f"{root}/index/data.mdb", limit_bytes=MAP_BYTES)
    return None


def _applied(index: bytes | None) -> Position:
    """The record that the index has applied last; the start where it cannot say."""
    with suppress(IndexUnreadableError):
        if index is not None:
            return read_index(index).applied
    return START


def _wanted_segments(log: Log, sequences: list[int], last: bytes | None, span: Span) -> list[int]:
    """The segments that hold the span: each begins with a full state, so that reading can too.

    Steps may come again after a rewind, so a step alone does not say where to begin.
    """
    if span.time is None and (span.count is None or span.step is not None):
        return sequences
    commits = 0
    for position in range(len(sequences) - 1, 0, -1):
        sequence = sequences[position]
        newest = last if position == len(sequences) - 1 else None
        found = read_log(log, [sequence], last=newest, first=sequence)
        entries = (item.record for item in found if isinstance(item, LogEntry))
        first = next(entries, None)
        if span.time is not None and first is not None and first["time"] < span.time:
            return sequences[position:]
        if span.count is not None and span.step is None:
            commits += sum(record["kind"] == "commit" for record in entries)
            if commits >= span.count:
                return sequences[position:]
    return sequences


class _Teller:
    """Turns records into rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.faults: list[str] = []
        self.acknowledged: set[FaultKey] = set()
        self._by_id: dict[str, Row] = {}
        self._heads: dict[str, str] = {}
        self._snapshots: dict[str, str] = {}

    def meet(self, record: Record) -> None:
        try:
            self._meet(record)
        except (KeyError, TypeError, ValueError, AttributeError, LogDamagedError) as error:
            self.faults.append(f"log record {record.get('id')}: {error!r}")

    def ended(self) -> list[Row]:
        """All rows, those marked that no name leads to."""
        led: set[str] = set()
        for start in (*self._heads.values(), *self._snapshots.values()):
            at: str | None = start
            while at is not None and at not in led:
                led.add(at)
                row = self._by_id.get(at)
                at = row.before if row is not None else None
        for row in self.rows:
            row.is_left = row.commit not in led
        return self.rows

    def _meet(self, record: Record) -> None:
        kind = record["kind"]
        self.acknowledged |= acknowledged_by(record)
        if kind == "commit":
            self._meet_commit(record)
        elif kind == "checkpoint":
            self._meet_checkpoint(record["state"])
        elif kind == "snapshot":
            if (received := record.get("received")) and received["id"] not in self._by_id:
                self._add(received)
            self._snapshots[record["name"]] = record["commit"]
            self._note(record["commit"], "snapshot", f"snapshot {record['name']}")
        elif kind == "branch":
            self._heads[record["name"]] = record["commit"]
            self._note(record["commit"], "branch", f"branch {record['name']}")
        elif kind == "delete":
            names = self._snapshots if record["what"] == "snapshot" else self._heads
            names.pop(record["name"], None)
            self._note_last("delete", f"deleted {record['what']} {record['name']}")
        elif kind == "rewind":
            self._heads[record["branch"]] = record["to"]
            place = self._place_text(record["to"])
            self._note(record["origin"], "rewind", f"then rewound {record['branch']} to {place}")
        elif kind == "policy":
            self._note_last("policy", f"retention {record['policy']}")
        elif kind == "repair":
            lost = f", {len(record['dropped'])} commits given up" if record["dropped"] else ""
            self._note_last("repair", f"then repaired{lost}")

    def _meet_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Its commits are known, unless the segments that told them are damaged or not read."""
        for commit in sorted(state["commits"].values(), key=lambda commit: commit["time"]):
            if commit["id"] not in self._by_id:
                self._add(commit)
        self._heads = {name: row["head"] for name, row in state["branches"].items()}
        self._snapshots = {name: row["commit"] for name, row in state["snapshots"].items()}

    def _meet_commit(self, record: Record) -> None:
        """A commit that was copied to another branch before is told once, with the steps before."""
        for entry in record.get("rolled_up") or ():
            self._add_past(PastStep.from_record(entry))
        self._heads[record["branch"]] = record["id"]
        if record["id"] in self._by_id:
            self._note(record["id"], "branch", f"branch {record['branch']}")
        else:
            self._add(record)

    def _add(self, record: Record) -> None:
        step, moment, metrics = record["step"], record["time"], record["metrics"]
        if type(step) is not int or type(moment) not in (int, float) or type(metrics) is not dict:
            raise TypeError(f"step {step!r}, time {moment!r}, metrics {metrics!r}")
        written = {entry[0]: entry[1] for entry in record["shards"].values() if entry[2] == step}
        self._append(
            Row(
                commit=record["id"],
                step=step,
                time=moment,
                branch=record["branch"],
                parent=record["parent"],
                before=record.get("origin_parent", record["parent"]),
                bytes=sum(written.values()),
                metrics=metrics,
            )
        )

    def _add_past(self, step: PastStep) -> None:
        """Tell a step that a copied commit brought along; its weights never were in this store."""
        if step.commit in self._by_id:
            return
        self._append(
            Row(
                commit=step.commit,
                step=step.step,
                time=step.time,
                branch=step.branch,
                parent=step.parent,
                before=step.parent,
                bytes=step.bytes,
                metrics=dict(step.metrics),
            )
        )

    def _append(self, row: Row) -> None:
        row.events.extend(("recipe", text) for text in _changes(row.metrics.get("recipe_changes")))
        self._by_id[row.commit] = row
        self.rows.append(row)

    def _place_text(self, commit: str) -> str:
        row = self._by_id.get(commit)
        return f"step {row.step}" if row is not None else commit

    def _note(self, commit: str, kind: str, text: str) -> None:
        row = self._by_id.get(commit)
        if row is not None:
            row.events.append((kind, text))

    def _note_last(self, kind: str, text: str) -> None:
        if self.rows:
            self.rows[-1].events.append((kind, text))


def _changes(changes: Any) -> Iterator[str]:
    """What a run changed in its recipe: name to a pair of old and new value."""
    if not isinstance(changes, dict):
        return
    for name, pair in changes.items():
        is_pair = isinstance(pair, list) and len(pair) == 2
        yield f"{name} {pair[0]} -> {pair[1]}" if is_pair else f"{name} changed"


def _is_unfinished(fault: LogFault, sequences: list[int]) -> bool:
    """Whether it is only the torn end of the last segment, which the next opening cuts."""
    return fault.kind == "tail" and fault.sequence == sequences[-1]


def _fault_text(fault: LogFault) -> str:
    return (
        f"{fault.path}: offset {fault.offset}: expected {fault.expected}, found {fault.found}; "
        "`shardb fsck` says more"
    )


def metric_names(rows: Iterable[Row]) -> list[str]:
    """Every metric that any row has."""
    return sorted({name for row in rows for name in row.metrics})
