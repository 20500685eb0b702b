"""The write-ahead log: segment files of chained frames. The truth of the store.

Owns naming, reading, appending, hardening and rotation of segments. Knows nothing of what records
mean. Callers hold the log's lock around everything that writes.

Invariants:
- Segment n+1 begins with a checkpoint record, so that reading can start at any segment.
- A segment appears under its name only whole (written beside, synced, renamed, directory synced).
- Every append is one record, synced before the next one starts. So only the last record of the log
  can be unfinished: sectors reach the disk in any order, and a whole record behind a half one would
  otherwise not prove damage.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import xxhash
import zstandard

from shardb import frames
from shardb.errors import LogDamagedError
from shardb.filesystem import (
    CREATE,
    READ,
    WRITE,
    FileSystem,
    opened,
    read_exactly,
    read_file,
    write_all,
    write_file_durably,
)
from shardb.frames import Frame

SEGMENT_PATTERN = re.compile(r"^(\d{10})\.wal(\.zst)?$")
SEGMENT_LIMIT_BYTES = 4 << 20
# Segments larger than this are refused before they are read: nothing the store writes comes near.
SEGMENT_READ_LIMIT_BYTES = 1 << 30
COMPRESSION_LEVEL = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """A place between two frames: what has been read or applied up to here."""

    sequence: int
    offset: int
    lsn: int
    digest: bytes


START = Position(sequence=1, offset=0, lsn=0, digest=frames.NO_DIGEST)


@dataclass(frozen=True, kw_only=True, slots=True)
class TornTail:
    """What lies behind the last valid frame of the last segment."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """The frames of one segment, and what is wrong behind them."""

    path: str
    frames: list[Frame]
    size_bytes: int
    torn: TornTail | None


class Log:
    """The segments under one directory."""

    def __init__(self, files: FileSystem, directory: str) -> None:
        self._files = files
        self.directory = directory
        # Up to here this process has synced the log itself; None before it has.
        self._synced: Position | None = None

    def path(self, sequence: int) -> str:
        return f"{self.directory}/{sequence:010d}.wal"

    def compressed_path(self, sequence: int) -> str:
        return f"{self.path(sequence)}.zst"

    def stored_path(self, sequence: int) -> str:
        """The file that holds a segment: the raw one, or the compressed one once it is closed."""
        raw, packed = self.path(sequence), self.compressed_path(sequence)
        if self._files.exists(raw) and not self._is_superseded(sequence):
            return raw
        return packed if self._files.exists(packed) else raw

    def _is_superseded(self, sequence: int) -> bool:
        """Whether a segment was closed: its compressed copy was durable before the next one began.

        A raw file beside it is one that its writer did not come to remove, or one that somebody
        put back from an older copy.
        """
        following = (self.path(sequence + 1), self.compressed_path(sequence + 1))
        return any(map(self._files.exists, following)) and self._files.exists(
            self.compressed_path(sequence)
        )

    def sequences(self) -> list[int]:
        """The segments that are there, raw or compressed, oldest first."""
        found = (SEGMENT_PATTERN.match(name) for name in self._files.list(self.directory))
        return sorted({int(match.group(1)) for match in found if match})

    def is_closed(self, sequence: int) -> bool:
        """Whether only the compressed copy of a segment is there."""
        return not self._files.exists(self.path(sequence))

    def sync_directory(self) -> None:
        """Make the names of the segments durable."""
        self._files.sync_directory(self.directory)

    def size_bytes(self, sequence: int) -> int:
        return self._file_bytes(self.path(sequence))

    def _file_bytes(self, path: str) -> int:
        """Bytes of a file; IsADirectoryError when a directory lies in its place."""
        status = self._files.status(path)
        if status.is_directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return status.size_bytes

    def read(self, sequence: int, start: int = 0) -> bytes:
        """The bytes of a segment from `start` on; LogDamagedError when it cannot be unpacked."""
        if self._is_superseded(sequence):
            with suppress(LogDamagedError, FileNotFoundError):  # a raw file may be there still
                return self._unpack(sequence)[start:]
        try:
            return self._read_raw(sequence, start)
        except FileNotFoundError:  # closed, maybe at this moment
            return self._unpack(sequence)[start:]

    def _read_raw(self, sequence: int, start: int) -> bytes:
        path = self.path(sequence)
        size = self._file_bytes(path)
        if size > SEGMENT_READ_LIMIT_BYTES:
            raise LogDamagedError(
                f"{path}: {size} bytes are more than any segment has; restore it from a copy",
                path=path,
                offset=SEGMENT_READ_LIMIT_BYTES,
            )
        with opened(self._files, path, READ) as file:
            return read_exactly(self._files, file, max(0, size - start), start)

    def scan(self, sequence: int, *, after: Position | None = None) -> Scan:
        """Read and check the frames of a segment, from its start or from `after` on.

        Raises LogDamagedError when an invalid frame has a valid one behind it, or when a frame
        does not continue the chain.
        """
        path = self.path(sequence)
        start = after.offset if after is not None else 0
        data = memoryview(self.read(sequence, start))
        found: list[Frame] = []
        offset = 0
        previous = (after.lsn, after.digest) if after is not None else None
        while (frame := frames.decode(data, offset)) is not None:
            if previous is not None and (
                frame.lsn != previous[0] + 1 or frame.previous != previous[1]
            ):
                raise LogDamagedError(
                    f"{path}: the record at offset {start + offset} does not follow the one before "
                    f"it; run `shardb fsck`, then `shardb repair`",
                    path=path,
                    offset=start + offset,
                )
            found.append(frame if start == 0 else _moved(frame, start))
            previous = (frame.lsn, frame.digest)
            offset += frames.HEADER_BYTES + len(frame.payload)
        torn = self._torn_tail(path, data, offset, start)
        return Scan(path=path, frames=found, size_bytes=start + len(data), torn=torn)

    def _torn_tail(self, path: str, data: memoryview, offset: int, start: int) -> TornTail | None:
        if offset == len(data):
            return None
        behind = frames.find_valid(data, offset + 1)
        if behind is not None:
            raise LogDamagedError(
                f"{path}: the record at offset {start + offset} is damaged, and record "
                f"{behind.lsn} behind it (offset {start + behind.offset}) is intact; this is "
                "damage, not an unfinished write. Run `shardb fsck`, then `shardb repair`",
                path=path,
                offset=start + offset,
            )
        return TornTail(path=path, offset=start + offset, length=len(data) - offset)

    def _unpack(self, sequence: int) -> bytes:
        path = self.compressed_path(sequence)
        try:
            packed = read_file(self._files, path, limit_bytes=SEGMENT_READ_LIMIT_BYTES)
            size = zstandard.frame_content_size(packed)
            if not 0 <= size <= SEGMENT_READ_LIMIT_BYTES:
                raise zstandard.ZstdError(f"content size {size}")
            return zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)
        except zstandard.ZstdError as error:
            raise LogDamagedError(
                f"{path}: this closed log segment cannot be unpacked ({error}); the run is not "
                "affected, its history is. Put the file back from a copy",
                path=path,
            ) from error

    def compress(self, sequence: int) -> None:
        """Write the compressed copy of a segment beside it, durably."""
        packer = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, write_checksum=True)
        packed = packer.compress(self.read(sequence))
        write_file_durably(self._files, self.compressed_path(sequence), packed)

    def describe(self, sequence: int) -> list[Any]:
        """Sequence, bytes and xxh3-128 of a closed segment's compressed file."""
        path = self.compressed_path(sequence)
        packed = read_file(self._files, path, limit_bytes=SEGMENT_READ_LIMIT_BYTES)
        return [sequence, len(packed), xxhash.xxh3_128_digest(packed)]

    def damaged_closed(self, closed: list[list[Any]], *, budget_bytes: int) -> list[str]:
        """Closed segments that are not as they were; digests of the newest, up to a budget."""
        damaged: list[str] = []
        for sequence, size, digest in reversed(closed):
            path = self.compressed_path(sequence)
            if not self._files.exists(path):
                damaged.append(f"{path}: missing")
            elif self._files.status(path).size_bytes != size:
                damaged.append(f"{path}: not {size} bytes long")
            elif size <= budget_bytes:
                budget_bytes -= size
                if self.describe(sequence)[2] != bytes(digest):
                    damaged.append(f"{path}: its bytes have changed")
        return damaged

    def drop_raw(self, sequence: int) -> None:
        """Remove the raw file of a closed segment that has a compressed copy."""
        if self._files.exists(self.path(sequence)):
            self._files.unlink(self.path(sequence))

    def append(self, position: Position, payload: bytes) -> Position:
        """Append one frame at `position`, which must be the end of the last segment, and sync it.

        After an error of the write the segment is cut back to `position`; where even that fails,
        or the sync does, the caller must treat the store as failed.
        """
        lsn = position.lsn + 1
        frame, digest = frames.encode(lsn=lsn, previous=position.digest, payload=payload)
        with opened(self._files, self.path(position.sequence), WRITE) as file:
            self._write_or_cut(file, frame, position.offset)
            self._files.fdatasync(file)
        end = position.offset + len(frame)
        self._synced = Position(sequence=position.sequence, offset=end, lsn=lsn, digest=digest)
        return self._synced

    def _write_or_cut(self, file: int, data: bytes, offset: int) -> None:
        try:
            write_all(self._files, file, data, offset)
        except OSError as error:
            try:
                self._files.truncate(file, offset)
            except OSError:
                raise error from None
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpaceInLogError(error.errno, error.strerror) from error
            raise

    def harden(self, start: Position, end: Position) -> None:
        """Make the frames between two positions of one segment durable, whoever wrote them.

        Their writer may have died before its sync, or the sync may have failed: a page that
        failed once reads back from memory as if it were safe. Writing the same bytes again makes
        the page dirty, and this sync is the one that counts.
        """
        offset = start.offset
        if self._synced is not None and self._synced.sequence == end.sequence:
            offset = max(offset, self._synced.offset)
        if offset >= end.offset:
            return
        with opened(self._files, self.path(end.sequence), WRITE) as file:
            data = read_exactly(self._files, file, end.offset - offset, offset)
            write_all(self._files, file, data, offset)
            self._files.fdatasync(file)
        self._synced = end

    def cut(self, torn: TornTail) -> None:
        """Remove a torn tail."""
        with opened(self._files, torn.path, WRITE) as file:
            self._files.truncate(file, torn.offset)
            self._files.fsync(file)

    def create_segment(self, position: Position, payload: bytes) -> Position:
        """Begin the segment after `position` with one record; it appears whole or not at all."""
        sequence = position.sequence + 1 if position.lsn else position.sequence
        frame, digest = frames.encode(
            lsn=position.lsn + 1, previous=position.digest, payload=payload
        )
        path = self.path(sequence)
        with opened(self._files, f"{path}.partial", WRITE | CREATE) as file:
            self._files.truncate(file, 0)
            write_all(self._files, file, frame, 0)
            self._files.fsync(file)
        self._files.rename(f"{path}.partial", path)
        self.sync_directory()
        return Position(sequence=sequence, offset=len(frame), lsn=position.lsn + 1, digest=digest)


class NoSpaceInLogError(OSError):
    """The log could not grow; nothing of the record is left in it."""


def _moved(frame: Frame, start: int) -> Frame:
    return Frame(
        lsn=frame.lsn,
        previous=frame.previous,
        digest=frame.digest,
        payload=frame.payload,
        offset=frame.offset + start,
    )
