"""Does a check find every kind of damage, name it, and find nothing where there is none?"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path

import pytest

import shardb
from shardb.branching import rewind
from shardb.errors import FormatError, NotFoundError, ShardbError, StorageFailedError
from shardb.filesystem import RealFileSystem
from shardb.findings import KINDS, Finding
from shardb.format import encode_format
from shardb.fsck import check_store
from shardb.fsck_audit import Progress
from shardb.fsck_impact import nearest_intact
from shardb.testing.operations import Fault
from shardb.testing.recording import RecordingFileSystem
from tests.support.small_stores import (
    SHARDS,
    commit_step,
    copy_store,
    flip_bit,
    fsck,
    kinds,
    object_of,
    only,
    tree,
)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of the store, for damaging."""
    return copy_store(whole, tmp_path / "run")


def test_is_a_whole_store_clean(run: Path) -> None:
    before = tree(run)
    report = fsck(run)
    assert (report.findings, report.complete) == ([], True)
    assert report.objects_checked == 3 * len(SHARDS) + 1
    assert report.bytes_checked == sum(p.stat().st_size for p in (run / "objects").iterdir())
    assert tree(run) == before  # nothing written, created, or touched


def test_does_the_report_have_the_promised_keys(run: Path) -> None:
    object_of(run, 2, "params/a").unlink()
    told = json.loads(json.dumps(fsck(run).to_json()))
    assert set(told) == {"findings", "objects_checked", "bytes_checked", "seconds", "complete"}
    assert set(told["findings"][0]) == set(Finding.__dataclass_fields__)


@pytest.mark.parametrize("place", [0, 9, 5000, -1])
def test_is_a_flipped_bit_of_an_object_found_and_named(run: Path, place: int) -> None:
    path = object_of(run, 2, "params/b")
    flip_bit(path, place)
    finding = only(fsck(run))
    assert (finding.kind, finding.severity, finding.path) == ("object_corrupt", "error", str(path))
    assert finding.shards == ("params/b",)
    assert (finding.steps, finding.snapshots, finding.branches) == ((2,), ("step-2",), ())
    assert finding.nearest_intact_step == 5
    assert finding.expected == f"digest {path.stem}"
    assert finding.next_command == f"shardb repair {run}"


def test_does_damage_of_the_head_name_the_branch(run: Path) -> None:
    flip_bit(object_of(run, 6, "optim/a"), 4500)
    finding = only(fsck(run))
    assert (finding.branches, finding.steps, finding.nearest_intact_step) == (("main",), (6,), 5)


def test_does_damage_of_a_shared_object_name_every_step(run: Path) -> None:
    flip_bit(object_of(run, 6, "meta/recipe"), 10)
    finding = only(fsck(run))
    assert (finding.steps, finding.nearest_intact_step) == ((2, 5, 6), None)


def test_is_a_missing_object_found(run: Path) -> None:
    path = object_of(run, 5, "params/a")
    path.unlink()
    finding = only(fsck(run))
    assert (finding.kind, finding.path, finding.steps) == ("object_missing", str(path), (5,))


@pytest.mark.parametrize("change", [-1, 1, 5000])
def test_is_a_wrong_size_found_with_the_place(run: Path, change: int) -> None:
    path = object_of(run, 5, "params/a")
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    finding = only(fsck(run))
    assert (finding.kind, finding.offset) == ("object_corrupt", len(data) + min(change, 0))


def test_are_two_exchanged_objects_found(run: Path) -> None:
    one, other = object_of(run, 2, "params/a"), object_of(run, 6, "params/b")
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    report = fsck(run)
    assert [f.kind for f in report.findings] == ["object_corrupt"] * 2
    said = " ".join(f.found or "" for f in report.findings)
    assert "the bytes of shard params/b of step 6" in said
    assert "the bytes of shard params/a of step 2" in said


def test_is_an_object_that_cannot_be_read_found(run: Path) -> None:
    path = object_of(run, 2, "params/a")
    fault = Fault(
        operation="pread_into", nth=1, error=errno.EIO, persistent=True, path_contains=path.name
    )
    report = check_store(RecordingFileSystem(str(run), fault=fault), str(run))
    assert only(report).kind == "object_unreadable"
    assert (only(report).found or "").startswith("Input/output error: the disk failed to read")
    path.unlink()
    path.mkdir()
    assert (only(fsck(run)).kind, only(fsck(run)).found) == ("object_missing", "Is a directory")


# FORMAT


@pytest.mark.parametrize("offset", [2, 30, 60, -3])
def test_is_a_damaged_format_found(run: Path, offset: int) -> None:
    flip_bit(run / "FORMAT", offset)
    finding = only(fsck(run))
    assert (finding.kind, finding.path) == ("format_damaged", str(run / "FORMAT"))


def test_is_a_missing_format_found(run: Path) -> None:
    (run / "FORMAT").unlink()
    assert only(fsck(run)).kind == "format_damaged"


def test_is_the_format_of_another_store_found(run: Path) -> None:
    (run / "FORMAT").write_bytes(encode_format("0" * 32))
    assert only(fsck(run)).kind == "format_foreign"


def test_is_a_newer_format_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardb.format.FORMAT_VERSION", 99)
    newer = encode_format("0" * 32)
    monkeypatch.undo()
    (run / "FORMAT").write_bytes(newer)
    with pytest.raises(FormatError, match="newer"):
        fsck(run)


# What cannot be looked at


def test_is_no_store_told_from_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        fsck(tmp_path)
    with pytest.raises(NotFoundError):
        fsck(tmp_path / "nowhere")


@pytest.mark.parametrize("nth", [1, 2], ids=["looking for obstacles", "taking the view"])
def test_is_a_store_that_cannot_be_listed_refused(run: Path, nth: int) -> None:
    fault = Fault(operation="list", nth=nth, error=errno.EIO, path_contains="/spare")
    files = RecordingFileSystem(str(run), fault=fault)
    with pytest.raises(StorageFailedError, match="cannot be read: Input/output error"):
        check_store(files, str(run))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_is_a_store_of_somebody_else_refused(run: Path) -> None:
    run.chmod(0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(StorageFailedError, match="Permission denied"):
            fsck(run)
    finally:
        os.seteuid(0)


# Leftovers


def test_are_leftovers_named_and_never_errors(run: Path) -> None:
    (run / "objects" / f"{'0' * 32}.safetensors").write_bytes(b"x")
    (run / "objects" / "notes.txt").write_bytes(b"x")
    (run / "spare" / "staged.main.0123").write_bytes(b"x")
    (run / "spare" / "held.4096.0123").write_bytes(b"x")
    (run / "spare" / "free.7.0123").write_bytes(b"not seven bytes")
    (run / "wal" / "0000000002.wal.partial").write_bytes(b"x")
    (run / "index" / "unreadable-1.mdb").write_bytes(b"x")
    (run / "leases" / f"{'1' * 32}.0123456789abcdef").write_bytes(b"x")
    shutil.rmtree(run / "locks")
    report = fsck(run)
    assert not report.has_errors
    found = {Path(f.path).relative_to(run).as_posix(): f.kind for f in report.findings}
    assert found == {
        f"objects/{'0' * 32}.safetensors": "object_unreferenced",
        "objects/notes.txt": "foreign_file",
        "spare/staged.main.0123": "staged_leftover",
        "spare/held.4096.0123": "staged_leftover",
        "spare/free.7.0123": "spare_misnamed",
        "wal/0000000002.wal.partial": "partial_file",
        "index/unreadable-1.mdb": "index_set_aside",
        f"leases/{'1' * 32}.0123456789abcdef": "lease_of_dead_reader",
        "locks": "directory_missing",
    }
    assert set(found.values()) <= set(KINDS)


def test_is_what_is_in_use_no_leftover(run: Path) -> None:
    with shardb.open(run) as store, store.at(step=2), store.begin() as txn:
        txn.stage("params/a", like=txn.read("params/a")).seal()
        store.writer.map(lambda _: None, [0])
        assert fsck(run).findings == []


def test_is_what_only_a_reader_keeps_no_leftover(run: Path) -> None:
    with shardb.open(run) as store, store.at(step=5):
        for step in (7, 8, 9):
            commit_step(store, step)
        report = fsck(run)
        assert report.findings == []
        flip_bit(run / "objects" / f"{object_of_lease(store, 'params/a')}.safetensors", 5000)
        assert kinds(fsck(run)) == ["object_corrupt"]


def object_of_lease(store: shardb.Store, shard: str) -> str:
    """The digest of a shard of the one commit that only a lease keeps."""

    def body(tables: shardb.state.Tables) -> str:  # type: ignore[name-defined]
        ((commit, _),) = tables.items("condemned")
        return bytes(tables.get("commits", commit)["shards"][shard][0]).hex()

    return store.index.read(body)


def test_is_a_store_with_rewinds_clean(run: Path) -> None:
    with shardb.open(run) as store:
        rewind(store, "main", "step-5")
        commit_step(store, 6)
        commit_step(store, 7)
    assert fsck(run).findings == []


# Budget and progress


def test_does_a_budget_read_first_what_was_not_read_for_longest(run: Path) -> None:
    names = sorted(path.stem for path in (run / "objects").iterdir())
    old, recent = names[4], dict.fromkeys(names, 100.0)
    seen: list[str] = []
    report = check_store(
        RealFileSystem(),
        str(run),
        budget_seconds=0.0,
        verified={**recent, old: 50.0},
        on_verified=seen.append,
    )
    assert (seen[0], report.complete) == (old, False)
    assert report.objects_checked == len(seen) < len(names)


def test_does_progress_reach_the_end(run: Path) -> None:
    shown: list[Progress] = []
    check_store(RealFileSystem(), str(run), on_progress=shown.append)
    assert (shown[-1].objects, shown[-1].bytes) == (
        shown[-1].objects_total,
        shown[-1].bytes_total,
    )


# Everything at once


def test_does_no_damage_make_it_fail_or_find_nothing(whole: Path, tmp_path: Path) -> None:
    """Wherever a bit of a file flips, the store opens as before, or the check tells of an error."""
    source = random.Random(7)
    with shardb.open(whole) as store:
        good = {commit.id: dict(commit.shards) for commit in store.commits()}
    targets = [p for p in tree(whole) if p.startswith(("FORMAT", "wal/", "index/data", "objects/"))]
    for attempt in range(60):
        run = copy_store(whole, tmp_path / f"run-{attempt}")
        path = run / source.choice(targets)
        flip_bit(path, source.randrange(path.stat().st_size), source.randrange(8))
        report = fsck(run)
        try:
            with shardb.open(run) as store:
                same = {c.id: dict(c.shards) for c in store.commits()} == good
        except ShardbError:
            same = False
        assert same or report.has_errors, f"{path}: {report.findings}"
        shutil.rmtree(run)


def test_is_the_nearest_intact_step_on_the_same_branch(run: Path) -> None:
    with shardb.open(run) as store:
        commits = {commit.step: commit for commit in store.commits()}
    damaged = {commits[2].shards["params/a"].digest}
    found = nearest_intact([commits[2]], list(commits.values()), damaged)
    assert found is not None
    assert found.step == 5
    assert nearest_intact([commits[2]], [commits[2]], damaged) is None
