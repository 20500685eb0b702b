"""Do gc, recover and fsck work with zero bytes free, however often?

On a file system of a few megabytes that is really full; making one takes the right to mount.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import shardb
from shardb.errors import StorageFullError
from tests.support.commands import Ended, shardb_command
from tests.support.small_stores import commit_step, fill_store, fsck, kinds

DISK_BYTES = 6 << 20


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small file system of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def run(disk: Path) -> Path:
    """A store on it, with steps 2, 5 and 6 of 0 to 6."""
    fill_store(disk / "run", range(7), snapshots=(2,))
    return disk / "run"


def fill(disk: Path) -> None:
    """Take every byte that is left."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with suppress(OSError):
                while file.write(b"x" * size):
                    pass
    assert os.statvfs(disk).f_bavail == 0


def check_fine(answer: Ended) -> None:
    assert answer.code == 0, answer.err


def test_do_the_verbs_of_repair_work_with_nothing_free(disk: Path, run: Path) -> None:
    for verb in ("fsck", "recover", "gc", "recover", "gc", "fsck", "info"):
        fill(disk)
        check_fine(shardb_command(verb, run))


def test_does_the_reserve_bring_up_an_index_that_is_behind(disk: Path, run: Path) -> None:
    shutil.rmtree(run / "index")
    shutil.rmtree(run / "spare")
    (run / "spare").mkdir()
    fill(disk)
    check_fine(shardb_command("show", run))  # it reads the log, and writes no index for that
    assert kinds(fsck(run)) == ["index_missing"]
    check_fine(shardb_command("recover", run))
    for verb in ("recover", "gc", "fsck"):
        fill(disk)
        check_fine(shardb_command(verb, run))
    assert fsck(run).findings == []


def test_does_gc_use_spare_files_and_the_reserve_to_open(disk: Path, run: Path) -> None:
    shutil.rmtree(run / "index")
    fill(disk)
    check_fine(shardb_command("gc", run))
    assert fsck(run).findings == []


def test_is_the_store_refused_and_whole_where_there_is_no_reserve(disk: Path, run: Path) -> None:
    """The control: it is the reserve that makes the others pass."""
    for place in ("index", "spare"):
        shutil.rmtree(run / place)
    (run / "spare").mkdir()
    (run / "reserve").unlink()
    fill(disk)
    for verb in ("recover", "gc"):
        assert shardb_command(verb, run).code == 6
    (disk / "filler").unlink()
    check_fine(shardb_command("recover", run))
    assert fsck(run).findings == []


def test_does_a_run_go_on_after_a_full_disk(disk: Path, run: Path) -> None:
    (disk / "filler").write_bytes(b"")
    shutil.rmtree(run / "spare")
    (run / "spare").mkdir()
    fill(disk)
    with shardb.open(run) as store:
        with pytest.raises(StorageFullError):
            commit_step(store, 7)
        assert store.resolve().step == 6
    check_fine(shardb_command("gc", run))
    assert kinds(fsck(run)) == []
    (disk / "filler").unlink()
    with shardb.open(run) as store:
        assert commit_step(store, 7).step == 7
    assert fsck(run).findings == []
