"""Does a packing that fails leave everything as it was, wherever it fails?"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import shardb
from shardb.errors import StorageFailedError, StorageFullError
from shardb.gc import collect_garbage
from shardb.pack import pack_snapshots
from shardb.pack_undo import unpack_snapshots
from tests.support.pack_stores import contents, fill, stored
from tests.support.small_stores import fsck
from tests.support.stores import InterposedFiles, poisoned

Contents = dict[str, dict[str, bytes]]


@pytest.fixture
def before(root: Path) -> Contents:
    """A closed store with two cold snapshots, and what is in them."""
    with shardb.open(root, create=True) as store:
        fill(store, range(6), snapshots=(1, 2))
        return contents(store)


def nothing(*_: Any, **__: Any) -> None:
    """Let every call through."""


class Failing:
    """Fails the n-th call of an operation; `only` looks at its arguments."""

    def __init__(self, nth: int, code: int, *, name: str = "") -> None:
        self.left = nth
        self.code = code
        self.name = name
        self.fired = False

    def __call__(self, *arguments: Any, **_: Any) -> None:
        if self.name and not any(self.name in str(argument) for argument in arguments):
            return
        self.left -= 1
        if self.left == 0:
            self.fired = True
            raise OSError(self.code, os.strerror(self.code))


def staged(root: Path) -> list[str]:
    return [path.name for path in (root / "spare").iterdir() if path.name.startswith("staged.")]


def check_whole(root: Path, before: Contents) -> None:
    """Everything reads as before, in a fresh process and by a check."""
    with shardb.open(root) as store:
        assert contents(store) == before
    assert not fsck(root).has_errors


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_does_a_full_disk_change_nothing(root: Path, before: Contents, code: int) -> None:
    for nth in range(1, 200):
        failing = Failing(nth, code)
        files = InterposedFiles("pwrite", nothing)
        with shardb.open(root, files=files) as store:
            files.before = failing
            images = stored(root)
            try:
                pack_snapshots(store)
            except StorageFullError:
                packed = stored(root)["pack"]
                assert staged(root) == []
                # Objects packed before are whole in their new form, all others in their old one.
                assert images["safetensors"] - packed == stored(root)["safetensors"]
            files.before = nothing
            assert contents(store) == before
        check_whole(root, before)
        if not failing.fired:
            return
    raise AssertionError("every call failed")


@pytest.mark.parametrize("operation", ["fdatasync", "sync_directory", "rename", "unlink", "open"])
@pytest.mark.parametrize("undo", [False, True], ids=["pack", "unpack"])
def test_is_nothing_lost_wherever_the_storage_fails(
    root: Path, before: Contents, operation: str, undo: bool
) -> None:
    for nth in range(1, 300):
        failing = Failing(nth, errno.EIO)
        files = InterposedFiles(operation, nothing)
        with shardb.open(root) as store:
            (pack_snapshots if undo else unpack_snapshots)(store)
        store = shardb.open(root, files=files)
        with poisoned(store):
            files.before = failing
            with suppress(StorageFailedError):
                (unpack_snapshots if undo else pack_snapshots)(store)
            files.before = nothing
        check_whole(root, before)
        if not failing.fired:
            return
    raise AssertionError("every call failed")


def test_does_a_failed_sync_poison_the_store(root: Path, before: Contents) -> None:
    files = InterposedFiles("fdatasync", nothing)
    store = shardb.open(root, files=files)
    with poisoned(store):
        files.before = Failing(1, errno.EIO)
        with pytest.raises(StorageFailedError):
            pack_snapshots(store)
        files.before = nothing
        with pytest.raises(StorageFailedError, match="open it again"):
            pack_snapshots(store)
        assert contents(store) == before


def test_is_a_full_log_no_harm(root: Path, before: Contents) -> None:
    """No space for the record itself: the packed file goes, the image stays."""
    images = stored(root)
    with shardb.open(root) as store:

        def full(*_: Any, **__: Any) -> None:
            raise StorageFullError("the log is full")

        store.appender.append = full  # type: ignore[method-assign]
        with pytest.raises(StorageFullError):
            pack_snapshots(store)
    assert stored(root) == images
    check_whole(root, before)


@pytest.mark.parametrize("undo", [False, True], ids=["pack", "unpack"])
def test_does_an_interrupt_leave_whole_objects(root: Path, before: Contents, undo: bool) -> None:
    for nth in range(1, 100):
        seen = 0

        def interrupt(*_: Any, after: int = nth, **__: Any) -> None:
            nonlocal seen
            seen += 1
            if seen == after:
                raise KeyboardInterrupt

        files = InterposedFiles("pwrite", nothing)
        with shardb.open(root, files=files) as store:
            (pack_snapshots if undo else unpack_snapshots)(store)
            files.before = interrupt
            try:
                (unpack_snapshots if undo else pack_snapshots)(store)
                done = True
            except KeyboardInterrupt:
                done = False
            files.before = nothing
            assert contents(store) == before
        check_whole(root, before)
        if done:
            return
        collect_garbage(str(root))
        assert fsck(root).findings == []
    raise AssertionError("every call was interrupted")
