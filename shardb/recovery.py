"""Bringing index and log together, when a store is opened and before every append.

Owns the rules that decide what a log's end means, and the recovery report. The log is the truth and
the index a cache with one duty: `applied`, the position up to which it has applied the log, is the
witness that the log was once that long.

- Behind `applied`: valid frames are hardened (written again and synced, since their writer may not
  have managed to), then applied. A torn tail behind them is cut and named in the report.
- Before `applied`: everything must be there and continue the chain, else the log is refused.
- An index that is missing or unreadable is rebuilt from the last checkpoint in the log.

Every function here is called with the log's lock held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardb import records, state
from shardb.errors import LogTruncatedError
from shardb.frames import Frame
from shardb.index import Index, applied_position, put_applied_position
from shardb.listing import listed
from shardb.log import START, Log, Position, Scan, TornTail
from shardb.state import Tables


@dataclass(kw_only=True)
class RecoveryReport:
    """What opening a store found: `shardb recover --json` prints it.

    `opened` maps a branch to its commit and step; `dropped`, `rebuilt` and `warnings` list what was
    left out, made anew or looks wrong, each with what, path and why; `needs` is the next command to
    run, or None.
    """

    opened: dict[str, dict[str, Any]] = field(default_factory=dict)
    dropped: list[dict[str, Any]] = field(default_factory=list)
    rebuilt: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    needs: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "opened": self.opened,
            "dropped": self.dropped,
            "rebuilt": self.rebuilt,
            "warnings": self.warnings,
            "needs": self.needs,
        }


def told(items: Iterable[Mapping[str, Any]]) -> list[str]:
    """Give entries of a report as lines for people: what a kill left many of takes one."""
    paths: dict[tuple[str, str], list[str]] = {}
    for item in items:
        paths.setdefault((item["what"], item["why"]), []).append(item["path"])
    return [f"{what}: {listed(found, most=1)}: {why}" for (what, why), found in paths.items()]


def catch_up(log: Log, index: Index, report: RecoveryReport, *, whole: bool) -> Position:
    """Apply what the log has beyond the index; return the end of the log.

    With `whole` the last segment is checked from its start, otherwise from where the index is.
    Raises LogDamagedError or LogTruncatedError when the log is not what the index has seen.
    """
    applied = index.read(applied_position)
    scan, start = read_end(log, applied, whole=whole)
    sequence = sequence_of(scan)
    end = _end_of(scan, sequence, start)
    if scan.torn is not None:
        _cut_torn_tail(log, scan.torn, report)
    new = [frame for frame in scan.frames if frame.lsn > applied.lsn]
    if sequence > applied.sequence:
        log.sync_directory()  # whoever began this segment may have died before that
    if new:
        # Records without effect too: the next one must not be durable behind one that is not.
        behind = start if whole else applied
        log.harden(_before(new[0], behind, sequence), end)
    if any(_has_effect(frame) for frame in new):
        _apply(index, new, end)
    return end


def sequence_of(scan: Scan) -> int:
    """The segment that was scanned."""
    return int(scan.path.rpartition("/")[2].split(".")[0])


def read_end(log: Log, applied: Position, *, whole: bool) -> tuple[Scan, Position]:
    """Scan the last segment; check that it holds, or continues, what the index has applied.

    Changes nothing: a torn tail is told in the scan. Returns it and where it began. Raises
    LogDamagedError or LogTruncatedError.
    """
    sequences = log.sequences()
    if not sequences or sequences[-1] < applied.sequence:
        raise LogTruncatedError(
            f"{log.path(applied.sequence)}: this log segment is missing, but the index has applied "
            f"record {applied.lsn} of it. Put the segment back, or run `shardb repair`",
            path=log.path(applied.sequence),
        )
    last = sequences[-1]
    path = log.path(last)
    if log.is_closed(last):
        raise LogTruncatedError(
            f"{path}: this log segment was closed, and the one behind it is missing. Put it back "
            "from a copy, or run `shardb repair`",
            path=log.path(last + 1),
        )
    if last == applied.sequence and log.size_bytes(last) < applied.offset:
        raise LogTruncatedError(
            f"{path}: {log.size_bytes(last)} bytes, but the index has applied record "
            f"{applied.lsn}, which ends at byte {applied.offset}: the log was cut or replaced by "
            "an older copy. Put the newer file back, or run `shardb repair`",
            path=path,
        )
    start = applied if last == applied.sequence and not whole else START
    scan = log.scan(last, after=applied if start is applied and applied.lsn else None)
    if whole and applied.lsn and last == applied.sequence:
        _check_witness(scan, applied)
    if start is START:
        _check_beginning(scan, applied, last)
    return scan, start


def _check_beginning(scan: Scan, applied: Position, sequence: int) -> None:
    """A segment appears with its first record or not at all; that one is a full state."""
    first = scan.frames[0] if scan.frames else None
    if first is None or records.unpack(first.payload)["kind"] != _first_kind(sequence):
        raise LogTruncatedError(
            f"{scan.path}: this log segment does not begin with the record it was made with: it "
            "was cut or replaced. Put it back from a copy, or run `shardb repair`",
            path=scan.path,
        )
    if sequence > applied.sequence and first.lsn <= applied.lsn:
        raise LogTruncatedError(
            f"{scan.path}: this segment begins with record {first.lsn}, but the index has applied "
            f"record {applied.lsn} of an earlier one: they are not of one history. Put the right "
            "segments back, or run `shardb repair`",
            path=scan.path,
        )


def _first_kind(sequence: int) -> str:
    return "init" if sequence == 1 else "checkpoint"


def _check_witness(scan: Scan, applied: Position) -> None:
    """The frame that the index applied last must be there, with the digest it had."""
    if any(f.end == applied.offset and f.digest == applied.digest for f in scan.frames):
        return
    raise LogTruncatedError(
        f"{scan.path}: record {applied.lsn}, which the index has applied, is not in this log: it "
        "was damaged, or replaced by another copy. Run `shardb fsck`, then `shardb repair`",
        path=scan.path,
    )


def _cut_torn_tail(log: Log, torn: TornTail, report: RecoveryReport) -> None:
    log.cut(torn)
    report.dropped.append(
        {
            "what": "torn record",
            "path": torn.path,
            "why": f"{torn.length} bytes behind offset {torn.offset} are an unfinished write that "
            "was never reported as done",
        }
    )


def _apply(index: Index, new: list[Frame], end: Position) -> None:
    decoded = [records.unpack(frame.payload) for frame in new]

    def body(tables: Tables) -> None:
        for record in decoded:
            state.apply(tables, record)
        put_applied_position(tables, end)

    index.write(body)


def _has_effect(frame: Frame) -> bool:
    return records.unpack(frame.payload)["kind"] not in state.WITHOUT_EFFECT


def _before(frame: Frame, previous: Position, sequence: int) -> Position:
    return Position(
        sequence=sequence, offset=frame.offset, lsn=frame.lsn - 1, digest=previous.digest
    )


def _end_of(scan: Scan, sequence: int, start: Position) -> Position:
    if not scan.frames:
        assert start.sequence == sequence
        return start
    last = scan.frames[-1]
    return Position(sequence=sequence, offset=last.end, lsn=last.lsn, digest=last.digest)
