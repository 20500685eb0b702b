"""What does the close of a file say, and to whom?"""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardb
from shardb.buffers import BufferPool
from shardb.filesystem import READ, WRITE, RealFileSystem, open_direct, opened, read_file
from shardb.testing.operations import Fault
from shardb.testing.recording import RecordingFileSystem
from shardb.transfer_source import read_chunks
from tests.support.stores import commit_step, values_of

SIZE_BYTES = 20 << 20


def closing_fails(root: Path) -> RecordingFileSystem:
    fault = Fault(operation="close", nth=1, error=errno.EINTR, persistent=True)
    return RecordingFileSystem(str(root), fault=fault)


def test_is_a_file_system_that_counts_nothing_not_taken_for_a_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ramfs says 0 of 0 bytes; what memory there is bounds it."""
    real, files = os.statvfs(tmp_path), RealFileSystem()
    full = os.statvfs_result((real.f_bsize, real.f_frsize, real.f_blocks, 0, 0, *real[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    assert files.space(str(tmp_path)).free_bytes == 0
    uncounted = os.statvfs_result((real.f_bsize, real.f_frsize, 0, 0, 0, *real[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda _: uncounted)
    space = files.space(str(tmp_path))
    assert 1 << 20 < space.free_bytes <= space.total_bytes
    assert space.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_is_a_store_on_ramfs_one_in_memory(tmp_path: Path) -> None:
    """Where filling a mapping changes the file's time on every page, all is still checked."""
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "ramfs", "none", tmp_path]).returncode:
        pytest.skip("only root can mount a file system")
    try:
        with shardb.open(tmp_path / "run", create=True) as store:
            assert store.mapped
            for step in range(1, 6):
                commit_step(store, step)
            assert values_of(store.begin()) == {"params/a": 5, "params/b": 5.25}
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_the_close_of_a_file_that_was_read_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    files = closing_fails(tmp_path)
    assert read_file(files, str(tmp_path / "f"), limit_bytes=3) == b"abc"
    assert files.fired_count == 1


def test_the_close_of_a_file_that_was_written_is_one(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    with (
        pytest.raises(InterruptedError),
        opened(closing_fails(tmp_path), str(tmp_path / "f"), WRITE),
    ):
        pass


@pytest.mark.parametrize("flags", [READ, WRITE])
def test_it_does_not_hide_why_a_block_ended(tmp_path: Path, flags: int) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    with (
        pytest.raises(KeyError, match="the first"),
        opened(closing_fails(tmp_path), str(tmp_path / "f"), flags),
    ):
        raise KeyError("the first")


def test_chunks_that_nobody_reads_to_the_end_close_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator is closed by its finalizer, out of which no error comes to anybody."""
    (tmp_path / "f").write_bytes(bytes(SIZE_BYTES))
    files = closing_fails(tmp_path)
    unheard: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: unheard.append(told.exc_value))
    buffers = BufferPool(SIZE_BYTES)
    chunks = read_chunks(files, str(tmp_path / "f"), SIZE_BYTES, buffers)
    assert len(next(chunks)) < SIZE_BYTES
    del chunks
    gc.collect()
    assert files.fired_count == 1
    assert unheard == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_without_direct_access_is_told_by_none(tmp_path: Path, code: int) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    fault = Fault(operation="open", nth=1, error=code)
    assert (
        open_direct(RecordingFileSystem(str(tmp_path), fault=fault), f"{tmp_path}/f", READ) is None
    )


def test_any_other_error_of_direct_access_is_told(tmp_path: Path) -> None:
    files = RecordingFileSystem(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        open_direct(files, os.path.join(tmp_path, "absent"), READ)
