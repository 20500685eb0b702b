"""Checking the log: frames, chain, content, and the index against it.

Owns the replay: every record is applied to tables in memory, each checkpoint is compared with what
the records before it gave, and the index with the tables at its position. Knows nothing of objects.

A state is trusted while every record up to here was there and made sense; behind damage it is
trusted again from the next checkpoint on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack

from shardb import state
from shardb.errors import LogDamagedError
from shardb.filesystem import FileSystem
from shardb.findings import Finding, Severity, command
from shardb.frames import Frame
from shardb.fsck_view import View
from shardb.history import FaultKey, LogEntry, LogFault, acknowledged_by, key_of, read_log
from shardb.index_state import IndexState, position_differences
from shardb.log import Log
from shardb.state import DictTables
from shardb.storage_errors import reason
from shardb.unshown import UNSHOWN, command_to_see

SHOWN_DIFFERENCES_MAX = 10
# The kind of a fault of the file alone: its records are whole, though it is not as it was closed.
CHANGED_FILE = "file"
_KIND_OF_FAULT = {
    "damaged": "log_damaged",
    "chain": "log_chain_broken",
    "garbled": "log_record_garbled",
    "missing": "log_missing",
    "unreadable": "log_unreadable",
    "tail": "log_damaged",
}


@dataclass(kw_only=True)
class Replay:
    """What the log says, and what is wrong with it.

    `tables` are the newest state, None where damage leaves it unknown. `faults` are those of the
    findings that a repair can acknowledge.
    """

    tables: DictTables | None
    findings: list[Finding] = field(default_factory=list)
    faults: list[tuple[FaultKey, Finding]] = field(default_factory=list)


def check_log(
    files: FileSystem, view: View, index: IndexState | None, *, log: Log | None = None
) -> Replay:
    """Read the whole log of a view and compare the index with it.

    `log` is by default the one that lies there.
    """
    log = log or Log(files, f"{view.root}/wal")
    replay = _Replaying(files, log, view, index, view.leased(files))
    if not view.sequences:
        replay.add("log_missing", log.directory, expected="log segments", found="none")
    for item in read_log(log, view.sequences, last=view.last):
        if isinstance(item, LogFault):
            replay.meet_fault(item)
        else:
            replay.meet_record(item)
    replay.check_beginnings()
    replay.meet_end()
    replay.check_closed()
    replay.acknowledge()
    keyed = zip(replay.keys, replay.findings, strict=True)
    return Replay(
        tables=replay.tables if replay.trusted else None,
        findings=replay.findings,
        faults=[(key, finding) for key, finding in keyed if key is not None],
    )


class _Replaying:
    """One pass over the log."""

    def __init__(
        self,
        files: FileSystem,
        log: Log,
        view: View,
        index: IndexState | None,
        leased: Collection[str],
    ) -> None:
        self.files = files
        self.log = log
        self.view = view
        self.index = index
        self.leased = leased
        self.tables = DictTables()
        self.trusted = view.sequences[:1] == [1]
        self.findings: list[Finding] = []
        self.keys: list[FaultKey | None] = []  # of the findings, one each
        self.acknowledged: set[FaultKey] = set()
        self.last: Frame | None = None
        self.tail: LogFault | None = None
        self.is_other_log = False
        self.is_hidden = False  # the storage does not show a segment, which may be whole
        self.begun: set[int] = set()
        self.effects_behind_index = 0

    # Going through the log

    def meet_fault(self, fault: LogFault) -> None:
        if fault.kind == "tail" and fault.sequence == self.view.sequences[-1]:
            self.tail = fault  # what it means depends on the index
            return
        self.trusted = False
        if fault.error in UNSHOWN:
            self.meet_unshown(fault)
            return
        self.add(
            _KIND_OF_FAULT[fault.kind],
            fault.path,
            offset=fault.offset,
            expected=fault.expected,
            found=fault.found,
            key=key_of(fault),
        )

    def meet_unshown(self, fault: LogFault) -> None:
        """A segment that is there and that nobody has seen: what it lacks is not known."""
        self.is_hidden = True
        self.add(
            "log_unreadable",
            fault.path,
            expected=fault.expected,
            found=reason(self.files, fault.refusal()),
            key=key_of(fault),
            next_command=command_to_see(self.files, self.view.root, fault.path, fault.error),
        )

    def meet_record(self, entry: LogEntry) -> None:
        self.last = entry.frame
        if entry.frame.offset == 0 and entry.record["kind"] == first_kind(entry.sequence):
            self.begun.add(entry.sequence)
        try:
            self.acknowledged |= acknowledged_by(entry.record)
            self._apply(entry)
        except (LogDamagedError, AssertionError, KeyError, TypeError, ValueError) as error:
            self.trusted = False
            self.add(
                "log_record_garbled",
                self.log.stored_path(entry.sequence),
                offset=entry.frame.offset,
                expected=f"record {entry.frame.lsn} to follow from those before it",
                found=str(error),
                key=(entry.sequence, "garbled", entry.frame.offset),
            )
        if self.index is None:
            return
        if entry.frame.lsn == self.index.applied.lsn:
            self._compare_index(self.index, entry)
        elif entry.frame.lsn > self.index.applied.lsn:
            self.effects_behind_index += entry.record["kind"] not in state.WITHOUT_EFFECT

    def _apply(self, entry: LogEntry) -> None:
        if entry.record["kind"] == "checkpoint":
            self._compare_checkpoint(entry)
            self.trusted = True
        if self.trusted:
            state.apply(self.tables, entry.record)
            state.sweep(self.tables, self.leased)

    def _compare_checkpoint(self, entry: LogEntry) -> None:
        told = _without_closed(entry.record["state"])
        if not self.trusted:
            return
        replayed = _without_closed(state.full_state(self.tables))
        # Compared as bytes: a metric that is no number is not equal to itself.
        if msgpack.packb(replayed) != msgpack.packb(told):
            self.add(
                "checkpoint_differs",
                self.log.stored_path(entry.sequence),
                offset=entry.frame.offset,
                expected=f"the state that records 1 to {entry.frame.lsn - 1} give",
                found=f"another one: {_first_difference(replayed, told)}",
                key=(entry.sequence, "checkpoint", entry.frame.offset),
            )

    def _compare_index(self, index: IndexState, entry: LogEntry) -> None:
        """The tables have reached the position of the index."""
        self.is_other_log = entry.frame.digest != index.applied.digest
        if self.is_other_log or not self.trusted:
            return
        found = position_differences(index, entry.frame, entry.sequence, self.tables)
        more = f" ({len(found)} entries differ)" if len(found) > SHOWN_DIFFERENCES_MAX else ""
        path = f"{self.view.root}/index/data.mdb"
        for difference in found[:SHOWN_DIFFERENCES_MAX]:
            self.add(
                "index_differs",
                path,
                expected=f"{difference.table} {difference.key}: {difference.expected}",
                found=f"{difference.found}{more}",
            )

    # What the end means

    def check_beginnings(self) -> None:
        """Every segment begins with the record it was made with, and the last one is raw."""
        told = {finding.path for finding in self.findings}
        for sequence in self.view.sequences:
            path = self.log.stored_path(sequence)
            if sequence not in self.begun and path not in told:
                self.trusted = False
                expected = f"a segment that begins with {first_kind(sequence)}"
                self.add(
                    "log_truncated",
                    path,
                    offset=0,
                    expected=expected,
                    found="none of it",
                    key=(sequence, "beginning", 0),
                )
                self.tail = None
        last = self.view.sequences[-1] if self.view.sequences else 0
        if last and self.log.stored_path(last) != self.log.path(last):
            self.trusted = False
            path = self.log.path(last + 1)
            expected = "a segment behind the last closed one"
            self.add("log_missing", path, expected=expected, found="no file")

    def meet_end(self) -> None:
        if self.index is not None and not self.is_hidden and self._ends_before(self.index):
            self._add_truncated(self.index)
            return
        recover = command("recover", self.view.root)
        if self.tail is not None:
            self.add(
                "log_torn_tail",
                self.tail.path,
                severity="warning",
                offset=self.tail.offset,
                expected=self.tail.expected,
                found=self.tail.found,
                next_command=recover,
            )
        if self.index is not None and self.last is not None and self.effects_behind_index:
            self.add(
                "index_behind",
                f"{self.view.root}/index/data.mdb",
                severity="info",
                expected=f"record {self.last.lsn} applied",
                found=f"record {self.index.applied.lsn} applied",
                next_command=recover,
            )

    def check_closed(self) -> None:
        """Compare the compressed segments with what the last checkpoint says of them."""
        told = {finding.path for finding in self.findings}
        for sequence, size, digest in self.tables.get("meta", "closed") or []:
            path = self.log.compressed_path(sequence)
            if path in told or self.log.stored_path(sequence) != path:
                continue
            actual = self.log.describe(sequence)
            if actual[1:] != [size, bytes(digest)]:
                self.add(
                    "log_damaged",
                    path,
                    expected=f"{size} bytes with digest {bytes(digest).hex()}",
                    found=f"{actual[1]} bytes with digest {actual[2].hex()}",
                    key=(sequence, CHANGED_FILE, 0),
                )

    def _ends_before(self, index: IndexState) -> bool:
        """Whether the log lacks the record that the index applied last.

        Damage before the end may have swallowed that very record; then it is told already.
        """
        last_lsn = self.last.lsn if self.last is not None else 0
        return self.is_other_log or last_lsn < index.applied.lsn

    def _add_truncated(self, index: IndexState) -> None:
        self.trusted = False
        applied = index.applied
        end = f"record {self.last.lsn} is the last one" if self.last else "no record at all"
        self.add(
            "log_truncated",
            self.log.path(applied.sequence),
            offset=self.tail.offset if self.tail is not None else None,
            expected=f"record {applied.lsn}, up to byte {applied.offset}: the index applied it",
            found=f"another record {applied.lsn}" if self.is_other_log else end,
        )

    def acknowledge(self) -> None:
        """What a repair has told is no error any more; there is nothing left to do about it."""
        for position, key in enumerate(self.keys):
            if key in self.acknowledged:
                self.findings[position] = replace(
                    self.findings[position],
                    kind="log_acknowledged",
                    severity="info",
                    next_command=None,
                )
                self.keys[position] = None

    def add(
        self,
        kind: str,
        path: str,
        *,
        severity: Severity = "error",
        key: FaultKey | None = None,
        **fields: Any,
    ) -> None:
        """Add a finding; `key` is there when a repair can acknowledge it.

        What is to be typed is a repair, unless `fields` say something else, or None.
        """
        fields.setdefault("next_command", command("repair", self.view.root))
        self.keys.append(key)
        self.findings.append(Finding(kind=kind, severity=severity, path=path, **fields))


def first_kind(sequence: int) -> str:
    """The kind of the record that a segment is made with."""
    return "init" if sequence == 1 else "checkpoint"


def _without_closed(told: dict[str, Any]) -> dict[str, Any]:
    """A state without the list of closed segments, which a checkpoint is about to extend."""
    meta = {key: value for key, value in told["meta"].items() if key != "closed"}
    return {**told, "meta": meta}


def _first_difference(expected: dict[str, Any], found: Any) -> str:
    if not isinstance(found, dict):
        return "no state"
    for table, rows in expected.items():
        other = found.get(table)
        if not isinstance(other, dict):
            return f"no table {table}"
        for key in sorted({*rows, *other}):
            if msgpack.packb(rows.get(key)) != msgpack.packb(other.get(key)):
                return f"entry {key!r} of {table} differs"
    return "more tables"
