"""Does a check find damage in the log and in the index, and know the end of a crash from damage?"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import shardb
from shardb import frames
from tests.support.small_stores import (
    SHARDS,
    commit_step,
    copy_store,
    fill_store,
    flip_bit,
    fsck,
    kinds,
    object_of,
    only,
)

SEGMENT = "wal/0000000001.wal"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of the store, for damaging."""
    return copy_store(whole, tmp_path / "run")


def last_frame(data: bytes) -> frames.Frame:
    """The last frame of a segment."""
    offset, last = 0, None
    while (frame := frames.decode(memoryview(data), offset)) is not None:
        offset, last = frame.end, frame
    assert last is not None
    return last


def test_is_a_flipped_bit_in_the_log_found_with_its_place(run: Path) -> None:
    second = frames.decode(memoryview((run / SEGMENT).read_bytes()), 0)
    assert second is not None
    flip_bit(run / SEGMENT, second.end + 70)
    finding = only(fsck(run))
    assert (finding.kind, finding.severity) == ("log_damaged", "error")
    assert (finding.path, finding.offset) == (str(run / SEGMENT), second.end)
    assert finding.expected == "record 2"


def test_is_a_damaged_log_no_reason_to_leave_objects_unread(run: Path) -> None:
    path = object_of(run, 2, "params/a")
    flip_bit(path, 6000)
    flip_bit(run / SEGMENT, 100)
    report = fsck(run)
    assert kinds(report) == ["log_damaged", "object_corrupt"]
    assert report.objects_checked == 3 * len(SHARDS) + 1


def test_is_a_shortened_log_found(run: Path) -> None:
    path = run / SEGMENT
    path.write_bytes(path.read_bytes()[:-300])
    finding = only(fsck(run))
    assert (finding.kind, finding.severity) == ("log_truncated", "error")


def test_is_a_log_cut_between_records_found(run: Path) -> None:
    path = run / SEGMENT
    data = path.read_bytes()
    path.write_bytes(data[: last_frame(data).offset])
    finding = only(fsck(run))
    assert finding.kind == "log_truncated"
    assert finding.found is not None
    assert "is the last one" in finding.found


def test_is_a_log_of_another_history_found(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    fill_store(other, range(9))
    shutil.copy(other / SEGMENT, run / SEGMENT)
    assert "log_truncated" in kinds(fsck(run))


def test_is_a_missing_log_found(run: Path) -> None:
    (run / SEGMENT).unlink()
    assert kinds(fsck(run)) == ["log_missing", "log_truncated"]


def test_is_a_torn_end_only_a_warning(run: Path) -> None:
    data = (run / SEGMENT).read_bytes()
    with (run / SEGMENT).open("ab") as file:
        file.write(data[last_frame(data).offset :][:50])
    finding = only(fsck(run))
    assert (finding.kind, finding.severity) == ("log_torn_tail", "warning")
    assert finding.next_command == f"shardb recover {run}"
    with shardb.open(run) as store:
        assert store.recovery.dropped[0]["path"] == str(run / SEGMENT)
    assert fsck(run).findings == []


def test_is_a_record_that_contradicts_the_others_found(run: Path) -> None:
    data = (run / SEGMENT).read_bytes()
    last = last_frame(data)
    payload = last.payload.replace(b"\xa6parent", b"\xa6parenT")
    frame, _ = frames.encode(lsn=last.lsn, previous=last.previous, payload=payload)
    (run / SEGMENT).write_bytes(data[: last.offset] + frame)
    assert "log_record_garbled" in kinds(fsck(run))


# Segments


def test_is_a_log_of_many_segments_clean(long: Path) -> None:
    assert fsck(long).findings == []


def test_is_a_damaged_closed_segment_found(long: Path, tmp_path: Path) -> None:
    run = copy_store(long, tmp_path / "run")
    closed = min((run / "wal").iterdir())
    flip_bit(closed, closed.stat().st_size // 2)
    finding = only(fsck(run))
    assert (finding.kind, finding.severity, finding.path) == ("log_damaged", "error", str(closed))
    with shardb.open(run) as store:  # and the run can go on
        commit_step(store, 12)


def test_is_a_missing_closed_segment_found(long: Path, tmp_path: Path) -> None:
    run = copy_store(long, tmp_path / "run")
    closed = sorted((run / "wal").iterdir())[1]
    closed.unlink()
    finding = only(fsck(run))
    assert finding.kind == "log_missing"
    assert finding.path.startswith(str(closed).removesuffix(".zst"))


@pytest.mark.parametrize("with_index", [True, False])
def test_is_a_missing_last_segment_found(long: Path, tmp_path: Path, with_index: bool) -> None:
    run = copy_store(long, tmp_path / "run")
    if not with_index:
        (run / "index/data.mdb").unlink()
    max((run / "wal").iterdir()).unlink()
    report = fsck(run)
    assert ("log_truncated" in kinds(report)) == with_index
    assert "log_missing" in kinds(report)


@pytest.mark.parametrize("content", [b"", b"SDBW", bytes(5000)])
def test_is_a_last_segment_without_its_beginning_found(
    long: Path, tmp_path: Path, content: bytes
) -> None:
    """Without an index nobody else knows; a segment appears with its first record or not at all."""
    run = copy_store(long, tmp_path / "run")
    (run / "index/data.mdb").unlink()
    max((run / "wal").iterdir()).write_bytes(content)
    report = fsck(run)
    assert kinds(report) == ["index_missing", "log_truncated"]
    assert report.has_errors


# The index


def test_is_a_missing_index_only_an_info(run: Path) -> None:
    shutil.rmtree(run / "index")
    finding = only(fsck(run))
    assert (finding.kind, finding.severity) == ("index_missing", "info")
    shardb.open(run).close()
    assert fsck(run).findings == []


def test_is_an_older_index_only_an_info(run: Path) -> None:
    kept = (run / "index/data.mdb").read_bytes()
    with shardb.open(run) as store:
        commit_step(store, 7)
    (run / "index/data.mdb").write_bytes(kept)
    report = fsck(run)
    assert not report.has_errors
    assert {"index_behind", "object_unreferenced"} >= set(kinds(report)) >= {"index_behind"}
    shardb.open(run).close()
    assert "index_behind" not in kinds(fsck(run))


@pytest.mark.parametrize("keep", [0, 100, 5000, -4096])
def test_is_a_cut_index_only_a_warning(run: Path, keep: int) -> None:
    path = run / "index/data.mdb"
    path.write_bytes(path.read_bytes()[:keep])
    finding = only(fsck(run))
    assert (finding.kind, finding.severity) == ("index_unreadable", "warning")


def test_is_a_changed_entry_of_the_index_found(run: Path) -> None:
    path = run / "index/data.mdb"
    digest = bytes.fromhex(object_of(run, 6, "params/a").stem)
    data = path.read_bytes()
    assert digest in data
    path.write_bytes(data.replace(digest, bytes(16)))
    report = fsck(run)
    assert kinds(report) == ["index_differs"]
    assert report.has_errors
    with shardb.open(run) as store:  # the log is the truth
        assert store.resolve().shards["params/a"].digest == digest.hex()
        assert store.recovery.rebuilt[0]["what"] == "index"
    assert kinds(fsck(run)) == ["index_set_aside"]
