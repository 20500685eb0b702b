"""Does the log end exactly where its last record ends, and is damage never taken for its end?"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import zstandard

from shardb import frames
from shardb import log as log_module
from shardb.errors import LogDamagedError
from shardb.filesystem import RealFileSystem
from shardb.log import START, Log, NoSpaceInLogError, Position
from tests.support.stores import InterposedFiles, flip_bit

PAYLOADS = [b"zero", b"one", b"two" * 1000, b"three"]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(RealFileSystem(), str(tmp_path))


def filled_log(log: Log, payloads: list[bytes] = PAYLOADS) -> list[Position]:
    """A segment of one record for each payload; the positions behind them."""
    positions = [log.create_segment(START, payloads[0])]
    for payload in payloads[1:]:
        positions.append(log.append(positions[-1], payload))
    return positions


def test_do_records_come_back_in_order(log: Log) -> None:
    end = filled_log(log)[-1]
    scan = log.scan(1)
    assert [frame.payload for frame in scan.frames] == PAYLOADS
    assert [frame.lsn for frame in scan.frames] == [1, 2, 3, 4]
    assert scan.torn is None
    assert (scan.frames[-1].end, scan.frames[-1].digest) == (end.offset, end.digest)
    assert scan.size_bytes == end.offset == log.size_bytes(1)


def test_can_reading_begin_behind_any_record(log: Log) -> None:
    positions = filled_log(log)
    for number, position in enumerate(positions):
        scan = log.scan(1, after=position)
        assert [frame.payload for frame in scan.frames] == PAYLOADS[number + 1 :]
        assert [frame.end for frame in scan.frames] == [p.offset for p in positions[number + 1 :]]


def test_does_every_record_name_its_predecessor(log: Log) -> None:
    filled_log(log)
    found = log.scan(1).frames
    assert found[0].previous == frames.NO_DIGEST
    assert [frame.previous for frame in found[1:]] == [frame.digest for frame in found[:-1]]


def test_does_the_next_segment_go_on_with_the_chain(log: Log) -> None:
    end = filled_log(log)[-1]
    begun = log.create_segment(end, b"checkpoint")
    assert log.sequences() == [1, 2]
    [first] = log.scan(2).frames
    assert (first.lsn, first.previous) == (5, end.digest)
    assert begun == Position(sequence=2, offset=first.end, lsn=5, digest=first.digest)


@pytest.mark.parametrize("cut", [1, 30, 56, 60])
def test_is_an_unfinished_last_record_a_torn_tail(log: Log, tmp_path: Path, cut: int) -> None:
    positions = filled_log(log)
    os.truncate(log.path(1), positions[-2].offset + cut)
    scan = log.scan(1)
    assert len(scan.frames) == 3
    assert scan.torn is not None
    assert (scan.torn.offset, scan.torn.length) == (positions[-2].offset, cut)
    log.cut(scan.torn)
    assert log.scan(1).torn is None
    assert log.append(positions[-2], b"again").lsn == 4
    assert [frame.payload for frame in log.scan(1).frames] == [*PAYLOADS[:3], b"again"]


@pytest.mark.parametrize("garbage", [b"\0", b"\0" * 5000, b"SDBW", b"x" * 100])
def test_is_garbage_behind_the_last_record_a_torn_tail(log: Log, garbage: bytes) -> None:
    end = filled_log(log)[-1]
    with open(log.path(1), "ab") as file:
        file.write(garbage)
    scan = log.scan(1)
    assert len(scan.frames) == 4
    assert scan.torn is not None
    assert (scan.torn.offset, scan.torn.length) == (end.offset, len(garbage))


@pytest.mark.parametrize("record", [0, 1, 2])
def test_is_damage_in_the_middle_refused_with_its_offset(log: Log, record: int) -> None:
    positions = filled_log(log)
    start = positions[record - 1].offset if record else 0
    for offset in range(start, positions[record].offset, 61):
        flip_bit(Path(log.path(1)), offset)
        with pytest.raises(LogDamagedError, match=f"offset {start} is damaged.*fsck") as caught:
            log.scan(1)
        assert (caught.value.offset, caught.value.path) == (start, log.path(1))
        flip_bit(Path(log.path(1)), offset)
    assert len(log.scan(1).frames) == 4


def test_is_a_record_left_out_noticed(log: Log) -> None:
    positions = filled_log(log)
    data = Path(log.path(1)).read_bytes()
    Path(log.path(1)).write_bytes(data[: positions[0].offset] + data[positions[1].offset :])
    with pytest.raises(LogDamagedError, match="does not follow") as caught:
        log.scan(1)
    assert caught.value.offset == positions[0].offset


def test_is_a_record_of_another_log_noticed(log: Log, tmp_path: Path) -> None:
    positions = filled_log(log)
    (tmp_path / "other").mkdir()
    other = Log(RealFileSystem(), str(tmp_path / "other"))
    forged = filled_log(other, [b"zero", b"ONE"])
    data = Path(other.path(1)).read_bytes()[forged[0].offset : forged[1].offset]
    with open(log.path(1), "r+b") as file:
        file.truncate(positions[1].offset)
        file.seek(positions[1].offset)
        file.write(data)
    with pytest.raises(LogDamagedError, match="does not follow"):
        log.scan(1)


def test_is_reading_behind_a_position_checked_against_it(log: Log) -> None:
    positions = filled_log(log)
    wrong = Position(sequence=1, offset=positions[1].offset, lsn=2, digest=bytes(16))
    with pytest.raises(LogDamagedError, match="does not follow"):
        log.scan(1, after=wrong)


def test_is_a_segment_longer_than_any_refused_unread(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled_log(log)
    monkeypatch.setattr(log_module, "SEGMENT_READ_LIMIT_BYTES", 100)
    with pytest.raises(LogDamagedError, match="more than any segment has"):
        log.scan(1)


def test_are_only_segments_taken_for_segments(log: Log, tmp_path: Path) -> None:
    filled_log(log)
    for name in ("0000000002.wal.partial", "x.wal", "3.wal", "0000000004.wal.bak", "notes"):
        (tmp_path / name).touch()
    assert log.sequences() == [1]


class Failing(RealFileSystem):
    """Writes `short` bytes at a time, and fails at the second write and, maybe, the truncation."""

    def __init__(self, error: int, *, truncate: bool) -> None:
        self._error = error
        self._truncate = truncate
        self.writes = 0

    def pwrite(self, file: int, data: Any, offset: int) -> int:
        self.writes += 1
        if self.writes == 2:
            raise OSError(self._error, os.strerror(self._error))
        return super().pwrite(file, bytes(data[:20]), offset)

    def truncate(self, file: int, length: int) -> None:
        if self._truncate:
            raise OSError(errno.EIO, "Input/output error")
        super().truncate(file, length)


@pytest.mark.parametrize(
    ("error", "truncate", "expected"),
    [
        (errno.ENOSPC, False, NoSpaceInLogError),
        (errno.EDQUOT, False, NoSpaceInLogError),
        (errno.EIO, False, OSError),
        (errno.ENOSPC, True, OSError),
    ],
)
def test_is_a_failed_append_cut_off(
    log: Log, tmp_path: Path, error: int, truncate: bool, expected: type[OSError]
) -> None:
    """Only where the cut succeeds is it certain that nothing of the record is there."""
    end = filled_log(log)[-1]
    with pytest.raises(OSError) as caught:
        Log(Failing(error, truncate=truncate), str(tmp_path)).append(end, b"next")
    assert type(caught.value) is expected
    assert log.size_bytes(1) == end.offset + (20 if truncate else 0)


def test_are_short_writes_gone_on_with(log: Log, tmp_path: Path) -> None:
    class Short(RealFileSystem):
        def pwrite(self, file: int, data: Any, offset: int) -> int:
            return super().pwrite(file, bytes(data[:7]), offset)

    end = filled_log(log)[-1]
    Log(Short(), str(tmp_path)).append(end, b"a long payload")
    assert log.scan(1).frames[-1].payload == b"a long payload"


def test_is_every_record_synced_before_append_returns(tmp_path: Path) -> None:
    synced: list[int] = []
    log = Log(InterposedFiles("fdatasync", synced.append), str(tmp_path))
    position = log.create_segment(START, b"first")
    for count in (1, 2, 3):
        position = log.append(position, b"next")
        assert len(synced) == count


def test_is_a_cut_synced_before_it_is_told(tmp_path: Path) -> None:
    """The report says that the tail is gone: power loss must not bring it back."""
    lengths: list[int] = []
    log = Log(
        InterposedFiles("fsync", lambda f: lengths.append(os.fstat(f).st_size)), str(tmp_path)
    )
    end = filled_log(log)[-1]
    lengths.clear()
    with open(log.path(1), "ab") as file:
        file.write(b"half a record")
    torn = log.scan(1).torn
    assert torn is not None
    log.cut(torn)
    assert lengths == [end.offset]


def test_does_a_segment_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for operation in ("pwrite", "fsync", "rename"):
        log = Log(InterposedFiles(operation, fail), str(tmp_path))
        with pytest.raises(OSError, match="Input/output"):
            log.create_segment(START, b"first")
        assert log.sequences() == []
    good = Log(RealFileSystem(), str(tmp_path))
    good.create_segment(START, b"x")
    assert [frame.payload for frame in good.scan(1).frames] == [b"x"]


def test_is_hardening_writing_the_same_bytes_again(tmp_path: Path) -> None:
    """A page whose sync failed reads back as if it were safe; only a new write makes it dirty."""
    operations: list[tuple[str, int, int]] = []

    class Noting(RealFileSystem):
        def pwrite(self, file: int, data: Any, offset: int) -> int:
            operations.append(("write", offset, len(data)))
            return super().pwrite(file, data, offset)

        def fdatasync(self, file: int) -> None:
            operations.append(("sync", 0, 0))
            super().fdatasync(file)

    writer = Log(RealFileSystem(), str(tmp_path))
    positions = filled_log(writer)
    log = Log(Noting(), str(tmp_path))
    before = Path(log.path(1)).read_bytes()
    log.harden(positions[1], positions[3])
    length = positions[3].offset - positions[1].offset
    assert operations == [("write", positions[1].offset, length), ("sync", 0, 0)]
    assert Path(log.path(1)).read_bytes() == before
    operations.clear()
    log.harden(positions[3], positions[3])
    log.harden(positions[1], positions[3])  # synced by this process: once is enough
    assert operations == []


def test_is_a_closed_segment_read_from_its_compressed_copy(log: Log) -> None:
    end = filled_log(log)[-1]
    log.compress(1)
    assert not log.is_closed(1)
    log.create_segment(end, b"checkpoint")
    log.drop_raw(1)
    log.drop_raw(1)
    assert log.is_closed(1)
    assert log.sequences() == [1, 2]
    assert log.stored_path(1) == log.compressed_path(1)
    assert [frame.payload for frame in log.scan(1).frames] == PAYLOADS
    assert os.path.getsize(log.compressed_path(1)) < end.offset


def zip_bomb() -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(1 << 20))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not zstd",
        zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 100),
        zip_bomb(),
        zip_bomb()[:-3],
    ],
    ids=["empty", "garbage", "no size", "bomb", "cut bomb"],
)
def test_is_a_closed_segment_refused_that_cannot_be_unpacked(
    log: Log, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "SEGMENT_READ_LIMIT_BYTES", 1 << 16)
    Path(log.compressed_path(1)).write_bytes(content)
    with pytest.raises(LogDamagedError, match="cannot be unpacked"):
        log.scan(1)


def test_is_damage_to_a_closed_segment_named(log: Log) -> None:
    position = filled_log(log)[-1]
    closed = []
    for sequence in (1, 2, 3):
        log.compress(sequence)
        position = log.create_segment(position, b"checkpoint")
        closed.append(log.describe(sequence))
        log.drop_raw(sequence)
    assert log.damaged_closed(closed, budget_bytes=1 << 20) == []
    os.unlink(log.compressed_path(1))
    with open(log.compressed_path(2), "ab") as file:
        file.write(b"x")
    flip_bit(Path(log.compressed_path(3)), 12)
    found = log.damaged_closed(closed, budget_bytes=1 << 20)
    assert [text.partition(": ")[2] for text in found] == [
        "its bytes have changed",
        f"not {closed[1][1]} bytes long",
        "missing",
    ]
    assert len(log.damaged_closed(closed, budget_bytes=0)) == 2


def test_is_a_segment_read_that_is_closed_at_this_moment(tmp_path: Path) -> None:
    plain = Log(RealFileSystem(), str(tmp_path))
    filled_log(plain)
    plain.compress(1)
    log = Log(InterposedFiles("status", lambda *_: plain.drop_raw(1)), str(tmp_path))
    assert [frame.payload for frame in log.scan(1).frames] == PAYLOADS


def test_is_an_older_raw_file_beside_a_closed_segment_not_believed(
    log: Log, tmp_path: Path
) -> None:
    """Somebody put it back from a copy; the compressed one is whole, and says more."""
    raw = Path(log.path(1))
    positions = filled_log(log)
    older = raw.read_bytes()[: positions[1].offset]
    log.compress(1)
    assert log.stored_path(1) == str(raw)  # the next one may never have begun
    log.create_segment(positions[-1], b"checkpoint")
    raw.write_bytes(older)
    assert [frame.payload for frame in log.scan(1).frames] == PAYLOADS
    assert log.stored_path(1) == log.compressed_path(1)
    flip_bit(Path(log.compressed_path(1)), 20)
    assert [frame.payload for frame in log.scan(1).frames] == PAYLOADS[:2]


def test_is_a_segment_that_is_nowhere_missing(log: Log) -> None:
    with pytest.raises(FileNotFoundError):
        log.scan(1)
