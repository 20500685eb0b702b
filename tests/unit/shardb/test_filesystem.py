"""What does the close of a file say, and to whom?"""

from __future__ import annotations

import errno
import gc
import os
import sys
from pathlib import Path

import pytest

from shardb.buffers import BufferPool
from shardb.filesystem import READ, WRITE, open_direct, opened, read_file
from shardb.testing.operations import Fault
from shardb.testing.recording import RecordingFileSystem
from shardb.transfer_source import read_chunks

SIZE_BYTES = 20 << 20


def closing_fails(root: Path) -> RecordingFileSystem:
    fault = Fault(operation="close", nth=1, error=errno.EINTR, persistent=True)
    return RecordingFileSystem(str(root), fault=fault)


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
