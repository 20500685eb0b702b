"""Reading the whole log without changing it, past whatever is damaged in it.

Owns the tolerant reader that `shardb log` and `shardb fsck` share: where the strict reader of
`shardb.log` refuses, this one names the fault and goes on behind it. `read_segment` is the one
function that knows how a segment is stored. Knows nothing of what records mean.

Invariants: nothing is written, not even a lock file. Under `quiet_log` nobody appends, applies or
retires, so that log, index and directories read inside the block belong together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardb import frames, records
from shardb.errors import ConflictError, LogDamagedError
from shardb.filesystem import READ, FileSystem, close_quietly
from shardb.frames import Frame
from shardb.log import Log
from shardb.records import Record

LOCK_WAIT_SECONDS_MAX = 30.0
LOCK_POLL_SECONDS = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFault:
    """Something in the log that is not as it was written.

    `kind` is "damaged" (bytes that are no frame, with frames behind them), "chain" (a frame that
    does not follow its predecessor), "garbled" (a valid frame whose payload is no record),
    "tail" (bytes behind the last frame of a segment), "missing" (a segment that is not there) or
    "unreadable" (the storage refuses to read it; then `error` is the number of what it said).
    `offset` counts unpacked bytes.
    """

    kind: str
    path: str
    sequence: int
    offset: int
    length: int
    expected: str
    found: str
    error: int | None = None

    def refusal(self) -> OSError:
        """What the operating system said; only of a segment that it did not show."""
        assert self.error is not None
        return OSError(self.error, os.strerror(self.error), self.path)


# Segment, kind and offset of a fault: what a repair acknowledges.
FaultKey = tuple[int, str, int]


def key_of(fault: LogFault) -> FaultKey:
    """What tells a fault from others."""
    return (fault.sequence, fault.kind, fault.offset)


def acknowledged_by(record: Record) -> set[FaultKey]:
    """The faults that a record says are known: a repair itself, or a checkpoint after it."""
    told: Any = ()
    if record["kind"] == "repair":
        told = record.get("acknowledged")
    elif record["kind"] == "checkpoint":
        told = record["state"]["meta"].get("acknowledged")
    return {(int(sequence), str(kind), int(offset)) for sequence, kind, offset in told or ()}


@dataclass(frozen=True, kw_only=True, slots=True)
class LogEntry:
    """One record and the frame that holds it."""

    sequence: int
    frame: Frame
    record: Record


@contextmanager
def quiet_log(files: FileSystem, root: str) -> Iterator[None]:
    """Hold the log's lock shared for a block, if there is a lock file; creates none.

    Raises ConflictError when somebody keeps the lock for longer than any append takes.
    """
    try:
        lock = files.open(f"{root}/locks/wal", READ)
    except FileNotFoundError:
        yield  # nobody has ever written here, or the store is a bare copy
        return
    try:
        deadline = time.monotonic() + LOCK_WAIT_SECONDS_MAX
        while not files.lock(lock, exclusive=False, blocking=False):
            if time.monotonic() > deadline:
                raise ConflictError(
                    f"{root}: another process has held the log's lock for "
                    f"{LOCK_WAIT_SECONDS_MAX:.0f} s; is it stopped? Let it go on, or end it",
                    path=root,
                )
            time.sleep(LOCK_POLL_SECONDS)
        yield
    finally:
        close_quietly(files, lock)


def read_segment(log: Log, sequence: int) -> bytes:
    """The frames of a segment as bytes, whether it is stored raw or compressed."""
    try:
        return log.read(sequence)
    except FileNotFoundError:
        return log.read(sequence)  # a writer has just replaced the raw file by the compressed one


def read_newest(log: Log) -> tuple[list[int], bytes | None]:
    """The segments that are there, and the content of the last one, under the log's quiet.

    None where it cannot be read: reading it again with the others names the fault.
    """
    sequences = log.sequences()
    try:
        return sequences, log.read(sequences[-1]) if sequences else None
    except (OSError, LogDamagedError):
        return sequences, None


def read_log(
    log: Log, sequences: list[int], *, last: bytes | None = None, first: int = 1
) -> Iterator[LogEntry | LogFault]:
    """Every record of the given segments in order, and every fault where it stands.

    `last` is the content of the last segment where the caller has read it already; `first` the
    segment from which on they should be there.
    """
    previous: Frame | None = None
    for position, sequence in enumerate(sequences):
        before = sequences[position - 1] if position else first - 1
        for lost in range(before + 1, sequence):
            yield _fault(
                log,
                lost,
                "missing",
                path=log.compressed_path(lost),
                expected=f"log segment {lost}",
                found="no file",
            )
            previous = None
        try:
            is_last = position == len(sequences) - 1
            data = last if is_last and last is not None else read_segment(log, sequence)
        except (OSError, LogDamagedError) as error:
            code = error.errno if isinstance(error, OSError) else None
            kind = "unreadable" if isinstance(error, OSError) else "damaged"
            told = {"expected": "a whole segment", "found": str(error), "error": code}
            yield _fault(log, sequence, kind, **told)
            previous = None
            continue
        for item in _read_frames(log, sequence, memoryview(data), previous):
            yield item
            if isinstance(item, LogEntry):
                previous = item.frame


def _read_frames(
    log: Log, sequence: int, data: memoryview, previous: Frame | None
) -> Iterator[LogEntry | LogFault]:
    """The frames of one segment; `previous` is the last one of the segment before, if known."""
    offset = 0
    while offset < len(data):
        frame = frames.decode(data, offset)
        if offset == 0 and sequence == 1 and frame is not None and frame.lsn != 1:
            expected, found = "record 1", f"record {frame.lsn}"
            yield _fault(log, sequence, "chain", expected=expected, found=found)
        if frame is None:
            behind = next_frame(data, offset + 1)
            yield _hole(log, sequence, data, offset, previous, behind)
            if behind is None:
                return
            frame, previous = behind, None
        elif (fault := _chain_fault(log, sequence, frame, previous)) is not None:
            yield fault
        offset, previous = frame.end, frame
        try:
            yield LogEntry(sequence=sequence, frame=frame, record=records.unpack(frame.payload))
        except LogDamagedError as error:
            yield _fault(
                log,
                sequence,
                "garbled",
                offset=frame.offset,
                length=frame.end - frame.offset,
                expected=f"record {frame.lsn}",
                found=error.message,
            )


def next_frame(data: memoryview, start: int) -> Frame | None:
    """The next whole frame; None too where there is too much that looks like one to go on."""
    try:
        return frames.find_valid(data, start)
    except LogDamagedError:
        return None


def _hole(
    log: Log,
    sequence: int,
    data: memoryview,
    offset: int,
    previous: Frame | None,
    behind: Frame | None,
) -> LogFault:
    end = behind.offset if behind is not None else len(data)
    return _fault(
        log,
        sequence,
        "damaged" if behind is not None else "tail",
        offset=offset,
        length=end - offset,
        expected=_lost_records(previous, behind),
        found=f"{end - offset} bytes that are no valid record",
    )


def _lost_records(previous: Frame | None, behind: Frame | None) -> str:
    if behind is None:
        return "the end of the segment, or one more record"
    last = behind.lsn - 1
    if previous is None:
        return f"records up to {last}"
    first = previous.lsn + 1
    return f"record {first}" if first == last else f"records {first} to {last}"


def _chain_fault(log: Log, sequence: int, frame: Frame, previous: Frame | None) -> LogFault | None:
    if previous is None:
        return None
    if frame.lsn == previous.lsn + 1 and frame.previous == previous.digest:
        return None
    return _fault(
        log,
        sequence,
        "chain",
        offset=frame.offset,
        length=frame.end - frame.offset,
        expected=f"record {previous.lsn + 1} behind digest {previous.digest.hex()}",
        found=f"record {frame.lsn} behind digest {frame.previous.hex()}",
    )


def _fault(log: Log, sequence: int, kind: str, **fields: Any) -> LogFault:
    return LogFault(
        kind=kind,
        path=fields.pop("path", None) or log.stored_path(sequence),
        sequence=sequence,
        offset=fields.pop("offset", 0),
        length=fields.pop("length", 0),
        **fields,
    )
