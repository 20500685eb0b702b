"""Is a log, an index or an object refused whose parts contradict each other?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import xxhash

from shardb import frames, records, references
from shardb.errors import LogDamagedError
from shardb.filesystem import RealFileSystem
from shardb.frames import Frame
from shardb.fsck_log import _first_difference
from shardb.fsck_objects import Wanted, inspect_object
from shardb.history import LogEntry, LogFault, next_frame, read_log
from shardb.log import Log
from shardb.state import DictTables
from tests.support.log_records import Log as Records
from tests.support.log_records import applied, commit, digest, record

A, B = "a" * 32, "b" * 32
LOG: Records = [record("init", store_id="s" * 32, version=1), commit(A, 1, None, 1)]


def test_is_a_commit_that_comes_again_with_other_shards_refused() -> None:
    again = {**commit(A, 1, None, 2), "branch": "elsewhere"}
    with pytest.raises(LogDamagedError, match="recorded twice"):
        applied([*LOG, record("snapshot", name="sent", commit=A, received=again)])


def test_is_a_repair_refused_that_drops_a_head() -> None:
    drop = record("repair", dropped=[A], acknowledged=[], closed=None)
    with pytest.raises(LogDamagedError, match="head of branch 'main'"):
        applied([*LOG, drop])


def test_is_no_more_given_up_than_is_referenced() -> None:
    with pytest.raises(LogDamagedError, match="which nothing references"):
        references.reference(DictTables(), digest(1).hex(), 4096, -1)


def test_is_only_what_is_packed_unpacked() -> None:
    with pytest.raises(LogDamagedError, match="is not packed"):
        applied([*LOG, record("unpack", digest=digest(1))])


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (None, "no state"),
        ({"branches": {}}, "no table commits"),
        ({"branches": {}, "commits": {A: 1, B: 3}}, f"entry {B!r} of commits differs"),
        ({"branches": {}, "commits": {A: 1, B: 2}, "more": {}}, "more tables"),
    ],
)
def test_is_the_first_difference_of_two_states_told(found: Any, told: str) -> None:
    assert _first_difference({"branches": {}, "commits": {A: 1, B: 2}}, found) == told


def test_is_an_object_malformed_that_was_committed_so(tmp_path: Path) -> None:
    """Its digest is right, and its header describes no tensors."""
    data = b"\xff" * 5000
    name = xxhash.xxh3_128_hexdigest(data)
    (tmp_path / "objects").mkdir()
    (tmp_path / f"objects/{name}.safetensors").write_bytes(data)
    fault = inspect_object(RealFileSystem(), str(tmp_path), Wanted(digest=name, bytes=5000))
    assert fault is not None
    assert (fault.kind, fault.offset) == ("object_malformed", 0)


# The log


def segment(root: Path, *payloads: bytes, lsn: int = 1) -> Log:
    """A log of one segment, of these records."""
    (root / "wal").mkdir()
    data, previous = b"", bytes(16)
    for number, payload in enumerate(payloads, lsn):
        frame, previous = frames.encode(lsn=number, previous=previous, payload=payload)
        data += frame
    (root / "wal/0000000001.wal").write_bytes(data)
    return Log(RealFileSystem(), f"{root}/wal")


def faults_of(log: Log) -> list[tuple[str, str, str]]:
    told = [item for item in read_log(log, [1]) if isinstance(item, LogFault)]
    return [(fault.kind, fault.expected, fault.found) for fault in told]


def test_is_a_log_told_that_does_not_begin_with_the_first_record(tmp_path: Path) -> None:
    log = segment(tmp_path, *map(records.pack, LOG), lsn=4)
    assert faults_of(log) == [("chain", "record 1", "record 4")]


def test_is_a_record_told_that_makes_no_sense_and_passed_over(tmp_path: Path) -> None:
    first, last = map(records.pack, LOG)
    log = segment(tmp_path, first, b"\xff no record", last)
    [(kind, expected, _)] = faults_of(log)
    assert (kind, expected) == ("garbled", "record 2")
    kinds = [item.record["kind"] for item in read_log(log, [1]) if isinstance(item, LogEntry)]
    assert kinds == ["init", "commit"]


def test_is_a_search_given_up_where_everything_looks_like_a_record() -> None:
    """Each promises as much as there is, so that to digest them all would not end."""
    head = frames.HEADER.pack(frames.MAGIC, 1 << 20, 1, bytes(16), bytes(8), bytes(16))
    data = memoryview(head * 4000 + bytes(1 << 20))
    found: Frame | None = next_frame(data, 0)
    assert found is None


def test_is_a_file_of_the_log_that_cannot_be_read_told(tmp_path: Path) -> None:
    log = segment(tmp_path, *map(records.pack, LOG))
    os.rename(tmp_path / "wal/0000000001.wal", tmp_path / "gone")
    assert [kind for kind, _, _ in faults_of(log)] == ["unreadable"]
