"""Does opening find the last commit, cut only what was never done, and refuse every other loss?"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import shardb
from shardb import appending, frames, records
from shardb.errors import (
    CorruptionError,
    LogDamagedError,
    LogTruncatedError,
    ShardbError,
    StorageFailedError,
)
from shardb.index import applied_position, put_applied_position
from shardb.log import Position
from shardb.recovery import told
from tests.support.stores import (
    InterposedFiles,
    answers,
    answers_at,
    commit_step,
    copied,
    filled,
    flip_bit,
    last_segment,
    values_of,
)


@pytest.fixture
def closed(root: Path) -> Path:
    """A closed store of four steps."""
    with shardb.open(root, create=True) as store:
        for step in (1, 2, 3, 4):
            commit_step(store, step)
    return root


def frame_ends(path: Path) -> list[int]:
    """Where each record of a segment ends."""
    data, ends = memoryview(path.read_bytes()), [0]
    while (frame := frames.decode(data, ends[-1])) is not None:
        ends.append(frame.end)
    return ends[1:]


def lose_index(root: Path) -> None:
    shutil.rmtree(root / "index")


def append_raw(root: Path, record: records.Record, *, cut: int = 0) -> None:
    """Append a record as a writer would that died before it applied it."""
    path = last_segment(root)
    data = memoryview(path.read_bytes())
    last = None
    offset = 0
    while (frame := frames.decode(data, offset)) is not None:
        last, offset = frame, frame.end
    assert last is not None
    encoded, _ = frames.encode(lsn=last.lsn + 1, previous=last.digest, payload=records.pack(record))
    with path.open("ab") as file:
        file.write(encoded[: len(encoded) - cut])


def test_is_the_report_of_a_whole_store_empty(closed: Path) -> None:
    with shardb.open(closed) as store:
        report = store.recovery.to_json()
        head = store.resolve()
    assert report["opened"] == {"main": {"commit": head.id, "step": 4}}
    assert report["dropped"] == report["rebuilt"] == []
    assert report["needs"] is None
    assert set(report) == {"opened", "dropped", "rebuilt", "warnings", "needs"}


def test_is_a_record_applied_whose_writer_died_before_it_could(closed: Path) -> None:
    with shardb.open(closed) as store:
        commit = store.resolve()
    append_raw(closed, records.new_record("snapshot", name="late", commit=commit.id))
    with shardb.open(closed) as store:
        assert store.snapshots()["late"].step == 4
        commit_step(store, 5)
    assert "late" in answers_at(closed)["snapshots"]


@pytest.mark.parametrize("cut", [1, 40, 100])
def test_is_an_unfinished_record_cut_and_named(closed: Path, cut: int) -> None:
    before = answers_at(closed)
    record = records.new_record("note", text="x" * 100)
    length = last_segment(closed).stat().st_size
    append_raw(closed, record, cut=cut)
    with shardb.open(closed) as store:
        [dropped] = store.recovery.dropped
        assert answers(store) == before
    assert dropped["what"] == "torn record"
    assert dropped["path"] == str(last_segment(closed))
    assert f"offset {length}" in dropped["why"]
    assert last_segment(closed).stat().st_size == length
    assert answers_at(closed) == before


def test_is_an_unfinished_record_cut_without_an_index_too(closed: Path) -> None:
    before = answers_at(closed)
    append_raw(closed, records.new_record("note", text="x" * 100), cut=7)
    lose_index(closed)
    assert answers_at(closed) == before


@pytest.mark.parametrize("back", range(1, 8))
def test_is_a_log_shorter_than_its_index_refused(closed: Path, back: int) -> None:
    """Never rebuilt over silently: the index is the witness."""
    path = last_segment(closed)
    os.truncate(path, frame_ends(path)[-1 - back])
    for _ in range(2):
        with pytest.raises(LogTruncatedError, match="index has applied") as caught:
            shardb.open(closed)
        assert caught.value.exit_code == 3


def test_is_the_damaged_last_record_refused_when_the_index_has_seen_it(closed: Path) -> None:
    path = last_segment(closed)
    flip_bit(path, frame_ends(path)[-1] - 3)
    with pytest.raises(LogTruncatedError, match="index has applied"):
        shardb.open(closed)


def test_is_damage_in_the_middle_refused_whatever_the_index_says(closed: Path) -> None:
    path = last_segment(closed)
    ends = frame_ends(path)
    flip_bit(path, ends[2] + 60)
    for _ in range(2):
        with pytest.raises(LogDamagedError, match=f"offset {ends[2]} is damaged"):
            shardb.open(closed)
        shutil.rmtree(closed / "index", ignore_errors=True)


def test_is_a_log_of_another_store_refused(closed: Path, root: Path) -> None:
    other = root.parent / "other"
    with shardb.open(other, create=True) as store:
        for step in range(1, 8):
            commit_step(store, step)
    shutil.copy(last_segment(other), last_segment(closed))
    with pytest.raises(CorruptionError):
        shardb.open(closed)
    lose_index(closed)
    with pytest.raises(CorruptionError, match="FORMAT"):
        shardb.open(closed)


@pytest.mark.parametrize("steps", [1, 3])
def test_is_a_log_refused_that_went_another_way(closed: Path, root: Path, steps: int) -> None:
    """A copy of the store went on by itself: its log has not what this index has applied."""
    other = copied(closed, root.parent / "other")
    for path, count in ((closed, 1), (other, steps)):
        with shardb.open(path) as store:
            for step in range(count):
                commit_step(store, store.resolve().step + 1, fill=step)
    shutil.copy(last_segment(other), last_segment(closed))
    with pytest.raises(LogTruncatedError, match="not in this log"):
        shardb.open(closed)


def test_is_an_index_of_another_store_refused(closed: Path, root: Path) -> None:
    other = root.parent / "other"
    with shardb.open(other, create=True) as store:
        commit_step(store, 1)
    lose_index(closed)
    copied(other / "index", closed / "index")
    with pytest.raises(CorruptionError):
        shardb.open(closed)


@pytest.mark.parametrize("keep_index", [True, False])
@pytest.mark.parametrize("content", [b"", b"\0" * 500, b"garbage"])
def test_does_a_store_whose_log_is_gone_not_open_empty(
    closed: Path, content: bytes, keep_index: bool
) -> None:
    last_segment(closed).write_bytes(content)
    if not keep_index:
        lose_index(closed)
    for create in (False, True):
        with pytest.raises(LogTruncatedError):
            shardb.open(closed, create=create)


@pytest.mark.parametrize("keep_index", [True, False])
def test_is_a_missing_log_refused(closed: Path, keep_index: bool) -> None:
    last_segment(closed).unlink()
    if not keep_index:
        lose_index(closed)
    with pytest.raises(LogTruncatedError):
        shardb.open(closed, create=True)


def test_is_what_a_dead_transaction_staged_named_and_reclaimed(closed: Path) -> None:
    staged = closed / "spare" / "staged.main.0123456789abcdef"
    staged.write_bytes(b"x" * 4096)
    with shardb.open(closed) as store:
        [dropped] = store.recovery.dropped
        assert dropped["what"] == "staged object"
        assert dropped["path"] == str(staged)
        assert staged.exists()
        commit_step(store, 5)
    assert not staged.exists()


def test_is_the_staging_of_a_living_writer_not_called_dead(closed: Path) -> None:
    with shardb.open(closed) as writer, writer.begin() as transaction:
        transaction.write("params/a", filled(5))
        with shardb.open(closed) as store:
            assert store.recovery.dropped == []


def test_does_opening_delete_nothing(closed: Path) -> None:
    for name in ("objects/leftover.safetensors", "spare/notes", "wal/x.partial", "other"):
        (closed / name).write_bytes(b"x")
    before = {p for p in closed.rglob("*") if p.is_file()}
    shardb.open(closed).close()
    assert {p for p in closed.rglob("*") if p.is_file()} >= before


# Several segments


@pytest.fixture
def segments(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A closed store whose log has been rotated several times."""
    monkeypatch.setattr(appending, "SEGMENT_LIMIT_BYTES", 2000)
    with shardb.open(root, create=True) as store:
        store.appender._segment_limit_bytes = 2000
        for step in range(1, 30):
            commit_step(store, step)
            if step == 7:
                store.create_snapshot("seven", "step-7")
    return root


def test_are_the_answers_the_same_from_the_last_segment_alone(segments: Path) -> None:
    names = sorted(path.name for path in (segments / "wal").iterdir())
    assert len(names) >= 3
    assert [name.endswith(".zst") for name in names] == [True] * (len(names) - 1) + [False]
    before = answers_at(segments)
    lose_index(segments)
    assert answers_at(segments) == before
    assert before["snapshots"].keys() == {"seven"}


def test_is_the_history_whole_over_the_segments(segments: Path) -> None:
    with shardb.open(segments) as store:
        found = [r["step"] for r in store.history() if r["kind"] == "commit"]
    assert found == list(range(1, 30))


def test_is_a_missing_last_segment_refused(segments: Path) -> None:
    last_segment(segments).unlink()
    for _ in range(2):
        with pytest.raises(LogTruncatedError):
            shardb.open(segments)
        shutil.rmtree(segments / "index", ignore_errors=True)


def test_is_a_last_segment_from_an_older_time_refused(segments: Path) -> None:
    with shardb.open(segments) as store:
        store.appender._segment_limit_bytes = 1 << 20
        older = last_segment(segments).read_bytes()
        commit_step(store, 30)
    last_segment(segments).write_bytes(older)
    with pytest.raises(LogTruncatedError):
        shardb.open(segments)


def test_is_a_damaged_closed_segment_a_warning(segments: Path) -> None:
    """It costs history, not the run."""
    closed_segment = min((segments / "wal").glob("*.zst"))
    flip_bit(closed_segment, 20)
    with shardb.open(segments) as store:
        warned = [w for w in store.recovery.warnings if w["what"] == "closed log segment"]
        assert [w["path"] for w in warned] == [str(closed_segment)]
        commit_step(store, 30)


def test_is_an_index_refused_that_is_ahead_of_a_later_segment(segments: Path) -> None:
    """Records of one history in the index, a log of another: neither may be believed."""
    with shardb.open(segments) as store:
        at = store.index.read(applied_position)
        wrong = Position(sequence=at.sequence - 1, offset=at.offset, lsn=at.lsn, digest=at.digest)
        store.index.write(lambda tables: put_applied_position(tables, wrong))
        with pytest.raises(LogTruncatedError, match="not of one history"):
            store.begin()


def test_does_a_segment_that_was_not_begun_right_end_nothing(segments: Path) -> None:
    path = last_segment(segments)
    ends = frame_ends(path)
    path.write_bytes(path.read_bytes()[ends[0] :])
    lose_index(segments)
    with pytest.raises(LogTruncatedError, match="does not begin with"):
        shardb.open(segments)


def rotating(root: Path, files: InterposedFiles) -> shardb.Store:
    store = shardb.open(root, create=True, files=files)
    store.appender._segment_limit_bytes = 1
    return store


Failure = Callable[..., None]


def failing(code: int, suffix: str) -> Failure:
    def fail(path: str, *_: object, **__: object) -> None:
        if path.endswith(suffix):
            raise OSError(code, os.strerror(code))

    return fail


def test_does_the_log_grow_on_when_there_is_no_space_for_a_segment(root: Path) -> None:
    files = InterposedFiles("rename", lambda *_: None)
    with rotating(root, files) as store:
        files.before = failing(errno.ENOSPC, ".wal.partial")
        for step in (1, 2, 3):
            commit_step(store, step)
        assert len(list(root.glob("wal/*.wal"))) == 1
        files.before = lambda *_: None
        commit_step(store, 4)
        assert len(list(root.glob("wal/*.wal*"))) > 1
    lose_index(root)
    with shardb.open(root) as store:
        assert store.resolve().step == 4


def test_has_the_log_one_end_when_a_segments_name_cannot_be_synced(root: Path) -> None:
    """Full or not: the new segment may be there, so the old one must not grow on."""
    files = InterposedFiles("sync_directory", lambda *_: None)
    store = rotating(root, files)
    store.appender._segment_limit_bytes = 1 << 20
    commit_step(store, 1)
    store.appender._segment_limit_bytes = 1
    calls: list[str] = []

    def fail_the_second(path: str) -> None:
        """The first one is for the compressed copy of the old segment."""
        calls.append(path)
        if calls.count(f"{root}/wal") == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files.before = fail_the_second
    with pytest.raises(ShardbError):
        commit_step(store, 2)
    with pytest.raises(StorageFailedError, match="open it again"):
        store.begin()
    files.before = lambda *_: None
    store.close()
    before = answers_at(root)
    lose_index(root)
    assert answers_at(root) == before


def test_is_the_name_of_a_segment_synced_again_after_its_writer_died(segments: Path) -> None:
    """Records appended to it would be lost with the name, however well they are synced."""
    with shardb.open(segments) as store:
        store.appender._segment_limit_bytes = 1
        old = copied(segments / "index", segments.parent / "index")
        commit_step(store, 30)
    shutil.rmtree(segments / "index")
    copied(old, segments / "index")
    synced: list[str] = []
    shardb.open(segments, files=InterposedFiles("sync_directory", synced.append)).close()
    assert f"{segments}/wal" in synced
    with shardb.open(segments) as store, store.at() as view:
        assert values_of(view) == {"params/a": 30.0, "params/b": 30.25}


def test_is_what_a_kill_left_told_in_one_line() -> None:
    def part(what: str, path: str, why: str = "it ended") -> dict[str, str]:
        return {"what": what, "path": path, "why": why}

    staged = [part("staged object", f"spare/staged.{number}") for number in range(1_201)]
    lines = told([*staged, part("record", "wal/1"), part("staged object", "a", "cut")])
    assert lines == [
        "staged object: spare/staged.0 and 1,200 more: it ended",
        "record: wal/1: it ended",
        "staged object: a: cut",
    ]
