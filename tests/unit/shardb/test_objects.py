"""Are object files immutable, checked when read, and reused only when nobody needs them?"""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from shardb import layout, objects
from shardb.buffers import BufferPool
from shardb.errors import ObjectCorruptError, ObjectMissingError
from shardb.filesystem import RealFileSystem
from shardb.layout import TensorSpec
from shardb.objects import ObjectFiles, StagedObject, branch_token, free_bytes_of
from shardb.references import Retired
from tests.support.stores import InterposedFiles, flip_bit

BRANCH = "main"


def image_of(value: int, items: int = 100) -> np.ndarray:
    built = layout.build({"weight": TensorSpec(dtype="U8", shape=(items,))})
    image = BufferPool(0).take(built.size_bytes, BRANCH).array(built.size_bytes, writable=True)
    image[:] = value
    image[: len(built.header)] = np.frombuffer(built.header, dtype=np.uint8)
    return image


def made(root: Path, files: RealFileSystem | None = None, *, verify: bool = True) -> ObjectFiles:
    for name in ("objects", "spare"):
        (root / name).mkdir(exist_ok=True)
    return ObjectFiles(files or RealFileSystem(), str(root), verify=verify)


@pytest.fixture
def store(tmp_path: Path) -> ObjectFiles:
    return made(tmp_path)


def committed(store: ObjectFiles, value: int, items: int = 100) -> StagedObject:
    staged = store.write(image_of(value, items), BRANCH)
    store.sync(staged)
    store.place(staged)
    return staged


def retired(staged: StagedObject) -> list[Retired]:
    return [Retired(digest=staged.digest, bytes=staged.bytes)]


def spare(store: ObjectFiles) -> list[str]:
    return sorted(name.rpartition(".")[0] for name in os.listdir(store.spare_directory))


@pytest.mark.parametrize("items", [1, 100, 4096, 300_000, (1 << 20) + 7])
def test_is_an_object_read_as_it_was_written(store: ObjectFiles, items: int) -> None:
    """Small ones are written through the page cache, large ones past it, with an odd tail."""
    staged = committed(store, 7, items)
    found, image = store.open(staged.digest, staged.bytes)
    assert np.array_equal(image, image_of(7, items))
    assert found.specs["weight"].shape == (items,)
    assert staged.digest == xxhash.xxh3_128_hexdigest(image_of(7, items).tobytes())
    assert os.listdir(store.directory) == [f"{staged.digest}.safetensors"]


def test_is_a_mapped_object_read_only(store: ObjectFiles) -> None:
    staged = committed(store, 7)
    _, image = store.open(staged.digest, staged.bytes)
    with pytest.raises(ValueError, match="read-only"):
        image[0] = 1
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        image.flags.writeable = True


def test_is_a_file_system_without_direct_writes_served(tmp_path: Path) -> None:
    def refuse(path: str, flags: int, mode: int = 0o666) -> None:
        if flags & objects.DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")

    store = made(tmp_path, InterposedFiles("open", refuse))
    for value in (1, 2):
        staged = committed(store, value, 300_000)
        _, image = store.open(staged.digest, staged.bytes)
        assert np.array_equal(image, image_of(value, 300_000))


def test_is_another_error_of_a_direct_open_told(tmp_path: Path) -> None:
    def refuse(path: str, flags: int, mode: int = 0o666) -> None:
        if flags & objects.DIRECT:
            raise OSError(errno.EIO, "Input/output error")

    store = made(tmp_path, InterposedFiles("open", refuse))
    with pytest.raises(OSError, match="Input/output"):
        store.write(image_of(1, 300_000), BRANCH)


@pytest.mark.parametrize("offset", [0, 9, 5000, -1])
def test_is_a_flipped_bit_found_at_the_first_read(tmp_path: Path, offset: int) -> None:
    staged = committed(made(tmp_path), 7, 5000)
    flip_bit(tmp_path / "objects" / f"{staged.digest}.safetensors", offset)
    with pytest.raises(ObjectCorruptError, match=f"{staged.digest}.*fsck"):
        made(tmp_path).open(staged.digest, staged.bytes)


def test_is_the_digest_left_alone_when_that_is_wanted(tmp_path: Path) -> None:
    staged = committed(made(tmp_path), 7, 5000)
    flip_bit(tmp_path / "objects" / f"{staged.digest}.safetensors", -1)
    _, image = made(tmp_path, verify=False).open(staged.digest, staged.bytes)
    assert image[-1] != 7


def test_is_a_digest_computed_once_a_process(tmp_path: Path, monkeypatch: Any) -> None:
    staged = committed(made(tmp_path), 7)
    store = made(tmp_path)
    store.open(staged.digest, staged.bytes)
    monkeypatch.setattr(objects.xxhash, "xxh3_128_hexdigest", lambda _: "again")
    assert store.open(staged.digest, staged.bytes)


def test_is_an_object_of_another_size_refused(store: ObjectFiles, tmp_path: Path) -> None:
    staged = committed(store, 7)
    with pytest.raises(ObjectCorruptError, match=f"{staged.bytes} bytes, but 9 were committed"):
        store.open(staged.digest, 9)
    os.truncate(store.path(staged.digest), 0)
    with pytest.raises(ObjectCorruptError, match="0 bytes"):
        store.open(staged.digest, staged.bytes)


def test_is_a_missing_object_named(store: ObjectFiles) -> None:
    with pytest.raises(ObjectMissingError, match=f"objects/{'0' * 32}.safetensors.*fsck"):
        store.open("0" * 32, 4096)


def test_is_a_retired_file_used_again(store: ObjectFiles) -> None:
    first = committed(store, 1)
    inode = os.stat(store.path(first.digest)).st_ino
    store.retire(retired(first))
    assert spare(store) == [f"free.{first.bytes}"]
    second = committed(store, 2)
    assert os.stat(store.path(second.digest)).st_ino == inode
    assert spare(store) == []
    assert os.listdir(store.directory) == [f"{second.digest}.safetensors"]


def test_is_a_spare_file_of_another_process_used(tmp_path: Path) -> None:
    first = made(tmp_path)
    staged = committed(first, 1)
    first.retire(retired(staged))
    second = committed(made(tmp_path), 2)
    assert spare(first) == []
    assert second.digest != staged.digest


def test_is_a_spare_file_that_another_process_took_no_error(tmp_path: Path) -> None:
    store = made(tmp_path)
    staged = committed(store, 1)
    store.retire(retired(staged))
    for name in os.listdir(store.spare_directory):
        os.unlink(f"{store.spare_directory}/{name}")
    assert committed(store, 2).bytes == staged.bytes


def test_is_only_a_file_of_the_same_size_used_again(store: ObjectFiles) -> None:
    store.retire(retired(committed(store, 1, 100)))
    committed(store, 2, 101)
    assert spare(store) == [f"free.{4096 + 100}"]


@pytest.mark.parametrize("alive", [True, False])
def test_is_a_retired_file_with_living_views_given_up(store: ObjectFiles, alive: bool) -> None:
    """Writing into it would change what somebody in this process is reading."""
    staged = committed(store, 1)
    _, image = store.open(staged.digest, staged.bytes)
    part: Any = image[5000:].view(np.uint8)[:10]
    del image
    if not alive:
        del part
    gc.collect()
    store.retire(retired(staged))
    assert spare(store) == ([] if alive else [f"free.{staged.bytes}"])
    committed(store, 2)
    if alive:
        assert np.all(part == 1)


def test_may_a_view_end_while_the_files_are_locked(store: ObjectFiles) -> None:
    staged = committed(store, 1)
    held = [store.open(staged.digest, staged.bytes)]
    thread = threading.Thread(target=held.clear, daemon=True)
    with store._lock:
        thread.start()
        thread.join(timeout=5)
        assert not thread.is_alive()
    store.retire(retired(staged))
    assert spare(store) == [f"free.{staged.bytes}"]


def test_is_retiring_what_is_gone_no_error(store: ObjectFiles) -> None:
    store.retire([Retired(digest="0" * 32, bytes=5)])
    assert spare(store) == []


def test_is_a_leftover_of_the_same_name_replaced(store: ObjectFiles) -> None:
    """A file name is never believed: only what was written now is what is there."""
    staged = store.write(image_of(7), BRANCH)
    Path(store.path(staged.digest)).write_bytes(b"a leftover of unknown content")
    store.sync(staged)
    store.place(staged)
    _, image = store.open(staged.digest, staged.bytes)
    assert np.array_equal(image, image_of(7))


def test_is_a_dropped_file_used_again(store: ObjectFiles) -> None:
    staged = store.write(image_of(1), BRANCH)
    store.drop(staged)
    assert spare(store) == [f"free.{staged.bytes}"]
    committed(store, 2)
    assert spare(store) == []


def test_are_descriptors_closed_once(tmp_path: Path) -> None:
    """A second close would hit whoever got the number meanwhile."""
    closed: list[int] = []
    store = made(tmp_path, InterposedFiles("close", closed.append))
    staged = store.write(image_of(1), BRANCH)
    store.place(staged)
    with pytest.raises(FileNotFoundError):
        store.drop(staged)
    assert len(closed) == 1


def test_is_the_number_of_open_files_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(objects, "OPEN_FILES_LIMIT", 3)
    synced: list[int] = []
    store = made(tmp_path, InterposedFiles("fdatasync", synced.append))
    staged = [store.write(image_of(value), BRANCH) for value in range(5)]
    assert len(synced) == 2
    for one in staged:
        store.sync(one)
    assert len(synced) == 5
    for one in staged:
        store.place(one)
    store.write(image_of(9), BRANCH)
    assert len(synced) == 5


@pytest.mark.parametrize("spared", [True, False])
def test_does_a_failed_write_leave_no_half_file(tmp_path: Path, spared: bool) -> None:
    """On a full disk every attempt would leave one more."""
    if spared:
        before = made(tmp_path)
        before.retire(retired(committed(before, 1)))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = made(tmp_path, InterposedFiles("pwrite", full))
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            store.write(image_of(2), BRANCH)
    assert spare(store) == ([f"free.{4096 + 100}"] if spared else [])


@pytest.mark.parametrize("other", ["main.x", "mai", "main2", "main/x", "x.main"])
def test_is_only_the_own_branchs_staged_file_reclaimed(store: ObjectFiles, other: str) -> None:
    mine = store.write(image_of(1), BRANCH)
    theirs = store.write(image_of(2), other)
    assert [os.path.basename(mine.path)] == store.reclaim_staged(BRANCH)
    assert os.path.exists(theirs.path)
    assert not os.path.exists(mine.path)
    assert store.reclaim_staged(BRANCH) == []


def test_is_a_half_written_file_reclaimed_with_the_size_it_has(store: ObjectFiles) -> None:
    staged = store.write(image_of(1), BRANCH)
    os.truncate(staged.path, 1000)
    store.reclaim_staged(BRANCH)
    assert spare(store) == ["free.1000"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("free.4096.0123456789abcdef", 4096),
        ("free.x.0", None),
        ("free.-5.0", None),
        ("free.4096", None),
        ("free.4096.a.b", None),
        ("staged.main.0", None),
        ("notes.txt", None),
    ],
)
def test_is_the_size_in_a_spare_name_read(name: str, expected: int | None) -> None:
    assert free_bytes_of(name) == expected


def test_have_branches_file_names_of_their_own() -> None:
    branches = ["a/b", "a", "b", "a.b", "a-b", "a_b"]
    tokens = {branch_token(branch) for branch in branches}
    assert len(tokens) == len(branches)
    assert all("/" not in token for token in tokens)


def test_is_a_spare_file_that_is_longer_than_its_name_says_not_used(store: ObjectFiles) -> None:
    """The bytes behind the image would be part of the object."""
    staged = committed(store, 1)
    store.retire(retired(staged))
    [name] = os.listdir(store.spare_directory)
    with open(f"{store.spare_directory}/{name}", "ab") as file:
        file.write(b"x")
    again = committed(store, 2)
    assert os.path.getsize(store.path(again.digest)) == again.bytes
    assert spare(store) == []
