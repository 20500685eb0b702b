"""Does an interrupted copy go on, and is nothing believed for its name?"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardb
from shardb.errors import (
    ObjectCorruptError,
    ObjectMissingError,
    StorageFailedError,
    StorageFullError,
)
from shardb.filesystem import RealFileSystem, Space
from shardb.records import ShardEntry
from shardb.transfer import copy_commit
from shardb.transfer_source import CHUNK_BYTES, StoreSource
from shardb.transfer_tally import Counts, Tally
from tests.support.transfer_stores import commit, contents, files_in


@pytest.fixture
def source(tmp_path: Path) -> Iterator[shardb.Store]:
    with shardb.open(tmp_path / "source", create=True) as store:
        commit(store, 0)
        yield store


class FailingFiles(RealFileSystem):
    """Files of a target that can be told to fail."""

    def __init__(self) -> None:
        self.free_bytes: int | None = None
        self.writes_left: int | None = None

    def space(self, path: str) -> Space:
        real = super().space(path)
        return real if self.free_bytes is None else Space(free_bytes=self.free_bytes, total_bytes=1)

    def pwrite(self, file: int, data: Any, offset: int) -> int:
        if self.writes_left is not None and len(data) > 10_000:
            self.writes_left -= 1
            if self.writes_left < 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pwrite(file, data, offset)


@pytest.fixture
def files() -> FailingFiles:
    return FailingFiles()


@pytest.fixture
def target(tmp_path: Path, files: FailingFiles) -> Iterator[shardb.Store]:
    with shardb.open(tmp_path / "target", create=True, files=files) as store:
        yield store


def interrupted_copy(source: shardb.Store, target: shardb.Store, files: FailingFiles) -> None:
    """Copy until the storage fails."""
    files.writes_left = 3
    with pytest.raises(StorageFailedError, match="writing"):
        copy_commit(source, target)
    files.writes_left = None
    assert target.branches() == {}


def staged_files(target: shardb.Store) -> list[Path]:
    return sorted(Path(target.root, "spare").glob("staged.*"))


def damage(paths: list[Path]) -> None:
    for path in paths:
        with path.open("r+b") as file:
            file.seek(100)
            file.write(b"damage")


def test_does_the_next_copy_go_on(
    source: shardb.Store, target: shardb.Store, files: FailingFiles
) -> None:
    interrupted_copy(source, target, files)
    assert staged_files(target)
    tally = Tally()
    copy_commit(source, target, tally=tally)
    assert tally.counts.objects_resumed >= 1
    assert tally.counts.objects_done == tally.counts.objects_total == 4
    assert tally.counts.bytes_done == tally.counts.bytes_total
    assert contents(target) == contents(source)
    assert files_in(Path(target.root), "spare") == []


def test_is_a_staged_file_with_other_bytes_copied_again(
    source: shardb.Store, target: shardb.Store, files: FailingFiles
) -> None:
    interrupted_copy(source, target, files)
    damage(staged_files(target))
    tally = Tally()
    copy_commit(source, target, tally=tally)
    assert tally.counts.objects_resumed == 0
    assert contents(target) == contents(source)


def test_would_the_tests_notice_that_a_name_was_believed(
    source: shardb.Store,
    target: shardb.Store,
    files: FailingFiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control arm: a digest that is taken from the name lets damaged bytes in."""
    interrupted_copy(source, target, files)
    damage(staged_files(target))

    def believed(files: Any, path: str, *rest: Any) -> str:
        return os.path.basename(path).split(".")[2][:32]

    monkeypatch.setattr("shardb.transfer_objects.file_digest", believed)
    copy_commit(source, target)
    with shardb.open(target.root) as again, pytest.raises(ObjectCorruptError):
        contents(again)


def test_is_a_placed_object_that_nothing_references_read_before_it_is_used(
    source: shardb.Store, target: shardb.Store
) -> None:
    """What a crash between placing and the record leaves: two right files, one with other bytes."""
    entries = list(source.resolve("main").shards.values())
    for position, entry in enumerate(entries[:3]):
        data = Path(source.objects.path(entry.digest)).read_bytes()
        if position == 0:
            data = data[:-1] + bytes([data[-1] ^ 1])
        Path(target.objects.path(entry.digest)).write_bytes(data)
    tally = Tally()
    copy_commit(source, target, tally=tally)
    assert tally.counts.objects_resumed == 2
    assert contents(target) == contents(source)


def test_does_a_transaction_take_back_what_a_copy_left(
    source: shardb.Store, target: shardb.Store, files: FailingFiles
) -> None:
    interrupted_copy(source, target, files)
    commit(target, 0, seed=4)
    assert staged_files(target) == []


def test_are_objects_of_a_leased_commit_left_where_they_are(
    source: shardb.Store, target: shardb.Store
) -> None:
    """A reader holds a commit that no branch keeps; another copy brings the same objects again."""
    copy_commit(source, target)
    first = source.resolve("main").id
    with target.at(ref="main") as view:
        for step in (1, 2, 3):
            commit(target, step, seed=7)
        with pytest.raises(shardb.errors.NotFoundError):
            target.resolve(first)
        copy_commit(source, target, branch="again")
        read = {name: view.read(name).image.tobytes() for name in view.names()}
    assert read == contents(source)
    assert contents(target, "again") == read


def test_does_a_damaged_source_change_nothing(source: shardb.Store, target: shardb.Store) -> None:
    entry = source.resolve("main").shards["params/block_000"]
    source.cache.pop(entry.digest)
    path = Path(source.objects.path(entry.digest))
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"rot")
    with pytest.raises(ObjectCorruptError, match="fsck") as caught:
        copy_commit(source, target)
    assert str(path) in str(caught.value)
    assert target.branches() == {}
    assert files_in(Path(target.root), "objects") == []


@pytest.mark.parametrize("cut", [0, 1, 4096])
def test_is_a_short_or_missing_object_an_error(
    source: shardb.Store, target: shardb.Store, cut: int
) -> None:
    entry = source.resolve("main").shards["params/block_000"]
    source.cache.pop(entry.digest)
    path = Path(source.objects.path(entry.digest))
    if cut:
        os.truncate(path, entry.bytes - cut)
    else:
        path.unlink()
    with pytest.raises(ObjectCorruptError if cut else ObjectMissingError, match=entry.digest):
        copy_commit(source, target)
    assert target.branches() == {}


def test_is_what_cannot_fit_refused_before_the_first_byte(
    source: shardb.Store, target: shardb.Store, files: FailingFiles
) -> None:
    files.free_bytes = 1_000_000
    with pytest.raises(StorageFullError, match="1000000 are free") as caught:
        copy_commit(source, target)
    needed = sum(entry.bytes for entry in source.resolve("main").shards.values())
    assert f"{needed} bytes are to be copied" in str(caught.value)
    assert caught.value.exit_code == 6
    assert files_in(Path(target.root), "spare") == []
    files.free_bytes = needed
    copy_commit(source, target)


def test_do_the_counts_take_a_failed_attempt_back(
    source: shardb.Store, target: shardb.Store, files: FailingFiles
) -> None:
    seen: list[Counts] = []
    tally = Tally(seen.append)
    files.writes_left = 3
    with pytest.raises(StorageFailedError):
        copy_commit(source, target, tally=tally)
    whole = [entry.bytes for entry in source.resolve("main").shards.values()]
    assert tally.counts.bytes_done in {n * whole[0] for n in range(4)}
    assert seen
    assert seen[-1] == tally.counts


def test_do_chunks_have_whole_pages_and_bounded_memory(tmp_path: Path) -> None:
    size = CHUNK_BYTES * 2 + 5000
    with shardb.open(tmp_path / "large", create=True, cache_bytes=0) as store:
        head = commit(store, 0, size=size, shards=("params/block_000",))
        entry = head.shards["params/block_000"]
        sizes = [len(chunk) for chunk in StoreSource(store).chunks(entry)]
        assert sizes[:2] == [CHUNK_BYTES, CHUNK_BYTES]
        assert sum(sizes) == entry.bytes
        wrong = ShardEntry(digest=entry.digest, bytes=entry.bytes + 1, step=0)
        with pytest.raises(ObjectCorruptError):
            list(StoreSource(store).chunks(wrong))
