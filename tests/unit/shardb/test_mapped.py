"""Is a mapped file handed out only by its own name, and never while somebody sees it?"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardb.filesystem import RealFileSystem
from shardb.mapped import MappedPool
from shardb.objects import ObjectFiles
from tests.support.stores import InterposedFiles

BYTES = 8192


def made(root: Path, files: RealFileSystem | None = None) -> tuple[ObjectFiles, MappedPool]:
    for name in ("objects", "spare"):
        (root / name).mkdir(exist_ok=True)
    objects = ObjectFiles(files or RealFileSystem(), str(root), verify=True)
    return objects, MappedPool(objects)


def spare(root: Path) -> list[str]:
    return sorted(name.rpartition(".")[0] for name in os.listdir(root / "spare"))


def test_is_a_buffer_the_file_itself(root: Path) -> None:
    root.mkdir()
    _, pool = made(root)
    buffer = pool.take(BYTES, "main")
    assert buffer.path is not None
    buffer.array(BYTES, writable=True)[:] = 7
    assert Path(buffer.path).read_bytes() == b"\x07" * BYTES
    assert buffer.inode == os.stat(buffer.path).st_ino
    assert spare(root) == ["staged.main"]


def test_is_a_file_free_when_its_last_array_is_gone(root: Path) -> None:
    root.mkdir()
    _, pool = made(root)
    buffer = pool.take(BYTES, "main")
    array: Any = buffer.array(BYTES, writable=False)[10:20]
    buffer.release(pool)
    pool.collect()
    assert spare(root) == ["staged.main"]
    del array
    pool.collect()
    assert spare(root) == [f"free.{BYTES}"]
    assert pool.take(BYTES, "side") is buffer
    assert spare(root) == ["staged.side"]


def test_is_a_file_that_another_process_took_left_to_it(root: Path) -> None:
    root.mkdir()
    _, pool = made(root)
    buffer = pool.take(BYTES, "main")
    buffer.release(pool)
    pool.collect()
    [free] = (root / "spare").iterdir()
    free.rename(root / "spare" / "staged.other.0")
    assert pool.take(BYTES, "main") is not buffer


def test_is_a_buffer_without_its_file_not_kept(root: Path) -> None:
    root.mkdir()
    _, pool = made(root)
    gone, disowned = pool.take(BYTES, "main"), pool.take(BYTES, "main")
    assert gone.path is not None
    os.unlink(gone.path)
    disowned.disown()
    for buffer in (gone, disowned):
        buffer.release(pool)
    pool.collect()
    assert pool.take(BYTES, "main") not in (gone, disowned)


def test_is_a_spare_file_of_an_earlier_process_mapped(root: Path) -> None:
    root.mkdir()
    _, first = made(root)
    first.take(BYTES, "main").release(first)
    first.close()
    inode = (root / "spare" / os.listdir(root / "spare")[0]).stat().st_ino
    _, second = made(root)
    assert second.take(BYTES, "main").inode == inode


def test_is_no_space_an_error_now_and_not_a_signal_later(root: Path) -> None:
    root.mkdir()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    _, pool = made(root, InterposedFiles("allocate", full))
    with pytest.raises(OSError, match="No space"):
        pool.take(BYTES, "main")


@pytest.mark.parametrize("present", [True, False])
def test_is_a_retired_file_held_while_it_is_seen(root: Path, present: bool) -> None:
    root.mkdir()
    objects, pool = made(root)
    buffer = pool.take(BYTES, "main")
    array = buffer.array(BYTES, writable=True)
    array[:] = 3
    assert buffer.path is not None
    digest = "ab" * 16
    os.rename(buffer.path, objects.path(digest))
    if not present:
        os.unlink(objects.path(digest))
    objects.hold(digest, buffer)
    buffer.release(pool)
    assert spare(root) == ([f"held.{BYTES}"] if present else [])
    assert array[5] == 3
    del array
    pool.collect()
    assert spare(root) == ([f"free.{BYTES}"] if present else [])


def test_can_a_store_in_memory_map_more_files_than_the_usual_limit() -> None:
    code = (
        "import resource\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "from shardb.mapped import allow_open_files\n"
        "allow_open_files()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
