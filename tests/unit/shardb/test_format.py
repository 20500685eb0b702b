"""Is a directory a store exactly when its FORMAT says so?"""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import xxhash

import shardb
from shardb import format as store_format
from shardb.cli import run as run_command
from shardb.errors import (
    CorruptionError,
    FormatError,
    NotFoundError,
    ShardbError,
    UsageError,
)
from shardb.filesystem import RealFileSystem
from shardb.repair import repair
from tests.support.small_stores import copy_store, fsck, tree
from tests.support.stores import InterposedFiles, commit_step

FILES = RealFileSystem()


def resealed(**changes: Any) -> bytes:
    """A FORMAT with changed fields and a right checksum."""
    fields = {"magic": "shardb", "version": 1, "store_id": "ab" * 16, **changes}
    fields = {name: value for name, value in fields.items() if value is not ...}
    text = json.dumps(fields, sort_keys=True)
    return json.dumps({**fields, "checksum": xxhash.xxh3_128_hexdigest(text.encode())}).encode()


def test_does_format_come_back_as_it_was() -> None:
    data = store_format.encode_format("ab" * 16)
    found = store_format.decode_format(data, "FORMAT")
    assert found == store_format.Format(version=1, store_id="ab" * 16)
    assert data.endswith(b"}\n")
    assert store_format.is_whole(data)
    assert store_format.decode_format(resealed(), "FORMAT") == found


def test_is_every_flipped_bit_of_format_noticed() -> None:
    data = store_format.encode_format("ab" * 16)
    for bit in range(len(data) * 8 - 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            found = store_format.decode_format(bytes(damaged), "FORMAT")
        except FormatError:
            continue
        # Upper or lower case of an escape, or white space, changes nothing that is said.
        assert found == store_format.decode_format(data, "FORMAT"), f"bit {bit}"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"[]", "damaged"),
        (b"{}", "damaged"),
        (b"[" * 2000, "damaged"),
        (resealed(magic=...), "damaged"),
        (resealed(magic="other"), "no shardb store"),
        (resealed(version=2), "newer than this program reads"),
        (resealed().replace(b'"version": 1', b'"version": 3'), "checksum.*repair.*says version 3"),
        (resealed().replace(b'"shardb"', b'"shbrdb"'), "checksum.*repair"),
        (resealed(version="1"), "checksum"),
        (resealed(version=True), "checksum"),
        (resealed(version=1.0), "checksum"),
        (resealed(store_id=5), "checksum"),
        (resealed()[:-2], "damaged"),
        (resealed().replace(b"abab", b"abac", 1), "checksum"),
    ],
)
def test_is_a_format_refused_that_is_not_ours(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        store_format.decode_format(data, "run/FORMAT")
    assert caught.value.path == "run/FORMAT"
    assert caught.value.exit_code == 3


def test_is_a_place_without_a_store_told(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no store here: give the one that `train"):
        shardb.open(tmp_path)
    with pytest.raises(NotFoundError, match="no store here"):
        shardb.open(tmp_path / "nothing" / "here")
    (tmp_path / "file").touch()
    with pytest.raises(NotFoundError, match="a file, not a store"):
        shardb.open(tmp_path / "file")


def test_is_a_log_without_format_not_taken_for_nothing(root: Path) -> None:
    with shardb.open(root, create=True) as store:
        commit_step(store, 1)
    (root / "FORMAT").unlink()
    for create in (False, True):
        with pytest.raises(FormatError, match=r"FORMAT.* missing"):
            shardb.open(root, create=create)


def damage_long(path: Path) -> None:
    path.write_bytes(b" " * 5000)


def damage_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def damage_foreign(path: Path) -> None:
    path.write_bytes(store_format.encode_format("cd" * 16))


@pytest.mark.parametrize("damage", [damage_long, damage_directory, damage_foreign])
def test_is_a_damaged_format_refused_at_opening(root: Path, damage: Any) -> None:
    shardb.open(root, create=True).close()
    damage(root / "FORMAT")
    with pytest.raises(FormatError, match="FORMAT"):
        shardb.open(root)
    with pytest.raises(FormatError, match="FORMAT"):
        shardb.open(root, create=True)


@pytest.mark.parametrize("made", ["nothing", "empty", "logs", "directories", "segment"])
def test_is_a_store_made_where_there_is_none(root: Path, made: str) -> None:
    """Also where making one was interrupted."""
    if made != "nothing":
        root.mkdir()
    if made == "logs":
        (root / "logs").mkdir()
    if made in ("directories", "segment"):
        store_format.create_directories(FILES, str(root))
    if made == "segment":
        shardb.open(root, create=True).close()
        (root / "FORMAT").unlink()
    with shardb.open(root, create=True) as store:
        assert store.branches() == {}
        assert store.recovery.rebuilt == []
        commit_step(store, 1)
    with shardb.open(root, create=True) as store:
        assert store.resolve().step == 1


def test_is_a_place_that_is_taken_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match=r"not empty \(notes.txt\)"):
        shardb.open(tmp_path, create=True)
    with pytest.raises(UsageError, match="this is a file"):
        shardb.open(tmp_path / "notes.txt", create=True)
    with pytest.raises(UsageError, match="parent"):
        shardb.open(tmp_path / "no" / "parent", create=True)
    with pytest.raises(ShardbError):
        shardb.open(tmp_path / "notes.txt" / "below", create=True)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "objects").touch()
    with pytest.raises(UsageError, match="cannot be made here"):
        shardb.open(tmp_path / "half", create=True)


def test_do_two_that_make_a_store_at_once_make_one(root: Path) -> None:
    """The second one must not replace the log into which the first one has committed."""
    at_work = threading.Event()
    commits: list[str] = []

    def first() -> None:
        with shardb.open(root, create=True) as store:
            commits.append(commit_step(store, 1).id)

    def late(path: str) -> None:
        if path.endswith("/locks") and not at_work.is_set():
            at_work.set()
            first()

    files = InterposedFiles("make_directory", late)
    with shardb.open(root, create=True, files=files) as store:
        assert at_work.is_set()
        assert [commit.id for commit in store.commits()] == commits


@pytest.mark.parametrize("readable", [True, False])
def test_is_a_new_store_durable_in_its_parent(root: Path, readable: bool) -> None:
    synced: list[str] = []

    def note(path: str) -> None:
        synced.append(path)
        if not readable and path == str(root.parent):
            raise PermissionError(13, "Permission denied")

    root.mkdir()
    shardb.open(root, create=True, files=InterposedFiles("sync_directory", note)).close()
    assert {str(root.parent), str(root), f"{root}/wal"} <= set(synced)
    assert synced.index(str(root.parent)) < synced.index(str(root))
    assert os.path.exists(root / "FORMAT")


@pytest.mark.parametrize("left", [("objects", "reserve"), ("objects",)])
def test_is_no_store_begun_over_the_objects_of_another(
    whole: Path, root: Path, left: tuple[str, ...]
) -> None:
    """A collection would give them back: FORMAT, log and index may be in a copy."""
    run = copy_store(whole, root)
    for path in run.iterdir():
        if path.name in left:
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = tree(run)
    for create in (False, True):
        with pytest.raises(FormatError, match=r"but there are objects.*clone COPY NEW"):
            shardb.open(run, create=create)
    with pytest.raises(CorruptionError, match="Clone the store from a copy"):
        repair(str(run), yes=True)
    assert tree(run) == before


def test_does_a_repair_go_on_with_the_index_where_format_and_log_are_gone(
    whole: Path, root: Path
) -> None:
    run = copy_store(whole, root)
    shutil.rmtree(run / "wal")
    (run / "FORMAT").unlink()
    assert run_command(["show", str(run)]) == 3
    repair(str(run), yes=True)
    assert not fsck(run).has_errors
    with shardb.open(run) as store:
        assert store.resolve().step == 6
        assert set(store.snapshots()) == {"step-2"}


def test_is_a_place_whose_objects_may_not_be_listed_no_store(tmp_path: Path) -> None:
    (tmp_path / "objects").write_bytes(b"no directory")
    with pytest.raises(NotFoundError):
        shardb.open(tmp_path)
