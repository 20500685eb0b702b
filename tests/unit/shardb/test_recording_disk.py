"""Which bytes and entries may a crash leave? One small scripted file workload a question."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardb.filesystem import CREATE, READ, WRITE, opened, write_file_durably
from shardb.testing.disk import DiskState, Image, Kept
from shardb.testing.images import ImageLimits, choices, tears
from shardb.testing.operations import Fault, Kind, Operation
from shardb.testing.recording import RecordingFileSystem, read_tree

Files = dict[str, bytes | None]
Script = Callable[[RecordingFileSystem, str], None]


def _record(tmp_path: Path, script: Script) -> RecordingFileSystem:
    files = RecordingFileSystem(str(tmp_path))
    script(files, files.root)
    files.shut_down()
    return files


def _after(files: RecordingFileSystem) -> DiskState:
    state = DiskState(files.initial)
    for operation in files.operations:
        state.advance(operation)
    return state


def _possible(files: RecordingFileSystem, *, seed: int = 0) -> list[Files]:
    """Every image that the explorer would try at the end of the log."""
    state = _after(files)
    found = {
        image.key: dict(image.files)
        for _, choice in choices(state, limits=ImageLimits(), seed=seed)
        for image in [state.image(choice)]
    }
    return list(found.values())


def _write(files: RecordingFileSystem, path: str, data: bytes, offset: int = 0) -> None:
    with opened(files, path, WRITE | CREATE) as file:
        files.pwrite(file, data, offset)


def _sync(files: RecordingFileSystem, path: str) -> None:
    with opened(files, path, WRITE) as file:
        files.fsync(file)


def test_all_operations_kept_is_what_the_real_directory_holds(tmp_path: Path) -> None:
    def script(files: RecordingFileSystem, root: str) -> None:
        files.make_directory(f"{root}/a")
        _write(files, f"{root}/a/one", b"1" * 700)
        files.rename(f"{root}/a/one", f"{root}/two")
        _write(files, f"{root}/two", b"22", 5)
        _write(files, f"{root}/three", b"3")
        files.unlink(f"{root}/three")
        with opened(files, f"{root}/two", WRITE) as file:
            files.truncate(file, 600)
            files.allocate(file, 650, keep_size=False)

    files = _record(tmp_path, script)
    state = _after(files)
    everything = {operation.number: Kept() for operation in state.pending}
    assert dict(state.image(everything).files) == read_tree(str(tmp_path))


def test_nothing_synced_may_leave_nothing(tmp_path: Path) -> None:
    files = _record(tmp_path, lambda f, root: _write(f, f"{root}/new", b"x"))
    possible = _possible(files)
    assert {} in possible
    assert {"new": b"x"} in possible
    assert {"new": b""} in possible


def test_a_synced_file_without_its_entry_may_be_gone(tmp_path: Path) -> None:
    def script(files: RecordingFileSystem, root: str) -> None:
        _write(files, f"{root}/new", b"x")
        _sync(files, f"{root}/new")

    assert _possible(_record(tmp_path, script)) == [{"new": b"x"}, {}]


def test_a_synced_entry_without_its_file_may_be_empty(tmp_path: Path) -> None:
    def script(files: RecordingFileSystem, root: str) -> None:
        _write(files, f"{root}/new", b"x")
        files.sync_directory(root)

    possible = _possible(_record(tmp_path, script))
    assert {"new": b""} in possible
    assert {"new": b"\0"} in possible
    assert {} not in possible


def test_a_durable_write_leaves_one_image(tmp_path: Path) -> None:
    def script(files: RecordingFileSystem, root: str) -> None:
        write_file_durably(files, f"{root}/new", b"x" * 5000)

    assert _possible(_record(tmp_path, script)) == [{"new": b"x" * 5000}]


def test_a_replaced_file_is_old_or_new(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def script(files: RecordingFileSystem, root: str) -> None:
        _write(files, f"{root}/file.partial", b"new")
        _sync(files, f"{root}/file.partial")
        files.rename(f"{root}/file.partial", f"{root}/file")

    possible = _possible(_record(tmp_path, script))
    assert {image["file"] for image in possible} == {b"old", b"new"}


def test_a_rename_between_directories_is_atomic(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / "file").write_bytes(b"x")
    moved = {"from": None, "to": None, "to/file": b"x"}

    def script(files: RecordingFileSystem, root: str) -> None:
        files.rename(f"{root}/from/file", f"{root}/to/file")

    files = _record(tmp_path, script)
    assert _possible(files) == [moved, {"from": None, "from/file": b"x", "to": None}]
    files.sync_directory(f"{files.root}/to")
    assert _possible(files) == [moved]


def test_syncing_a_directory_makes_no_other_directory_durable(tmp_path: Path) -> None:
    def script(files: RecordingFileSystem, root: str) -> None:
        files.make_directory(f"{root}/a")
        _write(files, f"{root}/a/file", b"x")
        _sync(files, f"{root}/a/file")
        files.sync_directory(f"{root}/a")

    files = _record(tmp_path, script)
    assert {} in _possible(files)
    files.sync_directory(files.root)
    assert _possible(files) == [{"a": None, "a/file": b"x"}]


def test_operations_on_one_entry_keep_their_order(tmp_path: Path) -> None:
    """The second file under a name is never there without the first having made way."""

    def script(files: RecordingFileSystem, root: str) -> None:
        _write(files, f"{root}/name", b"first")
        _sync(files, f"{root}/name")
        files.rename(f"{root}/name", f"{root}/other")
        _write(files, f"{root}/name", b"second")
        _sync(files, f"{root}/name")

    possible = _possible(_record(tmp_path, script))
    assert {"name": b"second"} not in possible
    assert {"name": b"second", "other": b"first"} in possible


def test_an_overwritten_file_that_was_renamed_shows_its_new_bytes_under_the_old_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "object").write_bytes(b"old" * 300)

    def script(files: RecordingFileSystem, root: str) -> None:
        files.rename(f"{root}/object", f"{root}/spare")
        _write(files, f"{root}/spare", b"new" * 300)
        _sync(files, f"{root}/spare")

    assert {"object": b"new" * 300} in _possible(_record(tmp_path, script))


def test_an_overwritten_sector_is_old_or_new(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"o" * 2048)
    files = _record(tmp_path, lambda f, root: _write(f, f"{root}/file", b"n" * 2048))
    for image in _possible(files):
        content = image["file"]
        assert content is not None
        for start in range(0, 2048, 512):
            assert content[start : start + 512] in (b"o" * 512, b"n" * 512)
    assert len(_possible(files)) > 4


def test_a_sector_holds_earlier_writes_with_a_later_one(tmp_path: Path) -> None:
    def script(files: RecordingFileSystem, root: str) -> None:
        write_file_durably(files, f"{root}/file", b"")
        _write(files, f"{root}/file", b"a" * 100)
        _write(files, f"{root}/file", b"b" * 100, 100)

    for image in _possible(_record(tmp_path, script)):
        content = image["file"]
        assert content is not None
        if b"b" in content:
            assert content.startswith(b"a" * 100)


def test_garbage_appears_only_in_sectors_that_are_new(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"o" * 700)
    files = _record(tmp_path, lambda f, root: _write(f, f"{root}/file", b"n" * 2000, 700))
    contents = {image["file"] for image in _possible(files)}
    assert b"o" * 700 + b"\0" * 2000 in contents
    strange = [c for c in contents if c is not None and set(c) - set(b"on\0")]
    assert strange
    assert all(set(content[:1024]) <= set(b"on\0") for content in strange)


def test_writes_of_a_failed_sync_are_not_saved_by_a_later_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"o" * 1024)
    files = RecordingFileSystem(str(tmp_path), fault=Fault(operation="fsync", nth=1, error=5))
    file = files.open(f"{files.root}/file", WRITE)
    files.pwrite(file, b"n" * 512, 0)
    with pytest.raises(OSError, match="Input/output"):
        files.fsync(file)
    files.fsync(file)
    assert {image["file"][:512] for image in _possible(files)} == {b"o" * 512, b"n" * 512}  # type: ignore[index]
    files.pwrite(file, b"n" * 512, 0)
    files.fsync(file)
    assert _possible(files) == [{"file": b"n" * 512 + b"o" * 512}]
    files.shut_down()


@pytest.mark.parametrize(
    ("pages", "expected"), [("new", b"oNNo"), ("old", b"oooo"), ("zero", b"o\0\0o")]
)
def test_after_a_failed_sync_memory_shows_what_its_model_says(
    tmp_path: Path, pages: str, expected: bytes
) -> None:
    (tmp_path / "file").write_bytes(b"oooo")
    fault = Fault(operation="fdatasync", nth=1, error=5, pages=pages)  # type: ignore[arg-type]
    files = RecordingFileSystem(str(tmp_path), fault=fault)
    file = files.open(f"{files.root}/file", WRITE)
    files.pwrite(file, b"NN", 1)
    with pytest.raises(OSError, match="Input/output"):
        files.fdatasync(file)
    assert files.pread(file, 10, 0) == expected
    files.shut_down()


def test_an_image_is_materialised_as_it_says(tmp_path: Path) -> None:
    image = Image(files={"a": None, "a/b": b"x" * 3000, "c": b""}, key=b"")
    image.materialise(str(tmp_path))
    assert read_tree(str(tmp_path)) == dict(image.files)
    with opened(RecordingFileSystem(str(tmp_path)), str(tmp_path / "c"), READ):
        assert os.path.getsize(tmp_path / "a" / "b") == 3000


def test_tears_respect_sectors_of_what_was_there() -> None:
    write = Operation(number=0, kind=Kind.WRITE, path="f", inode=1, offset=300, data=b"x" * 10_000)
    inside = {kept.stop for kept in tears(write, 20_000) if kept.stop is not None}
    assert inside
    assert all((300 + stop) % 512 == 0 for stop in inside)
    appended = {kept.stop for kept in tears(write, 300) if kept.stop is not None}
    assert {5_000, 9_999} <= appended
    small = Operation(number=0, kind=Kind.WRITE, path="f", inode=1, offset=0, data=b"x" * 512)
    assert not list(tears(small, 512))


def test_choices_are_the_same_for_a_seed_and_differ_between_seeds(tmp_path: Path) -> None:
    def script(files: RecordingFileSystem, root: str) -> None:
        for index in range(12):
            _write(files, f"{root}/file_{index}", bytes([index]) * 600)

    state = _after(_record(tmp_path, script))

    def labels(seed: int) -> list[str]:
        return [label for label, _ in choices(state, limits=ImageLimits(), seed=seed)]

    assert labels(1) == labels(1)
    assert labels(1) != labels(2)
