"""The verb `log`: every step that was ever committed, from the log itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from shardb.cli.places import JsonOption, StoreArgument, store_path
from shardb.cli.printing import (
    in_bytes,
    in_local_time,
    number,
    print_json,
    print_table,
    warn,
)
from shardb.errors import FormatError, LogDamagedError
from shardb.filesystem import FileSystem, RealFileSystem
from shardb.format import read_format
from shardb.history import LogEntry, LogFault, quiet_log, read_log, read_newest
from shardb.log import Log
from shardb.records import Commit, Record
from shardb.transfer_lineage import PastStep


@dataclass(kw_only=True)
class Row:
    """A commit as the log tells it; `bytes` are those of the shards that this step wrote."""

    commit: str
    step: int
    time: float
    branch: str
    parent: str | None
    bytes: int
    metrics: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "commit": self.commit,
            "step": self.step,
            "time": self.time,
            "metrics": self.metrics,
            "branch": self.branch,
            "parent": self.parent,
            "bytes": self.bytes,
            "notes": self.notes,
        }


def log(
    store: StoreArgument = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Only the last N commits.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Tell every step that was committed, the newest last: loss, learning rate, tokens, bytes.

    The log is the store's audit trail: it also holds steps whose weights were given back long ago,
    and those that a published commit brought along. Snapshots, changes of the recipe and rewinds
    are noted at the commit they belong to.

    \b
    Examples:
      shardb log run
      shardb log run --limit 20
      shardb log run --json

    It only reads, and opens nothing: it works beside a live run and on a damaged store. Where a
    part of the log is damaged it says so on standard error, tells the rest, and exits 1.
    An interrupt leaves nothing behind.
    """
    root = store_path(store)
    files = RealFileSystem()
    history = read_history(files, root, limit=limit)
    for fault in history.faults:
        warn(fault)
    if json:
        print_json([row.to_json() for row in history.rows])
    elif history.rows:
        _print_text(history.rows)
    else:
        print(f"{root}: no commit yet")
    return 1 if history.faults else 0


@dataclass(kw_only=True)
class History:
    """The commits of a log, oldest first, and where it is damaged."""

    rows: list[Row]
    faults: list[str]


def read_history(files: FileSystem, root: str, *, limit: int | None) -> History:
    """Read the whole log of a store; NotFoundError where there is none."""
    faults = []
    try:
        read_format(files, root)
    except FormatError as error:
        faults.append(error.message)
    wal = Log(files, f"{root}/wal")
    with quiet_log(files, root):
        sequences, last = read_newest(wal)
    told = _Telling(limit)
    for item in read_log(wal, sequences, last=last):
        if isinstance(item, LogEntry):
            told.meet(item.record)
        elif not _is_unfinished(item, sequences):
            faults.append(_fault_text(item))
    return History(rows=list(told.rows), faults=[*faults, *told.faults])


class _Telling:
    """Turns records into rows."""

    def __init__(self, limit: int | None) -> None:
        self.rows: deque[Row] = deque(maxlen=limit)
        self.seen: set[str] = set()
        self.faults: list[str] = []

    def meet(self, record: Record) -> None:
        try:
            self._meet(record)
        except (KeyError, TypeError, AttributeError, LogDamagedError) as error:
            self.faults.append(f"log record {record.get('id')}: {error}")

    def _meet(self, record: Record) -> None:
        kind = record["kind"]
        if kind == "commit":
            self._meet_commit(record)
        elif kind == "checkpoint":
            # The commits it repeats are known, unless the segments that told them are damaged.
            commits = sorted(record["state"]["commits"].values(), key=lambda c: c["time"])
            for commit in commits:
                if commit["id"] not in self.seen:
                    self._add(commit)
        elif kind == "snapshot":
            if (received := record.get("received")) and received["id"] not in self.seen:
                self._add(received)
            self._note(record["commit"], f"snapshot {record['name']}")
        elif kind == "delete":
            self._note_last(f"deleted {record['what']} {record['name']}")
        elif kind == "branch":
            self._note(record["commit"], f"branch {record['name']}")
        elif kind == "rewind":
            self._note_last(f"then rewound {record['branch']} to {record['to']}")
        elif kind == "policy":
            self._note_last(f"retention {record['policy']}")

    def _meet_commit(self, record: Record) -> None:
        """A commit that was copied to another branch before is told once, with the steps before."""
        for entry in record.get("rolled_up") or []:
            self._add_past(PastStep.from_record(entry))
        if record["id"] in self.seen:
            self._note(record["id"], f"branch {record['branch']}")
        else:
            self._add(record)

    def _add(self, record: Record) -> None:
        commit = Commit.from_record(record)
        self.seen.add(commit.id)
        changes = commit.metrics.get("recipe_changes")
        written = {e.digest: e.bytes for e in commit.shards.values() if e.step == commit.step}
        self.rows.append(
            Row(
                commit=commit.id,
                step=commit.step,
                time=commit.time,
                branch=commit.branch,
                parent=commit.parent,
                bytes=sum(written.values()),
                metrics=dict(commit.metrics),
                notes=list(_change_notes(changes)),
            )
        )

    def _add_past(self, step: PastStep) -> None:
        """Tell a step that a copied commit brought along; its weights never were in this store."""
        if step.commit in self.seen:
            return
        self.seen.add(step.commit)
        self.rows.append(
            Row(
                commit=step.commit,
                step=step.step,
                time=step.time,
                branch=step.branch,
                parent=step.parent,
                bytes=step.bytes,
                metrics=dict(step.metrics),
                notes=list(_change_notes(step.metrics.get("recipe_changes"))),
            )
        )

    def _note(self, commit: str, note: str) -> None:
        for row in reversed(self.rows):
            if row.commit == commit:
                row.notes.append(note)
                return

    def _note_last(self, note: str) -> None:
        if self.rows:
            self.rows[-1].notes.append(note)


def _change_notes(changes: Any) -> Iterator[str]:
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


def _print_text(rows: Iterable[Row]) -> None:
    rows = list(rows)
    branches = {row.branch for row in rows}
    many = len(branches) > 1
    headings = ("step", "loss", "validation", "rate", "tokens", "bytes", "time", "notes")
    table = [
        (
            str(row.step),
            number(row.metrics.get("loss")),
            number(row.metrics.get("validation_loss")),
            number(row.metrics.get("learning_rate"), ".3g"),
            number(row.metrics.get("tokens_seen")),
            in_bytes(row.bytes),
            in_local_time(row.time),
            "; ".join([f"branch {row.branch}"] * many + row.notes),
        )
        for row in rows
    ]
    print_table(headings, table, left=0)
