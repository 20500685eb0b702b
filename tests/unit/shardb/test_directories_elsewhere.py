"""Is a store told of, and refused before any work, whose objects lie on another file system?"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardb
from shardb.attributes import can_rename
from shardb.cli import run as run_command
from shardb.errors import StorageFailedError
from shardb.filesystem import RealFileSystem
from shardb.read_only import ReadOnlyStore, open_to_look
from tests.support.ram_disk import scratch_directory
from tests.support.small_stores import copy_store, fsck, only


@pytest.fixture
def split(whole: Path, tmp_path: Path) -> Iterator[Path]:
    """A store whose `objects/` is a link to another file system."""
    with scratch_directory() as other:
        run = copy_store(whole, tmp_path / "a run")
        if os.stat(other).st_dev == os.stat(run).st_dev:
            pytest.skip("there is one file system alone")
        shutil.move(run / "objects", Path(other) / "objects")
        (run / "objects").symlink_to(Path(other) / "objects")
        yield run


def test_is_it_refused_before_anything_is_done(split: Path) -> None:
    with pytest.raises(StorageFailedError, match="must be on one file system") as caught:
        shardb.open(split)
    assert f"{split}/objects" in str(caught.value)
    assert "shardb clone STORE NEW" in str(caught.value)


def test_is_it_read_all_the_same(split: Path) -> None:
    with open_to_look(str(split)) as store, store.at() as view:
        assert isinstance(store, ReadOnlyStore)
        assert view.read("params/a").digest == view.commit.shards["params/a"].digest


def test_does_a_check_name_it_and_what_helps(
    split: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = only(fsck(split))
    assert (finding.kind, finding.severity) == ("directory_elsewhere", "error")
    assert finding.next_command is not None
    words = shlex.split(finding.next_command)
    assert run_command(words[1:]) == 0, capsys.readouterr().err
    copy = Path(words[-1])
    assert fsck(copy).findings == []
    with shardb.open(copy) as store:
        assert store.resolve().step == 6
        assert set(store.snapshots()) == {"step-2"}


def test_is_a_directory_that_is_mounted_from_the_same_disk_found_too(
    whole: Path, tmp_path: Path
) -> None:
    run = copy_store(whole, tmp_path / "run")
    mount = ["mount", "--bind", str(run / "objects"), str(run / "objects")]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a directory cannot be mounted here: {done.stderr.decode().strip()}")
    try:
        assert [finding.kind for finding in fsck(run).findings] == ["directory_elsewhere"]
    finally:
        subprocess.run(["umount", "--lazy", run / "objects"], check=True)
    assert fsck(run).findings == []


def test_is_nothing_left_by_the_question(run: Path) -> None:
    before = sorted(path.name for path in run.rglob("*"))
    files = RealFileSystem()
    assert files.can_rename(str(run / "spare"), str(run / "objects"))
    assert can_rename(str(run / "spare"), str(run / "nowhere")), "it is told of elsewhere"
    assert sorted(path.name for path in run.rglob("*")) == before
