"""Something lies where a file of the store should be: is that named, with what to do about it?"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import shardb
from shardb.cli import run as run_command
from shardb.errors import LogTruncatedError, ShardbError
from tests.support.damage_store import Specimen, commit_step

LAST_SEGMENT = "the last segment"


@pytest.fixture
def run(specimen: Specimen, scratch: Path) -> Path:
    """A copy of the store."""
    return Path(shutil.copytree(specimen.root, scratch / "run"))


def replace(path: Path) -> None:
    """A directory for a file, a file for a directory."""
    if path.is_dir():
        shutil.rmtree(path)
        path.write_bytes(b"x")
    else:
        path.unlink()
        path.mkdir()


def place(run: Path, name: str) -> Path:
    """Where something is put in the way."""
    return max(run.glob("wal/*.wal")) if name == LAST_SEGMENT else run / name


@pytest.mark.parametrize("name", [LAST_SEGMENT, "locks/wal", "locks/index", "spare"])
def test_is_what_is_in_the_way_named(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = place(run, name)
    replace(taken)
    with pytest.raises(ShardbError, match="move it away, put back what was there") as caught:
        shardb.open(run)
    assert str(taken) in str(caught.value)
    assert run_command(["gc", str(run)]) == caught.value.exit_code
    assert "move it away" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["locks/wal", "locks/index", "spare"])
def test_does_the_store_go_on_when_it_was_moved_away(run: Path, name: str) -> None:
    replace(run / name)
    (run / name).rename(run.parent / "moved")
    with shardb.open(run) as store:
        head = store.resolve().step
        assert commit_step(store, head + 1).step == head + 1


def test_is_a_moved_segment_still_missed(run: Path) -> None:
    """What was there must be put back: the store does not begin anew without it."""
    taken = place(run, LAST_SEGMENT)
    replace(taken)
    taken.rmdir()
    with pytest.raises(LogTruncatedError):
        shardb.open(run)


@pytest.mark.parametrize("verb", [["fsck"], ["gc"], ["repair"], ["recover"], ["show"], ["info"]])
def test_is_a_url_refused_by_verbs_of_directories(
    run: Path, verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{run}"
    more = ["main"] if verb == ["show"] else []
    assert run_command([*verb, url, *more]) == 2
    assert f"shardb clone {url} DIRECTORY" in capsys.readouterr().err


def test_is_a_place_below_a_file_refused(scratch: Path) -> None:
    (scratch / "file").write_bytes(b"x")
    with pytest.raises(ShardbError, match="a file, not a store"):
        shardb.open(scratch / "file" / "store")
    with pytest.raises(ShardbError, match=r"file/store: .*must be a directory") as caught:
        shardb.open(scratch / "file" / "store", create=True)
    assert caught.value.exit_code == 2
